"""What it costs to know late: the hot prefix again, with load that is known some time later only.

Everything that the router knows of load (what it has sent, what has ended) is so many milliseconds
old, as where engine metrics are polled; what is cached where it knows at once, from its own routes.
At each decision the simulator knows the truth: how long every pod would take to a first token, by
its queue and its cache. A request is misrouted when another pod would have given it that 100 ms
sooner or more. A strategy that weighs more than the first token has some misroutes with lag 0, too.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import msgspec

from calinix.bench.fairness import scenario
from calinix.bench.results import Grid
from calinix.core.requests import RoutePlan
from calinix.sim.simulate import Stage, build
from calinix.sim.workload import SimRequest

LAGS_MS = (0, 10, 100, 500, 1000)
STRATEGIES = ("cacheAware", "predictive", "leastLoad")
MISROUTED_S = 0.1


class StalenessRow(msgspec.Struct, frozen=True, rename="camel"):
    """One strategy with one lag."""

    strategy: str
    lag_ms: int
    misrouted_ratio: float
    lost_mean_s: float
    """By how much the first token would have come sooner elsewhere, over all requests."""
    ttft_mean_s: float


class _Judge:
    """Compares each plan with the truth."""

    def __init__(self, stage: Stage):
        self._pods = stage.cluster.pods
        self.lost_s: list[float] = []

    def look(self, plan: RoutePlan, truth: SimRequest, now: float) -> None:
        """Before the plan is carried out."""
        ahead_s = [
            pod.predicted_first_token_s(truth.chain, truth.prompt_tokens, now) for pod in self._pods
        ]
        self.lost_s.append(ahead_s[plan.pod.slot] - min(ahead_s))


def measure(seeds: int, advance: Callable[[str], None]) -> list[StalenessRow]:
    """Every strategy with every lag."""
    rows = []
    for strategy in STRATEGIES:
        for lag_ms in LAGS_MS:
            rows.append(_row(strategy, lag_ms, seeds))
            advance(f"lag {lag_ms} ms, {strategy}")
    return rows


def _row(strategy: str, lag_ms: int, seeds: int) -> StalenessRow:
    lost_s: list[float] = []
    ttft_s: list[float] = []
    for seed in range(1, seeds + 1):
        late = scenario(lag_ms / 1e3)
        stage = build(late, strategy, seed)
        judge = _Judge(stage)
        stage.doors[0].watch = judge.look
        cluster = stage.cluster
        cluster.feed(late.workload.arrivals(random.Random(f"{seed}/arrivals"), 1.0))
        cluster.clock.run()
        lost_s += judge.lost_s
        recorder = cluster.recorder
        ttft_s += [
            first - came for first, came in zip(recorder.first_s, recorder.arrival_s, strict=True)
        ]
    return StalenessRow(
        strategy=strategy,
        lag_ms=lag_ms,
        misrouted_ratio=sum(lost > MISROUTED_S for lost in lost_s) / len(lost_s),
        lost_mean_s=statistics.fmean(lost_s),
        ttft_mean_s=statistics.fmean(ttft_s),
    )


def grid(rows: list[StalenessRow]) -> Grid:
    """The table."""
    return Grid(
        "Load that is known late: requests that another pod would have served 100 ms sooner",
        ("strategy", "lag ms", "misrouted", "lost, mean s", "TTFT mean s", "seed"),
        [
            (
                row.strategy,
                str(row.lag_ms),
                f"{row.misrouted_ratio:.1%}",
                f"{row.lost_mean_s:.3f}",
                f"{row.ttft_mean_s:.3f}",
                "-",
            )
            for row in rows
        ],
        "the hot prefix's callers and pods; only what is known of load is late",
    )
