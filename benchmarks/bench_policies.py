"""What the strategies promise, in simulation: each bar beside its figure, over several seeds.

    python benchmarks/bench_policies.py [--seeds N] [--only caches,2p2d,...] [--json FILE] [--quick]

The router is the real one and only time is simulated, so the figures are those of the simulator's
pods, whose constants the router does not know: its attention constant is 0, service times vary by
20 %. A ratio is the mean over the seeds of one strategy over that of another.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.progress import Progress

from calinix.sim.batch import run_all
from calinix.sim.measures import Outcome
from calinix.sim.scenarios import SCENARIOS
from calinix.sim.simulate import run
from calinix.sim.tasks import Task
from harness.machine import describe_machine, write_json
from harness.tables import new_console

Finding = dict[str, Any]
Runner = Callable[..., "Cell"]

CONTROLLED = ("weightedRoundRobin", "weightedPowerOfTwo", "predictive")
MAX_WORSE = 1.1
STRATEGIES = (
    "roundRobin",
    "weightedRoundRobin",
    "leastLoad",
    "powerOfTwo",
    "weightedPowerOfTwo",
    "cacheOnly",
    "cacheAware",
    "predictive",
)
MEASURES = (
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "e2e_mean_s",
    "e2e_p99_s",
    "tpot_mean_s",
    "goodput_ratio",
    "prefix_hit_ratio",
    "jain",
)
TABLES: tuple[tuple[str, float | None], ...] = (
    ("mooncake-conversation", 1.2),
    ("hot-prefix", None),
    ("azure-conversation", None),
    ("seed-2p2d", None),
    ("stale-state", None),
    ("heterogeneous-4p4d", None),
)
"""(scenario, load) in which docs/strategies.md compares them."""
HALF_STREAMED = "scenario.streamedShare=0.5"


class Cell:
    """One strategy in one setting: means over the seeds of whatever a run's row holds."""

    def __init__(self, outcomes: Sequence[Outcome]):
        self.rows = [outcome.row for outcome in outcomes]
        self.outcomes = outcomes

    def means(self) -> dict[str, Any]:
        """All of them, for the JSON; of the first tokens also the seeds' own."""
        fields = ("load", "requests", *MEASURES)
        means = {field: float(f"{getattr(self, field):.4g}") for field in fields}
        return means | {
            "ttft_mean_s_by_seed": [round(row.ttft_mean_s or 0.0, 4) for row in self.rows]
        }

    def __getattr__(self, field: str) -> float:
        return float(np.mean([getattr(row, field) for row in self.rows]))


def at_most(what: str, figure: float, limit: float) -> Finding:
    """A bar from above."""
    return {
        "what": what,
        "figure": round(figure, 3),
        "limit": f"<= {limit:g}",
        "holds": bool(figure <= limit),
    }


def at_least(what: str, figure: float, limit: float) -> Finding:
    """A bar from below."""
    return {
        "what": what,
        "figure": round(figure, 3),
        "limit": f">= {limit:g}",
        "holds": bool(figure >= limit),
    }


def caches(cell: Runner) -> list[Finding]:
    """mooncake-conversation: beside cache_aware, Dynamo's cost and a clairvoyant."""
    found = []
    for load in (1.0, 1.2):

        def of(strategy: str, changes: str = "", load: float = load) -> Cell:
            return cell("mooncake-conversation", strategy, load=load, changes=changes)

        ours, smg, dynamo = of("predictive"), of("smgCacheAware"), of("dynamoCost")
        best = of("clairvoyant")
        name = f"conversation x{load:g}: predictive"
        found += [
            at_most(f"{name} / smgCacheAware, p99 TTFT", ours.ttft_p99_s / smg.ttft_p99_s, 0.65),
            at_most(f"{name} / smgCacheAware, mean TTFT", ours.ttft_mean_s / smg.ttft_mean_s, 0.6),
            at_most(f"{name} / dynamoCost, p99 TTFT", ours.ttft_p99_s / dynamo.ttft_p99_s, 1.0),
            at_most(f"{name} / dynamoCost, mean TTFT", ours.ttft_mean_s / dynamo.ttft_mean_s, 0.8),
            at_most(f"{name} / clairvoyant, mean TTFT", ours.ttft_mean_s / best.ttft_mean_s, 1.2),
            at_most(f"{name} / smgCacheAware, mean E2E", ours.e2e_mean_s / smg.e2e_mean_s, 1.0),
            at_most(f"{name} / dynamoCost, mean E2E", ours.e2e_mean_s / dynamo.e2e_mean_s, 1.0),
        ]
        half, half_smg = of("predictive", HALF_STREAMED), of("smgCacheAware", HALF_STREAMED)
        ratio = half.ttft_p99_s / half_smg.ttft_p99_s
        found.append(at_most(f"{name} / smgCacheAware, p99 TTFT, half not streamed", ratio, 0.8))
    for factor in (1 / 3, 3):
        tokens = round(53_000 * factor)
        changes = f"gateway.strategy.predictive.attentionTokens={tokens}"
        wrong = cell("mooncake-conversation", "predictive", load=1.2, changes=changes)
        what = f"conversation x1.2: attention constant wrong by {factor:.2g}, p99 TTFT s (reported)"
        found.append(
            {"what": what, "figure": round(wrong.ttft_p99_s, 2), "limit": "-", "holds": True}
        )
    return found


def seed_2p2d(cell: Runner) -> list[Finding]:
    """seed-2p2d: the controller's weights against power of two."""
    two = cell("seed-2p2d", "powerOfTwo")
    found = []
    for name in ("weightedRoundRobin", "weightedPowerOfTwo"):
        ours = cell("seed-2p2d", name)
        literal = cell("seed-2p2d", f"{name}:controller.mode=literal")
        ttft, e2e = ours.ttft_mean_s / two.ttft_mean_s, ours.e2e_p99_s / two.e2e_p99_s
        found += [
            at_most(f"seed-2p2d: {name} / powerOfTwo, mean TTFT", ttft, 0.6),
            at_most(f"seed-2p2d: {name} / powerOfTwo, p99 E2E", e2e, 0.6),
            {
                "what": f"seed-2p2d: {name} literal / powerOfTwo, mean TTFT (reported)",
                "figure": round(literal.ttft_mean_s / two.ttft_mean_s, 3),
                "limit": "-",
                "holds": True,
            },
        ]
    return found


def late(cell: Runner) -> Iterator[Finding]:
    """stale-state and many-gateways: what is known is old, or only a part."""
    turns, two = cell("stale-state", "weightedRoundRobin"), cell("stale-state", "powerOfTwo")
    ratio = turns.ttft_mean_s / two.ttft_mean_s
    yield at_most("stale-state: weightedRoundRobin / powerOfTwo, mean TTFT", ratio, 0.5)
    for gateways in (4, 16):
        for sync_s in (1, 5):
            for speeds in ("[1]", "[1.5, 1.25, 0.75, 0.5]"):
                changes = (
                    f"scenario.gateways={gateways};scenario.syncS={sync_s};scenario.speeds={speeds}"
                )
                ours, *others = (
                    cell("many-gateways", name, changes=changes).ttft_mean_s
                    for name in ("predictive", "roundRobin", "powerOfTwo")
                )
                kind = "equal" if speeds == "[1]" else "unequal"
                what = (
                    f"{gateways} gateways, sync {sync_s} s, {kind} pods: predictive / best of "
                    "roundRobin and powerOfTwo, mean TTFT"
                )
                yield at_most(what, ours / min(others), 1.15)


def faults(cell: Runner) -> Iterator[Finding]:
    """slow-pod and pod-loss: no strategy with the controller is worse than power of two."""
    for scenario in ("slow-pod", "pod-loss"):
        two = cell(scenario, "powerOfTwo")
        for name in CONTROLLED:
            ratio = cell(scenario, name).ttft_p99_s / two.ttft_p99_s
            yield at_most(f"{scenario}: {name} / powerOfTwo, p99 TTFT", ratio, MAX_WORSE)


def spread(cell: Runner) -> list[Finding]:
    """hot-prefix and sequential-agents: neither one pod for all, nor no use of caches."""
    ours, least = cell("hot-prefix", "predictive"), cell("hot-prefix", "leastLoad")
    found = [
        at_most(
            "hot-prefix: predictive / leastLoad, p99 TTFT", ours.ttft_p99_s / least.ttft_p99_s, 1.0
        ),
        at_least(
            "hot-prefix: predictive / leastLoad, hit ratio",
            ours.prefix_hit_ratio / least.prefix_hit_ratio,
            1.0,
        ),
        at_least("hot-prefix: predictive, Jain", ours.jain, 0.75),
    ]
    stays, share = [], []
    for seed in range(1, len(ours.rows) + 1):
        done = run(SCENARIOS["sequential-agents"], "predictive", seed)
        pods, turns = done.requests.pod, 10
        later = np.arange(len(pods)) % turns > 0
        stays.append(float(np.mean(pods[later] == pods[np.flatnonzero(later) - 1])))
        share.append(float(np.bincount(pods, minlength=len(done.pods)).max() / np.mean(
            np.bincount(pods, minlength=len(done.pods)))))  # fmt: skip
    return [
        *found,
        at_least("sequential-agents: later turns on the same pod", min(stays), 0.95),
        at_most("sequential-agents: the busiest pod over its share", max(share), 2.0),
    ]


def side_by_side(cell: Runner) -> Iterator[Finding]:
    """The tables of docs/strategies.md: every strategy in some scenarios."""
    for scenario, load in TABLES:
        for strategy in STRATEGIES:
            ours = cell(scenario, strategy, load=load)
            what = f"{scenario}: {strategy}, mean TTFT s (reported)"
            yield {"what": what, "figure": round(ours.ttft_mean_s, 3), "limit": "-", "holds": True}


PARTS: dict[str, Callable[[Runner], Iterable[Finding]]] = {
    "caches": caches,
    "2p2d": seed_2p2d,
    "late": late,
    "faults": faults,
    "spread": spread,
    "tables": side_by_side,
}


def merged(path: Path, results: dict[str, Any]) -> dict[str, Any]:
    """`results`, and of the file's the parts that were not run now, in the order of PARTS."""
    if not path.exists():
        return results
    before = msgspec.json.decode(path.read_bytes())
    parts = before["parts"] | results["parts"]
    return results | {"parts": {name: parts[name] for name in PARTS if name in parts}}


def main() -> None:
    """Runs the parts, prints what holds, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    parser.add_argument(
        "--json", type=Path, help="write the figures to this file; other parts' in it are kept"
    )
    parser.add_argument("--quick", action="store_true", help="one seed")
    arguments = parser.parse_args()
    seeds = 1 if arguments.quick else arguments.seeds
    console = new_console()
    cells: dict[tuple[Any, ...], Cell] = {}
    used: list[dict[str, Any]] = []
    parts: dict[str, Any] = {}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("")

        def cell(
            scenario: str, strategy: str, load: float | None = None, changes: str = ""
        ) -> Cell:
            key = (scenario, strategy, load, changes)
            if key not in cells:
                progress.update(bar, description=f"{scenario} {strategy} {changes}", completed=0)
                tasks = [
                    Task(scenario, strategy, seed, load=load, changes=changes)
                    for seed in range(1, seeds + 1)
                ]
                outcomes = run_all(
                    tasks, lambda share, _: progress.update(bar, completed=100 * share)
                )
                cells[key] = Cell(outcomes)
            setting = {"scenario": scenario, "strategy": strategy, "changes": changes}
            used.append(setting | cells[key].means())
            return cells[key]

        for name in arguments.only.split(","):
            used.clear()
            found = []
            for one in PARTS[name](cell):
                found.append(one)
                verdict = "[green]holds[/]" if one["holds"] else "[bold red]does not hold[/]"
                console.print(f"{one['what']}: {one['figure']} ({one['limit']}) {verdict}")
            machine = describe_machine()
            parts[name] = {
                "machine": machine,
                "seeds": seeds,
                "findings": found,
                "cells": list(used),
            }
    if arguments.json is not None:
        results = {"benchmark": "policies", "method": __doc__, "parts": parts}
        write_json(arguments.json, merged(arguments.json, results))


if __name__ == "__main__":
    main()
