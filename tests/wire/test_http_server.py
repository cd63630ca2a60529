"""The server end of HTTP/1.1, byte by byte: what it answers, refuses, bounds and never does."""

from __future__ import annotations

import msgspec
import pytest

from calinix.config import Limits, Timeouts
from calinix.edge.http_request import BodyBudget
from calinix.edge.http_server import Request
from calinix.errors import NoPod, Unauthorized
from edgekit import Client, Clock, Requests, Wire, connect, echo

HOST = b"host: calinix\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"


def post(body: bytes, *lines: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    """A POST with its length."""
    return b"POST /v1/x %b\r\n%bcontent-length: %d\r\n%b\r\n%b" % (
        version,
        HOST,
        len(body),
        b"".join(line + b"\r\n" for line in lines),
        body,
    )


def chunked(body: bytes, *lines: bytes) -> bytes:
    """A POST whose chunked body is `body`, framing and all."""
    more = b"".join(line + b"\r\n" for line in lines)
    head = b"POST /v1/x HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n" + more
    return head + b"\r\n" + body


def status_of(sent: bytes) -> int:
    """The status of the only answer in `sent`, whose shape is OpenAI's and which closes."""
    head, _, body = sent.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"content-length: %d\r\n" % len(body) in head
    error = msgspec.json.decode(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head[9:12])


# ---- answers, to the byte


def test_a_whole_answer_to_the_byte() -> None:
    """`respond` adds the length and nothing else, in one write."""
    conn, wire, _ = connect(Requests(echo))
    conn.data_received(post(b"hi"))
    assert wire.writes == [
        b"HTTP/1.1 200 OK\r\nx-pod: mock\r\ncontent-length: 13\r\n\r\nPOST /v1/x hi"
    ]
    assert not wire.ended


def test_a_stream_to_the_byte() -> None:
    """The head waits for the first bytes; every `write` is one write; the last ends the chunks."""
    seen = Requests()
    conn, wire, _ = connect(seen)
    conn.data_received(GET)
    conn.begin(200, b"content-type: text/event-stream\r\n", None)
    assert (wire.writes, conn.response_started) == ([], False)
    conn.write(b"data: 1\n\n")
    assert (len(wire.writes), conn.response_started) == (1, True)
    conn.write(b"data: 2\n\n", b"9\r\ndata: 2\n\n\r\n")
    conn.write(b"")
    conn.write(b"data: 3\n\n", last=True)
    assert wire.writes == [
        (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n"
        ),
        b"9\r\ndata: 2\n\n\r\n",
        b"9\r\ndata: 3\n\n\r\n0\r\n\r\n",
    ]
    assert (len(wire.writes), conn.response_started) == (3, False)


def test_a_stated_length_passes_the_body_as_it_is() -> None:
    """With a length nothing is framed, and `wire` is not used."""
    conn, wire, _ = connect(Requests())
    conn.data_received(GET)
    conn.begin(404, b"", 6)
    conn.write(b"abc", b"3\r\nabc\r\n")
    conn.write(b"def", last=True)
    assert wire.writes == [b"HTTP/1.1 404 Not Found\r\ncontent-length: 6\r\n\r\nabc", b"def"]


def test_a_long_body_goes_out_beside_its_head() -> None:
    """Head and a long body are still one write to the transport."""
    conn, wire, _ = connect(Requests())
    conn.data_received(GET)
    conn.begin(200, b"", 100_000)
    conn.write(b"x" * 100_000, last=True)
    assert wire.writes == [b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000]


def test_http_1_0_gets_a_stream_that_ends_with_the_connection() -> None:
    """No chunks for HTTP/1.0, even where it asked to keep the connection."""
    conn, wire, _ = connect(Requests())
    conn.data_received(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    conn.begin(200, b"", None)
    conn.write(b"abc", b"3\r\nabc\r\n")
    conn.write(b"def", last=True)
    assert wire.sent == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabcdef"
    assert wire.asked == ["write_eof"]


CLOSE = b"connection: close\r\n"


@pytest.mark.parametrize(
    ("request_head", "line", "stays"),
    [
        (b"GET / HTTP/1.1\r\n" + HOST, b"", True),
        (b"GET / HTTP/1.1\r\n" + HOST + b"Connection: Close\r\n", CLOSE, False),
        (b"GET / HTTP/1.1\r\n" + HOST + b"connection: te, close\r\n", CLOSE, False),
        (b"GET / HTTP/1.1\r\n" + HOST + b"connection: te\r\n" + CLOSE, CLOSE, False),
        (b"GET / HTTP/1.0\r\n", CLOSE, False),
        (b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n", b"connection: keep-alive\r\n", True),
        (b"GET / HTTP/1.0\r\nconnection: keep-alive, close\r\n", CLOSE, False),
    ],
)  # fmt: skip
def test_keep_alive_rules(request_head: bytes, line: bytes, stays: bool) -> None:
    """The connection stays by the client's version and word, and the answer says so."""
    conn, wire, _ = connect(Requests(echo))
    conn.data_received(request_head + b"\r\n")
    assert wire.sent == (
        b"HTTP/1.1 200 OK\r\nx-pod: mock\r\ncontent-length: 6\r\n" + line + b"\r\nGET / "
    )
    assert wire.ended is not stays


def test_a_head_request_gets_the_head_alone() -> None:
    """HEAD: the length is stated, the body is not sent, chunked or not."""
    seen = Requests(echo)
    conn, wire, _ = connect(seen)
    head = b"HEAD /x HTTP/1.1\r\n" + HOST + b"\r\n"
    conn.data_received(head)
    assert wire.sent == b"HTTP/1.1 200 OK\r\nx-pod: mock\r\ncontent-length: 8\r\n\r\n"
    conn, wire, _ = connect(Requests())
    conn.data_received(head)
    conn.begin(200, b"", None)
    conn.write(b"abc", b"3\r\nabc\r\n")
    conn.write(b"", last=True)
    assert wire.sent == b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body(status: int) -> None:
    """204 and 304 carry neither body nor framing, either way of answering."""
    lines = {204: b"HTTP/1.1 204 No Content\r\n\r\n", 304: b"HTTP/1.1 304 Not Modified\r\n\r\n"}
    conn, wire, _ = connect(Requests(lambda r: r.conn.respond(status, b"", b"ignored")))
    conn.data_received(GET)
    assert wire.sent == lines[status]
    conn, wire, _ = connect(Requests())
    conn.data_received(GET)
    conn.begin(status, b"", None)
    conn.write(b"ignored", last=True)
    assert wire.sent == lines[status]


def test_a_status_without_a_phrase() -> None:
    """A pod's own status is passed on, though it has no name."""
    conn, wire, _ = connect(Requests(lambda r: r.conn.respond(599, b"", b"")))
    conn.data_received(GET)
    assert wire.sent == b"HTTP/1.1 599 \r\ncontent-length: 0\r\n\r\n"


def test_an_answer_held_can_be_replaced_until_it_is_written() -> None:
    """A pod that fails before its first byte leaves room for a true status."""
    conn, wire, _ = connect(Requests())
    conn.data_received(GET)
    conn.begin(200, b"", None)
    conn.begin(200, b"", 3)
    conn.respond(502, b"", b"no")
    assert wire.sent == b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 2\r\n\r\nno"


def test_nothing_is_answered_twice() -> None:
    """A second answer, or more after the last byte, is the host's error and sends nothing."""
    conn, wire, _ = connect(Requests(echo))
    conn.data_received(GET)
    sent = wire.sent
    with pytest.raises(RuntimeError, match="no answer is owed"):
        conn.respond(200, b"", b"")
    with pytest.raises(RuntimeError, match="no answer is owed"):
        conn.begin(200, b"", None)
    with pytest.raises(RuntimeError, match="no answer is owed"):
        conn.write(b"x", last=True)
    conn, wire, _ = connect(Requests())
    conn.data_received(GET)
    with pytest.raises(RuntimeError, match="before begin"):
        conn.write(b"x")
    conn.begin(200, b"", None)
    conn.write(b"x")
    with pytest.raises(RuntimeError, match="already"):
        conn.respond(502, b"", b"")
    with pytest.raises(RuntimeError, match="already"):
        conn.begin(200, b"", None)
    assert sent.count(b"HTTP/1.1") == wire.sent.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("parts", [(b"abcd",), (b"ab",), (b"ab", b"cd")])
def test_a_body_of_another_length_is_cut_off(parts: tuple[bytes, ...]) -> None:
    """A body that is not as long as was stated ends in a broken connection, not in a lie."""
    conn, wire, _ = connect(Requests())
    conn.data_received(GET)
    conn.begin(200, b"", 3)
    *first, last = parts
    for part in first:
        conn.write(part)
    with pytest.raises(RuntimeError, match="content-length"):
        conn.write(last, last=True)
    assert wire.asked == ["abort"]


# ---- what is read


def test_a_request_as_the_handler_sees_it() -> None:
    """Every attribute of a Request; names are lower-cased, values trimmed, order kept."""
    seen = Requests()
    conn, _, _ = connect(seen, clock=Clock())
    conn.data_received(
        b"POST /v1/x?a=b&c HTTP/1.1\r\nHost: pod:80\r\nX-A:  one \t\r\nx-a: two\r\nEmpty:\r\n"
        b"Content-Length: 2\r\n\r\nhi"
    )
    (request,) = seen.seen
    assert request.conn is conn
    assert (request.method, request.target) == ("POST", b"/v1/x?a=b&c")
    assert (request.path, request.query, request.body) == ("/v1/x", b"a=b&c", b"hi")
    assert (request.http_minor, request.keep_alive, request.received_at) == (1, True, 1000.0)
    assert request.headers == [
        (b"host", b"pod:80"),
        (b"x-a", b"one"),
        (b"x-a", b"two"),
        (b"empty", b""),
        (b"content-length", b"2"),
    ]
    assert request.header(b"x-a") == b"one"
    assert request.header(b"absent") is None


@pytest.mark.parametrize(
    ("line", "path", "query"),
    [
        (b"GET http://pod:80/v1/models?x=1 HTTP/1.1", "/v1/models", b"x=1"),
        (b"GET HTTPS://[::1]:80/a HTTP/1.1", "/a", b""),
        (b"GET http://pod HTTP/1.1", "/", b""),
        (b"GET http://pod?x HTTP/1.1", "/", b"x"),
        (b"GET //a//b HTTP/1.1", "//a//b", b""),
        (b"GET /a|b{} HTTP/1.1", "/a|b{}", b""),
        (b"OPTIONS * HTTP/1.1", "*", b""),
    ],
)
def test_targets_that_are_read(line: bytes, path: str, query: bytes) -> None:
    """Origin, absolute and asterisk form; the authority plays no part."""
    seen = Requests(echo)
    conn, _, _ = connect(seen)
    conn.data_received(line + b"\r\n" + HOST + b"\r\n")
    assert [(r.path, r.query) for r in seen.seen] == [(path, query)]


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (b"0\r\n\r\n", b""),
        (b"3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"000003\r\nabc\r\n2\r\nde\r\n000\r\n\r\n", b"abcde"),
        (b"3;name=value;other=\"quoted\"\r\nabc\r\n0;last\r\n\r\n", b"abc"),
        (b"A\r\n0123456789\r\n0\r\nx-sum: 1\r\nother:\r\n\r\n", b"0123456789"),
    ],
)  # fmt: skip
def test_chunked_bodies_that_are_read(body: bytes, read: bytes) -> None:
    """Chunks, short extensions and trailers; a request right behind is read as the next one."""
    seen = Requests(echo)
    conn, _, _ = connect(seen)
    conn.data_received(chunked(body) + GET)
    assert [(r.method, r.body) for r in seen.seen] == [("POST", read), ("GET", b"")]


def test_one_empty_line_before_a_request_is_passed_over() -> None:
    """RFC 9112 2.2, also where the line itself comes in two pieces; a second one is refused."""
    seen = Requests(echo)
    conn, wire, _ = connect(seen)
    for piece in (b"\r\n" + GET, b"\r", b"\n", GET, b"\r\n" + GET):
        conn.data_received(piece)
    assert len(seen.seen) == 3
    assert not wire.ended
    conn.data_received(b"\r\n\r\n" + GET)
    assert status_of(wire.writes[-1]) == 400
    assert len(seen.seen) == 3


def test_an_offer_of_h2c_is_passed_over() -> None:
    """Java's client offers h2c with its first request and goes on in HTTP/1.1."""
    seen = Requests(echo)
    conn, wire, _ = connect(seen)
    conn.data_received(
        post(b"hi", b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: A")
    )
    conn.data_received(GET)
    assert [r.body for r in seen.seen] == [b"hi", b""]
    assert not wire.ended


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


# ---- pipelining


def test_pipelined_requests_are_answered_in_order() -> None:
    """The handler gets the next request only once the one before it has been answered."""
    seen = Requests()
    conn, wire, _ = connect(seen)
    conn.data_received(post(b"a") + post(b"b") + GET)
    assert [r.body for r in seen.seen] == [b"a"]
    conn.respond(200, b"", b"1")
    assert [r.body for r in seen.seen] == [b"a", b"b"]
    conn.begin(200, b"", 1)
    conn.write(b"2", last=True)
    conn.respond(200, b"", b"3")
    assert [part[-1:] for part in wire.writes] == [b"1", b"2", b"3"]


def test_pipelined_requests_are_bounded() -> None:
    """At the bound reading pauses; what was read already is kept, and read once there is room."""
    seen = Requests()
    conn, wire, _ = connect(seen, Limits(pipelined_requests=2))
    conn.data_received(b"".join(post(b"%d" % n) for n in range(9)))
    assert wire.asked == ["pause"]
    for n in range(9):
        assert [r.body for r in seen.seen] == [b"%d" % m for m in range(n + 1)]
        conn.respond(200, b"", b"")
    assert wire.asked[-1] == "resume"
    assert len(wire.writes) == 9


def test_thousands_of_pipelined_requests_answered_at_once() -> None:
    """A handler that answers within its call is not called from within itself."""
    seen = Requests(echo)
    conn, wire, _ = connect(seen)
    conn.data_received(GET * 5000)
    assert len(seen.seen) == len(wire.writes) == 5000


def test_a_refusal_waits_for_the_answers_before_it() -> None:
    """A bad request behind a good one is answered after it, and only once."""
    seen = Requests()
    conn, wire, _ = connect(seen)
    conn.data_received(GET + b"GET / HTTP/1.1\r\n\r\n" + GET)
    assert not wire.writes
    conn.data_received(GET)
    conn.respond(200, b"", b"")
    assert len(wire.writes) == 2
    assert status_of(wire.writes[1]) == 400
    assert len(seen.seen) == 1
    assert wire.asked == ["write_eof"]


def test_nothing_is_read_after_the_last_request() -> None:
    """What follows a request that closes the connection is not a request."""
    seen = Requests(echo)
    conn, wire, _ = connect(seen)
    closing = b"GET / HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"
    conn.data_received(closing + GET)
    conn.data_received(GET)
    assert len(seen.seen) == len(wire.writes) == 1
    assert wire.asked == ["write_eof"]


# ---- 100-continue

EXPECT = post(b"hello", b"Expect: 100-Continue")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def test_a_client_that_waits_is_told_to_go_on() -> None:
    """Once, when the head is accepted and the body has not come."""
    seen = Requests(echo)
    conn, wire, _ = connect(seen)
    conn.data_received(EXPECT[:-5])
    assert wire.writes == [CONTINUE]
    conn.data_received(b"he")
    conn.data_received(b"llo")
    assert len(wire.writes) == 2
    assert [r.body for r in seen.seen] == [b"hello"]


def test_a_client_that_does_not_wait_is_told_nothing() -> None:
    """Not where the body came with the head, nor in HTTP/1.0."""
    conn, wire, _ = connect(Requests())
    conn.data_received(EXPECT)
    assert not wire.writes
    conn, wire, _ = connect(Requests())
    conn.data_received(EXPECT.replace(b"HTTP/1.1", b"HTTP/1.0")[:-5])
    assert not wire.writes


def test_going_on_waits_for_the_answer_before_it() -> None:
    """`100 Continue` never comes into the middle of another answer."""
    conn, wire, _ = connect(Requests())
    conn.data_received(GET + EXPECT[:-5])
    conn.begin(200, b"", 2)
    conn.write(b"o")
    assert len(wire.writes) == 1
    conn.write(b"k", last=True)
    assert wire.writes[1:] == [b"k", CONTINUE]


# ---- the handler's own failures


def test_a_handler_that_fails_is_answered_for() -> None:
    """500 and the end; the process is told, and lives."""
    clock = Clock()

    def fail(request: Request) -> None:
        raise ZeroDivisionError

    conn, wire, _ = connect(Requests(fail), clock=clock)
    conn.data_received(GET + GET)
    assert status_of(wire.sent) == 500
    assert [type(p["exception"]) for p in clock.problems] == [ZeroDivisionError]


def test_a_handler_that_fails_half_way_breaks_the_connection() -> None:
    """After the first byte there is no second answer."""

    def fail(request: Request) -> None:
        request.conn.begin(200, b"", None)
        request.conn.write(b"x")
        raise ZeroDivisionError

    conn, wire, _ = connect(Requests(fail))
    conn.data_received(GET)
    assert wire.sent.count(b"HTTP/1.1") == 1
    assert wire.asked == ["abort"]


def test_a_handler_that_fails_after_its_answer_changes_nothing() -> None:
    """The answer stands and the connection stays."""

    def fail(request: Request) -> None:
        echo(request)
        raise ZeroDivisionError

    conn, wire, _ = connect(Requests(fail))
    conn.data_received(GET)
    assert len(wire.writes) == 1
    assert not wire.ended


@pytest.mark.parametrize(
    ("error", "head"),
    [
        (Unauthorized("who?"), b"HTTP/1.1 401 Unauthorized\r\ncontent-type: application/json\r\n"),
        (
            NoPod("none", retry_after_s=3),
            (
                b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
                b"retry-after: 3\r\n"
            ),
        ),
    ],
)
def test_a_refusal_by_the_handler_keeps_the_connection(error: Exception, head: bytes) -> None:
    """An HttpError is an answer like any other."""

    def refuse(request: Request) -> None:
        raise error

    conn, wire, _ = connect(Requests(refuse))
    conn.data_received(GET)
    assert wire.sent.startswith(head + b"content-length: ")
    assert not wire.ended


# ---- the client, slow or gone


def test_a_slow_client_is_passed_on() -> None:
    """The stream hears of a full buffer and of room in it."""
    conn, wire, _ = connect(Requests())
    assert wire.high == 256 * 1024
    conn.data_received(GET)
    client = conn.stream = Client()
    conn.pause_writing()
    conn.resume_writing()
    assert client.heard == ["blocked", "ready"]


def test_a_client_that_does_not_read_gets_no_further_request_served() -> None:
    """The next request waits until the answers before it have been read."""
    clock, seen = Clock(), Requests()
    conn, _, _ = connect(seen, clock=clock)
    conn.data_received(GET + GET)
    conn.pause_writing()
    conn.respond(200, b"", b"")
    assert len(seen.seen) == 1
    conn.resume_writing()
    for callback in clock.soon:
        callback()
    assert len(seen.seen) == 2


def test_a_client_that_goes_is_heard_of_once_and_answers_to_it_are_dropped() -> None:
    """`on_client_gone` once; late calls of the handler are no errors and write nothing."""
    conn, wire, server = connect(Requests())
    conn.data_received(post(b"hi"))
    client = conn.stream = Client()
    conn.begin(200, b"", None)
    conn.write(b"x")
    conn.connection_lost(None)
    assert client.heard == ["gone"]
    conn.write(b"y")
    conn.begin(200, b"", None)
    conn.respond(200, b"", b"")
    conn.abort()
    assert len(wire.writes) == 1
    assert client.heard == ["gone"]
    assert server.connections == 0
    assert server.budget.held_bytes == 0


def test_nobody_is_told_of_a_client_that_is_owed_nothing() -> None:
    """After its answer, or after `abort`, a client may go unheard."""
    conn, _, _ = connect(Requests())
    conn.data_received(GET)
    client = conn.stream = Client()
    conn.respond(200, b"", b"")
    conn.connection_lost(None)
    assert client.heard == []
    conn, wire, _ = connect(Requests())
    conn.data_received(GET)
    conn.stream = client
    conn.abort()
    conn.connection_lost(None)
    assert client.heard == []
    assert wire.asked == ["abort"]


# ---- time

TIMES = Timeouts(client_ms=1000, keep_alive_ms=5000)


def test_a_request_has_to_arrive_in_time() -> None:
    """408 `clientMs` after the first byte, however many more have come since."""
    for data in (GET[:-1], post(b"hello")[:-1], chunked(b"5\r\nhell")):
        clock = Clock()
        conn, wire, server = connect(Requests(), clock=clock, timeouts=TIMES)
        clock.now += 4
        server.sweep(clock.now)
        conn.data_received(data[:1])
        for at in range(1, len(data)):
            clock.now += 1.0 / len(data)
            conn.data_received(data[at : at + 1])
        server.sweep(clock.now)
        assert not wire.writes
        clock.now += 0.1
        server.sweep(clock.now)
        assert status_of(wire.sent) == 408


def test_an_idle_connection_is_closed() -> None:
    """`keepAliveMs` after the last answer, in silence; not while an answer is owed."""
    clock = Clock()
    conn, wire, server = connect(Requests(), clock=clock, timeouts=TIMES)
    clock.now += 4
    conn.data_received(GET)
    clock.now += 100
    server.sweep(clock.now)
    assert not wire.ended
    conn.respond(200, b"", b"")
    clock.now += 5
    server.sweep(clock.now)
    assert not wire.ended
    clock.now += 0.1
    server.sweep(clock.now)
    assert wire.asked == ["close"]
    assert len(wire.writes) == 1


def test_a_late_request_does_not_disturb_the_answer_before_it() -> None:
    """The 408 of a pipelined request comes after the answer owed."""
    clock = Clock()
    conn, wire, server = connect(Requests(), clock=clock, timeouts=TIMES)
    conn.data_received(GET + b"GET")
    clock.now += 2
    server.sweep(clock.now)
    assert not wire.writes
    conn.respond(200, b"", b"")
    assert status_of(wire.writes[1]) == 408


def test_a_client_that_takes_nothing_is_dropped() -> None:
    """`clientMs` without a byte taken of what waits for it; any byte taken starts it anew."""
    clock = Clock()
    conn, wire, server = connect(Requests(), clock=clock, timeouts=TIMES)
    conn.data_received(GET)
    conn.pause_writing()
    for left in range(90, 0, -10):
        wire.waiting_bytes = left
        clock.now += 0.9
        server.sweep(clock.now)
    assert not wire.ended
    clock.now += 1.1
    server.sweep(clock.now)
    assert wire.asked == ["abort"]


def test_a_stream_that_is_taken_as_it_comes_is_left_alone() -> None:
    """While bytes are added to the buffer, its size says nothing of the client."""
    clock = Clock()
    conn, wire, server = connect(Requests(), clock=clock, timeouts=TIMES)
    conn.data_received(GET)
    conn.begin(200, b"", None)
    for _ in range(20):
        conn.write(b"x")
        wire.waiting_bytes = 50
        clock.now += 0.9
        server.sweep(clock.now)
    assert not wire.ended


def test_a_refused_client_is_listened_to_for_a_bounded_while() -> None:
    """After the last answer its bytes are dropped: 2 s of silence, or 10 s, end it."""
    for step_s, last_s in ((10.0, 10.0), (1.0, 11.0)):
        clock = Clock()
        conn, wire, server = connect(Requests(), clock=clock)
        conn.data_received(b"\0")
        while "close" not in wire.asked:
            clock.now += step_s
            server.sweep(clock.now)
            conn.data_received(b"more")
            assert clock.now - 1000 <= last_s
        assert len(wire.writes) == 1


def test_a_refused_client_cannot_send_for_ever() -> None:
    """Nor may it send without a bound of bytes."""
    conn, wire, _ = connect(Requests())
    conn.data_received(b"\0")
    for _ in range(300):
        if "abort" not in wire.asked:
            conn.data_received(bytes(1 << 20))
    assert "abort" in wire.asked


def test_connections_are_bounded() -> None:
    """Beyond the limit: 503 and the end; far beyond it: the end."""
    _, _, server = connect(Requests(), Limits(connections=2))
    wires = []
    for _ in range(131):
        conn, wire = type(next(iter(server.open)))(server), Wire()
        conn.connection_made(wire)
        wires.append(wire)
    assert wires[0].sent == b""
    assert [status_of(wire.sent) for wire in wires[1:129]] == [503] * 128
    assert all(wire.asked == ["abort"] for wire in wires[129:])
