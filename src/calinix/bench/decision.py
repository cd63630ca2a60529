"""What a routing decision costs: for callers that queue on one loop, and step by step.

Callers are a closed loop: each asks again when it has been told, and all of them stand in one queue
of one event loop, as requests do that come in at the same time. A caller's latency runs from the
moment it is enqueued until the plan is made, its lease is taken and another one is given back. So
with 128 callers most of it is waiting for the 127 others, on one core.

The pods are warm and busy. Of several rounds the best is shown, since whatever else runs on the
machine only adds; the averages of all of them are in the JSON. A bar that is missed while others
took the core, or while the rounds differed much, is neither held nor broken.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter, perf_counter_ns, thread_time_ns

import msgspec
import uvloop

from calinix.bench import published
from calinix.bench.desk import PREFIXES_PER_POD, SHAPES, Clock, Desk, bodies, stepping
from calinix.bench.results import Finding, Grid, at_least, at_most, is_noisy, quantile

CALLERS = (1, 12, 32, 64, 128)
SEED_PODS = 16
MANY_PODS = (64, 128, 256)
OPERATIONS = 1000
WARM_UP = 500
STEP_S = 0.001
"""Between two requests that are looked at step by step, on the router's clock."""
MAX_AVG_US = 12.0
MIN_PER_S = 80_000.0
MAX_STEP_US = {
    ("100 words", 16): 15.0,
    ("100 words", 256): 40.0,
    ("32 KB", 16): 50.0,
    ("32 KB", 256): 75.0,
}
LEAST_CPU_RATIO = 0.95
"""Where others had more of the core, a bar that is missed is undecided."""
MAX_GROWTH = {"100 words": 2.5, "32 KB": 1.5}
"""Of a decision among 256 pods over one among 16."""


class CallersRow(msgspec.Struct, frozen=True, rename="camel"):
    """One level: the best of its rounds."""

    prompt: str
    pods: int
    callers: int
    avg_us: float
    p50_us: float
    p99_us: float
    per_s: float
    cpu_ratio: float
    """CPU time over time: under 1 where others ran on the core."""
    rounds_avg_us: list[float]


class StepsRow(msgspec.Struct, frozen=True, rename="camel"):
    """Medians of one decision's steps, in microseconds, of the best round."""

    prompt: str
    pods: int
    decision_us: float
    """Body and route: all that is done until the plan is out."""
    decision_p99_us: float
    body_us: float
    route_us: float
    first_token_us: float
    end_us: float
    rounds_us: list[float]
    """The decision's median, round by round."""


class Decision(msgspec.Struct, frozen=True):
    """What was measured."""

    strategy: str
    callers: list[CallersRow]
    steps: list[StepsRow]


Advance = Callable[[str], None]


def measure(strategy: str, shapes: Sequence[str], rounds: int, advance: Advance) -> Decision:
    """All levels with prompts of these shapes; `advance` is told what has been done."""
    asked = []
    with quiet_collector():
        for shape, pods, callers in levels(shapes):
            asked.append(_level(strategy, shape, pods, callers, rounds))
            advance(f"{shape}, {pods} pods, {callers} callers")
        steps = []
        for shape in shapes:
            for pods in (SEED_PODS, *MANY_PODS):
                steps.append(_steps(strategy, shape, pods, rounds))
                advance(f"{shape}, {pods} pods, step by step")
    return Decision(strategy, asked, steps)


def levels(shapes: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """(prompt, pods, callers): the seed's levels for each shape, then more pods."""
    for shape in shapes:
        for callers in CALLERS:
            yield shape, SEED_PODS, callers
    for pods in MANY_PODS:
        for callers in (1, 128):
            yield shapes[0], pods, callers


def size(shapes: Sequence[str]) -> int:
    """How often `advance` is called."""
    return len(list(levels(shapes))) + len(shapes) * (1 + len(MANY_PODS))


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Garbage is collected as the gateway does it."""
    before = gc.get_threshold()
    gc.set_threshold(20_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class _Queue:
    """Callers in a closed loop, on one event loop."""

    def __init__(self, desk: Desk, kept: list[bytes], loop: asyncio.AbstractEventLoop):
        self._desk = desk
        self._kept = kept
        self._loop = loop
        self._left = len(kept)
        self._done = loop.create_future()
        self.taken_ns: list[int] = []

    async def run(self, callers: int) -> tuple[float, float]:
        """Seconds, and seconds of CPU, until all have been told."""
        began, cpu_began = perf_counter_ns(), thread_time_ns()
        for _ in range(min(callers, self._left)):
            self._enqueue()
        await self._done
        return (perf_counter_ns() - began) / 1e9, (thread_time_ns() - cpu_began) / 1e9

    def _enqueue(self) -> None:
        self._left -= 1
        # A body has just been read from a socket, so it is warm in the cache; this copy is, too.
        octets = bytes(bytearray(self._kept[self._left]))
        self._loop.call_soon(self._turn, octets, perf_counter_ns())

    def _turn(self, octets: bytes, enqueued_ns: int) -> None:
        self._desk.decide(octets)
        self.taken_ns.append(perf_counter_ns() - enqueued_ns)
        if self._left:
            self._enqueue()
        elif len(self.taken_ns) == len(self._kept):
            self._done.set_result(None)


def _level(strategy: str, shape: str, pods: int, callers: int, rounds: int) -> CallersRow:
    best: tuple[list[int], float, float] | None = None
    averages = []
    warm_up, kept = _requests(shape, pods)
    for desk in _desks(rounds, pods, strategy, lambda: perf_counter):
        _warm(desk, warm_up)
        taken_ns, elapsed_s, cpu_s = uvloop.run(_one_round(desk, kept, callers))
        averages.append(statistics.fmean(taken_ns) / 1e3)
        if best is None or averages[-1] == min(averages):
            best = taken_ns, elapsed_s, cpu_s
    assert best is not None
    taken_ns, elapsed_s, cpu_s = best
    return CallersRow(
        prompt=shape,
        pods=pods,
        callers=callers,
        avg_us=min(averages),
        p50_us=statistics.median(taken_ns) / 1e3,
        p99_us=quantile(taken_ns, 0.99) / 1e3,
        per_s=len(taken_ns) / elapsed_s,
        cpu_ratio=cpu_s / elapsed_s,
        rounds_avg_us=averages,
    )


async def _one_round(desk: Desk, kept: list[bytes], callers: int) -> tuple[list[int], float, float]:
    queue = _Queue(desk, kept, asyncio.get_running_loop())
    elapsed_s, cpu_s = await queue.run(callers)
    return queue.taken_ns, elapsed_s, cpu_s


@functools.lru_cache(2)
def _requests(shape: str, pods: int) -> tuple[list[bytes], list[bytes]]:
    """Those that warm a router up, and those of a round."""
    first = max(WARM_UP, PREFIXES_PER_POD * pods)
    made = list(bodies(shape, random.Random(1), first + OPERATIONS, pods))
    return made[:first], made[first:]


def _desks(rounds: int, pods: int, strategy: str, clock: Callable[[], Clock]) -> Iterator[Desk]:
    """One for each round. As in the gateway, a router is out of the collector's way from the start.

    Those of the level before are given back first.
    """
    gc.unfreeze()
    gc.collect()
    for _ in range(rounds):
        desk = Desk(pods, strategy, clock())
        gc.freeze()
        yield desk


def _warm(desk: Desk, warm_up: list[bytes]) -> None:
    """Lets it serve for a while."""
    for octets in warm_up:
        desk.decide(octets)


def _steps(strategy: str, shape: str, pods: int, rounds: int) -> StepsRow:
    found = []
    warm_up, kept = _requests(shape, pods)
    for desk in _desks(rounds, pods, strategy, lambda: stepping(STEP_S)):
        _warm(desk, warm_up)
        taken = [desk.steps(bytes(bytearray(octets))) for octets in kept]
        found.append(_row(shape, pods, taken))
    best = min(found, key=lambda row: row.decision_us)
    return msgspec.structs.replace(best, rounds_us=[row.decision_us for row in found])


def _row(shape: str, pods: int, taken: list[tuple[int, int, int, int]]) -> StepsRow:
    body, route, first, end = (
        statistics.median(values) / 1e3 for values in zip(*taken, strict=True)
    )
    decisions = [one[0] + one[1] for one in taken]
    return StepsRow(
        prompt=shape,
        pods=pods,
        decision_us=statistics.median(decisions) / 1e3,
        decision_p99_us=quantile(decisions, 0.99) / 1e3,
        body_us=body,
        route_us=route,
        first_token_us=first,
        end_us=end,
        rounds_us=[],
    )


def grids(found: Decision) -> list[Grid]:
    """The tables."""
    asked: list[tuple[str, ...]] = [
        (
            f"{row.prompt}, {row.pods} pods",
            str(row.callers),
            f"{row.avg_us:,.1f}",
            f"{row.p50_us:,.1f}",
            f"{row.p99_us:,.1f}",
            f"{row.per_s:,.0f}",
            *_published(row),
        )
        for row in found.callers
    ]
    steps: list[tuple[str, ...]] = [
        (
            f"{row.prompt}, {row.pods} pods",
            *(
                f"{value:.1f}"
                for value in (
                    row.decision_us,
                    row.decision_p99_us,
                    row.body_us,
                    row.route_us,
                    row.first_token_us,
                    row.end_us,
                )
            ),
        )
        for row in found.steps
    ]
    return [
        Grid(
            f"Routing decisions, {found.strategy}: microseconds from enqueue to plan",
            ("prompts", "callers", "avg", "p50", "p99", "per s", "seed: avg", "p50", "per s"),
            asked,
            f"{OPERATIONS:,} decisions a level, all callers on one core",
        ),
        Grid(
            f"One decision, {found.strategy}: medians in microseconds",
            ("prompts", "decision", "p99", "body", "route", "first token", "end"),
            steps,
            "decision = body + route; first token and end are what the router is told later",
        ),
    ]


def _published(row: CallersRow) -> tuple[str, str, str]:
    if row.prompt != SHAPES[0] or row.pods != SEED_PODS:
        return "-", "-", "-"
    per_s = published.DECISIONS_PER_S if row.callers >= 12 else None
    return (
        published.said(published.DECISION_AVG_US.get(row.callers)),
        published.said(published.DECISION_P50_US.get(row.callers)),
        published.said(per_s, about="~"),
    )


def findings(found: Decision) -> list[Finding]:
    """The bars."""
    return [*_of_callers(found.callers), *_of_steps(found.steps)]


def _of_callers(rows: list[CallersRow]) -> Iterator[Finding]:
    for row in rows:
        if row.prompt != SHAPES[0] or row.pods != SEED_PODS:
            continue
        doubtful = is_noisy(row.rounds_avg_us) or row.cpu_ratio < LEAST_CPU_RATIO
        if row.callers == 1:
            what = "decision, 1 caller, avg"
            yield at_most(what, row.avg_us, MAX_AVG_US, "us", doubtful=doubtful)
        elif row.callers in (12, 128):
            what = f"decisions a second, {row.callers} callers"
            yield at_least(what, row.per_s, MIN_PER_S, doubtful=doubtful)


def _of_steps(rows: list[StepsRow]) -> Iterator[Finding]:
    by_place = {(row.prompt, row.pods): row for row in rows}
    for (shape, pods), limit in MAX_STEP_US.items():
        row = by_place.get((shape, pods))
        if row is not None:
            what = f"decision, {shape}, {pods} pods, median"
            noisy = is_noisy(row.rounds_us)
            yield at_most(what, row.decision_us, limit, "us", doubtful=noisy)
    for shape, limit in MAX_GROWTH.items():
        few, many = (by_place.get((shape, pods)) for pods in (SEED_PODS, MANY_PODS[-1]))
        if few is not None and many is not None:
            what = f"decision among 256 pods over 16 pods, {shape}"
            noisy = is_noisy(few.rounds_us) or is_noisy(many.rounds_us)
            yield at_most(what, many.decision_us / few.decision_us, limit, doubtful=noisy)
