"""Prefill then decode with pods scripted by the byte: what goes where, and what can go wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

import kit
from fleets import gateway_of
from gatewaykit import (
    CHAT,
    DONE,
    STREAM_HEAD,
    Script,
    Served,
    admin,
    answer,
    body_of,
    chat_body,
    dispatch_of,
    event,
    fields_of,
    never,
    outcome,
    raw_pod,
)

HANDLE = b'{"do_remote_prefill": true, "x": [1, {"y":  "z"}]}'
PASSIVE = {"health": {"passive": {"enabled": True, "failures": 50}}}


def prefilled(after_s: float = 0.0) -> Script:
    """A script: a prefill's answer with a handle."""

    async def script(served: Served) -> None:
        await asyncio.sleep(after_s)
        await served.say(answer(b'{"choices":[],"kv_transfer_params":%b}' % HANDLE))

    return script


def says(status: bytes, body: bytes = b'{"error":"pod"}') -> Script:
    """A script: always this."""

    async def script(served: Served) -> None:
        await served.say(answer(body, status))

    return script


async def streams(served: Served) -> None:
    """A script: two events and the end."""
    await served.say(STREAM_HEAD + event(1), event(2), DONE)


async def hang_up(served: Served) -> None:
    """A script: closes without an answer."""
    served.hang_up()


def every_second(script: Script, other: Script) -> Script:
    """A script: by turns."""
    count = 0

    async def both(served: Served) -> None:
        nonlocal count
        count += 1
        await (other if count % 2 else script)(served)

    return both


async def ask(port: int, stream: bool = True, **more: Any) -> kit.Reply:
    """One chat."""
    return await kit.http(port, "POST", CHAT, chat_body(stream=stream, max_tokens=7, **more))


@kit.on_loop
async def test_what_each_leg_gets() -> None:
    """Prefill: one token, whole, with the client's headers; decode: the body and the handle."""
    async with (
        raw_pod(prefilled()) as prefill,
        raw_pod(streams) as decode,
        gateway_of(dispatch_of({"p": prefill}, {"d": {"url": decode.url, "apiKey": "k"}})) as app,
    ):
        headers = {"x-custom": "kept", "x-request-id": "r-1", "authorization": "Bearer mine"}
        body = chat_body(stream=True, max_tokens=7)
        reply = await kit.http(app.server.port, "POST", CHAT, body, headers)
        assert reply.events() == ['{"n":1}', '{"n":2}', "[DONE]"]
        (first,), (second,) = prefill.requests, decode.requests
        sent = msgspec.json.decode(body_of(first))
        assert (sent["max_tokens"], sent["stream"]) == (1, False)
        assert HANDLE in body_of(second)
        sent = msgspec.json.decode(body_of(second))
        del sent["kv_transfer_params"]
        assert sent == body
        traces = set[str]()
        for request in (first, second):
            got = dict(fields_of(request))
            assert got["x-custom"] == "kept"
            assert got["x-calinix-request-id"] == got["x-request-id"] == "r-1"
            assert (got["x-calinix-prefill-pod-id"], got["x-calinix-decode-pod-id"]) == ("p", "d")
            assert b"mine" not in request
            traces.add(got["traceparent"])
        assert len(traces) == 1
        assert b"Bearer k" in second
        assert b"Bearer k" not in first


@kit.on_loop
async def test_a_prefill_that_follows_a_hung_one_has_its_own_time() -> None:
    """The second prefill pod gets the whole of prefillMs, not what the first one left of it."""
    times = {"gateway": {"timeouts": {"prefillMs": 400}}}
    async with (
        raw_pod(never) as hung,
        raw_pod(prefilled(after_s=0.25)) as slow,
        raw_pod(streams) as decode,
        gateway_of(dispatch_of({"a": hung, "b": slow}, {"d": decode}, times)) as app,
    ):
        replies = await asyncio.gather(*(ask(app.server.port) for _ in range(2)))
        assert [reply.events()[-1] for reply in replies] == ["[DONE]"] * 2
        assert (len(hung.requests), len(slow.requests), len(decode.requests)) == (1, 2, 2)


@kit.on_loop
async def test_a_sweep_that_comes_early_knows_which_leg_is_late() -> None:
    """Time-outs are judged by the sweep's time, which may be ahead of the clock: it is retried."""
    times = {"gateway": {"timeouts": {"prefillMs": 60_000, "firstTokenMs": 90_000}}}
    async with (
        raw_pod(never) as hung,
        raw_pod(prefilled(after_s=0.0)) as other,
        raw_pod(streams) as decode,
        gateway_of(dispatch_of({"a": hung, "b": other}, {"d": decode}, times)) as app,
    ):
        asking = [asyncio.ensure_future(ask(app.server.port)) for _ in range(2)]
        await kit.until(lambda: bool(hung.requests), "one of them hangs")
        await kit.until(lambda: len(app.gateway.flights) == 1, "the other one is answered")
        (flight,) = app.gateway.flights
        flight.on_deadline(flight.deadline_s)
        replies = await asyncio.gather(*asking)
        assert [reply.events()[-1] for reply in replies] == ["[DONE]"] * 2
        assert (len(hung.requests), len(other.requests)) == (1, 2)


FAILING = {
    "500": says(b"500 Oops"),
    "503": says(b"503 Busy"),
    "429": says(b"429 Busy"),
    "hang-up": hang_up,
}


@pytest.mark.parametrize("name", FAILING)
@kit.on_loop
async def test_a_poisoned_prompt_meets_two_prefill_pods(name: str) -> None:
    """A prefill leg answers nobody, so it is sent again: once, and never a third time."""
    script = FAILING[name]
    async with (
        raw_pod(script) as one,
        raw_pod(script) as two,
        raw_pod(script) as three,
        raw_pod(streams) as decode,
        gateway_of(dispatch_of({"a": one, "b": two, "c": three}, {"d": decode})) as app,
    ):
        reply = await ask(app.server.port)
        asked = [len(pod.requests) for pod in (one, two, three)]
        assert sorted(asked) == [0, 1, 1]
        if name == "hang-up":
            assert reply.status == 502
            assert "prefill" in reply.json()["error"]["message"]
        else:
            assert (reply.status, reply.body) == (int(name), b'{"error":"pod"}')
        assert not decode.requests


@pytest.mark.parametrize("status", [400, 404, 422, 302])
@kit.on_loop
async def test_what_prefill_refuses_is_the_clients_answer(status: int) -> None:
    """A 4xx of the prefill pod is passed on as it is; nobody else is asked, nobody is blamed."""
    async with (
        raw_pod(says(b"%d Said" % status)) as one,
        raw_pod(says(b"%d Said" % status)) as two,
        raw_pod(streams) as decode,
        gateway_of(dispatch_of({"a": one, "b": two}, {"d": decode}, PASSIVE)) as app,
    ):
        for _ in range(4):
            reply = await ask(app.server.port)
            assert (reply.status, reply.body) == (status, b'{"error":"pod"}')
            assert reply.headers["x-calinix-decode-pod-id"] == "d"
        assert len(one.requests) + len(two.requests) == 4
        assert not decode.requests
        assert not any(pod["failuresInRow"] for pod in (await admin(app, "/admin/pods"))["pods"])


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"not json", b'{"kv_transfer_params": 7}', b"[" * 100_000]
)
@kit.on_loop
async def test_a_prefill_answer_that_cannot_be_used(body: bytes) -> None:
    """What is no prefill's answer is a 502; the decode pod is not asked with half a handle."""
    async with (
        raw_pod(says(b"200 OK", body)) as prefill,
        raw_pod(streams) as decode,
        gateway_of(dispatch_of({"p": prefill}, {"d": decode})) as app,
    ):
        reply = await ask(app.server.port)
        assert reply.status == 502
        assert "prefill" in reply.json()["error"]["message"]
        assert not decode.requests


@kit.on_loop
async def test_a_prefill_answer_is_bounded() -> None:
    """An answer without end is given up at 16 MiB, not kept."""

    async def endless(served: Served) -> None:
        await served.say(b"HTTP/1.1 200 OK\r\n\r\n")
        while not served.writer.is_closing():
            await served.say(bytes(1 << 20))

    async with (
        raw_pod(endless) as prefill,
        raw_pod(streams) as decode,
        gateway_of(dispatch_of({"p": prefill}, {"d": decode})) as app,
    ):
        reply = await ask(app.server.port)
        assert reply.status == 502
        assert "too large" in reply.json()["error"]["message"]


@kit.on_loop
async def test_a_kept_connection_that_the_only_prefill_pod_closed() -> None:
    """It is asked again on a new connection, and it is not blamed."""
    async with (
        raw_pod(every_second(hang_up, prefilled())) as prefill,
        raw_pod(streams) as decode,
        gateway_of(dispatch_of({"p": prefill}, {"d": decode}, PASSIVE)) as app,
    ):
        for number in range(1, 5):
            reply = await ask(app.server.port)
            assert reply.status == 200
            assert len(decode.requests) == number
        assert len(prefill.requests) == 7
        views = (await admin(app, "/admin/pods"))["pods"]
        assert [pod["failuresInRow"] for pod in views] == [0, 0]


@pytest.mark.parametrize("status", [b"503 Busy", b"429 Busy"])
@kit.on_loop
async def test_a_busy_decode_pod_keeps_the_prefill(status: bytes) -> None:
    """The decode leg goes elsewhere with the same handle; the prompt is prefilled once."""
    async with (
        raw_pod(prefilled()) as prefill,
        raw_pod(says(status)) as busy,
        raw_pod(streams) as free,
        gateway_of(dispatch_of({"p": prefill}, {"a": busy, "b": free})) as app,
    ):
        reply = await ask(app.server.port)
        assert reply.events()[-1] == "[DONE]"
        assert reply.headers["x-calinix-decode-pod-id"] == "b"
        assert reply.headers["x-calinix-prefill-pod-id"] == "p"
        assert body_of(busy.requests[0]) == body_of(free.requests[0])
        assert len(prefill.requests) == 1


@kit.on_loop
async def test_what_generates_nothing_is_one_leg() -> None:
    """Embeddings and other posts go to a decode pod alone."""
    async with (
        raw_pod(prefilled()) as prefill,
        raw_pod() as decode,
        gateway_of(dispatch_of({"p": prefill}, {"d": decode})) as app,
    ):
        for path, body in [
            ("/v1/embeddings", {"input": "text"}),
            ("/tokenize", {"prompt": "text"}),
            ("/v1/rerank", {"query": "q", "documents": ["d"]}),
        ]:
            reply = await kit.http(app.server.port, "POST", path, body)
            assert reply.status == 200
            assert reply.headers["x-calinix-target-pod-id"] == "d"
            assert "x-calinix-prefill-pod-id" not in reply.headers
        assert not prefill.requests


@kit.on_loop
async def test_no_depth_of_nesting_keeps_a_lease() -> None:
    """A body at the very edge of what can be parsed is served or refused; no load is left.

    Where that edge is differs between versions of Python.
    """
    async with (
        raw_pod(prefilled()) as prefill,
        raw_pod(streams) as decode,
        gateway_of(dispatch_of({"p": prefill}, {"d": decode})) as app,
    ):
        statuses = []
        for depth in (*range(860, 1010, 2), *range(2_000, 50_000, 1_000)):
            nested = b"[" * depth + b"]" * depth
            body = b'{"messages":[],"stream":true,"x":%b}' % nested
            statuses.append((await kit.http(app.server.port, "POST", CHAT, body)).status)
        assert set(statuses) == {200, 400}
        assert app.router.open_leases() == 0
        assert not app.gateway.flights


@kit.on_loop
async def test_the_outcome_of_a_dispatch() -> None:
    """The outcome of a dispatch has the decode pod's status and the tokens that it states."""

    async def with_usage(served: Served) -> None:
        usage = b'{"prompt_tokens":90,"completion_tokens":4,"total_tokens":94}'
        await served.say(answer(b'{"choices":[],"usage":%b}' % usage))

    async with (
        raw_pod(prefilled()) as prefill,
        raw_pod(with_usage) as decode,
        gateway_of(dispatch_of({"p": prefill}, {"d": decode})) as app,
    ):
        headers = {"x-request-id": "whole"}
        body = chat_body(max_tokens=4)
        assert (await kit.http(app.server.port, "POST", CHAT, body, headers)).status == 200
        found = await outcome(app, "whole")
        assert (found["status"], found["promptTokens"], found["outputTokens"]) == (200, 90, 4)
