"""The client end of HTTP/1.1: one `PodClient` a pod, with a pool of idle connections.

On a warm connection a request costs one write, and its answer no coroutine, task or timer: what
comes is handed to a `ResponseListener`, at most one `on_body` a read.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import ssl as ssl_module
from collections.abc import Iterable
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

from calinix.edge.fast import Outlet, Relay
from calinix.edge.http_response import ResponseHead, ResponseReader, SeenHead
from calinix.edge.http_wire import header_lines
from calinix.errors import CalinixError, ConfigError

__all__ = [
    "FetchError",
    "PodClient",
    "ResponseHead",
    "ResponseListener",
    "UpstreamCall",
    "UpstreamFailure",
    "fetch",
]

REUSED_CLOSED_S: Final = 0.05
"""A re-used connection that ends this soon without a byte had been closed before it was written."""
SALVAGE_READS, SALVAGE_BYTES = 16, 65536
SWEEP_S: Final = 1.0
FETCH_BODY_BYTES: Final = 16 * 1024 * 1024


_OUT_OF_SOCKETS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)


class UpstreamFailure(enum.Enum):
    """Why no whole answer came."""

    CONNECT = "connect"
    """No connection."""
    NO_SOCKET = "no_socket"
    """This process or machine has no socket left: that says nothing of the pod."""
    REUSED_CLOSED = "reused_closed"
    """A re-used connection that was closed already when it was written."""
    CLOSED = "closed"
    """Closed without a response head."""
    BROKEN = "broken"
    """Closed in the middle of the body."""
    PROTOCOL = "protocol"
    """Not HTTP, or over the bounds."""


class FetchError(CalinixError):
    """`fetch` got no whole answer; `failure` is None when time ran out or the body was too long."""

    def __init__(self, failure: UpstreamFailure | None, detail: str):
        super().__init__(detail)
        self.failure = failure


class ResponseListener(Protocol):
    """What hears a response: `on_head`, then `on_body` with `last` once, or `on_failure` once."""

    def on_head(self, head: ResponseHead) -> None:
        """The final answer's head; interim ones are passed over."""
        ...

    def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:
        """The body's bytes of one read; `wire` is the same in whole chunks, as received."""
        ...

    def on_failure(self, failure: UpstreamFailure, detail: str) -> None:
        """The answer is not, or no longer, to be had."""
        ...


class UpstreamCall:
    """One request under way."""

    __slots__ = ("_connection", "_listener", "_paused", "_task", "head_only", "sent")

    def __init__(self, listener: ResponseListener, head_only: bool):
        self.head_only = head_only
        self.sent = False
        """The request was handed to a connected socket."""
        self._listener: ResponseListener | None = listener
        self._connection: PodConnection | None = None
        self._paused = False
        self._task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Close the connection at once; nothing more is called."""
        self._listener = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        connection = self._connection
        if connection is not None:
            self._connection = None
            connection.abandon()

    def pass_through(self, relay: Relay) -> None:
        """From now on the listener hears of what `relay` does not pass on alone."""
        if self._connection is not None:
            self._connection.relay = relay

    def pause_reading(self) -> None:
        """Take nothing more from the pod for now, connected or not yet."""
        self._paused = True
        if self._connection is not None:
            self._connection.set_reading(False)

    def resume_reading(self) -> None:
        """Go on reading."""
        self._paused = False
        if self._connection is not None:
            self._connection.set_reading(True)


class PodConnection:
    """One connection to a pod: idle, or carrying one call."""

    def __init__(self, client: PodClient):
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._outlet: Outlet | None = None
        self._reader = ResponseReader(client.max_head_bytes, client.seen)
        self._call: UpstreamCall | None = None
        self._listener: ResponseListener | None = None
        self.relay: Relay | None = None
        self._sent_at = 0.0
        self._reused = False
        self.idle_since = 0.0

    # ---- what the client calls

    def start(self, call: UpstreamCall, data: bytes | tuple[bytes, bytes], now: float) -> None:
        """Send a request; the connection is usable."""
        outlet = self._outlet
        assert outlet is not None
        self._call = call
        self._listener = call._listener  # noqa: SLF001
        call._connection = self  # noqa: SLF001
        if call._paused:  # noqa: SLF001
            self.set_reading(False)
        call.sent = True
        self._sent_at = now
        self._reader.begin(call.head_only)
        if isinstance(data, tuple):
            outlet.write_both(data[0], data[1])
        else:
            outlet.write(data)

    def usable(self) -> bool:
        """Open, as far as is known."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close an idle connection."""
        if self._transport is not None:
            self._transport.close()

    def abandon(self) -> None:
        """Drop the connection under its call, which hears nothing more."""
        self._call = None
        self._listener = self.relay = None
        if self._transport is not None:
            self._transport.abort()

    def set_reading(self, on: bool) -> None:
        """Read on, or take nothing for now."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if on:
            transport.resume_reading()
        else:
            transport.pause_reading()

    # ---- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        # uvloop's transports have the interface without the base class.
        self._transport = cast("asyncio.Transport", transport)
        self._outlet = Outlet(self._transport, self._client.loop)

    def data_received(self, data: bytes) -> None:
        """Bytes from the pod."""
        listener = self._listener
        if listener is None:
            # Nobody asked: not even an end that a later request could take for its answer.
            self.abandon()
            self._client.forget(self)
            return
        reader = self._reader
        relay = self.relay
        if relay is not None and reader.between_chunks and relay.pass_on(data):
            return
        known = reader.head
        reader.feed(data)
        head = reader.head
        if head is None:
            if reader.fault is not None:
                self._fail(UpstreamFailure.PROTOCOL, reader.fault)
            return
        if known is None:
            listener.on_head(head)
            if self._listener is not listener:
                return
        if reader.done:
            self._complete(listener, reader.body)
            return
        if reader.body:
            listener.on_body(reader.body, reader.wire, False)
        if reader.fault is not None and self._listener is listener:
            self._fail(UpstreamFailure.PROTOCOL, reader.fault)

    def eof_received(self) -> bool:
        """The pod has closed its side; the transport closes ours."""
        self._ended(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        if exc is not None and self._listener is not None:
            self._read_what_came()
        self._ended(exc)
        self._transport = None
        if self._outlet is not None:
            self._outlet.close()
            self._outlet = None

    def pause_writing(self) -> None:
        """The buffer towards the pod is full."""

    def resume_writing(self) -> None:
        """The pod has read."""

    # ---- how a call ends

    def _read_what_came(self) -> None:
        """Read an answer that came just before the connection broke.

        A pod that refuses a large body answers, closes and so resets the connection; when our
        write meets the reset first, the answer lies unread in the socket.
        """
        transport = self._transport
        if transport is None or not transport.can_write_eof():
            return  # under TLS the socket's bytes are not the answer's
        with contextlib.suppress(OSError), transport.get_extra_info("socket").dup() as sock:
            sock.setblocking(False)
            for _ in range(SALVAGE_READS):
                data = sock.recv(SALVAGE_BYTES)
                if not data or self._listener is None:
                    break
                self.data_received(data)

    def _complete(self, listener: ResponseListener, body: bytes) -> None:
        """The response is whole. The connection goes back first: the listener may need it."""
        self._detach()
        transport = self._transport
        assert transport is not None
        if not self._reader.reusable or transport.get_write_buffer_size():
            # Also when the pod answered before it had read the whole request.
            transport.abort()
        else:
            self._reused = True
            self._client.release(self)
        listener.on_body(body, None, True)

    def _detach(self) -> None:
        call = self._call
        if call is not None:
            call._connection = None  # noqa: SLF001
            call._listener = None  # noqa: SLF001
        self._call = None
        self._listener = self.relay = None

    def _fail(self, failure: UpstreamFailure, detail: str) -> None:
        listener = self._listener
        self._detach()
        if self._transport is not None:
            self._transport.abort()
        if listener is not None:
            listener.on_failure(failure, detail)

    def _ended(self, exc: Exception | None) -> None:
        """The pod closed the connection, or it broke."""
        listener = self._listener
        if listener is None:
            self._client.forget(self)
            return
        reader = self._reader
        detail = str(exc) if exc is not None else "closed by the pod"
        if exc is None and reader.eof():
            self._complete(listener, b"")
        elif reader.head is not None:
            self._fail(UpstreamFailure.BROKEN, detail)
        elif (
            self._reused
            and not reader.heard
            and self._client.loop.time() - self._sent_at <= REUSED_CLOSED_S
        ):
            self._fail(UpstreamFailure.REUSED_CLOSED, detail)
        else:
            self._fail(UpstreamFailure.CLOSED, detail)


class PodClient:
    """One pod's endpoint. Idle connections are re-used, the latest first."""

    def __init__(
        self,
        url: str,
        loop: asyncio.AbstractEventLoop,
        *,
        connect_timeout_s: float,
        idle_timeout_s: float = 4.0,
        max_idle: int = 256,
        ssl: ssl_module.SSLContext | None = None,
        max_head_bytes: int = 65536,
    ):
        """`url` is http(s)://host[:port][/prefix]. Raises ConfigError.

        `connect_timeout_s` covers name, TCP and TLS; idle connections are closed after
        `idle_timeout_s`, and beyond `max_idle` of them.
        """
        self.loop = loop
        self.max_head_bytes = max_head_bytes
        self.seen = SeenHead()
        self._host, self._port, secure, self.host, self.prefix = read_pod_url(url)
        self._ssl = (ssl or ssl_module.create_default_context()) if secure else None
        self._connect_timeout_s = connect_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._max_idle = max_idle
        self._idle: list[PodConnection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    def send(
        self,
        data: bytes | tuple[bytes, bytes],
        listener: ResponseListener,
        *,
        head_only: bool = False,
    ) -> UpstreamCall:
        """Send a whole request, head and body; `head_only` for HEAD, whose answer has no body."""
        call = UpstreamCall(listener, head_only)
        now = self.loop.time()
        idle = self._idle
        while idle:
            connection = idle.pop()
            if now - connection.idle_since < self._idle_timeout_s and connection.usable():
                connection.start(call, data, now)
                return call
            connection.close()
        task = self.loop.create_task(self._connect(call, data))
        call._task = task  # noqa: SLF001
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return call

    def adopt(self, connect_timeout_s: float, ssl: ssl_module.SSLContext | None) -> None:
        """Other settings for connections that are opened from now on."""
        self._connect_timeout_s = connect_timeout_s
        if ssl is not None and self._ssl is not None:
            self._ssl = ssl

    def close(self) -> None:
        """Close idle connections now, the others when their answers are whole."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self, call: UpstreamCall, data: bytes | tuple[bytes, bytes]) -> None:
        detail = ""
        failure = UpstreamFailure.CONNECT
        connection: PodConnection | None = None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                made = PodConnection(self)
                await self.loop.create_connection(
                    lambda: cast("asyncio.Protocol", made), self._host, self._port, ssl=self._ssl
                )
                connection = made
        except TimeoutError:
            detail = f"no connection within {self._connect_timeout_s:g} s"
        except (OSError, ValueError) as error:  # ValueError: a name that IDNA refuses
            detail = str(error) or type(error).__name__
            if isinstance(error, OSError) and error.errno in _OUT_OF_SOCKETS:
                failure = UpstreamFailure.NO_SOCKET
        call._task = None  # noqa: SLF001
        listener = call._listener  # noqa: SLF001
        if listener is None:
            if connection is not None:
                connection.close()
        elif connection is None:
            call._listener = None  # noqa: SLF001
            listener.on_failure(failure, detail)
        elif not connection.usable():
            call._listener = None  # noqa: SLF001
            listener.on_failure(UpstreamFailure.CONNECT, "closed as soon as it was connected")
        else:
            connection.start(call, data, self.loop.time())

    def release(self, connection: PodConnection) -> None:
        """A connection is idle."""
        if self._closed or len(self._idle) >= self._max_idle:
            connection.close()
            return
        connection.idle_since = self.loop.time()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    def forget(self, connection: PodConnection) -> None:
        """A connection has ended while it was idle."""
        if connection in self._idle:
            self._idle.remove(connection)

    def _sweep(self) -> None:
        """Close what has been idle for too long: the front of the list."""
        limit = self.loop.time() - self._idle_timeout_s
        old = 0
        while old < len(self._idle) and self._idle[old].idle_since <= limit:
            self._idle[old].close()
            old += 1
        del self._idle[:old]
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep) if self._idle else None


def read_pod_url(url: str) -> tuple[str, int, bool, bytes, bytes]:
    """Host, port, whether https, the Host header's value and the path's prefix.

    Raises ConfigError.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError([f"{url}: {error}"]) from error
    secure = parts.scheme == "https"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError([f"{url}: not an http(s) URL with a host"])
    if parts.username is not None or "?" in url or "#" in url:
        raise ConfigError([f"{url}: a pod's URL has neither credentials nor a query"])
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError([f"{url!r}: a pod's URL is of visible ASCII characters"])
    host = parts.netloc.encode("ascii")
    prefix = parts.path.rstrip("/").encode("ascii")
    return parts.hostname, port or (443 if secure else 80), secure, host, prefix


class _Fetch:
    """The listener of one `fetch`."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.done: asyncio.Future[tuple[ResponseHead, bytes]] = loop.create_future()
        self._head: ResponseHead | None = None
        self._body = bytearray()

    def on_head(self, head: ResponseHead) -> None:
        self._head = head

    def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:  # noqa: ARG002
        if self.done.done():
            return
        self._body += body
        if len(self._body) > FETCH_BODY_BYTES:
            self.done.set_exception(FetchError(None, f"a body over {FETCH_BODY_BYTES} bytes"))
        elif last:
            assert self._head is not None
            self.done.set_result((self._head, bytes(self._body)))

    def on_failure(self, failure: UpstreamFailure, detail: str) -> None:
        if not self.done.done():
            self.done.set_exception(FetchError(failure, detail))


async def fetch(
    client: PodClient,
    method: str,
    path: str,
    headers: Iterable[tuple[bytes, bytes]] = (),
    body: bytes = b"",
    *,
    timeout_s: float = 10.0,
) -> tuple[ResponseHead, bytes]:
    """One request and its whole answer, for probes and tools; the body is bounded.

    Raises FetchError.
    """
    length = b"content-length: %d\r\n" % len(body) if body or method == "POST" else b""
    data = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b%b\r\n%b" % (
        method.encode("ascii"),
        client.prefix,
        path.encode("ascii"),
        client.host,
        header_lines(headers),
        length,
        body,
    )
    listener = _Fetch(client.loop)
    call = client.send(data, listener, head_only=method == "HEAD")
    try:
        async with asyncio.timeout(timeout_s):
            return await listener.done
    except TimeoutError:
        raise FetchError(None, f"no answer within {timeout_s:g} s") from None
    finally:
        call.cancel()
