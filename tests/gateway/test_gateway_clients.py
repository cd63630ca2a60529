"""Clients that leave, read slowly or not at all: pods are freed, and memory is bounded."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

import kit
from calinix.app import App
from calinix.core.events import ProbeSucceeded
from calinix.edge import http_server
from fleets import gateway_of, leases_given_back, merged
from gatewaykit import (
    CHAT,
    DONE,
    EVENTS,
    KEEP,
    STREAM_HEAD,
    Served,
    answer,
    black_hole,
    body_of,
    chat_body,
    chunk,
    config_of,
    dispatch_of,
    event,
    failures_of,
    metrics,
    outcome,
    raw_pod,
    times,
    total,
)

BLOCK = b"data: " + b"x" * 8_000 + b"\n\n"


def wanted(stream: bool = True, request_id: str = "leaving") -> bytes:
    """A chat request on a connection that would be kept."""
    lines = {**KEEP, "x-request-id": request_id}
    return kit.request_bytes("POST", CHAT, chat_body(stream=stream), lines)


async def gone(app: App, served: list[Served], status: str) -> None:
    """Within a second every pod's connection is closed, no load is left, the client is counted."""
    await kit.until(
        lambda: all(one.reader.at_eof() for one in served), "the pod is left", timeout_s=1.0
    )
    assert app.admin is not None
    await leases_given_back(app.admin.port)
    samples = await metrics(app)
    assert total(samples, "calinix_client_disconnects_total") == 1
    assert total(samples, "calinix_requests_total", status=status) == 1


class Watched:
    """A script that says these pieces, then `more` again and again until the gateway leaves."""

    def __init__(self, *pieces: bytes, more: bytes = b""):
        self.served: list[Served] = []
        self._pieces = pieces
        self._more = more

    async def script(self, served: Served) -> None:
        """The test looks whether the gateway has left."""
        self.served.append(served)
        await served.say(*self._pieces)
        while not served.reader.at_eof():
            await served.say(self._more, pause_s=0.05)


STAGES: dict[str, tuple[Watched, bytes, str]] = {
    "before-the-head": (Watched(), b"", "499"),
    "before-the-body": (Watched(STREAM_HEAD), b"", "499"),
    "in-the-stream": (
        Watched(STREAM_HEAD + event(1), event(2), more=event(3)),
        b'{"n":2}',
        "200",
    ),
    "in-a-whole-body": (
        Watched(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n0123", more=b"4"),
        b"0123",
        "200",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["close", "reset"])
@kit.on_loop
async def test_a_client_that_leaves(stage: str, how: str) -> None:
    """Whenever and however it goes: the pod is left within a second, and nobody is blamed."""
    watched, mark, status = STAGES[stage]
    watched.served.clear()
    async with (
        raw_pod(watched.script) as pod,
        gateway_of(config_of(times(failures=1), p=pod)) as app,
    ):
        client = await kit.Exchange.send(app.server.port, wanted())
        await kit.until(lambda: bool(pod.requests), "the pod is asked")
        if mark:
            await client.read_until(mark)
        if how == "reset":
            sock: socket.socket = client.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await client.leave()
        await gone(app, watched.served, status)
        assert (await outcome(app, "leaving"))["failure"] == "cancelled"
        assert await failures_of(app) == [0]


@kit.on_loop
async def test_a_client_that_leaves_while_its_pod_is_connected_to() -> None:
    """No connection comes about for nobody."""
    with black_hole() as hole:
        extra = merged(times(connectMs=5_000), {"health": {"intervalMs": 60_000}})
        async with raw_pod() as pod, gateway_of(config_of(extra, hole=hole, p=pod)) as app:
            app.gateway.observe(ProbeSucceeded("hole"))
            client = await kit.Exchange.send(app.server.port, wanted())
            await kit.until(lambda: bool(app.gateway.flights), "it is on its way")
            await client.leave()
            await gone(app, [], "499")
            assert not pod.requests


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@kit.on_loop
async def test_a_client_that_leaves_a_dispatch(leg: str) -> None:
    """In either leg: that leg's pod is left, and the other one holds nothing either."""
    watched = Watched()

    async def prefill(served: Served) -> None:
        if leg == "prefill":
            await watched.script(served)
        await served.say(answer(b'{"kv_transfer_params":{}}'))

    async with (
        raw_pod(prefill) as first,
        raw_pod(watched.script) as second,
        gateway_of(dispatch_of({"p": first}, {"d": second})) as app,
    ):
        client = await kit.Exchange.send(app.server.port, wanted())
        await kit.until(lambda: bool(watched.served), "the leg is sent")
        await client.leave()
        await gone(app, watched.served, "499")
        assert len(second.requests) == (leg == "decode")


@kit.on_loop
async def test_a_client_that_leaves_a_silent_stream_frees_the_pod() -> None:
    """It closes while its pod says nothing: the pod's connection is closed within a second."""
    watched = Watched()

    async def script(served: Served) -> None:
        await served.say(STREAM_HEAD, event(1))
        await watched.script(served)

    async with raw_pod(script) as pod, gateway_of(config_of(p=pod)) as app:
        client = await kit.Exchange.send(app.server.port, wanted())
        await client.reader.readuntil(b'{"n":1}')
        await client.leave()
        await gone(app, watched.served, "200")


async def endless(served: Served) -> None:
    """A script: a stream as fast as it is taken, until the gateway leaves."""
    await served.say(STREAM_HEAD)
    while not served.writer.is_closing():
        await served.say(chunk(BLOCK) * 16)


@kit.on_loop
async def test_a_client_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway holds little of its answer, stops reading, and cuts it after clientMs."""
    monkeypatch.setattr(http_server, "SWEEP_S", 0.05)
    log = tmp_path / "requests.log"
    extra = times(failures=1, clientMs=600, idleMs=100)
    extra["log"] = {"requests": True, "requestsFile": str(log)}
    async with raw_pod(endless) as pod, gateway_of(config_of(extra, p=pod)) as app:
        client = await kit.Exchange.send(app.server.port, wanted(), receive_bytes=8_192)
        await kit.until(
            lambda: any(flight.client_blocked for flight in app.gateway.flights), "it is blocked"
        )
        (connection,) = (one for one in app.server.open if one.stream is not None)
        assert connection._transport is not None
        (flight,) = app.gateway.flights
        passed, held = flight.written_bytes, connection._transport.get_write_buffer_size()
        assert held < 1_000_000
        # Longer than idleMs: what is not taken is not the pod's fault.
        await asyncio.sleep(0.3)
        assert flight.written_bytes == passed
        assert connection._transport.get_write_buffer_size() == held
        await kit.until(lambda: not app.gateway.flights, "it is cut", timeout_s=4.0)
        found = await outcome(app, "leaving")
        assert found["failure"] == "cancelled"
        assert await failures_of(app) == [0]
        samples = await metrics(app)
        assert total(samples, "calinix_client_disconnects_total") == 1
        assert '"error":"client_stalled"' in log.read_text()
        await client.leave()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@kit.on_loop
async def test_a_slow_client_gets_everything(stream: bool) -> None:
    """Megabytes to a client that takes longer than the pod's time-outs: not a byte is lost."""
    size = 1_000

    async def script(served: Served) -> None:
        if stream:
            await served.say(STREAM_HEAD)
            for _ in range(size):
                await served.say(chunk(BLOCK))
            await served.say(DONE)
        else:
            body = BLOCK * size
            head = b"HTTP/1.1 200 OK\r\n" + EVENTS + b"content-length: %d\r\n\r\n" % len(body)
            await served.say(head, body)

    extra = times(failures=1, idleMs=150, totalMs=150, firstTokenMs=150)
    async with raw_pod(script) as pod, gateway_of(config_of(extra, p=pod)) as app:
        request = kit.request_bytes("POST", CHAT, chat_body(stream=stream), {"connection": "close"})
        client = await kit.Exchange.send(app.server.port, request, receive_bytes=8_192)
        await client.read_until(b"\r\n\r\n")
        for _ in range(8):
            await asyncio.sleep(0.04)
            client.wire += await client.reader.read(65_536)
        await asyncio.sleep(0.2)
        reply = await client.reply()
        assert reply.complete
        expected = BLOCK * size + (b"data: [DONE]\n\n" if stream else b"")
        assert reply.body == expected
        assert await failures_of(app) == [0]


@kit.on_loop
async def test_a_pod_that_reads_slowly_gets_everything() -> None:
    """A large body to a pod that takes its time arrives whole; the gateway holds it once."""

    async def script(served: Served) -> None:
        await served.say(answer(b"{}"))

    body = b'{"prompt":"%b"}' % (b"y" * 8_000_000)
    async with raw_pod(script) as pod, gateway_of(config_of(p=pod)) as app:
        sending = asyncio.ensure_future(kit.http(app.server.port, "POST", "/v1/completions", body))
        await kit.until(lambda: app.server.budget.held_bytes == len(body), "it is held")
        assert (await sending).status == 200
        assert body_of(pod.requests[0]) == body
        assert app.server.budget.held_bytes == 0


@kit.on_loop
async def test_others_are_served_while_one_reads_nothing() -> None:
    """A client that takes nothing holds up its own connection alone."""

    async def script(served: Served) -> None:
        await (endless if b"leaving" in served.request else ok)(served)

    async def ok(served: Served) -> None:
        await served.say(answer(b"{}"))

    async with raw_pod(script) as pod, gateway_of(config_of(p=pod)) as app:
        lazy = await kit.Exchange.send(app.server.port, wanted(), receive_bytes=8_192)
        await kit.until(
            lambda: any(flight.client_blocked for flight in app.gateway.flights), "it is blocked"
        )
        for _ in range(5):
            reply: Any = await kit.http(app.server.port, "POST", CHAT, chat_body())
            assert reply.status == 200
        await lazy.leave()
        await kit.until(lambda: not app.gateway.flights, "the lazy one is forgotten")


@kit.on_loop
async def test_http_1_0_clients() -> None:
    """An old client gets a stream that ends with its connection, without chunks, and no more."""

    async def script(served: Served) -> None:
        await served.say(STREAM_HEAD, event(1), DONE)

    async with raw_pod(script) as pod, gateway_of(config_of(p=pod)) as app:
        body = b'{"messages":[],"stream":true}'
        head = b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body)
        client = await kit.Exchange.send(app.server.port, head + body)
        reply = await client.reply()
        assert "transfer-encoding" not in reply.headers
        assert reply.body == b'data: {"n":1}\n\ndata: [DONE]\n\n'
        assert pod.requests[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
