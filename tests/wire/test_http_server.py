"""The server end of HTTP/1.1, byte by byte: what it answers, and what it reads."""

from __future__ import annotations

import pytest

from edgekit import (
    HOST,
    Clock,
    Requests,
    chunked,
    connect,
    echo,
    post,
    status_of,
)

GET = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"


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
