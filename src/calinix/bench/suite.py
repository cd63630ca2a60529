"""The scenarios by name, and one result that holds what they found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from calinix.bench import bitmap, decision, fairness, index, staleness
from calinix.bench.bitmap import SetRow
from calinix.bench.decision import Decision
from calinix.bench.desk import SHAPES
from calinix.bench.fairness import FairnessRow
from calinix.bench.index import IndexRow
from calinix.bench.results import Finding, Grid
from calinix.bench.setting import Setting, setting
from calinix.bench.staleness import StalenessRow

SCENARIOS = {
    "decision": decision,
    "index": index,
    "bitmap": bitmap,
    "fairness": fairness,
    "staleness": staleness,
}
"""In the order in which they are run and shown; a scenario's docstring is its method."""
DECIDING = {"cacheAware": SHAPES, "predictive": SHAPES[:1]}
"""Strategies whose decisions are timed, and with which prompts; the bars are for the first."""


class Size(msgspec.Struct, frozen=True):
    """How long it takes."""

    rounds: int
    """Of what is timed."""
    seeds: int
    """Of what is simulated."""


FULL, QUICK = Size(9, 5), Size(3, 1)


class Result(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """What was found; a scenario that was not run has null or no rows."""

    machine: Setting
    quick: bool
    method: dict[str, str]
    findings: list[Finding]
    decision: list[Decision] = []
    index: list[IndexRow] = []
    bitmap: list[SetRow] = []
    fairness: list[FairnessRow] = []
    staleness: list[StalenessRow] = []


def steps(names: Sequence[str]) -> int:
    """How often `run` tells of progress."""
    counts = {
        "decision": sum(map(decision.size, DECIDING.values())),
        "index": 1,
        "bitmap": 1,
        "fairness": len(fairness.STRATEGIES),
        "staleness": len(staleness.STRATEGIES) * len(staleness.LAGS_MS),
    }
    return sum(counts[name] for name in names)


def run(names: Sequence[str], advance: Callable[[str], None], *, quick: bool = False) -> Result:
    """Runs scenarios by name. `advance` is told what has been done."""
    size = QUICK if quick else FULL
    decided: list[Decision] = []
    threads: list[IndexRow] = []
    sets: list[SetRow] = []
    fair: list[FairnessRow] = []
    late: list[StalenessRow] = []
    for name in names:
        if name == "decision":
            decided = [
                decision.measure(strategy, shapes, size.rounds, advance)
                for strategy, shapes in DECIDING.items()
            ]
        elif name == "index":
            threads = index.measure()
            advance("index")
        elif name == "bitmap":
            sets = bitmap.measure(size.rounds)
            advance("bitmap")
        elif name == "fairness":
            fair = fairness.measure(size.seeds, advance)
        else:
            late = staleness.measure(size.seeds, advance)
    return Result(
        machine=setting(),
        quick=quick,
        method={name: SCENARIOS[name].__doc__ or "" for name in names},
        findings=[
            *(decision.findings(decided[0]) if decided else []),
            *(bitmap.findings(sets) if sets else []),
            *fairness.findings(fair),
        ],
        decision=decided,
        index=threads,
        bitmap=sets,
        fairness=fair,
        staleness=late,
    )


def grids(result: Result) -> list[Grid]:
    """All tables."""
    shown = [grid for one in result.decision for grid in decision.grids(one)]
    if result.index:
        shown.append(index.grid(result.index, gil=result.machine.gil))
    if result.bitmap:
        shown.append(bitmap.grid(result.bitmap))
    if result.fairness:
        shown.append(fairness.grid(result.fairness))
    if result.staleness:
        shown.append(staleness.grid(result.staleness))
    return shown
