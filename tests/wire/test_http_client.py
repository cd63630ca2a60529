"""The client end of HTTP/1.1: answers whole and broken, connections kept and dropped."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable

import pytest

from calinix.edge.http_client import (
    FetchError,
    PodClient,
    PodConnection,
    UpstreamFailure,
    fetch,
    read_pod_url,
)
from calinix.edge.http_server import Request
from calinix.errors import ConfigError
from edgekit import (
    LOCAL,
    Answer,
    Clock,
    Requests,
    Wire,
    client_of,
    connect,
    connect_pod,
    echo,
    pod,
    read_request,
    reset,
    serving,
)
from kit import on_loop, until

REQUEST = b"GET / HTTP/1.1\r\nhost: pod\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def pod_of(wire: Wire) -> PodConnection:
    """The connection on a recording transport."""
    found = wire.pod  # type: ignore[attr-defined]
    assert isinstance(found, PodConnection)
    return found


def ask(data: bytes, *, size: int = 0, eof: bool = True, head_only: bool = False) -> Answer:
    """The answer that a listener hears when a pod sends `data`, in pieces of `size`."""
    client, wire = connect_pod()
    answer = Answer()
    client.send(REQUEST, answer, head_only=head_only)
    connection = pod_of(wire)
    for at in range(0, len(data), size or len(data) or 1):
        if not wire.is_closing():
            connection.data_received(data[at : at + (size or len(data))])
    if eof and not wire.is_closing():
        connection.eof_received()
    connection.connection_lost(None)
    return answer


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
    """Tokens in the same read as the garbage behind them are not lost."""
    answer = ask(CHUNKED + b"5\r\nhello\r\nxyz\r\n")
    assert answer.body == b"hello"
    assert answer.failure is UpstreamFailure.PROTOCOL
    assert all(wire is None for _, wire, _ in answer.parts)


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
    """A chunk's extensions speak of one hop."""
    client, wire = connect_pod()
    answer = Answer()
    client.send(REQUEST, answer)
    pod_of(wire).data_received(CHUNKED)
    pod_of(wire).data_received(b"5;signature=abcdef\r\nhello\r\n")
    pod_of(wire).data_received(b"5\r\nhello\r\n")
    assert [wire for _, wire, _ in answer.parts] == [None, b"5\r\nhello\r\n"]


# ---- connections


def reads(*data: bytes) -> list[bytes]:
    """Reads, for the eye."""
    return list(data)


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (reads(OK + b"content-length: 2\r\n\r\nhi"), True),
        (reads(CHUNKED + b"0\r\n\r\n"), True),
        (reads(CHUNKED + b"1\r\na\r\n", b"0\r\n\r\n"), True),
        (reads(OK + b"connection: keep-alive\r\ncontent-length: 0\r\n\r\n"), True),
        (reads(b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n"), True),
        (reads(b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n"), True),
        (reads(OK + b"Connection: Close\r\ncontent-length: 0\r\n\r\n"), False),
        (reads(OK + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"), False),
        (reads(b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n"), False),
        # data after the end, in the same read or a later one
        (reads(OK + b"content-length: 2\r\n\r\nhi!"), False),
        (reads(OK + b"content-length: 2\r\n\r\n", b"hi!"), False),
        (reads(OK + b"content-length: 0\r\n\r\n" + OK + b"content-length: 0\r\n\r\n"), False),
        (reads(OK + b"content-length: 2\r\n\r\nhi" + OK + b"content-length: 2\r\n\r\nhi"), False),
        (reads(CHUNKED + b"0\r\n\r\n" + CHUNKED + b"1\r\nx\r\n0\r\n\r\n"), False),
        (reads(CHUNKED + b"1\r\na\r\n", b"0\r\n\r\n" + OK), False),
        (reads(b"HTTP/1.1 304 Not Modified\r\ncontent-length: 2\r\n\r\nhi"), False),
        (reads(OK + b"content-length: 0\r\n\r\n", OK), False),
        (reads(OK + b"content-length: 0\r\n\r\n", b"\r\n"), False),
    ],
)
def test_which_connections_are_kept(data: list[bytes], kept: bool) -> None:
    """Only one that is clean: no byte of it can be taken for a later request's answer."""
    client, wire = connect_pod()
    answer = Answer()
    client.send(REQUEST, answer)
    for read in data:
        pod_of(wire).data_received(read)
    assert answer.whole
    assert answer.body in (b"", b"hi", b"a")
    assert wire.is_closing() is not kept
    assert len(client._idle) == kept


def test_an_answer_before_the_request_was_sent_ends_the_connection() -> None:
    """What waits in the buffer would be read as the next request."""
    client, wire = connect_pod()
    answer = Answer()
    client.send(REQUEST, answer)
    wire.waiting_bytes = 1000
    pod_of(wire).data_received(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\nno")
    assert answer.whole
    assert answer.body == b"no"
    assert wire.is_closing()


def test_idle_connections_are_used_latest_first_and_not_when_old() -> None:
    """LIFO; one idle for `idle_timeout_s` is closed, by the next request or by the sweep."""
    clock = Clock()
    client, first = connect_pod(clock)
    second_pod, second = PodConnection(client), Wire()
    second_pod.connection_made(second)
    clock.now += 3.5
    client.release(second_pod)
    call = client.send(REQUEST, Answer())
    assert second.writes
    call.cancel()
    clock.now += 0.4
    client._sweep()
    assert not first.ended
    clock.now += 0.1
    client._sweep()
    assert first.asked == ["close"]
    assert not client._idle


@on_loop
async def test_an_old_connection_is_not_used() -> None:
    """A pod closes after 5 s; a connection idle for 4 s is not written to, swept or not."""
    async with serving(Requests(echo)) as server, client_of(server.port) as client:
        await fetch(client, "GET", "/")
        (old,) = client._idle
        old.idle_since -= 4
        await fetch(client, "GET", "/")
        assert not old.usable()
        assert client._idle != [old]


@on_loop
async def test_a_connection_closed_while_idle_is_forgotten() -> None:
    """By the pod's end or by bytes that nobody asked for; the next request opens another."""
    closing: list[Callable[[], None]] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"content-length: 2\r\n\r\nhi")
        done = asyncio.Event()
        closing.append(done.set)
        await done.wait()
        if len(closing) == 2:
            writer.write(OK + b"content-length: 4\r\n\r\nevil")
            await reader.read()

    async with pod(script) as port, client_of(port) as client:
        for _ in range(3):
            _, body = await fetch(client, "GET", "/")
            assert body == b"hi"
            assert len(client._idle) == 1
            closing[-1]()
            await until(lambda: not client._idle, "forgotten")


def test_idle_connections_are_bounded() -> None:
    """Beyond `max_idle` a connection is closed when its answer is whole."""
    client, _ = connect_pod()
    client._max_idle = 2
    for kept in (True, False):
        connection, wire = PodConnection(client), Wire()
        connection.connection_made(wire)
        client.release(connection)
        assert wire.is_closing() is not kept


@on_loop
async def test_a_closed_client_keeps_nothing() -> None:
    """`close` ends idle connections at once, the others when their answers are whole."""
    seen = Requests(lambda r: echo(r) if r.path == "/now" else None)
    async with serving(seen) as server, client_of(server.port) as client:
        answer = Answer()
        client.send(REQUEST, answer)
        await fetch(client, "GET", "/now")
        await until(lambda: len(seen.seen) == 2, "both")
        client.close()
        await until(lambda: server.connections == 1, "the idle one is closed")
        next(r for r in seen.seen if r.path == "/").conn.respond(200, b"", b"")
        await answer.ended.wait()
        assert answer.whole
        await until(lambda: server.connections == 0, "the other one too")


# ---- failures on real sockets


@on_loop
async def test_no_connection() -> None:
    """Refused, not a name, or not in time: CONNECT, and nothing was sent."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind((LOCAL, 0))
        deaf.listen(0)
        for _ in range(4):  # more than its queue takes: a further one is not even refused
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        for url, detail in (
            (f"http://{LOCAL}:1", "refused"),
            (f"http://{'a' * 80}.invalid", "label"),
            (f"http://{LOCAL}:{deaf.getsockname()[1]}", r"no connection within 0\.1 s"),
        ):
            client = PodClient(url, loop, connect_timeout_s=0.1)
            answer = Answer()
            call = client.send(REQUEST, answer)
            await answer.ended.wait()
            assert answer.failure is UpstreamFailure.CONNECT
            assert re.search(detail, answer.detail)
            assert not call.sent


@on_loop
async def test_a_reused_connection_that_was_closed_is_told_apart() -> None:
    """REUSED_CLOSED at once and without a byte; a new connection, or later, is CLOSED."""
    late = False

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (await read_request(reader)).startswith(b"GET /ok"):
            writer.write(OK + b"content-length: 0\r\n\r\n")
        if late:
            await asyncio.sleep(0.1)

    async with pod(script) as port, client_of(port) as client:
        for warm, wait, failure in (
            (False, False, UpstreamFailure.CLOSED),
            (True, False, UpstreamFailure.REUSED_CLOSED),
            (True, True, UpstreamFailure.CLOSED),
        ):
            late = wait
            if warm:
                await fetch(client, "GET", "/ok")
            with pytest.raises(FetchError) as raised:
                await fetch(client, "GET", "/die")
            assert raised.value.failure is failure


@pytest.mark.parametrize("how", ["end", "reset"])
@on_loop
async def test_a_pod_closed_between_two_requests_is_met_by_the_write(how: str) -> None:
    """Closed before we could hear of it: the write meets it, REUSED_CLOSED."""
    pods: list[asyncio.StreamWriter] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pods.append(writer)
        await read_request(reader)
        writer.write(OK + b"content-length: 0\r\n\r\n")
        await reader.read()

    async with pod(script) as port, client_of(port) as client:
        await fetch(client, "GET", "/")
        answer = Answer()
        sock = pods[0].get_extra_info("socket").dup()
        if how == "reset":
            reset(pods[0])
        else:
            sock.shutdown(2)
        sock.close()
        client.send(REQUEST, answer)
        await answer.ended.wait()
        assert answer.failure is UpstreamFailure.REUSED_CLOSED


@on_loop
async def test_a_pod_that_dies_in_the_middle() -> None:
    """A reset within the body is BROKEN, also for a body that ends with the connection."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await read_request(reader)
        writer.write(OK + (b"content-length: 9\r\n" if b"length" in line else b"") + b"\r\nhello")
        await writer.drain()
        await asyncio.sleep(0.02)
        reset(writer)

    async with pod(script) as port, client_of(port) as client:
        for path in ("/length", "/until-the-end"):
            with pytest.raises(FetchError) as raised:
                await fetch(client, "GET", path)
            assert raised.value.failure is UpstreamFailure.BROKEN


@pytest.mark.parametrize("stop", ["reset", "end"])
@on_loop
async def test_an_early_answer_survives_the_end_of_the_connection(stop: str) -> None:
    """A 413 sent, and the connection broken, while our body is still going out: heard each time."""
    refusal = b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\nno"

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(refusal)
        await writer.drain()
        if stop == "reset":
            writer.transport.abort()  # with our bytes unread: a reset

    async with pod(script) as port, client_of(port) as client:
        for _ in range(40):
            head, body = await fetch(client, "POST", "/", body=bytes(8_000_000))
            assert (head.status, body) == (413, b"no")


def test_an_answer_left_in_the_socket_is_read_when_the_write_fails() -> None:
    """A write that meets the reset before the answer was read does not lose the answer."""
    ours, theirs = socket.socketpair()
    client, wire = connect_pod()
    wire._extra["socket"] = ours  # type: ignore[attr-defined]
    answer = Answer()
    client.send(REQUEST, answer)
    theirs.sendall(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\nno")
    pod_of(wire).connection_lost(BrokenPipeError())
    assert answer.whole
    assert answer.body == b"no"
    ours.close()
    theirs.close()


# ---- control


@on_loop
async def test_cancelling_closes_at_once_and_silences() -> None:
    """While connecting, waiting or reading: the pod sees the end, the listener hears nothing."""
    pods: list[str] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"1\r\na\r\n")
        pods.append("asked")
        await reader.read()
        pods.append("ended")

    async with pod(script) as port, client_of(port) as client:
        connecting, reading = Answer(), Answer()
        client.send(REQUEST, connecting).cancel()
        call = client.send(REQUEST, reading)
        await until(lambda: bool(reading.parts), "the first bytes")
        call.cancel()
        call.cancel()
        call.pause_reading()
        call.resume_reading()
        await until(lambda: "ended" in pods, "the pod sees it")
        assert (connecting.head, connecting.failure) == (None, None)
        assert (reading.body, reading.failure) == (b"a", None)
        assert pods == ["asked", "ended"]


@pytest.mark.parametrize("at", ["head", "body", "last"])
def test_a_listener_may_cancel_from_within(at: str) -> None:
    """Nothing is called after a `cancel` inside a call."""
    client, wire = connect_pod()

    class Cancelling(Answer):
        def on_head(self, head: object) -> None:
            assert not self.parts
            if at == "head":
                call.cancel()

        def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:
            assert at == ("last" if last else "body")
            self.parts.append((body, wire, last))
            call.cancel()

    answer = Cancelling()
    call = client.send(REQUEST, answer)
    end = {"head": b"", "body": b"xyz\r\n", "last": b"0\r\n\r\n"}[at]
    pod_of(wire).data_received(CHUNKED + b"1\r\na\r\n" + end)
    pod_of(wire).connection_lost(None)
    assert len(answer.parts) == (at != "head")
    assert answer.failure is None


def test_a_listener_may_send_again_on_the_same_connection() -> None:
    """When `last` is heard the connection is free already."""
    client, wire = connect_pod()
    second = Answer()

    class Again(Answer):
        def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:
            client.send(b"second", second)

    client.send(b"first", Again())
    pod_of(wire).data_received(OK + b"content-length: 0\r\n\r\n")
    pod_of(wire).data_received(OK + b"content-length: 2\r\n\r\nhi")
    assert wire.writes == [b"first", b"second"]
    assert second.body == b"hi"


@on_loop
async def test_paused_reading_holds_the_pod_back() -> None:
    """Nothing is heard while paused, and the pod's writes pile up; all of it comes afterwards."""
    size = 32 * 1024 * 1024
    written = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"content-length: %d\r\n\r\n" % size)
        for _ in range(32):
            writer.write(bytes(size // 32))
            await writer.drain()
        written.set()

    async with pod(script) as port, client_of(port) as client:
        answer = Answer()
        call = client.send(REQUEST, answer)
        await until(lambda: answer.head is not None, "the head")
        call.pause_reading()
        heard = len(answer.body)
        await asyncio.sleep(0.1)
        assert len(answer.body) == heard
        assert not written.is_set()
        call.resume_reading()
        await answer.ended.wait()
        assert len(answer.body) == size


# ---- URLs and fetch


def test_pod_urls() -> None:
    """Host, port, TLS, the Host header and the path's prefix; anything else is refused by name."""
    assert read_pod_url("http://pod") == ("pod", 80, False, b"pod", b"")
    assert read_pod_url("https://pod/") == ("pod", 443, True, b"pod", b"")
    assert read_pod_url("http://[::1]:8000/v/") == ("::1", 8000, False, b"[::1]:8000", b"/v")
    for url in (
        "pod:80", "ftp://pod", "http://", "http://pod:x", "http://pod:99999", "http://a@pod",
        "http://pod/?q", "http://pod/#f", "http://p\u00f6d", "http://pod/a b", "http://[::1",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"."):
            read_pod_url(url)


@on_loop
async def test_ipv6() -> None:
    """A pod on ::1, by a URL with brackets."""
    seen = Requests(echo)

    async with serving(seen) as server:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: type(conn)(server), "::1", 0)
        port = listener.sockets[0].getsockname()[1]
        client = PodClient(f"http://[::1]:{port}/base", loop, connect_timeout_s=2)
        head, body = await fetch(client, "GET", "/x")
        assert (head.status, body) == (200, b"GET /base/x ")
        assert seen.seen[0].header(b"host") == b"[::1]:%d" % port
        client.close()
        listener.close()


conn = connect(Requests(echo))[0]


@on_loop
async def test_fetch() -> None:
    """Method, path, headers and body arrive; HEAD has no body; a large answer is whole."""

    def answer(request: Request) -> None:
        if request.path == "/large":
            request.conn.respond(200, b"", bytes(5_000_000))
        else:
            echo(request)

    seen = Requests(answer)
    async with serving(seen) as server, client_of(server.port) as client:
        head, body = await fetch(client, "POST", "/a?b", [(b"x-a", b"1")], b"hi", timeout_s=5)
        assert (head.status, head.header(b"x-pod"), body) == (200, b"mock", b"POST /a?b hi")
        assert seen.seen[0].header(b"x-a") == b"1"
        head, body = await fetch(client, "HEAD", "/a")
        assert (head.content_length, body) == (8, b"")
        _, body = await fetch(client, "GET", "/large")
        assert len(body) == 5_000_000
        assert server.connections == 1


@on_loop
async def test_fetch_is_bounded_in_time_and_bytes() -> None:
    """No answer in time, or one without end: FetchError, and the connection is closed."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await read_request(reader)
        while b"/endless" in line:
            writer.write((OK + b"\r\n") if not writer.is_closing() else b"")
            while not writer.is_closing():
                writer.write(bytes(1 << 20))
                await writer.drain()
            return
        await reader.read()

    async with pod(script) as port, client_of(port) as client:
        with pytest.raises(FetchError, match=r"within 0\.05 s") as raised:
            await fetch(client, "GET", "/silent", timeout_s=0.05)
        assert raised.value.failure is None
        with pytest.raises(FetchError, match="over"):
            await fetch(client, "GET", "/endless")
