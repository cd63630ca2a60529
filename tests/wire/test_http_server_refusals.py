"""What the server end of HTTP/1.1 refuses, and every bound on what a client may send."""

from __future__ import annotations

import pytest

from calinix.config import Limits
from calinix.edge.http_request import BodyBudget
from edgekit import (
    HOST,
    Requests,
    chunked,
    connect,
    echo,
    post,
    status_of,
)

GET = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"


# ---- what is refused

BAD_HEADS = {
    # Content-Length and Transfer-Encoding
    "two lengths": (post(b"hello", b"content-length: 5"), 400),
    "lengths that differ": (post(b"hello", b"content-length: 6"), 400),
    "a list of lengths": (post(b"")[:-2].replace(b"gth: 0", b"gth: 5, 5") + b"\r\nhello", 400),
    "a signed length": (post(b"").replace(b"gth: 0", b"gth: +5"), 400),
    "a hexadecimal length": (post(b"").replace(b"gth: 0", b"gth: 0x5"), 400),
    "an empty length": (post(b"").replace(b"gth: 0", b"gth:"), 400),
    "a negative length": (post(b"").replace(b"gth: 0", b"gth: -1"), 400),
    "a huge length": (post(b"").replace(b"gth: 0", b"gth: 1" + b"0" * 30), 400),
    "a large length": (post(b"").replace(b"gth: 0", b"gth: 1" + b"0" * 14), 413),
    "length and chunked": (chunked(b"0\r\n\r\n", b"content-length: 5"), 400),
    "chunked and length": (post(b"hello", b"transfer-encoding: chunked"), 400),
    "gzip, chunked": (chunked(b"0\r\n\r\n").replace(b": chunked", b": gzip, chunked"), 400),
    "chunked, gzip": (chunked(b"0\r\n\r\n").replace(b": chunked", b": chunked, gzip"), 400),
    "gzip": (chunked(b"0\r\n\r\n").replace(b": chunked", b": gzip"), 400),
    "identity": (chunked(b"0\r\n\r\n").replace(b": chunked", b": identity"), 400),
    "chunked with a parameter": (chunked(b"").replace(b": chunked", b": chunked;q=1"), 400),
    "quoted chunked": (chunked(b"").replace(b": chunked", b': "chunked"'), 400),
    "an empty coding": (chunked(b"0\r\n\r\n").replace(b": chunked", b":"), 400),
    "chunked twice": (chunked(b"0\r\n\r\n", b"transfer-encoding: chunked"), 400),
    "chunked after a vertical tab": (chunked(b"").replace(b": chunked", b":\x0bchunked"), 400),
    "chunked in HTTP/1.0": (chunked(b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
    # Host
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n", 400),
    "two hosts in HTTP/1.0": (b"GET / HTTP/1.0\r\n" + HOST + HOST + b"\r\n", 400),
    "an empty host": (b"GET / HTTP/1.1\r\nhost:\r\n\r\n", 400),
    "a list of hosts": (b"GET / HTTP/1.1\r\nhost: a, b\r\n\r\n", 400),
    "a host with a path": (b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n", 400),
    "a host with a user": (b"GET / HTTP/1.1\r\nhost: a@b\r\n\r\n", 400),
    "an endless host": (b"GET / HTTP/1.1\r\nhost: " + b"a" * 300 + b"\r\n\r\n", 400),
    # lines
    "bare LF after the first line": (b"GET / HTTP/1.1\nhost: a\r\n\r\n", 400),
    "bare LF after a field": (b"GET / HTTP/1.1\r\nhost: a\nx: y\r\n\r\n", 400),
    "bare LFs at the end": (b"GET / HTTP/1.1\r\nhost: a\n\n", 400),
    "a bare LF at the end": (b"GET / HTTP/1.1\r\nhost: a\r\n\n", 400),
    "a bare LF in front": (b"\n" + GET, 400),
    "bare CR": (b"GET / HTTP/1.1\r\n" + HOST + b"x: a\rb\r\n\r\n", 400),
    "a folded line": (b"GET / HTTP/1.1\r\n" + HOST + b"x: a\r\n b\r\n\r\n", 400),
    "a folded first line": (b"GET / HTTP/1.1\r\n x: a\r\n" + HOST + b"\r\n", 400),
    "NUL": (b"GET / HTTP/1.1\r\n" + HOST + b"x: a\0b\r\n\r\n", 400),
    "a control byte": (b"GET / HTTP/1.1\r\n" + HOST + b"x: a\x01b\r\n\r\n", 400),
    "a space before the colon": (b"GET / HTTP/1.1\r\n" + HOST + b"x : a\r\n\r\n", 400),
    "a tab before the colon": (b"GET / HTTP/1.1\r\n" + HOST + b"x\t: a\r\n\r\n", 400),
    "a space before a length's colon": (post(b"hello").replace(b"length:", b"length :"), 400),
    "no colon": (b"GET / HTTP/1.1\r\n" + HOST + b"x\r\n\r\n", 400),
    "no name": (b"GET / HTTP/1.1\r\n" + HOST + b": x\r\n\r\n", 400),
    "a name that is no token": (b"GET / HTTP/1.1\r\n" + HOST + b"x\xff: a\r\n\r\n", 400),
    # the first line
    "not a word of HTTP": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "no version": (b"GET /\r\n" + HOST + b"\r\n", 400),
    "two spaces": (b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a space in the target": (b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a tab": (b"GET\t/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a space at the end": (b"GET / HTTP/1.1 \r\n" + HOST + b"\r\n", 400),
    "a lower-case version": (b"GET / http/1.1\r\n" + HOST + b"\r\n", 400),
    "another protocol": (b"GET / RTSP/1.0\r\n" + HOST + b"\r\n", 400),
    "HTTP/0.9": (b"GET / HTTP/0.9\r\n" + HOST + b"\r\n", 505),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\n" + HOST + b"\r\n", 505),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 505),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "a method in lower case": (b"get / HTTP/1.1\r\n" + HOST + b"\r\n", 501),
    "an unknown method": (b"FETCH / HTTP/1.1\r\n" + HOST + b"\r\n", 501),
    "CONNECT": (b"CONNECT pod:80 HTTP/1.1\r\n" + HOST + b"\r\n", 501),
    "a target without a slash": (b"GET health HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "an asterisk for GET": (b"GET * HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "another scheme": (b"GET ftp://pod/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "an absolute target without a host": (b"GET http:///a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "an absolute target with a user": (b"GET http://a@b/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a fragment": (b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a control byte in the target": (b"GET /\x01 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a high byte in the target": (b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a high byte in the query": (b"GET /?\xc3\xa4 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    # other protocols and expectations
    "a web socket": (
        b"GET / HTTP/1.1\r\n" + HOST + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
        501,
    ),
    "another expectation": (post(b"hi", b"expect: 200-ok"), 417),
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_bad_heads_are_refused(name: str) -> None:
    """One true status in OpenAI's shape, then the connection ends; the handler hears nothing."""
    data, status = BAD_HEADS[name]
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        seen = Requests(echo)
        conn, wire, server = connect(seen)
        for piece in pieces:
            conn.data_received(piece)
        assert status_of(wire.sent) == status
        assert wire.asked == ["write_eof"]
        assert not seen.seen
        assert server.budget.held_bytes == 0


BAD_CHUNKS = {
    "no size": b"\r\n",
    "no hexadecimal size": b"xyz\r\n",
    "a prefix": b"0x3\r\nabc\r\n",
    "a sign": b"+3\r\nabc\r\n",
    "an underscore": b"1_0\r\n" + b"a" * 16 + b"\r\n",
    "a negative size": b"-1\r\n",
    "a space before the size": b" 3\r\nabc\r\n",
    "a space after the size": b"3 \r\nabc\r\n",
    "a size over 60 bits": b"f" * 16 + b"\r\n",
    "bare LF after the size": b"3\nabc\r\n0\r\n\r\n",
    "bare LF after the chunk": b"3\r\nabc\n0\r\n\r\n",
    "a chunk longer than its size": b"3\r\nabcd\r\n0\r\n\r\n",
    "two other bytes for the chunk's end": b"3\r\nabcXX0\r\n\r\n",
    "one other byte in the chunk's end": b"3\r\nabc\rX0\r\n\r\n",
    "a chunk shorter than its size": b"5\r\nabc\r\n0\r\n\r\n",
    "a control byte in an extension": b"3;a=\x01\r\nabc\r\n0\r\n\r\n",
    "bare CR in an extension": b"3;a=\rb\r\nabc\r\n0\r\n\r\n",
    "a long extension": b"3;" + b"a" * 300 + b"\r\nabc\r\n0\r\n\r\n",
    "a trailer without a colon": b"0\r\ntrailer\r\n\r\n",
    "a trailer with a space in its name": b"0\r\nx y: z\r\n\r\n",
    "a folded trailer": b"0\r\nx: y\r\n z\r\n\r\n",
    "long trailers": b"0\r\n" + b"x: %b\r\n" % (b"y" * 1000) * 9 + b"\r\n",
    "a trailer without an end": b"0\r\nx: " + b"y" * 9000,
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_bad_chunks_are_refused(name: str) -> None:
    """400 and the end, whatever the split, and nothing of the body is kept."""
    data = chunked(BAD_CHUNKS[name])
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        seen = Requests(echo)
        conn, wire, server = connect(seen)
        for piece in pieces:
            conn.data_received(piece)
        assert status_of(wire.sent) == 400
        assert not seen.seen
        assert server.budget.held_bytes == 0


# ---- bounds


@pytest.mark.parametrize("size", [1, 100, 5000])
def test_the_head_is_bounded_whole_or_in_pieces(size: int) -> None:
    """431 once the head is over the limit, before its end has come, however it is cut."""
    data = b"GET / HTTP/1.1\r\n" + HOST + b"x: " + b"y" * 3000
    conn, wire, _ = connect(Requests(echo), Limits(header_bytes=2048))
    for at in range(0, len(data), size):
        conn.data_received(data[at : at + size])
    assert status_of(wire.sent) == 431


def test_the_head_may_be_as_long_as_its_limit() -> None:
    """A head of exactly `headerBytes` is read, one byte more is not."""
    for more, read in ((0, 1), (1, 0)):
        seen = Requests(echo)
        conn, _, _ = connect(seen, Limits(header_bytes=2048))
        head = b"GET / HTTP/1.1\r\n" + HOST + b"x: "
        conn.data_received(head + b"y" * (2048 + more - len(head) - 4) + b"\r\n\r\n")
        assert len(seen.seen) == read


@pytest.mark.parametrize("line", [b"a: b\r\n", b"long-name: " + b"v" * 90 + b"\r\n"])
def test_the_number_of_fields_is_bounded(line: bytes) -> None:
    """More than 256 fields are 431, in a short head and in a long one."""
    for count, status in ((255, 200), (256, 431)):
        conn, wire, _ = connect(Requests(echo))
        conn.data_received(b"GET / HTTP/1.1\r\n" + HOST + line * count + b"\r\n")
        assert int(wire.sent[9:12]) == status


def test_a_body_over_the_limit_is_refused_by_its_declared_length() -> None:
    """413 before a byte of the body came, and no `100 Continue`."""
    conn, wire, _ = connect(Requests(echo), Limits(body_bytes=10))
    conn.data_received(post(b"x" * 11, b"expect: 100-continue")[:-11])
    assert status_of(wire.sent) == 413


def test_a_body_over_the_limit_is_refused_by_its_actual_length() -> None:
    """A chunked body is counted as it comes; one of exactly the limit is read."""
    for size, status in ((10, 200), (11, 413)):
        conn, wire, server = connect(Requests(echo), Limits(body_bytes=10))
        conn.data_received(chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"x" * size)))
        assert int(wire.sent[9:12]) == status
        assert server.budget.held_bytes == 0


def test_framing_without_end_is_refused() -> None:
    """A body cannot be sent a byte a chunk for ever: its framing is bounded by its length."""
    conn, wire, _ = connect(Requests(echo))
    conn.data_received(chunked(b""))
    sent = 0
    while not wire.writes:
        conn.data_received(b"1;xxxxxxxxxxxxxxx\r\nx\r\n" * 1000)
        sent += 1000
        assert sent < 100_000
    assert status_of(wire.sent) == 400


def test_request_bytes_are_bounded_over_all_connections() -> None:
    """503 for the one that would go over; what is answered or lost makes room again."""
    seen = Requests()
    budget = BodyBudget(100)
    others = [connect(seen) for _ in range(3)]
    for other, _, server in others:
        other._reader._budget = server.budget = budget
    first, second, third = (other for other, _, _ in others)
    first.data_received(post(b"x" * 60))
    second.data_received(post(b"y" * 60)[:-30])
    assert budget.held_bytes == 90
    third.data_received(post(b"z" * 60)[:-40])
    assert status_of(others[2][1].sent) == 503
    assert budget.held_bytes == 90
    second.connection_lost(None)
    first.respond(200, b"", b"")
    assert budget.held_bytes == 0
