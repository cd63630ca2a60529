"""Calls to a pod: cancelled, held back, made from within another; pods' URLs; `fetch`."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from calinix.edge.http_client import (
    FetchError,
    PodClient,
    fetch,
    read_pod_url,
)
from calinix.edge.http_server import Request, ServerConnection
from calinix.errors import ConfigError
from edgekit import (
    CHUNKED,
    OK,
    REQUEST,
    Answer,
    Requests,
    client_of,
    connect_pod,
    echo,
    pod,
    pod_of,
    read_request,
    serving,
)
from kit import on_loop, until

# ---- control


@on_loop
async def test_cancelling_closes_at_once_and_silences() -> None:
    """While connecting, waiting or reading: the pod sees the end, the listener hears nothing."""
    pods: list[str] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"1\r\na\r\n")
        pods.append("asked")
        await reader.read()
        pods.append("ended")

    async with pod(script) as port, client_of(port) as client:
        connecting, reading = Answer(), Answer()
        client.send(REQUEST, connecting).cancel()
        call = client.send(REQUEST, reading)
        await until(lambda: bool(reading.parts), "the first bytes")
        call.cancel()
        call.cancel()
        call.pause_reading()
        call.resume_reading()
        await until(lambda: "ended" in pods, "the pod sees it")
        assert (connecting.head, connecting.failure) == (None, None)
        assert (reading.body, reading.failure) == (b"a", None)
        assert pods == ["asked", "ended"]


@pytest.mark.parametrize("at", ["head", "body", "last"])
def test_a_listener_may_cancel_from_within(at: str) -> None:
    """Nothing is called after a `cancel` inside a call."""
    client, wire = connect_pod()

    class Cancelling(Answer):
        def on_head(self, head: object) -> None:
            assert not self.parts
            if at == "head":
                call.cancel()

        def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:
            assert at == ("last" if last else "body")
            self.parts.append((body, wire, last))
            call.cancel()

    answer = Cancelling()
    call = client.send(REQUEST, answer)
    end = {"head": b"", "body": b"xyz\r\n", "last": b"0\r\n\r\n"}[at]
    pod_of(wire).data_received(CHUNKED + b"1\r\na\r\n" + end)
    pod_of(wire).connection_lost(None)
    assert len(answer.parts) == (at != "head")
    assert answer.failure is None


def test_a_listener_may_send_again_on_the_same_connection() -> None:
    """When `last` is heard the connection is free already."""
    client, wire = connect_pod()
    second = Answer()

    class Again(Answer):
        def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:
            client.send(b"second", second)

    client.send(b"first", Again())
    pod_of(wire).data_received(OK + b"content-length: 0\r\n\r\n")
    pod_of(wire).data_received(OK + b"content-length: 2\r\n\r\nhi")
    assert wire.writes == [b"first", b"second"]
    assert second.body == b"hi"


@on_loop
async def test_paused_reading_holds_the_pod_back() -> None:
    """Nothing is heard while paused, and the pod's writes pile up; all of it comes afterwards."""
    size = 32 * 1024 * 1024
    written = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"content-length: %d\r\n\r\n" % size)
        for _ in range(32):
            writer.write(bytes(size // 32))
            await writer.drain()
        written.set()

    async with pod(script) as port, client_of(port) as client:
        answer = Answer()
        call = client.send(REQUEST, answer)
        await until(lambda: answer.head is not None, "the head")
        call.pause_reading()
        heard = len(answer.body)
        await asyncio.sleep(0.1)
        assert len(answer.body) == heard
        assert not written.is_set()
        call.resume_reading()
        await answer.ended.wait()
        assert len(answer.body) == size


@on_loop
async def test_reading_may_be_paused_before_the_pod_is_connected() -> None:
    """A call that is still connecting remembers it: nothing is heard until reading goes on."""
    asked = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"content-length: 2\r\n\r\nok")
        asked.set()

    async with pod(script) as port, client_of(port) as client:
        answer = Answer()
        call = client.send(REQUEST, answer)
        call.pause_reading()
        await asked.wait()
        await asyncio.sleep(0.05)
        assert answer.head is None
        call.resume_reading()
        await answer.ended.wait()
        assert answer.body == b"ok"


# ---- URLs and fetch


def test_pod_urls() -> None:
    """Host, port, TLS, the Host header and the path's prefix; anything else is refused by name."""
    assert read_pod_url("http://pod") == ("pod", 80, False, b"pod", b"")
    assert read_pod_url("https://pod/") == ("pod", 443, True, b"pod", b"")
    assert read_pod_url("http://[::1]:8000/v/") == ("::1", 8000, False, b"[::1]:8000", b"/v")
    for url in (
        "pod:80", "ftp://pod", "http://", "http://pod:x", "http://pod:99999", "http://a@pod",
        "http://pod/?q", "http://pod/#f", "http://p\u00f6d", "http://pod/a b", "http://[::1",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"."):
            read_pod_url(url)


@on_loop
async def test_ipv6() -> None:
    """A pod on ::1, by a URL with brackets."""
    seen = Requests(echo)

    async with serving(seen) as server:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: cast("asyncio.Protocol", ServerConnection(server)), "::1", 0
        )
        port = listener.sockets[0].getsockname()[1]
        client = PodClient(f"http://[::1]:{port}/base", loop, connect_timeout_s=2)
        head, body = await fetch(client, "GET", "/x")
        assert (head.status, body) == (200, b"GET /base/x ")
        assert seen.seen[0].header(b"host") == b"[::1]:%d" % port
        client.close()
        listener.close()


@on_loop
async def test_fetch() -> None:
    """Method, path, headers and body arrive; HEAD has no body; a large answer is whole."""

    def answer(request: Request) -> None:
        if request.path == "/large":
            request.conn.respond(200, b"", bytes(5_000_000))
        else:
            echo(request)

    seen = Requests(answer)
    async with serving(seen) as server, client_of(server.port) as client:
        head, body = await fetch(client, "POST", "/a?b", [(b"x-a", b"1")], b"hi", timeout_s=5)
        assert (head.status, head.header(b"x-pod"), body) == (200, b"mock", b"POST /a?b hi")
        assert seen.seen[0].header(b"x-a") == b"1"
        head, body = await fetch(client, "HEAD", "/a")
        assert (head.content_length, body) == (8, b"")
        _, body = await fetch(client, "GET", "/large")
        assert len(body) == 5_000_000
        assert server.connections == 1


@on_loop
async def test_fetch_is_bounded_in_time_and_bytes() -> None:
    """No answer in time, or one without end: FetchError, and the connection is closed."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await read_request(reader)
        while b"/endless" in line:
            writer.write((OK + b"\r\n") if not writer.is_closing() else b"")
            while not writer.is_closing():
                writer.write(bytes(1 << 20))
                await writer.drain()
            return
        await reader.read()

    async with pod(script) as port, client_of(port) as client:
        with pytest.raises(FetchError, match=r"within 0\.05 s") as raised:
            await fetch(client, "GET", "/silent", timeout_s=0.05)
        assert raised.value.failure is None
        with pytest.raises(FetchError, match="over"):
            await fetch(client, "GET", "/endless")
