"""One answer a request and in order, whatever the handler, the client or the time does."""

from __future__ import annotations

import pytest

from calinix.config import Limits
from calinix.edge.http_server import Request
from calinix.errors import NoPod, Unauthorized
from edgekit import (
    HOST,
    Client,
    Clock,
    Requests,
    connect,
    echo,
    post,
    status_of,
)

GET = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"


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


def test_a_request_that_is_answered_does_not_count_as_waiting() -> None:
    """With nothing behind it reading goes on, so that the client's leaving is seen."""
    seen = Requests()
    conn, wire, _ = connect(seen, Limits(pipelined_requests=1))
    for n in range(3):
        conn.data_received(GET)
        assert len(seen.seen) == n + 1
        conn.respond(200, b"", b"")
    assert not wire.asked
    conn.data_received(GET)
    conn.data_received(GET)
    assert wire.asked == ["pause"]


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
    waiting, quiet, _ = connect(Requests(), Limits(pipelined_requests=1))
    waiting.data_received(closing + GET * 3)
    assert not quiet.asked  # nothing waits, so reading need not pause
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
