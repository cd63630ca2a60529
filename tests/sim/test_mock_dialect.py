"""The mock pod beside captures of a real vLLM pod: same fields, same order, same events, errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import kit
from calinix.engines.usage import read_usage
from calinix.sim.mock_pod import MockPod

SAMPLES = Path(__file__).parent.parent / "data/samples"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Say something nice to everyone here, please"}]}
USAGE = {"stream_options": {"include_usage": True}}


def tiny(**settings: Any) -> MockPod:
    """A mock of the pod that the captures were taken from."""
    return MockPod(model="tiny", max_model_len=1024, **settings)


def sample(name: str) -> kit.Reply:
    """A captured answer; the captures hold event streams without their chunk framing."""
    wire = (SAMPLES / f"{name}.http").read_bytes()
    reply = kit.parse_reply(wire)
    if reply.headers.get("transfer-encoding") == "chunked":
        reply = kit.Reply(
            reply.status, reply.headers, wire.partition(b"\r\n\r\n")[2], wire, complete=True
        )
    return reply


def shape(value: Any) -> Any:
    """The value with everything replaced by its type; objects keep the order of their fields."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


def event_shapes(reply: kit.Reply) -> list[Any]:
    """The shapes of a stream's events, runs of equal ones taken as one."""
    shapes: list[Any] = []
    for event in reply.events():
        one = event if event == "[DONE]" else shape(json.loads(event))
        if not shapes or shapes[-1] != one:
            shapes.append(one)
    return shapes


WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, HELLO | {"max_tokens": 8}),
    "completion": (TEXT, {"prompt": "Once upon a time", "max_tokens": 8}),
    "completion_salt": (TEXT, {"prompt": "a", "cache_salt": "s", "max_tokens": 2}),
    "completion_tokenids": (
        TEXT,
        {"prompt": [300, 301, 302, 303], "max_tokens": 3, "return_token_ids": True},
    ),
    "err_unknown_field": (TEXT, {"prompt": "a", "max_tokens": 1, "no_such_field": {"a": 1}}),
    "tokenize": ("/tokenize", {"prompt": "Once upon a time"}),
    "tokenize_chat": ("/tokenize", HELLO),
    "detokenize": ("/detokenize", {"tokens": [1, 2]}),
}

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat_stream": (CHAT, HELLO | USAGE),
    "chat_stream_continuous": (
        CHAT,
        HELLO | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat_stream_nousage": (CHAT, HELLO),
    "completion_stream": (TEXT, {"prompt": "a"} | USAGE),
}

ERRORS: dict[str, tuple[str, Any, dict[str, str]]] = {
    "err_badjson": (TEXT, b'{"model":"tiny",}', {}),
    "err_badtype": (CHAT, HELLO | {"temperature": "hot"}, {}),
    "err_ctype": (CHAT, HELLO, {"content-type": "text/plain"}),
    "err_maxtokens": (CHAT, HELLO | {"max_tokens": 5000}, {}),
    "err_maxtokens_stream": (CHAT, HELLO | {"max_tokens": 5000, "stream": True}, {}),
    "err_missing": (CHAT, {"model": "tiny"}, {}),
    "err_model_404": (CHAT, HELLO | {"model": "nope"}, {}),
    "err_n": (CHAT, HELLO | {"n": 0}, {}),
    "err_toolong": (TEXT, {"prompt": [7] * 3000}, {}),
    "err_path_404": ("/no/such/path", HELLO, {}),
}

GETS = {
    "models": "/v1/models",
    "version": "/version",
    "load": "/load",
    "health": "/health",
    "ping": "/ping",
    "err_method_405": CHAT,
}


def same_head(mine: kit.Reply, real: kit.Reply) -> None:
    """Status and header names equal those of the capture, in order, framing aside."""
    framing = {"content-length", "transfer-encoding", "connection"}
    names = [name for name in mine.headers if name not in framing]
    order = [name for name in real.headers if name not in framing]
    assert mine.status == real.status
    assert sorted(names) == sorted(order)
    for name in ("content-type", "server", "vary", "allow"):
        assert mine.headers.get(name) == real.headers.get(name)


@pytest.mark.parametrize("name", WHOLE)
@kit.on_loop
async def test_whole_answers(name: str) -> None:
    """Every field of the captured answer is there, in its order and of its type, and no other."""
    path, body = WHOLE[name]
    real = sample(name)
    async with tiny() as pod:
        mine = await kit.http(pod.port, "POST", path, body | {"model": "tiny"})
    same_head(mine, real)
    assert shape(mine.json()) == shape(real.json())


@pytest.mark.parametrize("name", STREAMS)
@kit.on_loop
async def test_streams(name: str) -> None:
    """The same kinds of events in the same order: role, tokens, last token, usage, end."""
    path, body = STREAMS[name]
    real = sample(name)
    async with tiny() as pod:
        mine = await kit.http(pod.port, "POST", path, body | {"stream": True, "max_tokens": 4})
    same_head(mine, real)
    assert event_shapes(mine) == event_shapes(real)
    assert mine.complete


@pytest.mark.parametrize("name", ERRORS)
@kit.on_loop
async def test_errors(name: str) -> None:
    """Errors are worded as the real pod words them, to the letter where nothing in it varies."""
    path, body, headers = ERRORS[name]
    real = sample(name)
    async with tiny() as pod:
        mine = await kit.http(pod.port, "POST", path, body, headers)
    python = tuple(sys.version_info)
    if name != "err_badjson" or python < (3, 13):
        same_head(mine, real)
        assert mine.json() == real.json()
        return
    # Its words are those of the pod's Python, which has others for this one since 3.13.
    text = real.body.replace(b"body.16", b"body.15")
    own = b"Illegal trailing comma before end of object"
    text = text.replace(b"Expecting property name enclosed in double quotes", own)
    assert mine.json() == json.loads(text)


@pytest.mark.parametrize("name", GETS)
@kit.on_loop
async def test_gets(name: str) -> None:
    """Model list, version, load, probes, and the wrong method."""
    real = sample(name)
    async with tiny() as pod:
        mine = await kit.http(pod.port, "GET", GETS[name])
    same_head(mine, real)
    if real.body:
        assert shape(mine.json()) == shape(real.json())
    else:
        assert mine.body == b""


@kit.on_loop
async def test_request_ids_name_the_answer() -> None:
    """X-Request-Id becomes part of the body's id and comes back as a header."""
    given = {"x-request-id": "calinix-req-2"}
    async with tiny() as pod:
        chat = await kit.http(pod.port, "POST", CHAT, HELLO, given)
        text = await kit.http(pod.port, "POST", TEXT, {"prompt": "a"}, given)
    assert chat.json()["id"] == sample("chat").json()["id"]
    assert text.json()["id"] == "cmpl-calinix-req-2"
    assert chat.headers["x-request-id"] == "calinix-req-2"


@kit.on_loop
async def test_streamed_text_is_the_whole_text() -> None:
    """Text, usage and finish reason are the same streamed or not, for every choice and prompt."""
    body = {"prompt": ["one two", "three"], "n": 2, "max_tokens": 5}
    async with tiny() as pod:
        whole = (await kit.http(pod.port, "POST", TEXT, body)).json()
        reply = await kit.http(pod.port, "POST", TEXT, body | {"stream": True} | USAGE)
    chunks = [json.loads(event) for event in reply.events()[:-1]]
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert [choice["text"] for choice in whole["choices"]] == list(texts.values())
    assert len(set(texts.values())) == 4
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"] == 3 + 20


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (TEXT, {"prompt": "a"}, 16),
        (TEXT, {"prompt": "a", "max_tokens": None}, 16),
        (CHAT, HELLO, 64),
        (CHAT, HELLO | {"max_completion_tokens": 3, "max_tokens": 9}, 3),
        (TEXT, {"prompt": [5] * 1000, "max_tokens": 500}, 24),
        (TEXT, {"prompt": [5] * 1000, "ignore_eos": True, "max_tokens": 500}, 24),
    ],
)
@kit.on_loop
async def test_lengths(path: str, body: dict[str, Any], tokens: int) -> None:
    """Defaults, both names of the bound, and the room that the context leaves."""
    async with tiny() as pod:
        reply = (await kit.http(pod.port, "POST", path, body)).json()
    assert reply["usage"]["completion_tokens"] == tokens
    bounded = path == TEXT or "max_completion_tokens" in body
    assert reply["choices"][0]["finish_reason"] == ("length" if bounded else "stop")


@kit.on_loop
async def test_cached_tokens_are_counted() -> None:
    """A prompt that comes again hits its full blocks but the last token's; salted, none."""
    body = {"prompt": list(range(40)), "max_tokens": 1}
    async with tiny() as pod:
        seen = []
        for extra in ({}, {}, {"cache_salt": "s"}):
            reply = await kit.http(pod.port, "POST", TEXT, body | extra)
            usage = read_usage(reply.body)
            assert usage is not None
            seen.append(usage.cached_tokens)
        assert seen == [0, 32, 0]
        page = (await kit.http(pod.port, "GET", "/metrics")).body.decode()
    labels = '{engine="0",model_name="tiny"}'
    assert f"vllm:prefix_cache_queries_total{labels} 120.0" in page
    assert f"vllm:prefix_cache_hits_total{labels} 32.0" in page


@kit.on_loop
async def test_tokenize_agrees_with_usage() -> None:
    """/tokenize counts a chat as its usage does, and gives the pieces that make up the text."""
    async with tiny() as pod:
        counted = (await kit.http(pod.port, "POST", "/tokenize", HELLO)).json()
        usage = (await kit.http(pod.port, "POST", CHAT, HELLO | {"max_tokens": 1})).json()["usage"]
        assert counted["count"] == usage["prompt_tokens"] == len(counted["tokens"])
        text = {"prompt": "Grüße, you\nthere", "return_token_strs": True}
        told = (await kit.http(pod.port, "POST", "/tokenize", text)).json()
        assert "".join(told["token_strs"]) == text["prompt"]
        back = await kit.http(pod.port, "POST", "/detokenize", {"tokens": told["tokens"]})
        assert back.json() == {"prompt": text["prompt"]}
        ids = {"prompt": told["tokens"], "max_tokens": 3}
        by_ids = (await kit.http(pod.port, "POST", TEXT, ids)).json()
        by_text = (await kit.http(pod.port, "POST", TEXT, text | {"max_tokens": 3})).json()
        assert by_ids["choices"][0]["text"] == by_text["choices"][0]["text"]
