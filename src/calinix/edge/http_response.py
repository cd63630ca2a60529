"""Responses out of a pod's bytes, strictly and without a socket: `ResponseReader`."""

from __future__ import annotations

from typing import Final

import httptools

from calinix.edge.fast import whole_chunks
from calinix.edge.http_errors import FramingError
from calinix.edge.http_strict import (
    MAX_FIELDS,
    SEEN_HEAD_BYTES,
    Fields,
    HeadBuffer,
    body_length,
    first_values,
    has_too_many_fields,
    keeps_alive,
    length_digits,
)
from calinix.edge.http_wire import HEAD_END

MAX_INTERIM: Final = 8
"""1xx answers before the answer."""

_PARSER_ERRORS = (httptools.HttpParserError, httptools.HttpParserUpgrade)
"""The second, of a 101, is not one of the first."""
_CHUNKED: Final = -1
_UNTIL_EOF: Final = -2
_REASON_BYTES = bytes((9, *range(0x20, 0x7F), *range(0x80, 0x100)))


class ResponseHead:
    """Status line and header fields; names are lower-cased.

    `content_length` is what the head states, also where no body follows (HEAD, 304); `chunked`
    says that the body came in chunks.
    """

    __slots__ = (
        "chunked",
        "content_length",
        "headers",
        "memo",
        "reason",
        "status",
        "values",
    )  # fmt: skip

    def __init__(
        self,
        status: int,
        reason: bytes,
        headers: Fields,
        content_length: int | None,
        chunked: bool,
        values: dict[bytes, bytes],
        memo: list[object] | None = None,
    ):
        self.status = status
        self.reason = reason
        self.headers = headers
        self.content_length = content_length
        self.chunked = chunked
        self.values = values
        """The first value of each header name."""
        self.memo: list[object] = [None] if memo is None else memo
        """One place for what the listener makes of the head but for its length: heads that are
        alike share it, so that it is made once for many."""

    def header(self, name: bytes) -> bytes | None:
        """The first value of the header with this lower-case name."""
        return self.values.get(name)


class SeenHead:
    """The last head with a counted body that a pod sent, for all its connections.

    Its next one often differs in the length alone: what was judged good is not judged again.
    """

    __slots__ = ("data", "head", "keeps_alive", "key")

    def __init__(self) -> None:
        self.data = b""
        self.key = b""
        """The same without the digits of the length."""
        self.head: ResponseHead | None = None
        self.keeps_alive = False

    def keep(self, data: bytes, head: ResponseHead, keeps_alive: bool) -> None:
        """Remembers a head that was judged good."""
        found = length_digits(data)
        if found is not None:
            self.data, self.head, self.keeps_alive = data, head, keeps_alive
            self.key = data[: found.start(1)] + data[found.end(1) :]

    def like(self, data: bytes) -> ResponseHead | None:
        """The head that these bytes are, if they differ from the last one in the length at most."""
        known = self.head
        if data == self.data or known is None:
            return known
        found = length_digits(data)
        if found is None or data[: found.start(1)] + data[found.end(1) :] != self.key:
            return None
        digits = found[1]
        length = int(digits)
        if not length:
            return None
        headers = [
            (name, digits) if name == b"content-length" else (name, value)
            for name, value in known.headers
        ]
        values = {**known.values, b"content-length": digits}
        self.data = data
        self.head = head = ResponseHead(
            known.status, known.reason, headers, length, False, values, known.memo
        )
        return head


class ResponseReader:
    """Reads one response after another off one connection.

    After `feed`, `head` is what was read of it (None until it is whole), `body` the body's bytes
    of this read, `wire` the same as received where they can be passed on as they are, `done` says
    that the response is whole, `fault` why it is none. `reusable` says whether another may follow.
    Heads and chunked bodies go through the parser, other bodies are only counted.
    """

    def __init__(self, max_head_bytes: int, seen: SeenHead | None = None):
        self.head: ResponseHead | None = None
        self.body = b""
        self.wire: bytes | None = None
        self.done = False
        self.fault: str | None = None
        self.reusable = True
        self.heard = False
        """A byte of this response has come."""
        self._max_head_bytes = max_head_bytes
        self._seen = seen or SeenHead()
        self._partial = HeadBuffer(max_head_bytes)
        self._parser: httptools.HttpResponseParser | None = None
        self._fields: Fields = []
        self._reason = b""
        self._head_complete = False
        self._head_only = False
        self._interim = 0
        self._left = 0  # bytes of the body still to come, _CHUNKED or _UNTIL_EOF
        self._in_chunk = False
        self.between_chunks = False
        """In a chunked body, the last read ended where a chunk did."""
        self._idle_bytes = 0  # framing since the last byte of the body
        self._complete = False  # the parser's message is
        self._pieces: list[bytes] = []
        # The parser calls this for each piece of the body; a bound method would cost more.
        self.on_body = self._pieces.append

    # What httptools calls.
    def on_message_begin(self) -> None:
        """The first byte of a response: refused after the end of the one that was asked for."""
        if self._complete:
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
        """The parser has seen the end."""
        self._complete = True

    def begin(self, head_only: bool) -> None:
        """Expect a response; to a HEAD request it has no body."""
        self.head = None
        self.done = False
        self.fault = None
        self.heard = False
        self._head_only = head_only
        self._interim = 0
        self._idle_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take one read."""
        self.heard = True
        self.wire = None
        if self.head is None:
            self.body = b""
            self._read_head(data)
        elif self._left == _CHUNKED:
            # Extensions are for this hop only: chunks that have any are framed anew.
            body = whole_chunks(data) if self.between_chunks else None
            if body is not None:
                # The parser is between chunks, as it would be had it seen them.
                self.body = body
                self.wire = data
                self._idle_bytes = 0
                return
            self._read_chunks(data)
        else:
            self._read_counted(data)

    def eof(self) -> bool:
        """The connection has ended. Returns whether that is how the response ends."""
        self.body = b""
        self.wire = None
        self.done = self.head is not None and self._left == _UNTIL_EOF
        return self.done

    def _read_counted(self, data: bytes) -> None:
        """A body whose length is known, or that the connection's end will end."""
        left = self._left
        if left == _UNTIL_EOF or len(data) < left:
            self.body = data
            if left != _UNTIL_EOF:
                self._left = left - len(data)
            return
        self.done = True
        if len(data) > left:
            self.reusable = False
            data = data[:left]
        self.body = data

    def _read_chunks(self, data: bytes) -> None:
        """A chunked body. What the parser found before a fault still counts."""
        parser = self._parser
        assert parser is not None
        try:
            parser.feed_data(data)
        except _PARSER_ERRORS as error:
            self.reusable = False
            if not self._complete:
                self.fault = _reason_of(error)
        self.done = self._complete
        pieces = self._pieces
        self.body = body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        # A part of a size line tells the parser nothing: only after a CRLF is it between chunks.
        self.between_chunks = not self._in_chunk and data[-1] == 10
        if body:
            self._idle_bytes = 0
        elif not self.done:
            self._idle_bytes += len(data)
            if self._idle_bytes > self._max_head_bytes and self.fault is None:
                self.fault = "too much framing without a body"

    def _read_head(self, data: bytes) -> None:
        try:
            while data and self.head is None:
                found = self._find_head(data)
                if found is None:
                    return
                head, data = found
                self._judge(head)  # leaves `head` None after an interim answer
        except OverflowError:
            self.fault = f"the response head is over {self._max_head_bytes} bytes"
        except FramingError as error:
            self.fault = str(error)
        except _PARSER_ERRORS as error:
            self.fault = _reason_of(error)
        if not data or self.head is None:
            return
        # The body's first bytes came in the same read.
        if self.done:
            self.reusable = False
        elif self._left == _CHUNKED:
            self._read_chunks(data)
        else:
            self._read_counted(data)

    def _find_head(self, data: bytes) -> tuple[bytes, bytes] | None:
        if not self._partial:
            end = data.find(HEAD_END) + 4
            if 4 <= end <= self._max_head_bytes:
                return data[:end], data[end:]
        found = self._partial.push(data)
        if found is None and not b"HTTP/1.".startswith(self._partial.start(7)):
            raise FramingError("not an HTTP/1.1 response")
        return found

    def _judge(self, head: bytes) -> None:
        """Judge a whole head. Raises FramingError and what the parser raises."""
        if not self._head_only:
            known = self._seen.like(head)
            if known is not None:
                assert known.content_length is not None
                self.head = known
                self._left = known.content_length
                self.reusable = self._seen.keeps_alive
                return
        minor = 1 if head.startswith(b"HTTP/1.1 ") else 0
        if not minor and not head.startswith(b"HTTP/1.0 "):
            raise FramingError("not an HTTP/1.1 response")
        if has_too_many_fields(head):
            raise FramingError(f"more than {MAX_FIELDS} header fields")
        fields: Fields = []
        self._fields = fields
        self._reason = b""
        self._head_complete = self._complete = False
        parser = self._parser
        if parser is None:
            self._parser = parser = httptools.HttpResponseParser(self)
        parser.feed_data(head)
        if len(fields) > MAX_FIELDS:
            raise FramingError(f"more than {MAX_FIELDS} header fields")
        if not self._head_complete:
            raise FramingError("the head does not end where it seems to")
        status = parser.get_status_code()
        if status < 200:
            self._interim += 1
            if status == 101 or self._interim > MAX_INTERIM:
                raise FramingError("a 101 or too many interim answers")
            return
        if self._reason.translate(None, _REASON_BYTES):
            raise FramingError("a control byte in the reason phrase")
        values = first_values(fields)
        length = body_length(minor, values)
        bodiless = self._head_only or status in (204, 304)
        self.reusable = keeps_alive(minor, values, fields)
        if bodiless or length == 0:
            self.done = True
        elif length is None:
            self._left = _UNTIL_EOF
            self.reusable = False
        else:
            self._left = length
            self._in_chunk = False
            self.between_chunks = True
        if not self._complete and (bodiless or length != _CHUNKED):
            self._parser = None  # it waits for a body that it will not be shown
        self.head = found = ResponseHead(
            status,
            self._reason,
            fields,
            length if length != _CHUNKED else None,
            length == _CHUNKED and not bodiless,
            values,
        )
        if not bodiless and length and length > 0 and len(head) <= SEEN_HEAD_BYTES:
            self._seen.keep(head, found, self.reusable)


def _reason_of(error: Exception) -> str:
    cause = error.__context__
    return str(cause) if isinstance(cause, FramingError) else str(error)
