"""A leg that does not answer the client: who listens to it, and what its failures mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from calinix import errors
from calinix.core.events import Failure
from calinix.edge.http_client import PodClient, ResponseHead, UpstreamCall, UpstreamFailure
from calinix.engines.base import Leg

if TYPE_CHECKING:
    from calinix.gateway.proxy import Flight

# The answer of a leg that does not answer the client: transfer handles, never a text of note.
_MAX_SIDE_ANSWER_BYTES: Final = 16 * 1024 * 1024
# Of a drained answer only its end is kept, for the usage that is in it.
_DRAINED_TAIL_BYTES: Final = 4096

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

CANNOT_HAVE_BEGUN = frozenset(
    {UpstreamFailure.CONNECT, UpstreamFailure.NO_SOCKET, UpstreamFailure.REUSED_CLOSED}
)
"""After these the pod has not seen the request."""

_error_line = re.compile(rb'^data:[ ]?(\{\s*"error"\s*:[^\r\n]*)([\r\n]?)', re.MULTILINE).search
_BAD_GATEWAY: Final = 502


def error_of(failure: UpstreamFailure) -> Callable[[str], errors.HttpError]:
    """The error of a client whose pod is lost."""
    return _no_socket if failure is UpstreamFailure.NO_SOCKET else errors.BadGateway


def _no_socket(message: str) -> errors.HttpError:
    return errors.NoPod(message, code="out_of_sockets", retry_after_s=1)


def stream_error(text: bytes, last: bool) -> tuple[int, bytes] | None:
    """(status, JSON body) of an error event in a stream; None where there is none, or not yet.

    SGLang answers 200 to a streamed request and says only then, in an event, what is wrong.
    """
    # Looked for first, as it is nearly never there and a search by lines costs much more.
    found = _error_line(text) if b'"error"' in text else None
    if found is None or not (found[2] or last):
        return None
    try:
        error = msgspec.json.decode(found[1])["error"]
        code = error.get("code") if isinstance(error, dict) else None
    except msgspec.MsgspecError:
        return _BAD_GATEWAY, errors.error_body("the prefill pod failed", "bad_gateway")
    return (code if isinstance(code, int) and 400 <= code < 600 else _BAD_GATEWAY), found[1]


def query_head(client: PodClient, path: str) -> bytes:
    """A request to a pod's bootstrap server: nothing of the client's goes there."""
    return b"GET %b HTTP/1.1\r\nhost: %b\r\naccept: application/json\r\n\r\n" % (
        path.encode("ascii"),
        client.host,
    )


class SideLeg:
    """Listens to a leg that does not answer the client, and keeps what is needed of its answer."""

    __slots__ = ("call", "due_s", "flight", "head", "leg", "pieces", "size_bytes")

    def __init__(self, flight: Flight, leg: Leg, due_s: float):
        self.flight = flight
        self.leg = leg
        self.due_s = due_s
        """When its whole answer has to be there."""
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
        head = self.head
        if self.leg.drained and head is not None and head.status < 300:
            tail = b"".join(self.pieces) + body
            error = stream_error(tail, last) if self.flight.streamed else None
            if error is not None:
                self.flight.on_side_refused(self, error[0], error[1])
                return
            self.pieces = [tail[-_DRAINED_TAIL_BYTES:]]
        elif self.size_bytes > _MAX_SIDE_ANSWER_BYTES:
            self.flight.on_side_failed(self, Failure.CLOSED, "its answer is too large")
            return
        else:
            self.pieces.append(body)
        if last:
            self.flight.on_side_answered(self, b"".join(self.pieces))

    def on_failure(self, failure: UpstreamFailure, detail: str) -> None:
        """No answer."""
        self.flight.on_side_failed(
            self,
            FAILURES[failure],
            detail,
            cannot_have_begun=failure in CANNOT_HAVE_BEGUN,
            may_stay=failure is UpstreamFailure.REUSED_CLOSED,
            kind=error_of(failure),
        )
