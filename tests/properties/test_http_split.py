"""HTTP/1.1, by properties: no split of the bytes matters, and no bytes do harm."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from calinix.config import Limits
from calinix.edge.http_client import UpstreamFailure
from calinix.edge.http_server import Request
from calinix.edge.http_wire import ChunkedReader, frame_chunk
from edgekit import (
    CHUNKED,
    OK,
    REQUEST,
    Answer,
    Clock,
    Requests,
    Wire,
    connect,
    connect_pod,
    echo,
    pod_of,
)

LIMITS = Limits(header_bytes=2048, body_bytes=4096, pipelined_requests=3)
tokens = st.text("abcXYZ-09", min_size=1, max_size=8).map(str.encode)
values = st.binary(max_size=12).map(
    lambda data: bytes(b for b in data if b >= 0x20 and b != 0x7F).strip()
)
bodies = st.binary(max_size=60)
framed = st.sampled_from(["length", "chunked", "none"])


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, tuple[str, bytes]]:
    """A good request's bytes, with the method and body that they hold."""
    method = draw(st.sampled_from(["GET", "POST", "PUT", "HEAD"]))
    names = draw(st.lists(st.tuples(tokens, values), max_size=3))
    lines = b"".join(b"x-%b: %b\r\n" % field for field in names)
    head = b"%b /%b HTTP/1.1\r\nHost: a\r\n%b" % (method.encode(), draw(tokens), lines)
    body, framing = draw(bodies), draw(framed)
    if framing == "length":
        data = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    elif framing == "chunked":
        data = head + b"transfer-encoding: chunked\r\n\r\n" + draw(chunks(body))
    else:
        data, body = head + b"\r\n", b""
    return data, (method, body)


@st.composite
def chunks(draw: st.DrawFn, body: bytes) -> bytes:
    """The body in chunks, with extensions and trailers at times."""
    extension = st.sampled_from([b"", b"", b";a", b";a=b;c"])
    out = b""
    while body:
        size = draw(st.integers(1, len(body)))
        out += b"%x%b\r\n%b\r\n" % (size, draw(extension), body[:size])
        body = body[size:]
    trailers = draw(st.lists(tokens, max_size=2))
    return out + b"0\r\n" + b"".join(b"%b: x\r\n" % name for name in trailers) + b"\r\n"


@st.composite
def split(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The bytes in reads, at most a few dozen of them, or each byte by itself."""
    if draw(st.booleans()):
        cuts = sorted(draw(st.sets(st.integers(1, max(len(data) - 1, 1)), max_size=30)))
        edges = [0, *[cut for cut in cuts if cut < len(data)], len(data)]
    else:
        edges = list(range(len(data) + 1))
    return [data[a:b] for a, b in pairwise(edges) if a < b]


def served(reads: list[bytes]) -> tuple[list[tuple[Any, ...]], bytes, Wire]:
    """The requests handed over, all that was sent, and the transport."""
    clock = Clock()
    seen = Requests(echo)
    conn, wire, server = connect(seen, LIMITS, clock=clock)
    for read in reads:
        conn.data_received(read)
    assert not clock.problems
    conn.connection_lost(None)
    assert server.budget.held_bytes == 0
    return [facts(request) for request in seen.seen], wire.sent, wire


def facts(request: Request) -> tuple[Any, ...]:
    """All of a request but its connection and time."""
    line = (request.method, request.target, request.path, request.query, request.http_minor)
    return (*line, request.headers, request.keep_alive, request.body)


@given(st.data(), st.lists(requests(), min_size=1, max_size=6))
def test_requests_are_the_same_for_any_split(
    data: st.DataObject, made: list[tuple[bytes, tuple[str, bytes]]]
) -> None:
    """A pipeline of good requests is read, and answered, alike however its bytes come."""
    wire = b"".join(request for request, _ in made)
    whole, sent, _ = served([wire])
    assert [(fact[0], fact[-1]) for fact in whole] == [expected for _, expected in made]
    again, sent_again, _ = served(data.draw(split(wire)))
    assert (again, sent_again) == (whole, sent)


PIECES = st.sampled_from(
    [
        b"GET / HTTP/1.1\r\n", b"POST /v1/x HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n", b"Host: a\r\n",
        b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n",
        b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: x\r\n",
        b"Expect: 100-continue\r\n", b"hello", b"5\r\nhello\r\n", b"0\r\n\r\n", b"0\r\n",
        b"\r\n", b"\n", b"\r", b" ", b"\0", b":",
        b"x: y\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n", b"A" * 700,
        b"HTTP/1.1 200 OK\r\n", b"ffffffffffffffffff\r\n", b"\x16\x03\x01", b"\xff\xfe",
    ]
)  # fmt: skip
junk = st.lists(st.one_of(PIECES, PIECES, st.binary(max_size=8)), max_size=12).map(b"".join)


@given(st.data(), junk)
def test_no_request_bytes_do_harm(data: st.DataObject, bytes_in: bytes) -> None:
    """Each answer is a request's 200 or one last true 4xx/5xx; the next client is served."""
    for reads in ([bytes_in] if bytes_in else [], data.draw(split(bytes_in))):
        seen, sent, wire = served(reads)
        statuses = [int(part[:3]) for part in sent.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]
        final = [status for status in statuses if status != 100]
        refusals = [status for status in final if status != 200]
        assert final.count(200) == len(seen)
        assert len(refusals) <= 1
        if refusals:
            assert final[-1] == refusals[0]
            assert refusals[0] in {400, 413, 417, 431, 501, 505}
            assert "write_eof" in wire.asked
            error = msgspec.json.decode(sent[sent.rfind(b'{"error"') :])
            assert error["error"]["message"]
    assert served([b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"])[1].startswith(b"HTTP/1.1 200 ")


@given(st.data(), junk)
def test_bad_requests_are_judged_alike_for_any_split(data: st.DataObject, bytes_in: bytes) -> None:
    """What is handed over before a refusal, and whether there is one, is no matter of reads."""
    whole, sent, _ = served([bytes_in] if bytes_in else [])
    again, sent_again, _ = served(data.draw(split(bytes_in)))
    assert again == whole
    if b"HTTP/1.1 4" in sent or b"HTTP/1.1 5" in sent:
        assert b"HTTP/1.1 4" in sent_again or b"HTTP/1.1 5" in sent_again


# ---- the other end


def heard(reads: list[bytes], *, eof: bool = True, head_only: bool = False) -> Answer:
    """What a listener hears; the connection ends after the reads."""
    client, wire = connect_pod(max_head_bytes=2048)
    answer = Answer()
    client.send(REQUEST, answer, head_only=head_only)
    connection = pod_of(wire)
    for read in reads:
        if not wire.is_closing():
            connection.data_received(read)
    if eof and not wire.is_closing():
        connection.eof_received()
    connection.connection_lost(None)
    return answer


def gist(answer: Answer) -> tuple[Any, ...]:
    """What must not depend on reads."""
    head = answer.head
    return (
        None if head is None else (head.status, head.headers, head.content_length, head.chunked),
        answer.body,
        answer.whole,
        answer.failure,
    )


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A good response and its body."""
    names = draw(st.lists(st.tuples(tokens, values), max_size=3))
    lines = b"".join(b"x-%b: %b\r\n" % field for field in names)
    interim = draw(st.sampled_from([b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n"]))
    body, framing = draw(bodies), draw(framed)
    head = interim + b"HTTP/1.1 %d OK\r\n" % draw(st.sampled_from([200, 404, 503])) + lines
    if framing == "length":
        return head + b"content-length: %d\r\n\r\n" % len(body) + body, body
    if framing == "chunked":
        return head + b"transfer-encoding: chunked\r\n\r\n" + draw(chunks(body)), body
    return head + b"\r\n" + body, body


@given(st.data(), responses())
def test_responses_are_the_same_for_any_split(
    data: st.DataObject, made: tuple[bytes, bytes]
) -> None:
    """Head, body and end of a good response do not depend on reads."""
    wire, body = made
    whole = heard([wire])
    assert (whole.body, whole.whole, whole.failure) == (body, True, None)
    assert gist(heard(data.draw(split(wire)))) == gist(whole)


RESPONSE_PIECES = st.sampled_from(
    [
        OK, b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 204 No\r\n",
        b"HTTP/1.1 101 Go\r\n", b"HTTP/1.1 999 x\r\n", b"Content-Length: 5\r\n",
        b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n",
        b"Upgrade: x\r\n", b"hello", b"5\r\nhello\r\n", b"5;a=b\r\nhello\r\n", b"0\r\n\r\n",
        b"0\r\n", b"\r\n", b"\n", b"\r", b" ", b"\0", b":", b"x: y\r\n", b"A" * 700,
        b"fffffffffffffffff\r\n", CHUNKED, b"\xff",
    ]
)  # fmt: skip
response_junk = st.lists(
    st.one_of(RESPONSE_PIECES, RESPONSE_PIECES, st.binary(max_size=8)), max_size=12
).map(b"".join)


@given(st.data(), response_junk, st.booleans())
def test_no_response_bytes_do_harm(data: st.DataObject, bytes_in: bytes, head_only: bool) -> None:
    """Nothing is raised; the listener hears one end, and the same one for any split."""
    whole = heard([bytes_in] if bytes_in else [], head_only=head_only)
    assert whole.whole is not (whole.failure is not None)
    cut = heard(data.draw(split(bytes_in)), head_only=head_only)
    assert gist(cut) == gist(whole)
    if whole.failure is UpstreamFailure.BROKEN:
        assert whole.head is not None


@given(st.data(), bodies)
def test_what_a_pod_sends_is_what_a_client_gets(data: st.DataObject, body: bytes) -> None:
    """From the pod's bytes, through `begin` and `write`, the client's answer has the same body.

    Whatever the split, and although reads of whole chunks are passed on as they are.
    """
    wire = CHUNKED + data.draw(chunks(body))
    conn, to_client, _ = connect(Requests())
    conn.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    client, to_pod = connect_pod()

    class Relay(Answer):
        def on_head(self, head: Any) -> None:
            conn.begin(head.status, b"", head.content_length)

        def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:
            conn.write(body, wire, last)

    client.send(REQUEST, Relay())
    for read in data.draw(split(wire)):
        pod_of(to_pod).data_received(read)
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    assert to_client.sent.startswith(head)
    reader = ChunkedReader()
    assert reader.feed(to_client.sent[len(head) :]) == b""
    assert reader.getvalue() == body
    assert len(to_pod.writes) == 1


@given(st.data(), bodies)
def test_chunks_are_read_as_framed(data: st.DataObject, body: bytes) -> None:
    """What `frame_chunk` frames, `ChunkedReader` reads, and what follows is given back."""
    framed_bytes = frame_chunk(body[:7]) + frame_chunk(body[7:]) + b"0\r\n\r\n"
    reader = ChunkedReader()
    rest: bytes | None = None
    for read in data.draw(split(framed_bytes)):
        assert rest is None
        rest = reader.feed(read)
    assert rest == b""
    assert reader.getvalue() == body
    assert ChunkedReader().feed(framed_bytes + b"next") == b"next"
