"""For tests of the HTTP edges: a transport that only records, servers, pods and raw clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import msgspec

from calinix.config import Limits, Timeouts
from calinix.edge.http_client import PodClient, PodConnection, ResponseHead, UpstreamFailure
from calinix.edge.http_server import HttpServer, Request, RequestHandler, ServerConnection

LOCAL = "127.0.0.1"
HOST = b"host: calinix\r\n"
REQUEST = b"GET / HTTP/1.1\r\nhost: pod\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


class Clock:
    """What the edges ask of a loop, with a time that only tests move."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.problems: list[dict[str, Any]] = []
        self.soon: list[Callable[[], None]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Clock:
        return self

    def cancel(self) -> None:
        pass

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.problems.append(context)


def loop_of(clock: Clock) -> asyncio.AbstractEventLoop:
    """The clock, as the edges' types want it."""
    return cast("asyncio.AbstractEventLoop", clock)


class Wire(asyncio.Transport):
    """A transport that records what is written to it and what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.asked: list[str] = []
        self.waiting_bytes = 0

    @property
    def sent(self) -> bytes:
        return b"".join(self.writes)

    @property
    def ended(self) -> bool:
        return bool({"close", "abort", "write_eof"}.intersection(self.asked))

    def write(self, data: Any) -> None:
        assert not self.is_closing(), "written to after its end"
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self.asked.append("write_eof")

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.asked.append("close")

    def abort(self) -> None:
        self.asked.append("abort")

    def is_closing(self) -> bool:
        return "close" in self.asked or "abort" in self.asked

    def pause_reading(self) -> None:
        self.asked.append("pause")

    def resume_reading(self) -> None:
        self.asked.append("resume")

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes


class Requests:
    """A handler that keeps what it is handed and answers only where `answer` says how."""

    def __init__(self, answer: Callable[[Request], None] | None = None):
        self.seen: list[Request] = []
        self._answer = answer

    def on_request(self, request: Request) -> None:
        self.seen.append(request)
        if self._answer is not None:
            self._answer(request)


def echo(request: Request) -> None:
    """Answers with what was asked."""
    body = b"%b %b %b" % (request.method.encode(), request.target, request.body)
    request.conn.respond(200, b"x-pod: mock\r\n", body)


class Client:
    """A ResponseStream that notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_client_blocked(self) -> None:
        self.heard.append("blocked")

    def on_client_ready(self) -> None:
        self.heard.append("ready")

    def on_client_gone(self) -> None:
        self.heard.append("gone")


class Answer:
    """A ResponseListener that keeps what it hears, in order."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.parts: list[tuple[bytes, bytes | None, bool]] = []
        self.failure: UpstreamFailure | None = None
        self.detail = ""
        self.ended = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(body for body, _, _ in self.parts)

    @property
    def whole(self) -> bool:
        return bool(self.parts) and self.parts[-1][2]

    def on_head(self, head: ResponseHead) -> None:
        assert self.head is None, "two heads"
        self._check_open()
        self.head = head

    def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:
        assert self.head is not None, "a body before its head"
        assert body or last, "an empty part that ends nothing"
        self._check_open()
        self.parts.append((body, wire, last))
        if last:
            self.ended.set()

    def on_failure(self, failure: UpstreamFailure, detail: str) -> None:
        self._check_open()
        self.failure, self.detail = failure, detail
        self.ended.set()

    def _check_open(self) -> None:
        assert not self.whole, "after the last part"
        assert self.failure is None, "after a failure"


def connect(
    handler: RequestHandler,
    limits: Limits | None = None,
    *,
    clock: Clock | None = None,
    timeouts: Timeouts | None = None,
) -> tuple[ServerConnection, Wire, HttpServer]:
    """A server connection on a recording transport, without a loop."""
    clock = clock or Clock()
    server = HttpServer(handler, loop_of(clock), limits or Limits(), timeouts or Timeouts())
    connection, wire = ServerConnection(server), Wire()
    connection.connection_made(wire)
    return connection, wire, server


def connect_pod(clock: Clock | None = None, max_head_bytes: int = 65536) -> tuple[PodClient, Wire]:
    """A client with one warm connection on a recording transport, without a loop."""
    loop = loop_of(clock or Clock())
    client = PodClient(
        f"http://{LOCAL}:1", loop, connect_timeout_s=1, max_head_bytes=max_head_bytes
    )
    connection, wire = PodConnection(client), Wire()
    connection.connection_made(wire)
    client.release(connection)
    wire.pod = connection  # type: ignore[attr-defined]
    return client, wire


@contextlib.asynccontextmanager
async def serving(
    handler: RequestHandler, limits: Limits | None = None, timeouts: Timeouts | None = None
) -> AsyncIterator[HttpServer]:
    """A listening server; when it has drained it holds nothing."""
    loop = asyncio.get_running_loop()
    server = HttpServer(handler, loop, limits or Limits(), timeouts or Timeouts())
    await server.start(LOCAL, 0)
    try:
        yield server
    finally:
        await server.drain(5)
    assert server.connections == 0
    assert server.budget.held_bytes == 0


@contextlib.asynccontextmanager
async def pod(
    script: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """A pod that runs `script` for each connection; yields its port."""
    tasks: set[asyncio.Task[Any]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(run, LOCAL, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def client_of(port: int, **options: Any) -> AsyncIterator[PodClient]:
    """A PodClient of a local port."""
    loop = asyncio.get_running_loop()
    client = PodClient(f"http://{LOCAL}:{port}", loop, **{"connect_timeout_s": 2.0, **options})
    try:
        yield client
    finally:
        client.close()
        await asyncio.sleep(0.01)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """A request's head, and its body where it states a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    at = head.lower().find(b"content-length:")
    length = int(head[at + 15 : head.find(b"\r", at)]) if at >= 0 else 0
    return head + await reader.readexactly(length)


async def talk(port: int, *pieces: bytes, half_close: bool = False) -> bytes:
    """Send pieces, each in a write of its own, and read until the server closes."""
    reader, writer = await asyncio.open_connection(LOCAL, port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.002)
        if half_close:
            writer.write_eof()
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def reset(writer: asyncio.StreamWriter) -> None:
    """Break the connection with a reset."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


def post(body: bytes, *lines: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    """A POST with its length."""
    return b"POST /v1/x %b\r\n%bcontent-length: %d\r\n%b\r\n%b" % (
        version,
        HOST,
        len(body),
        b"".join(line + b"\r\n" for line in lines),
        body,
    )


def chunked(body: bytes, *lines: bytes) -> bytes:
    """A POST whose chunked body is `body`, framing and all."""
    more = b"".join(line + b"\r\n" for line in lines)
    head = b"POST /v1/x HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n" + more
    return head + b"\r\n" + body


def status_of(sent: bytes) -> int:
    """The status of the only answer in `sent`, whose shape is OpenAI's and which closes."""
    head, _, body = sent.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"content-length: %d\r\n" % len(body) in head
    error = msgspec.json.decode(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head[9:12])


def pod_of(wire: Wire) -> PodConnection:
    """The connection on a recording transport."""
    found = wire.pod  # type: ignore[attr-defined]
    assert isinstance(found, PodConnection)
    return found


def ask(data: bytes, *, size: int = 0, eof: bool = True, head_only: bool = False) -> Answer:
    """The answer that a listener hears when a pod sends `data`, in pieces of `size`."""
    client, wire = connect_pod()
    answer = Answer()
    client.send(REQUEST, answer, head_only=head_only)
    connection = pod_of(wire)
    for at in range(0, len(data), size or len(data) or 1):
        if not wire.is_closing():
            connection.data_received(data[at : at + (size or len(data))])
    if eof and not wire.is_closing():
        connection.eof_received()
    connection.connection_lost(None)
    return answer
