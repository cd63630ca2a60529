"""How long a client may take: to send, to read, to come back, to leave."""

from __future__ import annotations

from calinix.config import Limits, Timeouts
from calinix.edge.http_server import ServerConnection
from edgekit import (
    HOST,
    Clock,
    Requests,
    Wire,
    chunked,
    connect,
    post,
    status_of,
)

GET = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"

EXPECT = post(b"hello", b"Expect: 100-Continue")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
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


def test_the_time_of_a_client_that_waits_runs_from_its_going_on() -> None:
    """A request whose `100 Continue` waits behind an answer is not late meanwhile."""
    clock = Clock()
    conn, wire, server = connect(Requests(), clock=clock, timeouts=TIMES)
    conn.data_received(GET + EXPECT[:-5])
    clock.now += 60
    server.sweep(clock.now)
    conn.respond(200, b"", b"")
    assert wire.writes[1:] == [CONTINUE]
    clock.now += 0.9
    server.sweep(clock.now)
    assert len(wire.writes) == 2
    clock.now += 0.2
    server.sweep(clock.now)
    assert status_of(wire.writes[2]) == 408


def test_a_connection_that_comes_into_a_drain_is_closed_soon() -> None:
    """It was accepted before the drain; idle, it does not hold the drain up."""
    clock = Clock()
    _, wire, server = connect(Requests(), clock=clock, timeouts=TIMES)
    server.draining = True
    clock.now += 0.9
    server.sweep(clock.now)
    assert not wire.ended
    clock.now += 0.2
    server.sweep(clock.now)
    assert wire.asked == ["close"]


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
        conn, wire = ServerConnection(server), Wire()
        conn.connection_made(wire)
        wires.append(wire)
    assert wires[0].sent == b""
    assert [status_of(wire.sent) for wire in wires[1:129]] == [503] * 128
    assert all(wire.asked == ["abort"] for wire in wires[129:])
