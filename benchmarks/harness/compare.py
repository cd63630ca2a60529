"""Slices of measurement, and what they come to: medians, and ratios of CPU between contenders."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from harness import contenders as who
from harness.cases import BARS, CASES, Case
from harness.tools import Load

NOISY_CORES = 0.5
"""A slice during which others used more than this many cores is not quotable."""


class Slice(msgspec.Struct, frozen=True):
    """One measurement of one fresh process; `attempts` counts the noisy ones before it, and it."""

    case: str
    contender: str
    repeat: int
    attempts: int
    load: Load

    @property
    def is_noisy(self) -> bool:
        """Others used the machine meanwhile."""
        return self.load.other > NOISY_CORES

    def value(self, case: Case) -> float:
        """What the case compares."""
        return float(getattr(self.load, case.per))


class Spread(msgspec.Struct, frozen=True):
    """Several values in one line."""

    median: float
    min: float
    max: float


class Summary(msgspec.Struct, frozen=True, rename="camel"):
    """All slices of one contender in one case."""

    case: str
    contender: str
    value: Spread
    unit: str
    p50_us: float
    p99_us: float
    rps: float
    rss_mb: float
    slices: int
    noisy_slices: int
    faults: int


class Ratio(msgspec.Struct, frozen=True):
    """Calinix over a peer, repeat by repeat, so that a drift of the machine meets both alike."""

    case: str
    peer: str
    ratio: Spread
    limit: float | None
    holds: bool | None
    noisy: bool
    """Half or more of the slices of either were disturbed: not quotable."""


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most."""
    return Spread(statistics.median(values), min(values), max(values))


def summarise(slices: Sequence[Slice]) -> list[Summary]:
    """One summary for each contender in each case, in the order of CASES."""
    summaries = []
    for case in CASES:
        mine = _slices_of(case, slices)
        for name in dict.fromkeys(one.contender for one in mine):
            taken = [one for one in mine if one.contender == name]
            summaries.append(
                Summary(
                    case=case.name,
                    contender=name,
                    value=spread([one.value(case) for one in taken]),
                    unit=case.unit,
                    p50_us=statistics.median(one.load.p50 for one in taken),
                    p99_us=statistics.median(one.load.p99 for one in taken),
                    rps=statistics.median(one.load.rps for one in taken),
                    rss_mb=statistics.median(one.load.rss_mb for one in taken),
                    slices=len(taken),
                    noisy_slices=sum(one.is_noisy for one in taken),
                    faults=sum(not one.load.is_whole for one in taken),
                )
            )
    return summaries


class MaxRate(msgspec.Struct, frozen=True, rename="camel"):
    """The most requests a second that a contender answers on one core, in a closed loop."""

    case: str
    contender: str
    requests_per_s: Spread
    core_used: float
    """Of its core; well under 1: the load generator and the pods were what held it up."""


def max_rates(slices: Sequence[Slice]) -> list[MaxRate]:
    """From the slices of whole answers that come as fast as they can."""
    return [
        MaxRate(
            case=one.case,
            contender=one.contender,
            requests_per_s=spread([taken.load.rps for taken in mine]),
            core_used=statistics.median(taken.load.util for taken in mine),
        )
        for one in summarise(slices)
        if one.unit == "CPU us/request"
        for mine in [[s for s in slices if (s.case, s.contender) == (one.case, one.contender)]]
    ]


def _slices_of(case: Case, slices: Sequence[Slice]) -> list[Slice]:
    return [one for one in slices if one.case == (case.of or case.name)]


def _is_noisy(slices: Sequence[Slice], contender: str) -> bool:
    """Whether half or more of its slices are: then its median need not be a quiet one."""
    mine = [one.is_noisy for one in slices if one.contender == contender]
    return 2 * sum(mine) >= len(mine)


def ratios(slices: Sequence[Slice]) -> list[Ratio]:
    """Calinix against each peer in each case; empty when Calinix was not measured."""
    found = []
    limits = {(bar.case, bar.peer): bar.limit for bar in BARS}
    for case in CASES:
        values: dict[str, dict[int, float]] = {}
        for one in _slices_of(case, slices):
            values.setdefault(one.contender, {})[one.repeat] = one.value(case)
        mine = values.pop(who.CALINIX, {})
        for peer, theirs in values.items():
            pairs = [mine[i] / theirs[i] for i in mine if theirs.get(i)]
            if not pairs:
                continue
            over = spread(pairs)
            limit = limits.get((case.name, peer))
            names = (who.CALINIX, peer)
            concerned = [s for s in _slices_of(case, slices) if s.contender in names]
            whole = all(s.load.is_whole for s in concerned)
            found.append(
                Ratio(
                    case=case.name,
                    peer=peer,
                    ratio=over,
                    limit=limit,
                    holds=None if limit is None else whole and over.median <= limit,
                    noisy=any(_is_noisy(concerned, name) for name in names),
                )
            )
    return found
