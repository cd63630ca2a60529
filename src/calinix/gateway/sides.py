"""A leg that does not answer the client: who listens to it, and what its failures mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from calinix import errors
from calinix.core.events import Failure
from calinix.edge.http_client import ResponseHead, UpstreamCall, UpstreamFailure
from calinix.engines.base import Leg

if TYPE_CHECKING:
    from calinix.gateway.proxy import Flight

# The answer of a leg that does not answer the client: transfer handles, never a text of note.
_MAX_SIDE_ANSWER_BYTES = 16 * 1024 * 1024

FAILURES = {
    UpstreamFailure.CONNECT: Failure.CONNECT,
    # The gateway's own want: no sign of illness either.
    UpstreamFailure.NO_SOCKET: Failure.CANCELLED,
    # A kept connection that the pod had closed in its own time: no sign of illness.
    UpstreamFailure.REUSED_CLOSED: Failure.CANCELLED,
    UpstreamFailure.CLOSED: Failure.CLOSED,
    UpstreamFailure.BROKEN: Failure.BROKEN,
    UpstreamFailure.PROTOCOL: Failure.CLOSED,
}
"""What a lost call says of its pod."""


def error_of(failure: UpstreamFailure) -> Callable[[str], errors.HttpError]:
    """The error of a client whose pod is lost."""
    return _no_socket if failure is UpstreamFailure.NO_SOCKET else errors.BadGateway


def _no_socket(message: str) -> errors.HttpError:
    return errors.NoPod(message, code="out_of_sockets", retry_after_s=1)


class SideLeg:
    """Listens to a leg that does not answer the client, and keeps its whole answer."""

    __slots__ = ("call", "flight", "head", "leg", "pieces", "size_bytes")

    def __init__(self, flight: Flight, leg: Leg):
        self.flight = flight
        self.leg = leg
        self.call: UpstreamCall | None = None
        self.head: ResponseHead | None = None
        self.pieces: list[bytes] = []
        self.size_bytes = 0

    def on_head(self, head: ResponseHead) -> None:
        """The status, and what the body is."""
        self.head = head

    def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:  # noqa: ARG002
        """A piece of the answer; the last one hands it to the flight."""
        self.size_bytes += len(body)
        if self.size_bytes > _MAX_SIDE_ANSWER_BYTES:
            self.flight.on_side_failed(self, Failure.CLOSED, "its answer is too large")
            return
        self.pieces.append(body)
        if last:
            self.flight.on_side_answered(self, b"".join(self.pieces))

    def on_failure(self, failure: UpstreamFailure, detail: str) -> None:
        """No answer."""
        reused = failure is UpstreamFailure.REUSED_CLOSED
        kind = error_of(failure)
        self.flight.on_side_failed(self, FAILURES[failure], detail, may_stay=reused, kind=kind)
