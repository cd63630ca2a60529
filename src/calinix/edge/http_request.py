"""Requests out of a client's bytes, strictly and without a socket: `RequestReader`."""

from __future__ import annotations

from collections import deque
from io import BytesIO
from typing import TYPE_CHECKING

import httptools
import msgspec

from calinix.config import Limits
from calinix.edge.http_strict import (
    MAX_FIELDS,
    ExpectationError,
    Fields,
    FramingError,
    HeadBuffer,
    NotServedError,
    OverloadedError,
    body_length,
    check_host,
    connection_tokens,
    first_values,
    keeps_alive,
    read_request_line,
    split_target,
)
from calinix.edge.http_wire import CRLF, HEAD_END, ChunkedReader
from calinix.errors import BadRequest, HeadersTooLarge, HttpError, PayloadTooLarge

if TYPE_CHECKING:
    from calinix.edge.http_server import ServerConnection

HELD_BODY_BYTES = 1 << 30
"""Request bodies that one server holds at a time, over all its connections."""


class BodyBudget:
    """The request bytes that are held for all connections of one server."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, max_bytes: int = HELD_BODY_BYTES):
        self.held_bytes = 0
        self.max_bytes = max_bytes


class Request(msgspec.Struct, frozen=True, eq=False):
    """One whole request. Header names are lower-cased; `received_at` is its first byte's time."""

    conn: ServerConnection
    method: str
    target: bytes
    path: str
    query: bytes
    headers: Fields
    body: bytes
    http_minor: int
    keep_alive: bool
    received_at: float
    values: dict[bytes, bytes]
    """The first value of each header name."""

    def header(self, name: bytes) -> bytes | None:
        """The first value of the header with this lower-case name."""
        return self.values.get(name)


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
        self._conn = conn
        self._limits = limits
        self._budget = budget
        self._partial = HeadBuffer(limits.header_bytes)
        self._rest = b""  # bytes that wait until `ready` has room
        self._ended = False  # the client said it sends no more, or what it sent was refused
        self._skipped_line = False
        self._fields: Fields = []
        self._head_complete = False
        self._head: tuple[str, bytes, str, bytes, int, bool, dict[bytes, bytes]] | None = None
        self._body: BytesIO | ChunkedReader | None = None
        self._left = 0  # bytes of the body still to come, where its length is known
        self._held = 0  # bytes of the unfinished body in the budget

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
        try:
            while data:
                if self._body is not None:
                    data = self._take_body(self._body, data)
                elif self.full:
                    self._rest = data
                    return
                else:
                    data = self._take_head(data, now)
                if self._ended:
                    return
        except FramingError as error:
            self.stop()
            raise BadRequest(f"not valid HTTP/1.1: {error}") from error
        except HttpError:
            self.stop()
            raise

    def stop(self) -> None:
        """Read no more: forget the unfinished request."""
        self._ended = True
        self.began_at = 0.0
        self.continue_due = False
        self._body = None
        self._budget.held_bytes -= self._held
        self._held = 0

    def _take_head(self, data: bytes, now: float) -> bytes:
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
            end = data.find(HEAD_END) + 4
            if 4 <= end <= self._limits.header_bytes:
                if end == len(data):
                    self._begin(data)
                    return b""
                self._begin(data[:end])
                return self._take_rest(data, end)
            if not 65 <= data[0] <= 90:
                raise BadRequest("the first byte does not begin a request")
        try:
            found = self._partial.push(data)
        except OverflowError:
            limit = self._limits.header_bytes
            raise HeadersTooLarge(f"the request head is over {limit} bytes") from None
        if found is None:
            return b""
        self._begin(found[0])
        return found[1]

    def _take_rest(self, data: bytes, at: int) -> bytes:
        """What follows a head in the same read: most often exactly the body."""
        size = self._left
        if size and len(data) - at == size:
            body = data[at:]
            self._body = None
            self._hold(size)
            self._finish(body)
            return b""
        return data[at:]

    def _begin(self, head: bytes) -> None:
        """Judge a whole head; a request without a body is complete with it."""
        method, target, minor = read_request_line(head[: head.find(CRLF)])
        path, query = split_target(method, target)
        if head.count(CRLF) > MAX_FIELDS + 2:
            raise HeadersTooLarge(f"more than {MAX_FIELDS} header fields")
        fields = self._fields = []
        self._head_complete = False
        try:
            httptools.HttpRequestParser(self).feed_data(head)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            raise FramingError(str(error)) from error
        if not self._head_complete:
            raise FramingError("the head does not end where it seems to")
        values = first_values(fields)
        check_host(minor, values)
        length = body_length(minor, values)
        keep_alive = keeps_alive(minor, values, fields)
        if b"upgrade" in values:
            _refuse_upgrade(values[b"upgrade"], fields)
        self._head = (method, target, path, query, minor, keep_alive, values)
        if not length:
            self._finish(b"")
            return
        if length > self._limits.body_bytes:
            raise self._too_large()
        self._left = max(length, 0)
        self._body = BytesIO() if length > 0 else ChunkedReader()
        if b"expect" in values:
            if values[b"expect"].lower() != b"100-continue":
                raise ExpectationError("only `expect: 100-continue` is understood")
            self.continue_due = minor == 1

    def _take_body(self, body: BytesIO | ChunkedReader, data: bytes) -> bytes:
        self.continue_due = False
        if isinstance(body, ChunkedReader):
            rest = body.feed(data)
            size = body.body_bytes
            self._hold(size - self._held)
            if size > self._limits.body_bytes:
                raise self._too_large()
            if rest is None:
                return b""
            self._finish(body.body())
            return rest
        left = self._left
        if len(data) < left:
            body.write(data)
            self._left = left - len(data)
            self._hold(len(data))
            return b""
        self._hold(left)
        if len(data) == left:
            body.write(data)
            self._finish(body.getvalue())
            return b""
        body.write(data[:left])
        self._finish(body.getvalue())
        return data[left:]

    def _hold(self, size: int) -> None:
        """Count `size` more bytes of this body. Raises OverloadedError."""
        budget = self._budget
        self._held += size
        budget.held_bytes += size
        if budget.held_bytes > budget.max_bytes:
            raise OverloadedError("too many request bytes are held at present")

    def _finish(self, body: bytes) -> None:
        """The request is whole. Its bytes stay in the budget until it has been answered."""
        head = self._head
        assert head is not None
        method, target, path, query, minor, keep_alive, values = head
        request = Request(
            self._conn,
            method,
            target,
            path,
            query,
            self._fields,
            body,
            minor,
            keep_alive,
            self.began_at,
            values,
        )
        self.ready.append(request)
        self._body = None
        self._head = None
        self._left = 0
        self._held = 0
        self.began_at = 0.0
        self._skipped_line = False
        self._ended = not keep_alive

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is over {self._limits.body_bytes} bytes")


def _refuse_upgrade(value: bytes, fields: Fields) -> None:
    """Refuse another protocol, unless it is one that a client offers without needing it.

    RFC 9110 7.8: a server may ignore an upgrade. Java's HTTP client offers h2c with every first
    request and goes on in HTTP/1.1. Raises NotServedError.
    """
    if b"upgrade" in connection_tokens(fields) and value.lower() != b"h2c":
        raise NotServedError("no upgrade to another protocol is served")
