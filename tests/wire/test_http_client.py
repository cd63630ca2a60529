"""What the client end of HTTP/1.1 makes of a pod's bytes, whole and broken."""

from __future__ import annotations

import pytest

from calinix.edge.http_client import (
    UpstreamFailure,
)
from edgekit import (
    CHUNKED,
    OK,
    REQUEST,
    Answer,
    ask,
    connect_pod,
    pod_of,
)

# ---- what is sent


def test_a_request_is_one_write() -> None:
    """On a warm connection: one write, whether the request is one buffer or two."""
    for data in (b"head and body", (b"head ", b"and body")):
        client, wire = connect_pod()
        call = client.send(data, Answer())
        assert call.sent
        assert wire.writes == [b"head and body"]


# ---- answers that are whole

WHOLE = {
    "a length": (OK + b"content-length: 5\r\n\r\nhello", b"hello"),
    "no body": (OK + b"content-length: 0\r\n\r\n", b""),
    "chunks": (CHUNKED + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello"),
    "chunks with extensions and trailers": (
        CHUNKED + b"5;a=b\r\nhello\r\n0;c\r\nx-sum: 1\r\n\r\n",
        b"hello",
    ),
    "no chunks": (CHUNKED + b"0\r\n\r\n", b""),
    "the connection's end": (OK + b"\r\nhello", b"hello"),
    "the connection's end, at once": (OK + b"\r\n", b""),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello"),
    "HTTP/1.0 with a length": (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
    "after interim answers": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
        + OK
        + b"content-length: 5\r\n\r\nhello",
        b"hello",
    ),
    "no reason": (b"HTTP/1.1 200\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
    "204 with a length": (b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n", b""),
    "304 with a length": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", b""),
    "204 with chunks": (b"HTTP/1.1 204 No\r\ntransfer-encoding: chunked\r\n\r\n", b""),
}


@pytest.mark.parametrize("name", WHOLE)
def test_answers_that_are_whole(name: str) -> None:
    """Each way that a body can end, whatever the split."""
    data, body = WHOLE[name]
    for size in (0, 1, 2, 7):
        answer = ask(data, size=size)
        assert answer.failure is None
        assert answer.whole
        assert answer.body == body


def test_a_head_as_the_listener_sees_it() -> None:
    """Names are lower-cased, values trimmed, order kept; length and chunks are told apart."""
    answer = ask(
        b"HTTP/1.1 429 Too Many\r\nRetry-After:  1 \r\nSet-Cookie: a\r\nset-cookie: b\r\n"
        b"Content-Length: 0\r\n\r\n"
    )
    head = answer.head
    assert head is not None
    assert (head.status, head.reason) == (429, b"Too Many")
    assert (head.content_length, head.chunked) == (0, False)
    assert head.headers == [
        (b"retry-after", b"1"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"content-length", b"0"),
    ]
    assert head.header(b"set-cookie") == b"a"
    head = ask(CHUNKED + b"0\r\n\r\n").head
    assert head is not None
    assert (head.content_length, head.chunked) == (None, True)


def test_the_head_is_heard_before_the_body_comes() -> None:
    """A stream's head does not wait for its first token."""
    client, wire = connect_pod()
    answer = Answer()
    client.send(REQUEST, answer)
    pod_of(wire).data_received(CHUNKED)
    assert answer.head is not None
    assert not answer.parts


@pytest.mark.parametrize("line", [b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b""])
def test_an_answer_to_head_has_no_body(line: bytes) -> None:
    """Whatever its head says would follow; the connection stays for the next request."""
    client, wire = connect_pod()
    for n in range(1, 3):
        answer = Answer()
        client.send(b"HEAD / HTTP/1.1\r\n\r\n", answer, head_only=True)
        pod_of(wire).data_received(OK + line + b"\r\n")
        assert answer.whole
        assert answer.body == b""
        assert len(wire.writes) == n
    answer = Answer()
    client.send(REQUEST, answer)
    pod_of(wire).data_received(OK + b"content-length: 2\r\n\r\nhi")
    assert answer.body == b"hi"
    assert not wire.ended


# ---- answers that are none

BAD = {
    "not HTTP": (b"SSH-2.0-OpenSSH_9\r\n", UpstreamFailure.PROTOCOL),
    "HTTP/2": (b"HTTP/2 200\r\n\r\n", UpstreamFailure.PROTOCOL),
    "HTTP/2.0": (b"HTTP/2.0 200 OK\r\n\r\n", UpstreamFailure.PROTOCOL),
    "HTTP/0.9": (b"HTTP/0.9 200 OK\r\n\r\n", UpstreamFailure.PROTOCOL),
    "TLS": (b"\x15\x03\x03\x00\x02\x02\x46", UpstreamFailure.PROTOCOL),
    "an empty line first": (b"\r\n" + OK + b"content-length: 0\r\n\r\n", UpstreamFailure.PROTOCOL),
    "two digits": (b"HTTP/1.1 99 x\r\n\r\n", UpstreamFailure.PROTOCOL),
    "four digits": (b"HTTP/1.1 2000 x\r\n\r\n", UpstreamFailure.PROTOCOL),
    "a control byte in the reason": (b"HTTP/1.1 200 O\0K\r\n\r\n", UpstreamFailure.PROTOCOL),
    "switching": (
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        UpstreamFailure.PROTOCOL,
    ),
    "nine interim answers": (b"HTTP/1.1 100 Continue\r\n\r\n" * 9, UpstreamFailure.PROTOCOL),
    "two lengths": (OK + b"content-length: 1\r\n" * 2 + b"\r\na", UpstreamFailure.PROTOCOL),
    "lengths that differ": (
        OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
        UpstreamFailure.PROTOCOL,
    ),
    "a list of lengths": (OK + b"content-length: 1, 1\r\n\r\na", UpstreamFailure.PROTOCOL),
    "a signed length": (OK + b"content-length: +1\r\n\r\na", UpstreamFailure.PROTOCOL),
    "a huge length": (OK + b"content-length: 1%b\r\n\r\na" % (b"0" * 17), UpstreamFailure.PROTOCOL),
    "length and chunks": (
        OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        UpstreamFailure.PROTOCOL,
    ),
    "chunks and length": (
        OK + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        UpstreamFailure.PROTOCOL,
    ),
    "gzip, chunked": (
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        UpstreamFailure.PROTOCOL,
    ),
    "gzip": (OK + b"transfer-encoding: gzip\r\n\r\nabc", UpstreamFailure.PROTOCOL),
    "chunks in HTTP/1.0": (
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        UpstreamFailure.PROTOCOL,
    ),
    "bare LF": (b"HTTP/1.1 200 OK\ncontent-length: 0\n\n", UpstreamFailure.PROTOCOL),
    "a folded line": (OK + b"a: b\r\n c\r\ncontent-length: 0\r\n\r\n", UpstreamFailure.PROTOCOL),
    "a space before the colon": (OK + b"content-length : 0\r\n\r\n", UpstreamFailure.PROTOCOL),
    "a bad chunk size": (CHUNKED + b"xyz\r\n", UpstreamFailure.PROTOCOL),
    "a chunk too long": (CHUNKED + b"2\r\nabc\r\n0\r\n\r\n", UpstreamFailure.PROTOCOL),
    "a long head": (OK + b"a: %b\r\n\r\n" % (b"b" * 70_000), UpstreamFailure.PROTOCOL),
    "a head without end": (OK + b"a: %b" % (b"b" * 70_000), UpstreamFailure.PROTOCOL),
    "many fields": (OK + b"a: b\r\n" * 300 + b"\r\n", UpstreamFailure.PROTOCOL),
    "many long fields": (OK + b"a: %b\r\n" % (b"b" * 90) * 300 + b"\r\n", UpstreamFailure.PROTOCOL),
    "trailers without end": (
        CHUNKED + b"0\r\n" + b"a: b\r\n" * 20_000,
        UpstreamFailure.PROTOCOL,
    ),
    "an extension without end": (CHUNKED + b"1;" + b"a" * 70_000, UpstreamFailure.PROTOCOL),
    "nothing": (b"", UpstreamFailure.CLOSED),
    "a part of a head": (OK + b"content-len", UpstreamFailure.CLOSED),
    "an interim answer alone": (b"HTTP/1.1 100 Continue\r\n\r\n", UpstreamFailure.CLOSED),
    "a part of a body": (OK + b"content-length: 5\r\n\r\nhell", UpstreamFailure.BROKEN),
    "a part of a chunk": (CHUNKED + b"5\r\nhell", UpstreamFailure.BROKEN),
    "no last chunk": (CHUNKED + b"5\r\nhello\r\n", UpstreamFailure.BROKEN),
    "a last chunk without its end": (CHUNKED + b"5\r\nhello\r\n0\r\n", UpstreamFailure.BROKEN),
    "a head without its body": (OK + b"content-length: 5\r\n\r\n", UpstreamFailure.BROKEN),
}


@pytest.mark.parametrize("name", BAD)
def test_answers_that_are_none(name: str) -> None:
    """One failure of the right kind, whatever the split, and no end of a body."""
    data, failure = BAD[name]
    for size in (0, 1, 1000) if len(data) < 10_000 else (0, 1000):
        answer = ask(data, size=size)
        assert answer.failure is failure
        assert answer.detail
        assert not answer.whole


def test_what_came_before_a_fault_is_heard() -> None:
    """Tokens in the same read as the garbage behind them are not lost; the garbage is."""
    for reads in ((CHUNKED + b"5\r\nhello\r\nxyz\r\n",), (CHUNKED, b"5\r\nhello\r\nxyz\r\n")):
        client, to_pod = connect_pod()
        answer = Answer()
        client.send(REQUEST, answer)
        for read in reads:
            pod_of(to_pod).data_received(read)
        assert answer.parts == [(b"hello", None, False)]
        assert answer.failure is UpstreamFailure.PROTOCOL


# ---- the body as received


def test_whole_chunks_are_passed_as_received() -> None:
    """`wire` is the read itself where it held whole chunks: no copy, no framing anew."""
    client, wire = connect_pod()
    answer = Answer()
    client.send(REQUEST, answer)
    one, two = b"5\r\nhello\r\n", b"1\r\n,\r\n6\r\n world\r\n"
    for read in (
        CHUNKED + one,
        one,
        two,
        b"5\r\nhel",
        b"lo\r\n",
        one + b"5",
        b"\r\nhello\r\n",
        one,
    ):
        pod_of(wire).data_received(read)
    pod_of(wire).data_received(one + b"0\r\n\r\n")
    assert [(body, wire) for body, wire, _ in answer.parts] == [
        (b"hello", None),  # came with the head
        (b"hello", one),
        (b", world", two),
        (b"hel", None),
        (b"lo", None),
        (b"hello", None),  # a part of a size line behind it
        (b"hello", None),
        (b"hello", one),
        (b"hello", None),  # the end
    ]
    assert answer.parts[1][1] is one


def test_extensions_are_not_passed_on() -> None:
    """A chunk's extensions speak of one hop, short ones and those between plain chunks too."""
    client, wire = connect_pod()
    answer = Answer()
    client.send(REQUEST, answer)
    pod_of(wire).data_received(CHUNKED)
    plain = b"5\r\nhello\r\n"
    for size in (b"5;signature=abcdef", b"5;a=b", b"0000000005"):
        pod_of(wire).data_received(size + b"\r\nhello\r\n")
        pod_of(wire).data_received(plain * 2 + size + b"\r\nhello\r\n")
    pod_of(wire).data_received(plain)
    assert [wire for _, wire, _ in answer.parts] == [None] * 6 + [plain]
