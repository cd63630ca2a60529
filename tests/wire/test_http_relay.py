"""Both HTTP ends together, as a gateway joins them: what a request costs, what faults leave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from calinix.edge.http_client import PodClient, ResponseHead, UpstreamCall, UpstreamFailure
from calinix.edge.http_server import Request
from edgekit import CHUNKED, LOCAL, OK, Requests, client_of, connect, connect_pod, pod_of, serving
from kit import on_loop


class Relay:
    """Joins one client's request to one pod's answer."""

    def __init__(self, request: Request, client: PodClient):
        self.conn = request.conn
        self.conn.stream = self
        head = b"%b %b HTTP/1.1\r\nhost: pod\r\ncontent-length: %d\r\n\r\n" % (
            request.method.encode(),
            request.target,
            len(request.body),
        )
        self.call: UpstreamCall = client.send((head, request.body), self)

    def on_client_blocked(self) -> None:
        self.call.pause_reading()

    def on_client_ready(self) -> None:
        self.call.resume_reading()

    def on_client_gone(self) -> None:
        self.call.cancel()

    def on_head(self, head: ResponseHead) -> None:
        self.conn.begin(head.status, b"", head.content_length)

    def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:
        self.conn.write(body, wire, last)

    def on_failure(self, failure: UpstreamFailure, detail: str) -> None:
        if self.conn.response_started:
            self.conn.break_off()
        else:
            self.conn.respond(502, b"", failure.value.encode())


def relay_to(client: PodClient) -> Callable[[Request], None]:
    """How a handler answers by asking the pod."""

    def answer(request: Request) -> None:
        Relay(request, client)

    return answer


@pytest.mark.parametrize("size", [0, 10, 100_000])
def test_a_warm_request_is_two_reads_and_two_writes(size: int) -> None:
    """And each further read of a stream is one more write: syscalls are what a proxy costs."""
    client, to_pod = connect_pod()
    conn, to_client, _ = connect(Requests(relay_to(client)))
    body = b"x" * size
    request = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size + body
    answer = OK + b"content-length: %d\r\n\r\n" % size + body
    for turn in range(1, 4):
        conn.data_received(request)
        assert len(to_pod.writes) == turn
        pod_of(to_pod).data_received(answer)
        assert len(to_client.writes) == turn
    conn.data_received(request)
    for turn, read in enumerate((CHUNKED + b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"), 4):
        pod_of(to_pod).data_received(read)
        assert len(to_client.writes) == turn
    assert len(to_pod.writes) == 4


class FaultyPod(asyncio.Protocol):
    """Answers in every way, and breaks off in every way."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, found, body = self._held.partition(b"\r\n\r\n")
        if not found:
            return
        chance, write = self._rng.random(), self._transport.write  # type: ignore[attr-defined]
        length = int(head.rsplit(b" ", 1)[1])
        if chance < 0.1:
            self._transport.abort()  # type: ignore[attr-defined]
        elif chance < 0.15:
            write(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\nno")
            self._transport.close()
        elif len(body) >= length:
            self._held = body[length:]
            if chance < 0.5:
                write(OK + b"content-length: 5\r\n\r\nhello")
            elif chance < 0.6:
                write(OK + b"\r\nhello")
                self._transport.close()
            else:
                write(CHUNKED)
                self._stream()

    def _stream(self) -> None:
        chance, write = self._rng.random(), self._transport.write  # type: ignore[attr-defined]
        if self._transport.is_closing():
            return
        if chance < 0.03:
            self._transport.abort()  # type: ignore[attr-defined]
        elif chance < 0.05:
            write(b"nonsense")
        elif chance < 0.3:
            write(b"5\r\nhello\r\n0\r\n\r\n")
        else:
            write(b"5\r\nhello\r\n" * (20_000 if chance < 0.33 else 1))
            asyncio.get_running_loop().call_later(self._rng.random() * 0.002, self._stream)


async def drive(port: int, rng: random.Random) -> None:
    """A client that sends, reads, half-closes and leaves as it likes; none may wait in vain."""
    for _ in range(30):
        reader, writer = await asyncio.open_connection(LOCAL, port)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            for _ in range(rng.randrange(1, 5)):
                size = rng.choice([0, 10, 1000, 300_000])
                writer.write(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size)
                writer.write(bytes(size))
                chance = rng.random()
                if chance < 0.1:
                    break
                if chance < 0.15:
                    writer.write_eof()
                    await reader.read()
                    break
                head = await reader.readuntil(b"\r\n\r\n")
                assert int(head[9:12]) in {200, 413, 502}
                if b"content-length: " in head:
                    length = head.split(b"content-length: ")[1].split(b"\r")[0]
                    await reader.readexactly(int(length))
                    continue
                while size := int(await reader.readuntil(b"\r\n"), 16):
                    await reader.readexactly(size + 2)
                await reader.readexactly(2)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd" if Path("/proc/self/fd").exists() else "/dev/fd"))


@pytest.mark.parametrize("seed", range(3))
@on_loop
async def test_faults_on_both_sides_leave_nothing_behind(seed: int) -> None:
    """Resets, nonsense, early answers, clients that leave: all end, no file or byte is kept."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    before = open_files()
    pods = await loop.create_server(lambda: FaultyPod(rng), LOCAL, 0)
    async with client_of(pods.sockets[0].getsockname()[1]) as client:
        handler = Requests(relay_to(client))
        async with serving(handler) as server:
            async with asyncio.timeout(30):
                await asyncio.gather(*[drive(server.port, rng) for _ in range(8)])
            handler.seen.clear()
    pods.close()
    await asyncio.sleep(0.05)
    assert not client._tasks
    assert open_files() <= before + 2  # the loop's own, opened with its first socket
