"""Responses out of a pod's bytes, strictly and without a socket: `ResponseReader`."""

from __future__ import annotations

import httptools
import msgspec

from calinix.edge.http_strict import (
    MAX_FIELDS,
    Fields,
    FramingError,
    HeadBuffer,
    body_length,
    first_values,
    keeps_alive,
)
from calinix.edge.http_wire import CRLF, HEAD_END

MAX_INTERIM = 8
"""1xx answers before the answer."""
CHUNK_FRAMING_BYTES = 12
"""Size line and CRLFs of a chunk without extensions, at most (eight hex digits)."""

_REASON_BYTES = bytes((9, *range(0x20, 0x7F), *range(0x80, 0x100)))


class ResponseHead(msgspec.Struct, frozen=True, eq=False):
    """Status line and header fields; names are lower-cased.

    `content_length` is what the head states, also where no body follows (HEAD, 304); `chunked`
    says that the body came in chunks.
    """

    status: int
    reason: bytes
    headers: Fields
    content_length: int | None
    chunked: bool
    values: dict[bytes, bytes]
    """The first value of each header name."""

    def header(self, name: bytes) -> bytes | None:
        """The first value of the header with this lower-case name."""
        return self.values.get(name)


class ResponseReader:
    """Reads one response after another off one connection.

    After `feed`, `head` is what was read of it (None until it is whole), `body` the body's bytes
    of this read, `wire` the same as received where they can be passed on as they are, `done` says
    that the response is whole, `fault` why it is none. `reusable` says whether another may follow.
    """

    def __init__(self, max_head_bytes: int):
        self.head: ResponseHead | None = None
        self.body = b""
        self.wire: bytes | None = None
        self.done = False
        self.fault: str | None = None
        self.reusable = True
        self.heard = False
        """A byte of this response has come."""
        self._max_head_bytes = max_head_bytes
        self._partial = HeadBuffer(max_head_bytes)
        self._parser: httptools.HttpResponseParser | None = None
        self._fields: Fields = []
        self._reason = b""
        self._head_complete = False
        self._head_only = False
        self._interim = 0
        self._until_eof = False
        self._in_chunk = False
        self._at_boundary = False  # the last read ended where a chunk did
        self._count = 0  # pieces of the body in this read
        self._idle_bytes = 0  # framing since the last byte of the body
        self._pieces: list[bytes] = []
        # httptools calls this for each piece of the body; a bound method would cost more.
        self.on_body = self._pieces.append

    # What httptools calls.
    def on_message_begin(self) -> None:
        """The first byte of a response: refused after the end of the one that was asked for."""
        if self.done:
            raise FramingError("data after the end of the response")

    def on_status(self, reason: bytes) -> None:
        """A part of the reason phrase."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or a trailer, which nobody asked for."""
        if not self._head_complete:
            self._fields.append((name.lower(), value.rstrip()))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._head_complete = True

    def on_chunk_header(self) -> None:
        """A chunk's size line is whole."""
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        """A chunk is whole, its CRLF included."""
        self._in_chunk = False

    def on_message_complete(self) -> None:
        """The response is whole; an interim one is not yet the one that was asked for."""
        self.done = True

    def begin(self, head_only: bool) -> None:
        """Expect a response; to a HEAD request it has no body."""
        self.head = None
        self.done = False
        self.fault = None
        self.heard = False
        self._head_only = head_only
        self._interim = 0
        self._until_eof = False
        self._idle_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take one read."""
        self.heard = True
        self.body = b""
        self.wire = None
        if self.head is None:
            self._read_head(data)
        elif self._until_eof:
            self.body = data
        else:
            self._read_body(data)
            if self.head.chunked and not self.done:
                at_boundary = not self._in_chunk and data[-1] == 10
                if at_boundary and self._at_boundary and self._plain_chunks(data):
                    self.wire = data
                self._at_boundary = at_boundary
                self._bound_framing(data)

    def eof(self) -> bool:
        """The connection has ended. Returns whether that is how the response ends."""
        self.body = b""
        self.wire = None
        self.done = self._until_eof
        return self.done

    def _plain_chunks(self, data: bytes) -> bool:
        """Whether a read of whole chunks holds no extensions: those are for this hop only."""
        return len(data) <= len(self.body) + CHUNK_FRAMING_BYTES * self._count

    def _bound_framing(self, data: bytes) -> None:
        if self.body:
            self._idle_bytes = 0
            return
        self._idle_bytes += len(data)
        if self._idle_bytes > self._max_head_bytes and self.fault is None:
            self.fault = "too much framing without a body"

    def _read_body(self, data: bytes) -> None:
        """Feed the parser; what it found before a fault still counts."""
        parser = self._parser
        assert parser is not None
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.reusable = False
            if not self.done:
                self.fault = _reason_of(error)
        pieces = self._pieces
        self._count = len(pieces)
        if self._count == 1:
            self.body = pieces[0]
            pieces.clear()
        elif pieces:
            self.body = b"".join(pieces)
            pieces.clear()

    def _read_head(self, data: bytes) -> None:
        while data and self.head is None and self.fault is None:
            try:
                found = self._find_head(data)
                if found is None:
                    return
                head, data = found
                self._judge(head, data)
            except OverflowError:
                self.fault = f"the response head is over {self._max_head_bytes} bytes"
            except FramingError as error:
                self.fault = str(error)
            except httptools.HttpParserError as error:
                self.fault = _reason_of(error)
            # An interim answer leaves `head` None and the loop goes on with what follows it.

    def _find_head(self, data: bytes) -> tuple[bytes, bytes] | None:
        if not self._partial:
            end = data.find(HEAD_END) + 4
            if 4 <= end <= self._max_head_bytes:
                return (data, b"") if end == len(data) else (data[:end], data[end:])
            if not b"HTTP/1.".startswith(data[:7]):
                raise FramingError("not an HTTP/1.1 response")
        return self._partial.push(data)

    def _judge(self, head: bytes, rest: bytes) -> None:
        """Parse a whole head, then the body's first bytes."""
        minor = 1 if head.startswith(b"HTTP/1.1 ") else 0
        if not minor and not head.startswith(b"HTTP/1.0 "):
            raise FramingError("not an HTTP/1.1 response")
        if head.count(CRLF) > MAX_FIELDS + 2:
            raise FramingError(f"more than {MAX_FIELDS} header fields")
        self._fields = fields = []
        self._reason = b""
        self._head_complete = False
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        parser = self._parser
        parser.feed_data(head)
        if not self._head_complete:
            raise FramingError("the head does not end where it seems to")
        status = parser.get_status_code()
        if status < 200:
            self.done = False
            self._interim += 1
            if status == 101 or self._interim > MAX_INTERIM:
                raise FramingError("a 101 or too many interim answers")
            return
        self._settle(status, minor, fields, first_values(fields))
        if rest:
            self._first_body(rest)

    def _settle(self, status: int, minor: int, fields: Fields, values: dict[bytes, bytes]) -> None:
        """Decide how the body ends."""
        length = body_length(minor, values)
        if self._reason.translate(None, _REASON_BYTES):
            raise FramingError("a control byte in the reason phrase")
        bodiless = self._head_only or status in (204, 304)
        self._until_eof = length is None and not bodiless
        self.reusable = keeps_alive(minor, values, fields) and not self._until_eof
        if bodiless:
            if not self.done:
                self._parser = None  # it waits for a body that does not come
            self.done = True
        self.head = ResponseHead(
            status,
            self._reason,
            fields,
            length if length is not None and length >= 0 else None,
            length == -1 and not bodiless,
            values,
        )
        self._in_chunk = False
        self._at_boundary = True

    def _first_body(self, rest: bytes) -> None:
        """The body's bytes that came in the same read as the head."""
        if self.done:
            self.reusable = False
        elif self._until_eof:
            self.body = rest
        else:
            self._read_body(rest)
            self._at_boundary = not self._in_chunk and rest[-1] == 10
            self._bound_framing(rest)


def _reason_of(error: httptools.HttpParserError) -> str:
    cause = error.__context__
    return str(cause) if isinstance(cause, FramingError) else str(error)
