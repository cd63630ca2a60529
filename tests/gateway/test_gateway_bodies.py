"""Request bodies: untouched byte for byte, but for what would steer a KV transfer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import kit
from fleets import gateway_of
from gatewaykit import (
    CHAT,
    DONE,
    STREAM_HEAD,
    Served,
    answer,
    body_of,
    chat_body,
    chunk,
    config_of,
    event,
    metrics,
    raw_pod,
    total,
)

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/rerank": {"query": "q", "documents": ["d"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/classify": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
    "/custom": {"anything": True},
}
# Each would reach an engine as a transfer field, whatever its spelling.
STEERING = {
    "plain": b'"kv_transfer_params":{"remote_host":"evil"}',
    "null": b'"kv_transfer_params":null',
    "escaped": rb'"kv\u005ftransfer_params":{"remote_host":"evil"}',
    "all-escaped": b'"'
    + b"".join(b"\\u%04x" % byte for byte in b"kv_transfer_params")
    + b'":{"remote_host":"evil"}',
    "twice": b'"kv_transfer_params":1,"kv_transfer_params":{"remote_host":"evil"}',
    "ec": b'"ec_transfer_params":{"remote_host":"evil"}',
    "bootstrap": b'"bootstrap_host":"evil","bootstrap_port":1,"bootstrap_room":2',
    "ranks": b'"routed_dp_rank":7,"disagg_prefill_dp_rank":7,"data_parallel_rank":"evil"',
    "bootstrap-unknown": b'"bootstrap_of_tomorrow":"evil"',
    "extra-arguments": b'"vllm_xargs":{"kv_transfer_params":{"remote_host":"evil"},"kept":1}',
    "extra-arguments-escaped": rb'"vllm\u005fxargs":{"bootstrap\u005fhost":"evil","kept":1}',
    "extra-arguments-twice": b'"vllm_xargs":{"kept":1},"vllm_xargs":{"bootstrap_room":"evil"}',
    "extra-arguments-first": b'"vllm_xargs":{"bootstrap_room":"evil"},"vllm_xargs":{"kept":1}',
    "extra-arguments-first-escaped": (
        rb'"vllm\u005fxargs":{"bootstrap_room":"evil"},"vllm_xargs":{"kept":1}'
    ),
}
UNTOUCHED = [
    b'{ "prompt" : "Hi" ,\r\n "x":1.50, "y":[ 1,2 ] ,"z":"\\u00e9" }',
    b'{"prompt":"Hi","prompt":"Ho","x":9007199254740993,"y":1e400,"z":-0.0}',
    '{"prompt":"Grüße 你好 👋 \\ud83d\\udc4b","stop":["\\n"]}'.encode(),
    b'{"prompt":"kv_transfer_params bootstrap_host","metadata":{"kv_transfer_params":1}}',
    b'{"prompt":"Hi","vllm_xargs":{"kept" : 1}}',
    b'\t{"prompt":[1,2,3]}\n',
]


@pytest.mark.parametrize("path", ENDPOINTS)
@kit.on_loop
async def test_transfer_fields_never_reach_a_pod(path: str) -> None:
    """However spelled and wherever an engine would look for them, on every path that takes JSON."""
    extra = {"gateway": {"passthroughPaths": ["/custom"]}}
    async with raw_pod() as pod, gateway_of(config_of(extra, p=pod)) as app:
        good = msgspec.json.encode({"model": "mock", **ENDPOINTS[path]})
        for name, steering in STEERING.items():
            for body in (good[:-1] + b"," + steering + b"}", b"{" + steering + b"," + good[1:]):
                pod.requests.clear()
                reply = await kit.http(app.server.port, "POST", path, body)
                assert reply.status == 200, (name, reply.body)
                sent = msgspec.json.decode(body_of(pod.requests[0]))
                kept = sent.pop("vllm_xargs", {})
                assert sent == msgspec.json.decode(good), name
                assert kept in ({}, {"kept": 1}), name


@pytest.mark.parametrize("body", UNTOUCHED)
@kit.on_loop
async def test_other_bodies_pass_byte_for_byte(body: bytes) -> None:
    """Spacing, number forms, escapes, duplicate keys: what is not stripped is not touched."""
    async with raw_pod() as pod, gateway_of(config_of(p=pod)) as app:
        for path in ("/v1/completions", "/tokenize"):
            reply = await kit.http(app.server.port, "POST", path, body)
            assert reply.status == 200, reply.body
        assert [body_of(request) for request in pod.requests] == [body, body]


@pytest.mark.parametrize(
    "body",
    [
        '{"kv_transfer_params":{"remote_host":"evil"}}'.encode("utf-16"),
        '{"kv_transfer_params":{"remote_host":"evil"}}'.encode("utf-32-le"),
        '{"kv_transfer_params":{"remote_host":"evil"}}'.encode("utf-8-sig"),
        b'{"kv_transfer_params":{"remote_host":"evil"}',
        b'  \x00{"kv_transfer_params":1}',
    ],
)
@kit.on_loop
async def test_json_in_disguise_is_refused(body: bytes) -> None:
    """What an engine might read as JSON and we cannot is a 400, on every path."""
    async with raw_pod() as pod, gateway_of(config_of(p=pod)) as app:
        for path in ("/v1/completions", "/tokenize", "/score"):
            reply = await kit.http(app.server.port, "POST", path, body)
            assert reply.status == 400, path
            assert reply.json()["error"]["type"] == "invalid_request_error"
        assert not pod.requests


@kit.on_loop
async def test_sizes() -> None:
    """A body of megabytes passes whole and is forgotten after; one over the limit is a 413."""
    extra = {"gateway": {"limits": {"bodyBytes": 4_000_000}}}
    async with raw_pod() as pod, gateway_of(config_of(extra, p=pod)) as app:
        text = "x" * 3_900_000
        reply = await kit.http(app.server.port, "POST", "/v1/completions", {"prompt": text})
        assert reply.status == 200
        assert msgspec.json.decode(body_of(pod.requests[0])) == {"prompt": text}
        reply = await kit.http(app.server.port, "POST", "/v1/completions", {"prompt": text * 2})
        assert reply.status == 413
        assert len(pod.requests) == 1
        assert app.server.budget.held_bytes == 0


@kit.on_loop
async def test_what_is_wrong_with_a_body_is_said() -> None:
    """400 in OpenAI's shape, with the field to blame and the request's id; no pod is asked."""
    async with raw_pod() as pod, gateway_of(config_of(p=pod)) as app:
        for path, body, param in [
            ("/v1/chat/completions", b"", None),
            ("/v1/chat/completions", b"[]", None),
            ("/v1/chat/completions", b"{}", "messages"),
            ("/v1/completions", b'{"prompt":[]}', "prompt"),
            ("/v1/responses", b"{}", "input"),
            ("/v1/embeddings", b"{}", "input"),
        ]:
            headers = {"x-request-id": "mine"}
            reply = await kit.http(app.server.port, "POST", path, body, headers)
            assert reply.status == 400, path
            assert reply.headers["x-request-id"] == "mine"
            error = reply.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["param"] == param
            assert error["message"]
        assert not pod.requests


@kit.on_loop
async def test_keys_of_any_length_are_kept_short() -> None:
    """Clients choose sessions and tenants: what is kept of them is short, and tells them apart.

    A model's name that is too long is nobody's.
    """
    async with raw_pod() as pod, gateway_of(config_of(p=pod)) as app:
        long = "k" * 100_000
        for key in ["short", long + "1", long + "2", long + "1"]:
            body = chat_body(prompt_cache_key=key, cache_salt=key)
            assert (await kit.http(app.server.port, "POST", CHAT, body)).status == 200
        by_header = {"x-calinix-session-key": "h" * 10_000}
        assert (await kit.http(app.server.port, "POST", CHAT, chat_body(), by_header)).status == 200
        kept = list(app.router._state.sessions._sessions)
        assert len(kept) == 4  # the third of five is the second again
        assert (b"short", "short") in kept
        assert all(len(tenant) < 130 and len(key) < 130 for tenant, key in kept)
        assert len({tenant for tenant, _ in kept}) == 4
        body = chat_body() | {"model": "m" * 2000}
        reply = await kit.http(app.server.port, "POST", CHAT, body)
        assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")


@kit.on_loop
async def test_impossible_usage_harms_nobody() -> None:
    """A pod that counts wrongly: its answer is passed on, and nothing is learned from it."""
    counts = [b"-3", b"1" + b"0" * 300, b"1" + b"0" * 400]
    answers = [
        b'{"choices":[],"usage":{"prompt_tokens":%b,"completion_tokens":%b}}' % pair
        for count in counts
        for pair in ((b"9", count), (count, b"2"))
    ]
    left = iter(answers)

    async def script(served: Served) -> None:
        await served.say(answer(next(left)))

    async with raw_pod(script) as pod, gateway_of(config_of(p=pod)) as app:
        for wanted in answers:
            reply = await kit.http(app.server.port, "POST", CHAT, chat_body("Hi " * 100))
            assert (reply.status, reply.body) == (200, wanted)
        assert total(await metrics(app), "calinix_output_tokens_total") == 0
        assert app.router.open_leases() == 0


@pytest.mark.parametrize("pad", [0, 3000])
@kit.on_loop
async def test_usage_is_read_from_an_answer_in_tiny_pieces(pad: int) -> None:
    """A pod that cuts its last events into many packets, as whole chunks or not: usage is seen."""
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
    end = b'data: {"choices":[{"text":"%b"}]}\n\n' % (b"x" * pad) + usage
    cut = [end[at : at + 16] for at in range(0, len(end), 16)]
    framed = b"".join(map(chunk, cut))

    async def script(served: Served) -> None:
        pieces = list(map(chunk, cut))
        if b"torn" in served.request:
            pieces = [framed[at : at + 16] for at in range(0, len(framed), 16)]
        await served.say(STREAM_HEAD, event(1), *pieces, DONE, pause_s=0.001)

    async with raw_pod(script) as pod, gateway_of(config_of(p=pod)) as app:
        for text in ("torn", "whole"):
            body = chat_body(text) | {"stream": True}
            reply = await kit.http(app.server.port, "POST", CHAT, body)
            assert reply.body.endswith(usage + b"data: [DONE]\n\n")
        assert total(await metrics(app), "calinix_prompt_tokens_total") == 18
