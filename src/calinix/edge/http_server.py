"""The server end of HTTP/1.1: one `asyncio.Protocol` a connection, and the port that makes them.

A connection answers its requests in order, one at a time. The handler answers whenever it likes:
whole with `respond`, or with `begin` and `write` as the bytes come. Every call of `write` is one
write to the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import ssl as ssl_module
import struct
from typing import Any, Final, Protocol, cast

from calinix.config import Limits, Timeouts
from calinix.edge.fast import Outlet
from calinix.edge.http_errors import OverloadedError
from calinix.edge.http_request import BodyBudget, Request, RequestHead, RequestReader
from calinix.edge.http_wire import (
    CHUNKED_LINE,
    CLOSE_LINE,
    CONTINUE,
    JSON_LINE,
    KEEP_ALIVE_LINE,
    LAST_CHUNK,
    frame_chunk,
    status_line,
)
from calinix.errors import HttpError, RequestTimeout

__all__ = [
    "HttpServer",
    "Request",
    "RequestHandler",
    "RequestHead",
    "ResponseStream",
    "ServerConnection",
]

WRITE_HIGH_WATER_BYTES: Final = 256 * 1024
COPY_BYTES: Final = 16 * 1024
"""Up to here head and body are joined; longer bodies go out beside the head, in one writev."""
LINGER_QUIET_S: Final = 2.0
"""How long a closing connection waits for a client that sends nothing."""
LINGER_S: Final = 10.0
LINGER_BYTES: Final = 256 * 1024 * 1024
"""What a client may still send after its last answer, so that a reset does not overtake it."""
REFUSED_CONNECTIONS: Final = 128
"""Connections beyond the limit that are told so with a 503; those beyond these are dropped."""
SWEEP_S: Final = 1.0
UNREAD_S: Final = 0.2
"""How long clients that have just connected are waited for when the server drains."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: on, no time: closing sends a reset."""
BACKLOG: Final = 4096
_NOTHING = (0, 0.0)


class RequestHandler(Protocol):
    """The host."""

    def on_request(self, request: Request) -> None:
        """A whole request. What this raises is answered (500 unless an HttpError)."""
        ...


class ResponseStream(Protocol):
    """What a handler installs as `request.conn.stream` to hear of its client."""

    def on_client_blocked(self) -> None:
        """The client reads slower than it is written to: stop reading from the pod."""
        ...

    def on_client_ready(self) -> None:
        """The client has caught up."""
        ...

    def on_client_gone(self) -> None:
        """The client is gone; at most once, and only while an answer is owed."""
        ...


class ServerConnection:
    """One client connection."""

    def __init__(self, server: HttpServer):
        self.stream: ResponseStream | None = None
        self._server = server
        self._loop = server.loop
        self._reader = RequestReader(self, server.limits, server.budget)
        self._transport: asyncio.Transport | None = None
        self._outlet: Outlet | None = None
        self._request: Request | None = None  # the one that an answer is owed to
        self._refusal: HttpError | None = None  # answered after the requests before it
        self._handing_over = False
        self._paused = False  # reading
        self._blocked = False  # the client's side of the buffer is full
        self._idle_since = 0.0
        self._buffered = _NOTHING  # what last waited for a client that takes nothing, and when
        # The answer under way.
        self._head: bytes | None = None  # begun, not yet written
        self._started = False
        self._chunked = False
        self._bodiless = False
        self._keep = True  # the connection outlives this answer
        self._left: int | None = None  # bytes still owed where the length is stated
        # The end.
        self._closing = False  # the last answer is out; what comes is dropped
        self._closing_since = 0.0
        self._heard_at = 0.0
        self._dropped_bytes = 0

    # ---- what the handler calls

    @property
    def response_started(self) -> bool:
        """Whether a byte of this answer has been written."""
        return self._started

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Answer in one piece; `headers` are whole lines. Replaces a `begin` not yet written."""
        request = self._owed("respond")
        if request is None:
            return
        close = self._ends_with(request)
        if status < 200 or status in (204, 304):
            length, body = b"", b""
        else:
            length = b"content-length: %d\r\n" % len(body)
            if request.head.method == "HEAD":
                body = b""
        self._started = True
        self._send(b"%b%b%b%b\r\n" % (status_line(status), headers, length, close), body)
        self._finish()

    def begin(self, status: int, headers: bytes, content_length: int | None) -> None:
        """Hold an answer's head until its first `write`; another `begin` replaces it.

        Without `content_length` the body is chunked, or ends with an HTTP/1.0 connection.
        """
        request = self._owed("begin")
        if request is None:
            return
        bodiless = status < 200 or status in (204, 304)
        self._chunked = False
        self._left = None if bodiless else content_length
        framing = b""
        if bodiless:
            pass
        elif content_length is not None:
            framing = b"content-length: %d\r\n" % content_length
        elif request.head.http_minor == 1:
            self._chunked = True
            framing = CHUNKED_LINE
        self._bodiless = bodiless or request.head.method == "HEAD"
        if not framing and not bodiless:
            self._keep = False
        close = self._ends_with(request)
        self._head = b"%b%b%b%b\r\n" % (status_line(status), headers, framing, close)

    def write(self, body: bytes, wire: bytes | None = None, last: bool = False) -> None:
        """Write a part of the body begun, in one write; `wire` is the same already in chunks."""
        if self._request is None:
            self._owed("write")
            return
        head = self._head
        if head is not None:
            self._head = None
            self._started = True
        elif not self._started:
            raise RuntimeError("write before begin")
        if self._bodiless:
            data = b""
        elif self._chunked:
            data = wire if wire is not None else frame_chunk(body)
            if last:
                data += LAST_CHUNK
        else:
            data = body
            if self._left is not None:
                self._left -= len(body)
                if self._left < 0 or (last and self._left):
                    self.abort()
                    raise RuntimeError("the body is not as long as its content-length")
        if head is not None:
            self._send(head, data)
        elif data:
            assert self._outlet is not None
            self._outlet.write(data)
        if last:
            self._finish()

    def chunk_outlet(self) -> Outlet | None:
        """Where whole chunks of the answer under way go as they are; None: nowhere.

        Good until the handler ends the answer or hears that its client is gone.
        """
        is_open = self._started and self._request is not None
        return self._outlet if is_open and self._chunked and not self._bodiless else None

    def abort(self) -> None:
        """Drop the connection at once. Nothing more is called for the answer owed."""
        self._cut()
        self._release()

    def break_off(self) -> None:
        """End an answer that cannot be completed: what was written goes out, without its end.

        The client then knows that something is missing; an end would say that it is whole.
        """
        if self._ends_with_connection():
            self._cut()
        elif self._transport is not None:
            self._flush()
            self._transport.close()
        self._closing = True
        self._release()

    # ---- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        # uvloop's transports have the interface without the base class.
        self._transport = transport = cast("asyncio.Transport", transport)
        self._outlet = Outlet(transport, self._loop)
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self._idle_since = self._loop.time()
        server = self._server
        beyond = len(server.open) - server.limits.connections
        server.open.add(self)
        if beyond >= REFUSED_CONNECTIONS or server.closed:
            self.abort()
        elif beyond >= 0:
            self._refuse(OverloadedError("too many connections"))

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        now = self._loop.time()
        if self._closing:
            self._drop(len(data), now)
            return
        self._feed(data, now)
        if self._request is None:
            self._hand_over()
        reader = self._reader
        if reader.stopped or (reader.ready and reader.full):
            self._pause()

    def eof_received(self) -> bool:
        """The client sends no more: it has left, and what it is owed is cancelled.

        A closed socket and one of which only the half is closed look the same until they are
        written to. Engines and other proxies take both for a client that has left; a pod that
        goes on for nobody costs more than the rare client that half-closes.
        """
        return False

    def pause_writing(self) -> None:
        """The buffer towards the client is full."""
        self._blocked = True
        self._buffered = _NOTHING
        if self.stream is not None:
            self.stream.on_client_blocked()

    def resume_writing(self) -> None:
        """The client has read."""
        self._blocked = False
        self._buffered = _NOTHING
        if self.stream is not None:
            self.stream.on_client_ready()
        elif self._request is None and not self._closing:
            self._loop.call_soon(self._hand_over)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The connection is closed."""
        self._transport = None
        if self._outlet is not None:
            self._outlet.close()
            self._outlet = None
        self._closing = True
        self._server.forget(self)
        stream = self.stream if self._request is not None else None
        self._reader.discard()
        self._release()
        if stream is not None:
            stream.on_client_gone()

    # ---- requests

    def _feed(self, data: bytes, now: float) -> None:
        reader = self._reader
        try:
            reader.feed(data, now)
        except HttpError as error:
            self._refusal = error
        if reader.continue_due and self._request is None and not reader.ready:
            self._continue()

    def _pause(self) -> None:
        """Read no further while as many requests wait as may."""
        if self._transport is not None and not self._paused and not self._closing:
            self._paused = True
            self._transport.pause_reading()

    def _hand_over(self) -> None:
        """Give the handler the next request; the loop takes the place of recursion."""
        if self._handing_over:
            return
        self._handing_over = True
        reader = self._reader
        while self._request is None and not self._closing and not self._leaves_much():
            if reader.ready:
                self._request = request = reader.ready.popleft()
                self._call_handler(request)
            elif self._refusal is not None:
                self._refuse(self._refusal)
            elif reader.stopped:
                self._feed(b"", self._loop.time())
            elif self._paused:
                self._paused = False
                if self._transport is not None:
                    self._transport.resume_reading()
            else:
                if reader.continue_due:
                    self._continue()
                break
        self._handing_over = False

    def _leaves_much(self) -> bool:
        """Whether the client leaves much unread: known once what waits for it has been written."""
        if self._reader.ready:
            self._flush()
        return self._blocked

    def _call_handler(self, request: Request) -> None:
        try:
            self._server.handler.on_request(request)
        except HttpError as error:
            self._answer_error(request, error)
        except Exception as error:  # noqa: BLE001  the host's failure must not end the process
            self._loop.call_exception_handler(
                {
                    "message": "a request's handler failed",
                    "exception": error,
                    "protocol": self,
                    "transport": self._transport,
                }
            )
            failure = HttpError("the gateway failed to handle this request")
            failure.__cause__ = error
            self._answer_error(request, failure, close=True)

    def _answer_error(self, request: Request, error: HttpError, close: bool = False) -> None:
        if self._request is not request:
            return  # the handler had answered
        if self._started:
            self.abort()
            return
        self._keep = not close
        self.respond(error.status, error_lines(error), error.body())

    def _continue(self) -> None:
        assert self._outlet is not None
        self._reader.continue_due = False
        self._reader.began_at = self._loop.time()  # its time runs from when it may be sent
        self._outlet.write(CONTINUE)

    def _refuse(self, error: HttpError) -> None:
        """Answer what is not a request, and close."""
        self._refusal = None
        self._reader.stop()
        body = error.body()
        head = b"%b%bcontent-length: %d\r\n%b\r\n" % (
            status_line(error.status),
            error_lines(error),
            len(body),
            CLOSE_LINE,
        )
        self._send(head, body)
        self._close()

    # ---- answers

    def _owed(self, verb: str) -> Request | None:
        """The request to answer; None where the client is gone, so that nobody listens."""
        if self._request is not None:
            if self._started:
                raise RuntimeError(f"{verb}: this request is being answered already")
            return self._request
        if self._closing:
            return None
        raise RuntimeError(f"{verb}: no answer is owed")

    def _ends_with(self, request: Request) -> bytes:
        """The Connection line of the answer, having settled whether the connection stays."""
        if not request.head.keep_alive or self._server.draining:
            self._keep = False
        if not self._keep:
            return CLOSE_LINE
        return b"" if request.head.http_minor else KEEP_ALIVE_LINE

    def _send(self, head: bytes, body: bytes) -> None:
        outlet = self._outlet
        assert outlet is not None
        if len(body) > COPY_BYTES:
            outlet.write_both(head, body)
        else:
            outlet.write(head + body)

    def _finish(self) -> None:
        """The answer is whole."""
        keep = self._keep
        self._release()
        if not keep:
            self._close()
            return
        self._idle_since = self._loop.time()
        self._hand_over()

    def _release(self) -> None:
        """Forget the request that was answered, or never will be."""
        request = self._request
        if request is not None:
            self._server.budget.held_bytes -= len(request.body)
            self._request = None
        self.stream = None
        self._head = None
        self._started = False
        self._keep = True
        self._buffered = _NOTHING

    # ---- the end

    def _close(self) -> None:
        """Close after the last answer, leaving the client time to read it (RFC 9112 9.6)."""
        transport = self._transport
        self._closing = True
        self._reader.discard()
        if transport is None or transport.is_closing():
            return
        self._flush()
        if not transport.can_write_eof():
            transport.close()  # TLS closes in both directions by itself
            return
        self._closing_since = self._heard_at = self._loop.time()
        transport.write_eof()
        if self._paused:
            self._paused = False
            transport.resume_reading()

    def _flush(self) -> None:
        if self._outlet is not None:
            self._outlet.flush()

    def _ends_with_connection(self) -> bool:
        """Whether the body under way looks whole wherever the connection ends."""
        return self._started and self._left is None and not (self._chunked or self._bodiless)

    def _cut(self) -> None:
        """End the connection at once, and so that half an answer is not taken for a whole one."""
        self._closing = True
        transport = self._transport
        if transport is None:
            return
        sock = transport.get_extra_info("socket") if self._ends_with_connection() else None
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        transport.abort()

    def _drop(self, size: int, now: float) -> None:
        self._heard_at = now
        self._dropped_bytes += size
        if self._dropped_bytes > LINGER_BYTES:
            self._cut()

    def sweep(self, now: float, timeouts: Timeouts) -> None:
        """Hold the client to its times; called about once a second."""
        transport = self._transport
        if transport is None:
            return
        if transport.get_write_buffer_size() > 0:
            self._sweep_writing(transport, now, timeouts.client_ms / 1000)
        elif self._closing:
            if now - self._heard_at > LINGER_QUIET_S or now - self._closing_since > LINGER_S:
                transport.close()
        elif self._reader.began_at:
            late = now - self._reader.began_at > timeouts.client_ms / 1000
            if late and not self._reader.continue_due:
                self._reader.stop()
                self._refusal = RequestTimeout("the request did not arrive in time")
                self._hand_over()
        elif self._request is None:
            limit_s = SWEEP_S if self._server.draining else timeouts.keep_alive_ms / 1000
            if now - self._idle_since > limit_s:
                transport.close()

    def _sweep_writing(self, transport: asyncio.Transport, now: float, limit_s: float) -> None:
        """Drop a client that has taken nothing of its answer for `limit_s`.

        Judged only while nothing is added to the buffer, which then shrinks if anything is taken.
        """
        size, since = self._buffered
        waiting = transport.get_write_buffer_size()
        if not self._blocked and self._request is not None:
            self._buffered = _NOTHING
        elif waiting < size or not since:
            self._buffered = (waiting, now)
        elif now - since > limit_s:
            self._cut()
        self._heard_at = self._closing_since = now

    def drop(self) -> None:
        """Close at once; the handler hears of it."""
        self._cut()

    def close_idle(self) -> None:
        """Close unless a request is arriving or being answered."""
        busy = self._request is not None or self._reader.began_at or self._reader.ready
        if not busy and not self._closing and self._transport is not None:
            self._closing = True
            self._flush()
            self._transport.close()


class HttpServer:
    """A listening port and its connections."""

    def __init__(
        self,
        handler: RequestHandler,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        timeouts: Timeouts,
    ):
        self.handler = handler
        self.loop = loop
        self.limits = limits
        self.timeouts = timeouts
        self.budget = BodyBudget()
        self.open: set[ServerConnection] = set()
        self.draining = False
        self.closed = False
        self.port = 0
        """The port it listens on; known after `start`."""
        self._server: asyncio.Server | None = None
        self._ssl: ssl_module.SSLContext | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._all_done: asyncio.Future[None] | None = None

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self.open)

    async def start(
        self,
        host: str,
        port: int,
        ssl: ssl_module.SSLContext | None = None,
        sock: socket.socket | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """Listen on host and port (0: any), or on a bound socket. Raises OSError.

        `shared`: other processes listen there too, and the kernel deals out the connections.
        """
        handshake_s = self.timeouts.client_ms / 1000 if ssl is not None else None
        self._ssl = ssl
        listen = functools.partial(
            self.loop.create_server,
            lambda: cast("asyncio.Protocol", ServerConnection(self)),
            ssl=ssl,
            ssl_handshake_timeout=handshake_s,
            backlog=BACKLOG,
        )
        if shared:
            listen = functools.partial(listen, reuse_port=True)
        server = await (listen(host or None, port) if sock is None else listen(sock=sock))
        self._begin(server)
        sockets: Any = server
        self.port = sockets.sockets[0].getsockname()[1]  # uvloop's are no tuple

    async def start_local(self, path: str) -> None:
        """Listen on a unix socket at `path`. Raises OSError."""
        self._begin(
            await self.loop.create_unix_server(
                lambda: cast("asyncio.Protocol", ServerConnection(self)), path
            )
        )

    def _begin(self, server: asyncio.Server) -> None:
        self._server = server
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep_again)

    def adopt(self, limits: Limits, timeouts: Timeouts) -> None:
        """Other limits and times: the limits for connections made from now on."""
        self.limits = limits
        self.timeouts = timeouts

    def sweep(self, now: float) -> None:
        """Hold every client to its times; the server calls this itself once a second."""
        for connection in tuple(self.open):
            connection.sweep(now, self.timeouts)

    def _sweep_again(self) -> None:
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep_again)
        self.sweep(self.loop.time())

    def forget(self, connection: ServerConnection) -> None:
        """A connection is closed."""
        self.open.discard(connection)
        if not self.open and self._all_done is not None and not self._all_done.done():
            self._all_done.set_result(None)

    async def _stop_listening(self, timeout_s: float) -> None:
        """From now on connections are refused; those that the kernel has taken are still served.

        At most `timeout_s` is waited for their TLS handshakes.
        """
        if self._server is None:
            return
        sockets: Any = self._server
        listeners = [socket.socket(fileno=os.dup(one.fileno())) for one in sockets.sockets]
        self._server.close()
        taken: list[socket.socket] = []
        for listener in listeners:
            listener.setblocking(False)
            with listener, contextlib.suppress(OSError):  # nobody waits any more
                while len(taken) < BACKLOG:
                    taken.append(listener.accept()[0])
        tasks = [self.loop.create_task(self._adopt_taken(one)) for one in taken]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def _adopt_taken(self, client: socket.socket) -> None:
        try:
            await self.loop.connect_accepted_socket(
                lambda: cast("asyncio.Protocol", ServerConnection(self)), client, ssl=self._ssl
            )
        except OSError:  # it is gone
            client.close()
        except asyncio.CancelledError:
            client.close()
            raise

    async def drain(self, timeout_s: float) -> None:
        """Accept no more, answer what is owed, then close; after `timeout_s` drop what is left."""
        self.draining = True
        unread_s = min(UNREAD_S, timeout_s)
        await self._stop_listening(unread_s)
        if timeout_s > 0 and self.open:
            # What clients have sent by now may lie unread in their sockets.
            await asyncio.sleep(unread_s)
        for connection in tuple(self.open):
            connection.close_idle()
        if self.open and timeout_s > 0:
            self._all_done = self.loop.create_future()
            await asyncio.wait((self._all_done,), timeout=timeout_s)
        self.closed = True
        if self.open:
            self._all_done = self.loop.create_future()
            for connection in tuple(self.open):
                connection.drop()
            await asyncio.wait((self._all_done,), timeout=SWEEP_S)
        if self._sweeper is not None:
            self._sweeper.cancel()


def error_lines(error: HttpError) -> bytes:
    """The header lines that go with an error's body."""
    if error.retry_after_s is None:
        return JSON_LINE
    return JSON_LINE + b"retry-after: %d\r\n" % error.retry_after_s
