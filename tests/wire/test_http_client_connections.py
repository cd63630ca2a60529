"""A pod's connections: kept, dropped, refused, broken."""

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
)
from edgekit import (
    CHUNKED,
    LOCAL,
    OK,
    REQUEST,
    Answer,
    Clock,
    Requests,
    Wire,
    client_of,
    connect_pod,
    echo,
    pod,
    pod_of,
    read_request,
    reset,
    serving,
)
from kit import on_loop, until

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
