"""Requests out of a client's bytes, strictly and without a socket: `RequestReader`."""

from __future__ import annotations

from collections import deque
from io import BytesIO
from typing import TYPE_CHECKING, Final

import httptools

from calinix.config import Limits
from calinix.edge.http_errors import (
    ExpectationError,
    FramingError,
    NotServedError,
    OverloadedError,
)
from calinix.edge.http_strict import (
    CACHED_LINE_BYTES,
    MAX_FIELDS,
    SEEN_HEAD_BYTES,
    Fields,
    HeadBuffer,
    RequestLine,
    body_length,
    cached_request_line,
    check_host,
    connection_tokens,
    first_values,
    has_too_many_fields,
    is_token,
    keeps_alive,
    length_digits,
    read_request_line,
)
from calinix.edge.http_wire import CRLF, HEAD_END, ChunkedReader
from calinix.errors import BadRequest, HeadersTooLarge, HttpError, PayloadTooLarge

if TYPE_CHECKING:
    from calinix.edge.http_server import ServerConnection

HELD_BODY_BYTES: Final = 1 << 30
"""Request bodies that one server holds at a time, over all its connections."""


class BodyBudget:
    """The request bytes that are held for all connections of one server."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, max_bytes: int = HELD_BODY_BYTES):
        self.held_bytes = 0
        self.max_bytes = max_bytes


class RequestHead:
    """A request's head as judged. Requests whose heads are alike share one."""

    __slots__ = (
        "fields", "http_minor", "keep_alive", "memo", "method", "path", "query", "target", "values",
    )  # fmt: skip

    def __init__(
        self, line: RequestLine, fields: Fields, values: dict[bytes, bytes], keep_alive: bool
    ):
        self.method, self.target, self.path, self.query, self.http_minor = line
        self.fields = fields
        """Names are lower-cased; without content-length, in which heads that are alike differ."""
        self.values = values
        """The first value of each header name."""
        self.keep_alive = keep_alive
        self.memo: object = None
        """What the handler makes of the head alone: kept here, it is made once."""


class Request:
    """One whole request; `received_at` is its first byte's time."""

    __slots__ = ("body", "conn", "head", "received_at")

    def __init__(
        self,
        conn: ServerConnection,
        head: RequestHead,
        body: bytes,
        received_at: float,
    ):
        self.conn = conn
        self.head = head
        self.body = body
        self.received_at = received_at

    @property
    def method(self) -> str:
        """In upper case."""
        return self.head.method

    @property
    def target(self) -> bytes:
        """As it was sent."""
        return self.head.target

    @property
    def path(self) -> str:
        """Of the target, as it was sent."""
        return self.head.path

    @property
    def query(self) -> bytes:
        """Of the target, without the question mark."""
        return self.head.query

    @property
    def headers(self) -> Fields:
        """Names are lower-cased."""
        return self.head.fields

    @property
    def http_minor(self) -> int:
        """1 for HTTP/1.1, 0 for HTTP/1.0."""
        return self.head.http_minor

    @property
    def keep_alive(self) -> bool:
        """Whether the client lets the connection outlive the answer."""
        return self.head.keep_alive

    def header(self, name: bytes) -> bytes | None:
        """The first value of the header with this lower-case name."""
        return self.head.values.get(name)


class RequestReader:
    """Turns reads into `ready` requests, in order; at most `limits.pipelined_requests` wait there.

    `feed` raises HttpError once, for the first request that is refused; nothing is read after it.
    """

    def __init__(self, conn: ServerConnection, limits: Limits, budget: BodyBudget):
        self.ready: deque[Request] = deque()
        self.began_at = 0.0
        """When the first byte of the unfinished request came; 0 where there is none."""
        self.continue_due = False
        """The client waits for `100 Continue` before it sends the body."""
        self._conn: ServerConnection | None = conn
        self._limits = limits
        self._budget = budget
        self._partial = HeadBuffer(limits.header_bytes)
        self.stopped = False
        """Bytes wait until `ready` has room: `feed(b"")` then goes on with them."""
        self._rest = b""  # these bytes, or the first half of an empty line
        self._ended = False  # the client said it sends no more, or what it sent was refused
        self._skipped_line = False
        # The head of the request whose body is still to come, or that came last.
        self._fields: Fields = []
        self._head_complete = False
        self._head: RequestHead | None = None
        self._seen = b""  # its bytes, and the same without the digits of its length
        self._seen_key = b""
        self._length = 0  # of its body; -1: chunked
        # Its body.
        self._body: BytesIO | ChunkedReader | None = None
        self._left = 0  # bytes still to come, where the length is known
        self._held = 0  # bytes counted in the budget

    # What httptools calls.
    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field; the parser leaves white space at the end of the value."""
        self._fields.append((name.lower(), value.rstrip()))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._head_complete = True

    @property
    def full(self) -> bool:
        """No further request is read until one is taken out of `ready`."""
        return len(self.ready) >= self._limits.pipelined_requests

    def feed(self, data: bytes, now: float) -> None:
        """Take one read. Raises HttpError, and then takes nothing more."""
        if self._ended:
            return
        if self._rest:
            data, self._rest = self._rest + data, b""
            self.stopped = False
        try:
            while data:
                if self._body is not None:
                    data = self._take_body(self._body, data)
                elif self.ready and self.full:
                    self._rest = data
                    self.stopped = True
                    return
                else:
                    data = self._take_head(data, now)
        except FramingError as error:
            self.stop()
            raise BadRequest(f"not valid HTTP/1.1: {error}") from error
        except HttpError:
            self.stop()
            raise

    def discard(self) -> None:
        """Read no more, and forget what is ready too, and for whom."""
        self.stop()
        self._conn = None  # else the two would hold each other until garbage is collected
        for request in self.ready:
            self._budget.held_bytes -= len(request.body)
        self.ready.clear()

    def stop(self) -> None:
        """Read no more: forget the unfinished request."""
        self._ended = True
        self.began_at = 0.0
        self.continue_due = False
        self._body = None
        self._rest = b""
        self.stopped = False
        self._budget.held_bytes -= self._held
        self._held = 0

    def _take_head(self, data: bytes, now: float) -> bytes:
        """Read a head, and the body where it came whole. Returns what is left to read."""
        if self._partial or data[0] == 13:
            return self._take_split_head(data, now)
        end = data.find(HEAD_END) + 4
        if not 4 <= end <= self._limits.header_bytes:
            return self._take_split_head(data, now)
        self.began_at = now
        size = len(data)
        length = self._begin(data if end == size else data[:end])
        if length == 0:
            return self._finish(b"", data[end:])
        if size - end == length:
            self._held = length
            self._budget.held_bytes += length
            self._check_budget()
            return self._finish(data[end:], b"")
        self._expect_body(length)
        return data[end:]

    def _take_split_head(self, data: bytes, now: float) -> bytes:
        """The same for a head that does not come in one piece, or not at all."""
        if not self._partial:
            if data[0] == 13 and not self._skipped_line:
                # RFC 9112 2.2: one empty line before a request is passed over.
                if data[:2] == CRLF:
                    self._skipped_line = True
                    return data[2:]
                if len(data) == 1:
                    self._rest = data
                    return b""
            self.began_at = now
            if not is_token(data[:1]):
                raise BadRequest("the first byte does not begin a request")
        try:
            found = self._partial.push(data)
        except OverflowError:
            limit = self._limits.header_bytes
            raise HeadersTooLarge(f"the request head is over {limit} bytes") from None
        if found is None:
            return b""
        head, rest = found
        length = self._begin(head)
        if length == 0:
            return self._finish(b"", rest)
        self._expect_body(length)
        return rest

    def _begin(self, head: bytes) -> int:
        """Judge a whole head. Returns its body's length, -1 for a chunked one.

        A kept-alive client repeats its head, but for the length of the body: what was judged good
        once is not judged again.
        """
        if head == self._seen:
            return self._length
        key = b""
        if len(head) <= SEEN_HEAD_BYTES and (found := length_digits(head)) is not None:
            key = head[: found.start(1)] + head[found.end(1) :]
            if key == self._seen_key:
                length = int(found[1])
                if length > self._limits.body_bytes:
                    raise self._too_large()
                self._seen, self._length = head, length
                return length
        self._length = self._judge(head)
        if len(head) <= SEEN_HEAD_BYTES:
            self._seen, self._seen_key = head, key
        else:
            self._seen = self._seen_key = b""
        return self._length

    def _judge(self, head: bytes) -> int:
        """The same for a head that was not seen before."""
        line = head[: head.find(CRLF)]
        read_line = cached_request_line if len(line) <= CACHED_LINE_BYTES else read_request_line
        first_line = read_line(line)
        minor = first_line[4]
        if has_too_many_fields(head):
            raise HeadersTooLarge(f"more than {MAX_FIELDS} header fields")
        fields: Fields = []
        self._fields = fields
        self._head_complete = False
        try:
            httptools.HttpRequestParser(self).feed_data(head)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            raise FramingError(str(error)) from error
        if len(fields) > MAX_FIELDS:
            raise HeadersTooLarge(f"more than {MAX_FIELDS} header fields")
        if not self._head_complete:
            raise FramingError("the head does not end where it seems to")
        values = first_values(fields)
        check_host(minor, values.get(b"host"))
        length = body_length(minor, values)
        keep_alive = keeps_alive(minor, values, fields)
        if b"upgrade" in values:
            _refuse_upgrade(values[b"upgrade"], fields)
        if b"expect" in values and values[b"expect"].lower() != b"100-continue":
            raise ExpectationError("only `expect: 100-continue` is understood")
        if b"content-length" in values:
            del values[b"content-length"]
            fields = [field for field in fields if field[0] != b"content-length"]
        self._head = RequestHead(first_line, fields, values, keep_alive)
        if length is None:
            return 0
        if length > self._limits.body_bytes:
            raise self._too_large()
        return length

    def _expect_body(self, length: int) -> None:
        """Go on with a body that did not come whole in the head's own read."""
        self._left = length
        self._body = BytesIO() if length > 0 else ChunkedReader()
        head = self._head
        assert head is not None
        self.continue_due = b"expect" in head.values and head.http_minor == 1

    def _take_body(self, body: BytesIO | ChunkedReader, data: bytes) -> bytes:
        self.continue_due = False
        before = self._held
        if isinstance(body, ChunkedReader):
            rest = body.feed(data)
            self._held = body.body_bytes
        else:
            left = self._left
            rest = data[left:] if len(data) >= left else None
            body.write(data[:left] if rest else data)
            self._held = body.tell()
            self._left = left - (self._held - before)
        self._budget.held_bytes += self._held - before
        self._check_budget()
        if self._held > self._limits.body_bytes:
            raise self._too_large()
        return b"" if rest is None else self._finish(body.getvalue(), rest)

    def _check_budget(self) -> None:
        if self._budget.held_bytes > self._budget.max_bytes:
            raise OverloadedError("too many request bytes are held at present")

    def _finish(self, body: bytes, rest: bytes) -> bytes:
        """The request is whole; its bytes stay in the budget until it has been answered."""
        head, conn = self._head, self._conn
        assert head is not None
        assert conn is not None
        self.ready.append(Request(conn, head, body, self.began_at))
        self._body = None
        self._held = 0
        self.began_at = 0.0
        self._skipped_line = False
        if head.keep_alive:
            return rest
        self._ended = True
        return b""

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is over {self._limits.body_bytes} bytes")


def _refuse_upgrade(value: bytes, fields: Fields) -> None:
    """Refuse another protocol, unless it is one that a client offers without needing it.

    RFC 9110 7.8: a server may ignore an upgrade. Java's HTTP client offers h2c with every first
    request and goes on in HTTP/1.1. Raises NotServedError.
    """
    if b"upgrade" in connection_tokens(fields) and value.lower() != b"h2c":
        raise NotServedError("no upgrade to another protocol is served")
