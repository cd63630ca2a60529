"""What both ends insist on in an HTTP/1.1 head, beyond what the parser refuses by itself."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from calinix.edge.http_errors import FramingError, NotServedError, VersionError
from calinix.errors import BadRequest

MAX_FIELDS: Final = 256
"""Header fields in one head."""
MAX_LENGTH_DIGITS: Final = 15
MAX_HOST_BYTES: Final = 262
"""A name of 255 bytes and a port."""
UNCOUNTED_HEAD_BYTES: Final = 4096
"""A head up to here is not searched for too many fields before it is parsed."""

SEEN_HEAD_BYTES: Final = 4096
"""Longer heads are judged each time; of the others the last one is kept."""
length_digits = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,15})\r\n").search
"""Where a head states its body's length: often all in which it differs from the one before."""

METHODS = {
    name.encode("ascii"): name
    for name in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
}
VERSIONS = {b"HTTP/1.1": 1, b"HTTP/1.0": 0}
SINGLE_FIELDS = frozenset({b"host", b"content-length", b"transfer-encoding"})
"""Fields whose repetition makes two readers of the same bytes disagree."""

_VISIBLE = bytes(range(0x21, 0x7F))
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+;=-]+)(?::[0-9]*)?").fullmatch
is_token = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch
_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)(/[^?]*)?(?:\?(.*))?", re.IGNORECASE).fullmatch

Fields = list[tuple[bytes, bytes]]


RequestLine = tuple[str, bytes, str, bytes, int]


def read_request_line(line: bytes) -> RequestLine:
    """Method, target, path, query and minor version of a line without its CRLF.

    Raises HttpError.
    """
    parts = line.split(b" ")
    if len(parts) != 3:
        raise BadRequest("the request line is not `method target version`")
    minor = VERSIONS.get(parts[2])
    if minor is None:
        if re.fullmatch(rb"HTTP/[0-9]\.[0-9]", parts[2]):
            raise VersionError("this server speaks HTTP/1.1 and HTTP/1.0")
        raise BadRequest("the request line does not end in an HTTP version")
    method = METHODS.get(parts[0])
    if method is None:
        if is_token(parts[0]):
            raise NotServedError("this method is not served")
        raise BadRequest("the method is not a token")
    path, query = split_target(method, parts[1])
    return method, parts[1], path, query, minor


cached_request_line = lru_cache(maxsize=512)(read_request_line)
"""The same for short lines: clients send few different ones."""
CACHED_LINE_BYTES: Final = 128


def split_target(method: str, target: bytes) -> tuple[str, bytes]:
    """Path and query of a request target in origin, absolute or asterisk form. Raises BadRequest.

    The authority of an absolute target is dropped: nothing is routed by the host's name.
    """
    if target.translate(None, _VISIBLE) or b"#" in target:
        raise BadRequest("the request target holds a byte that no target may hold")
    if target[:1] == b"/":
        path, _, query = target.partition(b"?")
        return path.decode("ascii"), query
    if target == b"*" and method == "OPTIONS":
        return "*", b""
    match = _ABSOLUTE(target)
    if match is None or not _HOST(match[1]):
        raise BadRequest("the request target is neither a path nor an http URL")
    return (match[2] or b"/").decode("ascii"), match[3] or b""


def first_values(fields: Fields) -> dict[bytes, bytes]:
    """The first value of each name. Raises FramingError for a repeated SINGLE_FIELDS name."""
    values = dict(fields)
    if len(values) != len(fields):
        values = {}
        for name, value in fields:
            if name not in values:
                values[name] = value
            elif name in SINGLE_FIELDS:
                raise FramingError(f"repeated {name.decode('ascii')}")
    return values


def connection_tokens(fields: Fields) -> frozenset[bytes]:
    """The lower-cased members of every Connection field; those that name fields are hop-by-hop."""
    return frozenset(
        token.strip(b" \t").lower()
        for name, value in fields
        if name == b"connection"
        for token in value.split(b",")
    )


def keeps_alive(minor: int, values: dict[bytes, bytes], fields: Fields) -> bool:
    """Whether the connection outlives this message, by its version and Connection fields."""
    value = values.get(b"connection")
    if value is None:
        return minor == 1
    if len(values) == len(fields):
        lowered = value.lower()
        if lowered == b"keep-alive":
            return True
        if lowered == b"close":
            return False
    tokens = connection_tokens(fields)
    return b"close" not in tokens and (minor == 1 or b"keep-alive" in tokens)


def body_length(minor: int, values: dict[bytes, bytes]) -> int | None:
    """How the body ends: its Content-Length, -1 for chunked, None where neither is stated.

    Raises FramingError for what two readers could understand in two ways.
    """
    coding = values.get(b"transfer-encoding")
    length = values.get(b"content-length")
    if coding is not None:
        if length is not None:
            raise FramingError("both content-length and transfer-encoding")
        if minor == 0:
            raise FramingError("transfer-encoding in HTTP/1.0")
        if coding.lower() != b"chunked":
            raise FramingError("transfer-encoding other than chunked")
        return -1
    if length is None:
        return None
    if not length.isdigit() or len(length) > MAX_LENGTH_DIGITS:
        raise FramingError("content-length is not a number")
    return int(length)


def check_host(minor: int, host: bytes | None) -> None:
    """HTTP/1.1 has exactly one Host, and it is a host. Raises BadRequest."""
    if host is None:
        if minor == 1:
            raise BadRequest("HTTP/1.1 needs a host header")
    elif len(host) > MAX_HOST_BYTES or not _is_host(host):
        raise BadRequest("the host header does not name a host")


@lru_cache(maxsize=256)
def _is_host(host: bytes) -> bool:
    return _HOST(host) is not None


def has_too_many_fields(head: bytes) -> bool:
    """Whether a long head is nothing but fields, found before the parser calls for each of them."""
    return len(head) > UNCOUNTED_HEAD_BYTES and head.count(b"\r\n") > MAX_FIELDS + 2


class HeadBuffer:
    """Gathers a head that comes in pieces, so that the parser is fed once (pieces cost it n^2)."""

    __slots__ = ("_data", "_max_bytes")

    def __init__(self, max_bytes: int):
        self._data = bytearray()
        self._max_bytes = max_bytes

    def __bool__(self) -> bool:
        return bool(self._data)

    def start(self, size: int) -> bytes:
        """The first `size` bytes held."""
        return bytes(self._data[:size])

    def push(self, data: bytes) -> tuple[bytes, bytes] | None:
        """The head and what follows it, or None while its end is to come.

        Raises OverflowError over the bound, FramingError on a bare LF (which a strict search for
        the head's end would wait behind).
        """
        held = self._data
        known = len(held)
        held += data
        end = held.find(b"\r\n\r\n", max(known - 3, 0))
        if end < 0:
            if len(held) > self._max_bytes:
                raise OverflowError
            window = held[max(known - 1, 0) :]
            if window.count(b"\n") != window.count(b"\r\n") + (window[0] == 10 and known > 0):
                raise FramingError("a line ends in a bare LF")
            return None
        if end + 4 > self._max_bytes:
            raise OverflowError
        whole = bytes(held)
        held.clear()
        return whole[: end + 4], whole[end + 4 :]
