"""HTTP/1.1 bytes as both ends write them: status lines, header lines, chunk framing and reading."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from io import BytesIO
from typing import Final

from calinix.edge.http_errors import FramingError

CRLF: Final = b"\r\n"
HEAD_END: Final = b"\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON_LINE: Final = b"content-type: application/json\r\n"
CLOSE_LINE: Final = b"connection: close\r\n"
KEEP_ALIVE_LINE: Final = b"connection: keep-alive\r\n"
CHUNKED_LINE: Final = b"transfer-encoding: chunked\r\n"

MAX_CHUNK_LINE_BYTES: Final = 256
"""A chunk's size line with its extensions."""
MAX_TRAILER_BYTES: Final = 8192
"""All trailers of one body; they are dropped, so nobody needs long ones."""
FREE_FRAMING_BYTES: Final = 256 * 1024
"""Framing that a chunked body may carry beyond its own length, so that a body cannot be sent a
byte a chunk for ever."""

_RENAMED = {
    413: "Content Too Large",
    414: "URI Too Long",
    416: "Range Not Satisfiable",
    422: "Unprocessable Content",
}
"""RFC 9110 renamed these; older Pythons have the old names."""
_STATUS_LINES = {
    int(status): b"HTTP/1.1 %d %b\r\n"
    % (status, _RENAMED.get(int(status), status.phrase).encode("ascii"))
    for status in HTTPStatus
}
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e]*)?").fullmatch
_TRAILER_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*").fullmatch


def status_line(status: int) -> bytes:
    """`HTTP/1.1 200 OK` and CRLF; a status that has no phrase gets none."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """`name: value` lines, each with its CRLF."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def frame_chunk(body: bytes) -> bytes:
    """`body` as one chunk; nothing for nothing, since an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(body), body) if body else b""


class ChunkedReader:
    """Reads one chunked body, whatever the split of its bytes; trailers are checked and dropped."""

    __slots__ = ("_body", "_in_trailers", "_left", "_line", "_overhead", "_trailer_bytes")

    def __init__(self) -> None:
        self._body = BytesIO()
        self._trailer_bytes = MAX_TRAILER_BYTES  # that may still come
        self._left = 0  # bytes of the chunk still to come, its CRLF included
        self._line = b""  # a size or trailer line whose end has not arrived
        self._in_trailers = False
        self._overhead = 0

    @property
    def body_bytes(self) -> int:
        """Length of the body so far."""
        return self._body.tell()

    def getvalue(self) -> bytes:
        """The body; whole once `feed` has returned the rest."""
        return self._body.getvalue()

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes. Returns what follows the body's end, or None while the end is to come.

        Raises FramingError.
        """
        size, before = len(data), self._body.tell()
        at = self._take_data(data, 0) if self._left else 0
        if self._line:
            data, at, self._line = self._line + data[at:], 0, b""
        while at < len(data):
            end = data.find(CRLF, at)
            if end < 0:
                self._keep_line(data[at:])
                break
            line = data[at:end]
            at = end + 2
            if self._in_trailers:
                if not line:
                    return data[at:]
                self._check_trailer(line)
            else:
                self._begin_chunk(line)
                at = self._take_data(data, at) if self._left else at
        self._overhead += size - (self._body.tell() - before)
        if self._overhead > FREE_FRAMING_BYTES + self._body.tell():
            raise FramingError("the chunks are too small")
        return None

    def _keep_line(self, line: bytes) -> None:
        bound = self._trailer_bytes if self._in_trailers else MAX_CHUNK_LINE_BYTES
        if len(line) > bound + 1:  # the last byte may be the CR of its end
            raise FramingError("a line of the chunked body is too long")
        self._line = line

    def _begin_chunk(self, line: bytes) -> None:
        match = _CHUNK_LINE(line) if len(line) <= MAX_CHUNK_LINE_BYTES else None
        if match is None:
            raise FramingError("not a chunk size")
        size = int(match[1], 16)
        self._left = size + 2 if size else 0
        self._in_trailers = size == 0

    def _check_trailer(self, line: bytes) -> None:
        self._trailer_bytes -= len(line) + 2
        if self._trailer_bytes < 0:
            raise FramingError("the trailers are too long")
        if not _TRAILER_LINE(line):
            raise FramingError("not a trailer field")

    def _take_data(self, data: bytes, at: int) -> int:
        """Take the chunk's bytes from `at`; returns where its part of `data` ends."""
        end = min(at + self._left, len(data))
        left = self._left - (end - at)
        body_end = min(end, at + max(self._left - 2, 0))
        self._body.write(data[at:body_end] if at or body_end < len(data) else data)
        tail = data[body_end:end]
        if tail and tail != CRLF[2 - left - len(tail) : 2 - left]:
            raise FramingError("a chunk is longer than its size")
        self._left = left
        return end
