"""Every time-out, with times short enough to be waited for: when it runs out, and what follows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

import kit
from calinix.core.events import ProbeSucceeded
from calinix.edge import http_server
from fleets import gateway_of
from gatewaykit import (
    CHAT,
    DONE,
    KEEP,
    STREAM_HEAD,
    Connection,
    Script,
    Served,
    admin,
    answer,
    black_hole,
    chat_body,
    chunk,
    config_of,
    event,
    failures_of,
    metrics,
    never,
    outcome,
    raw_pod,
    times,
    total,
)


@contextlib.asynccontextmanager
async def elapsed(least_s: float, most_s: float) -> AsyncIterator[None]:
    """The block has to take so long."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    yield
    took = loop.time() - begin
    assert least_s <= took <= most_s, took


async def ask(port: int, stream: bool, request_id: str = "r-1", path: str = CHAT) -> kit.Reply:
    """One request with this id."""
    headers = {"x-request-id": request_id}
    return await kit.http(port, "POST", path, chat_body(stream=stream, max_tokens=5), headers)


@kit.on_loop
async def test_connect_ms() -> None:
    """A pod that does not take connections: after connectMs another one, or a 502."""
    extra = times(connectMs=250)
    async with raw_pod() as pod:
        with black_hole() as hole:
            async with gateway_of(config_of(extra, hole=hole, p=pod)) as app:
                app.gateway.observe(ProbeSucceeded("hole"))
                async with elapsed(0.2, 1.5):
                    reply = await ask(app.server.port, stream=True)
                assert reply.status == 200
                assert reply.headers["x-calinix-target-pod-id"] == "p"
                failed = total(await metrics(app), "calinix_pod_failures_total", pod_id="hole")
                assert failed == 1
                app.gateway.upstreams["p"].client._port = 9
                app.gateway.upstreams["p"].client.close()
                async with elapsed(0.2, 1.5):
                    reply = await ask(app.server.port, stream=False, request_id="both")
                assert reply.status == 502
                assert (await outcome(app, "both"))["failure"] == "connect"


async def silent_head(served: Served) -> None:
    """A script: a stream's head, and nothing more."""
    await served.say(STREAM_HEAD)
    await never(served)


async def pings(served: Served) -> None:
    """A script: a stream's head, and comments for ever."""
    with contextlib.suppress(ConnectionError):
        await served.say(STREAM_HEAD)
        while not served.reader.at_eof():
            await served.say(chunk(b": ping\n\n"), pause_s=0.03)
            served.writer.write(b"")


@pytest.mark.parametrize("script", [never, silent_head], ids=["nothing", "head"])
@kit.on_loop
async def test_first_token_ms(script: Script) -> None:
    """No event in time: a true 504, though a head had come; the pod is to blame."""
    async with raw_pod(script) as pod, gateway_of(config_of(times(firstTokenMs=200), p=pod)) as app:
        async with elapsed(0.19, 1.0):
            reply = await ask(app.server.port, stream=True)
        assert reply.status == 504
        assert "firstTokenMs" in reply.json()["error"]["message"]
        assert reply.json()["error"]["type"] == "upstream_timeout_error"
        assert await failures_of(app) == [1]
        assert (await outcome(app, "r-1"))["failure"] == "timeout"
        assert len(pod.requests) == 1


@kit.on_loop
async def test_comments_are_no_first_token() -> None:
    """Pings keep a connection, not a request: the stream ends with an error all the same."""
    async with raw_pod(pings) as pod, gateway_of(config_of(times(firstTokenMs=250), p=pod)) as app:
        async with elapsed(0.2, 1.0):
            reply = await ask(app.server.port, stream=True)
        assert reply.status == 200
        assert reply.body.startswith(b": ping\n\n")
        assert "firstTokenMs" in reply.events()[-1]
        assert not reply.complete


@kit.on_loop
async def test_missing_first_tokens_eject_a_pod() -> None:
    """After as many in a row as configured the pod rests, and the others do its work."""
    extra = times(failures=2, firstTokenMs=150)
    async with (
        raw_pod(never) as hung,
        raw_pod() as good,
        gateway_of(config_of(extra, a=hung, b=good)) as app,
    ):
        replies = await asyncio.gather(*(ask(app.server.port, stream=True) for _ in range(4)))
        assert sorted(reply.status for reply in replies) == [200, 200, 504, 504]
        for _ in range(3):
            assert (await ask(app.server.port, stream=True)).status == 200
        views = {pod["id"]: pod for pod in (await admin(app, "/admin/pods"))["pods"]}
        assert views["a"]["state"] == "ejected"
        assert "2 failures in a row" in views["a"]["reason"]


@kit.on_loop
async def test_an_announcement_does_not_shorten_the_first_token() -> None:
    """APIs that announce an answer before its first token: firstTokenMs goes on to hold."""

    async def script(served: Served) -> None:
        await served.say(STREAM_HEAD + chunk(b'data: {"type":"message_start"}\n\n'))
        await asyncio.sleep(0.4)
        delta = chunk(b'data: {"type":"content_block_delta"}\n\n')
        await served.say(delta, chunk(b'data: {"type":"message_stop"}\n\n') + b"0\r\n\r\n")

    extra = times(firstTokenMs=2000, idleMs=150)
    async with raw_pod(script) as pod, gateway_of(config_of(extra, p=pod)) as app:
        reply = await ask(app.server.port, stream=True, path="/v1/messages")
        assert "message_stop" in reply.events()[-1]
        assert reply.complete


@kit.on_loop
async def test_idle_ms() -> None:
    """Events apart by less than idleMs go on for longer than it; a longer gap ends the stream."""

    async def script(served: Served) -> None:
        await served.say(STREAM_HEAD, *map(event, range(6)), pause_s=0.08)
        await never(served)

    async with raw_pod(script) as pod, gateway_of(config_of(times(idleMs=200), p=pod)) as app:
        async with elapsed(0.55, 2.0):
            reply = await ask(app.server.port, stream=True)
        assert reply.status == 200
        assert reply.events()[:6] == [f'{{"n":{n}}}' for n in range(6)]
        assert "idleMs" in reply.events()[6]
        assert not reply.complete
        assert await failures_of(app) == [1]
        assert (await outcome(app, "r-1"))["failure"] == "timeout"


@kit.on_loop
async def test_total_ms() -> None:
    """Not streamed: 504 after totalMs; that alone never ejects, however often it happens."""
    extra = times(failures=1, totalMs=150, firstTokenMs=50, idleMs=50)
    async with raw_pod(never) as pod, gateway_of(config_of(extra, p=pod)) as app:
        async with elapsed(0.14, 1.0):
            replies = await asyncio.gather(
                *(ask(app.server.port, False, f"r-{n}") for n in range(4))
            )
        for reply in replies:
            assert reply.status == 504
            assert "totalMs" in reply.json()["error"]["message"]
        assert await failures_of(app) == [0]
        assert app.router.ready()
        assert (await outcome(app, "r-1"))["failure"] == "total_timeout"


@kit.on_loop
async def test_total_ms_in_the_middle_of_a_body() -> None:
    """Bytes were passed on: the answer is cut short, not ended."""

    async def script(served: Served) -> None:
        await served.say(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n0123")
        await never(served)

    async with raw_pod(script) as pod, gateway_of(config_of(times(totalMs=150), p=pod)) as app:
        reply = await ask(app.server.port, stream=False)
        assert (reply.status, reply.body, reply.complete) == (200, b"0123", False)


@kit.on_loop
async def test_client_ms_and_keep_alive_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a request gets a 408, an idle connection ends; one whose answer is owed waits on."""
    monkeypatch.setattr(http_server, "SWEEP_S", 0.05)

    async def slow(served: Served) -> None:
        await asyncio.sleep(0.8)
        await served.say(answer(b"{}"))

    extra = times(clientMs=400, keepAliveMs=400)
    async with raw_pod(slow) as pod, gateway_of(config_of(extra, p=pod)) as app:
        port = app.server.port
        whole = kit.request_bytes("POST", CHAT, chat_body(), KEEP)
        waiting = await Connection.send(port, whole)
        half = await kit.Exchange.send(port, whole[:-5])
        idle = await Connection.send(port, kit.request_bytes("GET", "/health", None, KEEP))
        assert (await idle.next_reply()).status == 200
        async with elapsed(0.3, 1.0):
            reply = await half.reply()
            assert reply.status == 408
            assert reply.headers["connection"] == "close"
        async with elapsed(0.0, 1.0):
            assert await idle.reader.read() == b""
        await idle.leave()
        assert (await waiting.next_reply()).status == 200
        await waiting.leave()


@kit.on_loop
async def test_time_outs_do_not_touch_what_goes_well() -> None:
    """A stream that lasts longer than all of them together, event by event, is left alone."""

    async def script(served: Served) -> None:
        await served.say(STREAM_HEAD, *map(event, range(12)), DONE, pause_s=0.06)

    extra = times(firstTokenMs=300, idleMs=300, totalMs=300, clientMs=300, keepAliveMs=300)
    async with raw_pod(script) as pod, gateway_of(config_of(extra, p=pod)) as app:
        async with elapsed(0.7, 3.0):
            reply = await ask(app.server.port, stream=True)
        assert reply.events()[-1] == "[DONE]"
        assert reply.complete
        assert await failures_of(app) == [0]
