"""The innermost steps of the bytes path: chunks that are passed on, and writing to sockets.

The readable specification; `_bytes_path.pyx` is the same behaviour, compiled, and writes past the
event loop's transport where it can. fast.py chooses.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

SHORT_BYTES = 1024
"""A piece of an answer that is shorter is kept together with what comes next."""

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n").match


def whole_chunks(data: bytes) -> bytes | None:
    """The body in `data` where it is nothing but whole chunks; None where it is anything else.

    A chunk here has one to eight digits, no extension, and is not the last one: bytes that may be
    passed on as they are, and that leave a parser between chunks where they found it.
    """
    pieces, at = [], 0
    while at < len(data):
        line = _SIZE_LINE(data, at)
        if line is None:
            return None
        begin, length = line.end(), int(line[1], 16)
        at = begin + length + 2
        if not length or data[at - 2 : at] != b"\r\n":
            return None
        pieces.append(data[begin : begin + length])
    return b"".join(pieces) or None


def count_events(data: bytes) -> int:
    """How many lines begin with `data:`: the events of an SSE stream, but for one cut in two."""
    return data.startswith(b"data:") + data.count(b"\ndata:")


def with_end(tail: tuple[bytes, bytes], piece: bytes) -> tuple[bytes, bytes]:
    """The last two pieces of an answer, once `piece` has come.

    What follows a short piece is joined to it: the two are the answer's last SHORT_BYTES at least,
    however finely it is cut.
    """
    earlier, latest = tail
    if len(latest) < SHORT_BYTES:
        return (earlier, latest + piece)
    return (latest, piece) if piece else tail


class Relay:
    """Passes on the middle of a streamed answer: reads of whole chunks, to the client as they came.

    What there is to know of them is kept until it is taken.
    """

    __slots__ = ("_clock", "_outlet", "_tail", "body_bytes", "events", "last_s")

    def __init__(self, outlet: Outlet, clock: Callable[[], float]) -> None:
        """`outlet` is a client's, whose answer goes out in chunks; `clock` is in seconds."""
        self._outlet = outlet
        self._clock = clock
        self._tail = (b"", b"")
        self.events = 0
        """Since `take`, like the two that follow."""
        self.body_bytes = 0
        self.last_s = 0.0
        """When the last read was passed on; 0: none was."""

    def pass_on(self, data: bytes) -> bool:
        """Write a read to the client; False: it is no whole chunks, and nothing was done."""
        body = whole_chunks(data)
        if body is None:
            return False
        self.events += count_events(body)
        self.body_bytes += len(body)
        self.last_s = self._clock()
        self._tail = with_end(self._tail, data)
        self._outlet.write(data)
        return True

    def take(self) -> bytes:
        """The end of the bodies passed on since the last call, as whole reads.

        It was SHORT_BYTES at least with its framing, or all. What was counted is forgotten.
        """
        found = whole_chunks(b"".join(self._tail)) or b""
        self._tail = (b"", b"")
        self.events = self.body_bytes = 0
        self.last_s = 0.0
        return found


class Outlet:
    """Where a connection's bytes go out, in the order of the calls.

    Compiled, it hands them to the socket itself, and only what does not fit to the transport,
    which keeps it and tells the protocol to pause, as ever. What one turn of the event loop writes
    to all connections is gathered and goes out at the turn's end (at the latest when 32 wait): a
    write to a socket whose reader sleeps pays for waking it, and of writes close behind each other
    only the first does. Where turns bring one write each there is nothing to gather, and writes
    go out at once but for a try now and then. Under TLS all goes to the transport.
    """

    __slots__ = ("_transport",)

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,  # noqa: ARG002
    ) -> None:
        """`loop` is the one that calls the transport's protocol, and that writes here."""
        self._transport = transport

    def write(self, data: bytes) -> None:
        """Send these bytes."""
        self._transport.write(data)

    def write_both(self, first: bytes, second: bytes) -> None:
        """Send the one, then the other, without joining them."""
        self._transport.writelines((first, second))

    def flush(self) -> None:
        """Hand on what waits for the end of this turn: before the transport is to close."""

    def close(self) -> None:
        """The connection is lost: its socket's number may soon be another's."""
