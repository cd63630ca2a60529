"""The official `openai` client through `calinix serve`, against mock pods, in both modes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest

import kit
from clients import MODEL, MODES, serving, user

LONG = "Explain cache aware routing in simple words. " * 40


@MODES
@kit.on_loop
async def test_chat(mode: str, tmp_path: Path) -> None:
    """A chat answer arrives as the pod gave it, with the headers that say where it came from."""
    async with serving(tmp_path, mode) as stand:
        raw = await stand.client.chat.completions.with_raw_response.create(
            model=MODEL, messages=user("Hello there"), max_tokens=7
        )
        answer = raw.parse()
        assert answer.usage
        assert answer.usage.completion_tokens == 7
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content
        assert raw.headers["x-calinix-mode"] == mode
        assert raw.headers["x-calinix-cache-hit"] == "false"
        target = raw.headers["x-calinix-target-pod-id"]
        assert stand.fleet.posts(target) == 1
        assert target.startswith("single" if mode == "single" else "decode")
        if mode == "dispatch":
            assert raw.headers["x-calinix-decode-pod-id"] == target
            assert stand.fleet.posts(raw.headers["x-calinix-prefill-pod-id"]) == 1


@MODES
@kit.on_loop
async def test_chat_stream(mode: str, tmp_path: Path) -> None:
    """A stream has role, tokens and usage in order, and the same text as the whole answer."""
    async with serving(tmp_path, mode) as stand:
        whole = await stand.client.chat.completions.create(
            model=MODEL, messages=user("Count"), max_tokens=12
        )
        stream = await stand.client.chat.completions.create(
            model=MODEL,
            messages=user("Count"),
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices == []
        assert chunks[-1].usage
        assert chunks[-1].usage.completion_tokens == 12
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content


@MODES
@kit.on_loop
async def test_streamed_bytes_equal_what_the_pod_sent(mode: str, tmp_path: Path) -> None:
    """Byte for byte: the body that the client gets is the body that left the answering pod."""
    async with serving(tmp_path, mode) as stand:
        body = {
            "model": MODEL,
            "messages": user("Grüße, 你好, 👋"),
            "max_tokens": 50,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        path = "/v1/chat/completions"
        reply = await kit.http(stand.served.port, "POST", path, body, {"x-calinix-mode": mode})
        assert reply.complete
        assert reply.events()[-1] == "[DONE]"
        proxy = stand.fleet.proxies[reply.headers["x-calinix-target-pod-id"]]
        (link,) = (link for link in proxy.links if b"POST /v1/" in link.up)
        # The link may have carried probes and model lists before; the stream is its last answer.
        sent = kit.parse_reply(b"HTTP/1.1 " + bytes(link.down).rpartition(b"HTTP/1.1 ")[2])
        assert sent.headers["content-type"].startswith("text/event-stream")
        assert reply.body == sent.body
        assert reply.headers["content-type"] == sent.headers["content-type"]


@MODES
@kit.on_loop
async def test_a_repeated_prompt_lands_where_its_prefix_is(mode: str, tmp_path: Path) -> None:
    """The second time, the gateway says hit, the pod is the same, and its own count agrees."""
    async with serving(tmp_path, mode) as stand:
        seen = []
        for ending in ("first", "second", "third"):
            raw = await stand.client.chat.completions.with_raw_response.create(
                model=MODEL, messages=user(LONG + ending), max_tokens=1
            )
            header = "x-calinix-target-pod-id" if mode == "single" else "x-calinix-prefill-pod-id"
            usage = raw.parse().usage
            assert usage
            details = usage.prompt_tokens_details
            cached = (details.cached_tokens or 0) if details else 0
            seen.append((raw.headers[header], raw.headers["x-calinix-cache-hit"], cached > 0))
        pods, hits, cached_there = zip(*seen, strict=True)
        assert len(set(pods)) == 1
        assert hits == ("false", "true", "true")
        if mode == "single":
            assert cached_there == (False, True, True)


@MODES
@kit.on_loop
async def test_completions(mode: str, tmp_path: Path) -> None:
    """The older completions API, with a text and with token ids, whole and streamed."""
    async with serving(tmp_path, mode) as stand:
        for prompt in ("Once upon a time", [11, 22, 33, 44]):
            answer = await stand.client.completions.create(model=MODEL, prompt=prompt, max_tokens=5)
            assert answer.usage
            assert answer.usage.completion_tokens == 5
            stream = await stand.client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=5, stream=True
            )
            text = "".join([c.choices[0].text async for c in stream if c.choices])
            assert text == answer.choices[0].text


@kit.on_loop
async def test_embeddings(tmp_path: Path) -> None:
    """Embeddings of a list of inputs come back one for one."""
    async with serving(tmp_path, "single") as stand:
        answer = await stand.client.embeddings.create(model=MODEL, input=["one", "two", "three"])
        assert [item.index for item in answer.data] == [0, 1, 2]
        assert all(len(item.embedding) > 0 for item in answer.data)


@kit.on_loop
async def test_models(tmp_path: Path) -> None:
    """The pods' model lists come back merged, one by one too, with fields beyond OpenAI's kept."""
    async with serving(tmp_path, "single") as stand:
        models = [model async for model in stand.client.models.list()]
        assert [model.id for model in models] == [MODEL]
        assert models[0].to_dict()["max_model_len"]
        assert (await stand.client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await stand.client.models.retrieve("no-such-model")


@kit.on_loop
async def test_responses(tmp_path: Path) -> None:
    """The responses API: created, continued and read back on the pod that keeps it."""
    async with serving(tmp_path, "single") as stand:
        first = await stand.client.responses.create(model=MODEL, input="Hello", max_output_tokens=5)
        assert first.output_text
        for _ in range(4):  # by chance, without the rule, two pods would not do this four times
            following = await stand.client.responses.create(
                model=MODEL,
                input="And then?",
                previous_response_id=first.id,
                max_output_tokens=5,
            )
            assert following.output_text
            assert (await stand.client.responses.retrieve(first.id)).id == first.id
        events = await stand.client.responses.create(
            model=MODEL, input="Hello", max_output_tokens=5, stream=True
        )
        kinds = [event.type async for event in events]
        assert kinds[0] == "response.created"
        assert kinds[-1] in ("response.completed", "response.incomplete")


@MODES
@kit.on_loop
async def test_transfer_handles_of_a_client_never_reach_a_pod(mode: str, tmp_path: Path) -> None:
    """Made-up handles are removed, at the top and in vllm_xargs, and the request is served."""
    extra = {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil.example"},
        "bootstrap_room": 7,
        "vllm_xargs": {"kv_transfer_params": {"remote_host": "evil.example"}, "kept": 1},
    }

    async with serving(tmp_path, mode) as stand:
        answer = await stand.client.chat.completions.create(
            model=MODEL, messages=user("Hi"), max_tokens=2, extra_body=extra
        )
        assert answer.choices
        links = [link for proxy in stand.fleet.proxies.values() for link in proxy.links]
        seen = b"".join(bytes(link.up) for link in links)
        assert b"evil.example" not in seen
        assert b"bootstrap_room" not in seen
        assert b'"kept"' in seen


@MODES
@kit.on_loop
async def test_many_at_once(mode: str, tmp_path: Path) -> None:
    """Forty streams at the same time: each client gets its own answer, whole."""
    async with serving(tmp_path, mode) as stand:

        async def one(number: int) -> tuple[int, str]:
            stream = await stand.client.completions.create(
                model=MODEL, prompt=f"{number} of forty", max_tokens=9, stream=True
            )
            return number, "".join([c.choices[0].text async for c in stream if c.choices])

        streamed = dict(await asyncio.gather(*(one(number) for number in range(40))))
        for number in (0, 17, 39):
            whole = await stand.client.completions.create(
                model=MODEL, prompt=f"{number} of forty", max_tokens=9
            )
            assert whole.choices[0].text == streamed[number]
        decisions = await kit.http(stand.served.admin_port, "GET", "/admin/decisions?last=100")
        assert len(decisions.json()["decisions"]) == 43


@kit.on_loop
async def test_request_ids_are_kept(tmp_path: Path) -> None:
    """The request id comes back and finds the decision; a header of ours is not trusted."""
    async with serving(tmp_path, "single") as stand:
        raw = await stand.client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=user("Hi"),
            max_tokens=1,
            extra_headers={"x-request-id": "my-own-id", "x-calinix-target-pod-id": "single-9"},
        )
        assert raw.headers["x-request-id"] == raw.headers["x-calinix-request-id"] == "my-own-id"
        assert raw.headers.get_list("x-calinix-target-pod-id") != ["single-9"]
        path = "/admin/decisions?request_id=my-own-id"
        (decision,) = (await kit.http(stand.served.admin_port, "GET", path)).json()["decisions"]
        assert "my-own-id" in json.dumps(decision)
