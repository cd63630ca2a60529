"""A connection that repeats its heads is read as if each were its first."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from calinix.config import Limits, Timeouts
from calinix.edge.http_request import BodyBudget, RequestReader
from calinix.edge.http_server import HttpServer, ServerConnection
from calinix.errors import HttpError

LIMITS = Limits(body_bytes=50)

HEADS = [
    b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %b\r\n\r\n",
    b"POST /a HTTP/1.1\r\nHost: h\r\ncontent-length: %b\r\nX-A: 1\r\n\r\n",
    b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %b\r\nContent-Length: 5\r\n\r\n",
    b"POST /b HTTP/1.1\r\nHost: h\r\nContent-Length: %b\r\nConnection: close\r\n\r\n",
    b"GET /a?x=%b HTTP/1.1\r\nHost: h\r\n\r\n",
]
LENGTHS = [b"0", b"5", b"05", b"17", b"+5", b"-1", b"5 ", b"99", b"1000000000000000", b""]


def read(reader: RequestReader, data: bytes) -> Any:
    """What comes of the bytes of one request: its fields, the refusal, or that more is to come."""
    try:
        reader.feed(data, 1.0)
    except HttpError as error:
        return error.status
    if not reader.ready:
        return None
    request = reader.ready.popleft()
    return (request.method, request.target, request.headers, request.body, request.keep_alive)


def reader_of() -> RequestReader:
    """A reader of a connection that does not matter."""
    nobody = cast("Any", None)
    conn = ServerConnection(HttpServer(nobody, nobody, LIMITS, Timeouts()))
    return RequestReader(conn, LIMITS, BodyBudget())


@given(st.lists(st.tuples(st.sampled_from(HEADS), st.sampled_from(LENGTHS)), max_size=8))
def test_what_was_read_before_changes_nothing(parts: list[tuple[bytes, bytes]]) -> None:
    """Each request comes out of a used connection as out of a new one, refusals too."""
    used = reader_of()
    for head, length in parts:
        size = int(length) if length.isdigit() and int(length) < 1000 and b"Length" in head else 0
        size = size or (int(length) if b"length" in head and length.isdigit() else 0)
        data = head % length + b"x" * min(size, 1000)
        fresh = read(reader_of(), data)
        assert read(used, data) == fresh
        ended = not isinstance(fresh, tuple) or not fresh[4]
        if ended:
            return
