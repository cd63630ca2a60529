"""Faults that a mock pod can be told to have, by command line, by POST /mock/faults or in tests."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from calinix.errors import BadRequest

FaultKind = Literal[
    "refuse", "hang", "hangAfterHeaders", "reset", "cut", "garbage", "status", "slow"
]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """One fault. It strikes `count` requests (None: all) and ends after `for_s` (None: never)."""

    kind: FaultKind
    """`refuse` closes the listener; `hang` never answers; `hangAfterHeaders` sends a stream's head
    and no token; `reset` drops the connection after `chunks` events (or half of a whole body);
    `cut` begins an answer at once and drops it; `garbage` is a 200 that is no JSON; `status`
    answers `status`; `slow` stretches prefill and decode by `factor`."""
    status: Annotated[int, Meta(ge=400, le=599)] = 503
    chunks: Annotated[int, Meta(ge=0)] = 0
    factor: Annotated[float, Meta(gt=0)] = 4.0
    count: Annotated[int, Meta(ge=1)] | None = None
    for_s: Annotated[float, Meta(gt=0)] | None = None
    everywhere: bool = False
    """Strikes probes and scrapes too, not only inference."""


MAX_FAULTS = 32
_decoder = msgspec.json.Decoder(list[Fault] | Fault)


def faults_from_json(body: bytes) -> list[Fault]:
    """One fault or a list of them. Raises BadRequest."""
    try:
        faults = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"not a fault: {_said(error)}") from error
    return faults if isinstance(faults, list) else [faults]


def faults_from_text(text: str) -> list[Fault]:
    """`status:status=503,count=2;slow:factor=4` as faults. Raises BadRequest."""
    faults = []
    for one in filter(None, (part.strip() for part in text.split(";"))):
        kind, _, settings = one.partition(":")
        fields: dict[str, object] = {"kind": kind.strip()}
        for setting in filter(None, settings.split(",")):
            name, _, value = setting.partition("=")
            fields[name.strip()] = value.strip()
        try:
            faults.append(msgspec.convert(fields, Fault, strict=False))
        except msgspec.ValidationError as error:
            raise BadRequest(f"not a fault: {one!r}: {_said(error)}") from error
    return faults


def _said(error: msgspec.MsgspecError) -> str:
    """What is wrong; of a kind that is none, also which there are."""
    text = str(error)
    return f"{text}; there are {', '.join(get_args(FaultKind))}" if ".kind`" in text else text


class _Active:
    """A fault in force: until when, and how many requests it still strikes."""

    __slots__ = ("fault", "left", "until_s")

    def __init__(self, fault: Fault, now: float):
        self.fault = fault
        self.until_s = float("inf") if fault.for_s is None else now + fault.for_s
        self.left = float("inf") if fault.count is None else fault.count

    def holds(self, now: float) -> bool:
        return now < self.until_s and self.left > 0


class FaultSet:
    """The faults in force. `now` is the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._active: list[_Active] = []

    def add(self, fault: Fault, now: float) -> None:
        """Puts the fault in force. Raises BadRequest when there are too many."""
        self._active = [active for active in self._active if active.holds(now)]
        if len(self._active) >= MAX_FAULTS:
            raise BadRequest(f"more than {MAX_FAULTS} faults at once")
        self._active.append(_Active(fault, now))

    def clear(self, kind: FaultKind | None = None) -> None:
        """Ends all faults, or those of one kind."""
        self._active = [
            active for active in self._active if kind is not None and active.fault.kind != kind
        ]

    def in_force(self, now: float) -> list[Fault]:
        """The faults that have not ended."""
        return [active.fault for active in self._active if active.holds(now)]

    def strike(self, now: float, *, inference: bool) -> Fault | None:
        """The fault that this request meets, if any; its count goes down."""
        for active in self._active:
            fault = active.fault
            strikes = fault.kind not in ("slow", "refuse") and active.holds(now)
            if strikes and (inference or fault.everywhere):
                active.left -= 1
                return fault
        return None

    def slow_factor(self, now: float) -> float:
        """By how much work is stretched now."""
        factor = 1.0
        for fault in self.in_force(now):
            if fault.kind == "slow":
                factor *= fault.factor
        return factor
