"""The failure matrix of prefill/decode: its cells, and what has to come of each.

What is expected is worked out here from the rules in words, and knows nothing of the gateway's own
code. A cell is one request through a gateway with these faults on its pods. `spare`: beside the
pod of each role that has the fault there is a good one; the faulty one is asked first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Protocol = Literal["nixl", "plain", "mooncake", "sglang"]
Prefill = Literal["ok", "refuses", "500", "hangs", "closes", "no params", "garbage"]
Decode = Literal["ok", "refuses", "500", "hangs", "dies"]
Client = Literal["stays", "in prefill", "between", "mid-answer"]
End = Literal["whole", "error", "event", "cut", "left"]

PROTOCOLS: tuple[Protocol, ...] = ("nixl", "plain", "mooncake", "sglang")
PREFILL: tuple[Prefill, ...] = (
    "ok", "refuses", "500", "hangs", "closes", "no params", "garbage"
)  # fmt: skip
DECODE: tuple[Decode, ...] = ("ok", "refuses", "500", "hangs", "dies")
CLIENT: tuple[Client, ...] = ("stays", "in prefill", "between", "mid-answer")
TIMEOUT_S = 0.5
"""Every time-out of the gateway in these cells."""
SLACK_S = 2.0
"""On a busy machine, on top of the time-outs that a cell has to wait for."""

RETRIED: frozenset[Prefill] = frozenset({"refuses", "500", "hangs", "closes", "garbage"})
"""Failures of a prefill leg that is alone: it answers nobody, so another pod is asked."""


class Cell(NamedTuple):
    """One request, and all that goes wrong around it."""

    protocol: Protocol
    stream: bool
    spare: bool
    prefill: Prefill
    decode: Decode
    client: Client

    @property
    def together(self) -> bool:
        """Both legs are sent at once; else decode follows prefill."""
        return self.protocol in ("mooncake", "sglang")

    @property
    def faulty_decode(self) -> str:
        """The decode pod that has the fault: the one that is asked first.

        A prefill that is tried elsewhere is planned anew, and pods take turns.
        """
        anew = not self.together and self.spare and self.prefill in RETRIED
        return "d2" if anew else "d1"

    def __str__(self) -> str:
        kind = "stream" if self.stream else "whole"
        spare = "spare" if self.spare else "alone"
        return f"{self.protocol}/{kind}/{spare}/{self.prefill}/{self.decode}/{self.client}"


Counts = frozenset[int]
NEVER, ONCE, MAYBE = frozenset({0}), frozenset({1}), frozenset({0, 1})


class Expected(NamedTuple):
    """What has to come of a cell. Sets, where two faults race and either may be met first."""

    ends: frozenset[tuple[int, End]]
    """(status, how the answer ends); (0, "left") where the client does not wait for it."""
    calls: dict[str, Counts]
    """Requests that p1, p2, d1 and d2 got."""
    cancelled: frozenset[str]
    """Pods whose request the gateway took back."""
    may_cancel: frozenset[str]
    """Pods that may have been reached before it was taken back, or not."""
    waits: int
    """Time-outs that have to pass."""


def cells() -> Iterator[Cell]:
    """Every single fault, and every pair that can occur together."""
    for protocol in PROTOCOLS:
        for stream in (True, False):
            for spare in (False, True):
                for prefill in PREFILL:
                    for decode in DECODE:
                        for client in CLIENT:
                            cell = Cell(protocol, stream, spare, prefill, decode, client)
                            if _can_occur(cell):
                                yield cell


def _can_occur(cell: Cell) -> bool:
    prefill, decode, client = cell.prefill, cell.decode, cell.client
    if (prefill != "ok") + (decode != "ok") + (client != "stays") > 2:
        return False
    if prefill == "no params" and cell.protocol != "nixl":
        return False  # the others never have any
    if cell.together:
        return _can_occur_together(cell)
    goes_on = prefill in ("ok", "no params") or (cell.spare and prefill in RETRIED)
    if not goes_on and decode != "ok":
        return False  # decode is never asked
    if client == "in prefill":
        return decode == "ok" and (goes_on or prefill == "hangs") and prefill != "no params"
    if client == "between":
        return goes_on and (decode in ("ok", "hangs") or (cell.spare and decode == "refuses"))
    return client == "stays" or (
        goes_on and (decode == "ok" or (cell.spare and decode == "refuses"))
    )


def _can_occur_together(cell: Cell) -> bool:
    prefill, decode, client = cell.prefill, cell.decode, cell.client
    retried = cell.spare and prefill == "refuses"
    if client == "in prefill":
        return (prefill in ("ok", "hangs") or retried) and decode in ("ok", "hangs")
    if client == "between":
        may_begin = decode in ("ok", "hangs") or (cell.spare and decode == "refuses")
        return (prefill == "ok" or retried) and may_begin
    if client == "mid-answer":
        return (prefill == "ok" or retried) and (
            decode == "ok" or (cell.spare and decode == "refuses")
        )
    return True


def expected(cell: Cell) -> Expected:
    """What the rules say of a cell."""
    return _expected_together(cell) if cell.together else _expected_in_turn(cell)


def _calls(
    p1: Counts = NEVER, p2: Counts = NEVER, d1: Counts = NEVER, d2: Counts = NEVER
) -> dict[str, Counts]:
    return {"p1": p1, "p2": p2, "d1": d1, "d2": d2}


def _expected(
    ends: set[tuple[int, End]],
    calls: dict[str, Counts],
    cancelled: Sequence[str] = (),
    may_cancel: Sequence[str] = (),
    waits: int = 0,
) -> Expected:
    return Expected(frozenset(ends), calls, frozenset(cancelled), frozenset(may_cancel), waits)


# --- nixl and plain: decode follows prefill ----------------------------------------------------

_STATUS_OF: dict[str, int] = {
    "refuses": 502, "500": 500, "hangs": 504, "closes": 502, "garbage": 502
}  # fmt: skip


def _expected_in_turn(cell: Cell) -> Expected:
    fault = cell.prefill
    calls = _calls(NEVER if fault == "refuses" else ONCE)
    cancelled: list[str] = ["p1"] if fault == "hangs" else []
    waits, retries, last = 0, 1, "p1"
    if fault == "hangs" and not (cell.client == "in prefill" and not cell.spare):
        waits += 1
    if fault in RETRIED and cell.spare:
        retries, last, fault = 0, "p2", "ok"
        calls["p2"] = ONCE
    if cell.client == "in prefill":
        if fault == "ok":
            cancelled.append(last)
        return _expected({(0, "left")}, calls, cancelled, waits=waits)
    if fault in _STATUS_OF:
        return _expected({(_STATUS_OF[fault], "error")}, calls, cancelled, waits=waits)
    return _then_decode(cell, calls, cancelled, waits, retries)


def _then_decode(
    cell: Cell, calls: dict[str, Counts], cancelled: list[str], waits: int, retries: int
) -> Expected:
    fault, last = cell.decode, cell.faulty_decode
    if fault == "refuses" and cell.spare and retries:
        last, fault = "d2", "ok"
    if fault != "refuses":
        calls[last] = ONCE
    if cell.client != "stays" and fault != "refuses":
        return _expected({(0, "left")}, calls, [*cancelled, last], waits=waits)
    if fault == "hangs":
        cancelled, waits = [*cancelled, last], waits + 1
    return _expected({_end_of_decode(cell, fault)}, calls, cancelled, waits=waits)


def _end_of_decode(cell: Cell, fault: Decode) -> tuple[int, End]:
    """What a client sees of the decode pod's own fault."""
    if fault == "ok":
        return 200, "whole"
    if fault == "dies":
        # What is out is out: an event says so where one can; else the length is not reached.
        return (200, "event") if cell.stream else (200, "cut")
    return _STATUS_OF[fault], "error"


# --- mooncake and sglang: both at once ---------------------------------------------------------


def _expected_together(cell: Cell) -> Expected:
    prefill, decode = cell.prefill, cell.decode
    if cell.client != "stays":
        return _leaves_together(cell)
    if prefill == "ok" and decode == "ok":
        return _expected({(200, "whole")}, _calls(ONCE, d1=ONCE))
    if prefill == "ok":
        return _decode_fails_together(cell)
    return _prefill_fails_together(cell)


def _decode_fails_together(cell: Cell) -> Expected:
    """The prefill leg is taken back where it is not over: SGLang's waits for its decode pod."""
    fault = cell.decode
    waiting = ("p1",) if cell.protocol == "sglang" else ()
    if fault == "refuses":
        if not cell.spare:
            return _expected({(502, "error")}, _calls(MAYBE), may_cancel=["p1"])
        # Neither can have given anything away: anew with others, or, where the prefill is over
        # already, only decode.
        return _expected({(200, "whole")}, _calls(MAYBE, MAYBE, d2=ONCE), may_cancel=["p1"])
    if fault == "500":
        return _expected({(500, "error")}, _calls(MAYBE, d1=ONCE), may_cancel=["p1"])
    if fault == "hangs":
        return _expected({(504, "error")}, _calls(ONCE, d1=ONCE), ["d1", *waiting], waits=1)
    return _expected({_end_of_decode(cell, "dies")}, _calls(ONCE, d1=ONCE))


def _prefill_fails_together(cell: Cell) -> Expected:
    """An error on the prefill side ends the request at once, and the decode leg is taken back.

    Only a pod that cannot have begun is replaced, and then both legs are sent anew. With a fault
    on either side, either may be met first.
    """
    fault, other = cell.prefill, cell.decode
    p1 = NEVER if fault == "refuses" else ONCE if other in ("ok", "hangs", "dies") else MAYBE
    anew: tuple[int, End] = (200, "whole") if cell.spare else (502, "error")
    ends: set[tuple[int, End]] = {(_STATUS_OF[fault], "error")}
    if fault == "refuses":
        ends = {anew}
    if other == "refuses":
        ends |= {anew}
    if other == "500":
        ends |= {(500, "error")}
    if fault == "hangs" and other in ("refuses", "500"):
        ends.discard((504, "error"))
    is_retried = cell.spare and "refuses" in (fault, other)
    always = ends == {(200, "whole")}
    second = (ONCE if always else MAYBE) if is_retried else NEVER
    d1 = NEVER if other == "refuses" else MAYBE
    waits = 1 if fault == "hangs" and other in ("ok", "hangs", "dies") else 0
    if waits:
        d1 = ONCE
    cancelled = ["p1", "d1"] if waits else ["p1"] if fault == "hangs" and p1 == ONCE else []
    calls = _calls(p1, second, d1, second)
    return _expected(ends, calls, cancelled, may_cancel=["p1", "d1"], waits=waits)


def _leaves_together(cell: Cell) -> Expected:
    left: set[tuple[int, End]] = {(0, "left")}
    if cell.spare and "refuses" in (cell.prefill, cell.decode):
        # The first pair is given up and the second is there when the client leaves.
        p1 = NEVER if cell.prefill == "refuses" else MAYBE
        d1 = NEVER if cell.decode == "refuses" else MAYBE
        p2 = ONCE if cell.prefill == "refuses" else MAYBE
        late = ["p2", "d2"] if cell.client == "in prefill" else ["d2"]
        return _expected(left, _calls(p1, p2, d1, ONCE), late, may_cancel=["p1", "p2", "d1"])
    if cell.client == "in prefill":
        return _expected(left, _calls(ONCE, d1=ONCE), ["p1", "d1"])
    waits_for_decode = cell.protocol == "sglang" and cell.decode == "hangs"
    gone = ["p1", "d1"] if waits_for_decode else ["d1"]
    return _expected(left, _calls(ONCE, d1=ONCE), gone)
