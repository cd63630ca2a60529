"""A pod that repeats its heads is read as if each were its first."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from calinix.edge.http_response import ResponseReader, SeenHead

HEADS = [
    b"HTTP/1.1 200 OK\r\ndate: a\r\ncontent-length: %b\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ndate: b\r\nContent-Length: %b\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: %b\r\nconnection: close\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: %b\r\ncontent-length: 3\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\ncontent-length: %b\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nx: %b\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\ncontent-length: %b\r\n\r\n",
]
LENGTHS = [b"0", b"3", b"03", b"12", b"+3", b"3 ", b"-1", b"1000000000000000", b""]


def read(reader: ResponseReader, data: bytes, head_only: bool) -> Any:
    """What comes of one read that is a whole response, or should be."""
    reader.begin(head_only)
    reader.feed(data)
    head = reader.head
    told = None
    if head is not None:
        told = (head.status, head.headers, head.content_length, head.chunked, head.values)
    return told, reader.body, reader.done, reader.fault, reader.reusable


@given(
    st.lists(st.tuples(st.sampled_from(HEADS), st.sampled_from(LENGTHS), st.booleans()), max_size=8)
)
def test_what_was_read_before_changes_nothing(parts: list[tuple[bytes, bytes, bool]]) -> None:
    """Each response is read with a pod's last head at hand as it is without, faults too."""
    seen = SeenHead()
    for head, length, head_only in parts:
        size = int(length) if length.isdigit() and len(length) < 4 and b"chunked" not in head else 0
        data = head % length + b"x" * (0 if head_only else size)
        fresh = read(ResponseReader(4096), data, head_only)
        assert read(ResponseReader(4096, seen), data, head_only) == fresh
