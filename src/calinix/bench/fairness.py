"""A hot prefix: how evenly it is spread, and how often it is found.

64 callers in a closed loop, who begin within a second, ask 16 simulated pods: 1,000 requests in
all, each of 5,000 tokens. The first 4,096 of these are the hot prefix in nine of ten requests, and
one of 15 others in the rest. Time is virtual and the pods are the simulator's (a model of the 70B
class, service times that vary by 20 %): a request waits for its pod's prefill, computes what is not
in the pod's cache and decodes an answer of 300 tokens in the mean. Its lease is held from routing
to its last token, and the caller asks again then, so what a strategy sees as load is what the pods
really have.

Jain's index is that of requests per pod, as the seed's was: 1 where all pods got as many, 1/16
where one got all. A request is a hit where the pod found all of its 4,096 tokens. The pods begin
empty, so each copy of a prefix costs a miss. All figures are means over seeds.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from calinix.bench import published
from calinix.bench.results import Finding, Grid, at_least
from calinix.sim.measures import jain_index, row_of
from calinix.sim.prompts import Blocks, Length
from calinix.sim.scenarios import LARGE_POD, Group, Scenario
from calinix.sim.simulate import run
from calinix.sim.workload import SimRequest

PODS, CALLERS, REQUESTS = 16, 64, 1000
BLOCK_TOKENS = 128
PROMPT_TOKENS, SHARED_TOKENS = 5_000, 4_096
HOT_SHARE = 0.9
OTHER_PREFIXES = 15
RAMP_S = 1.0
"""In which the callers begin."""
MIN_JAIN, MIN_HITS = 0.90, 0.95
JUDGED = ("cacheAware", "predictive")
STRATEGIES = ("cacheAware", "predictive", "cacheOnly", "leastLoad")


class HotPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """Callers that ask again as soon as they are answered."""

    requests: int = REQUESTS
    callers: int = CALLERS
    answer: Length = Length(mean=300.0, most=2_048)
    block_tokens: int = BLOCK_TOKENS

    def arrivals(self, rng: random.Random, load: float) -> Iterator[SimRequest]:  # noqa: ARG002
        """Every caller's first request within RAMP_S; the others follow."""
        shared, own = Blocks(), Blocks(1 << 40)
        prefixes = [shared.take(SHARED_TOKENS // BLOCK_TOKENS) for _ in range(OTHER_PREFIXES + 1)]
        rest = PROMPT_TOKENS // BLOCK_TOKENS - SHARED_TOKENS // BLOCK_TOKENS
        left = self.requests

        def ask(now: float) -> SimRequest | None:
            nonlocal left
            if not left:
                return None
            left -= 1
            which = 0 if rng.random() < HOT_SHARE else 1 + rng.randrange(OTHER_PREFIXES)
            chain = prefixes[which] + own.take(rest)
            return SimRequest(now, PROMPT_TOKENS, self.answer.draw(rng), chain, None, ask)

        begins_s = sorted(rng.uniform(0.0, RAMP_S) for _ in range(self.callers))
        firsts = [ask(begin_s) for begin_s in begins_s]
        return iter([first for first in firsts if first is not None])


class FairnessRow(msgspec.Struct, frozen=True, rename="camel"):
    """One strategy."""

    strategy: str
    jain: float
    work_jain: float
    """Of the tokens that the pods computed."""
    hit_rate: float
    ttft_mean_s: float
    ttft_p99_s: float
    jain_by_seed: list[float]


def scenario(late_s: float = 0.0, settings: dict[str, Any] | None = None) -> Scenario:
    """The pods and the callers; what the gateway knows of load is `late_s` old."""
    figures = msgspec.structs.replace(LARGE_POD, block_size=BLOCK_TOKENS)
    return Scenario(
        name="hot-prefix-callers",
        description="",
        workload=HotPrefix(),
        groups=(Group(count=PODS, figures=figures),),
        late_s=late_s,
        settings=settings or {},
    )


def measure(seeds: int, advance: Callable[[str], None]) -> list[FairnessRow]:
    """Every strategy."""
    rows = []
    for strategy in STRATEGIES:
        rows.append(_row(strategy, seeds))
        advance(f"hot prefix, {strategy}")
    return rows


def _row(strategy: str, seeds: int) -> FairnessRow:
    jains, work, hits, means, tails = [], [], [], [], []
    for seed in range(1, seeds + 1):
        done = run(scenario(), strategy, seed)
        counts = np.bincount(done.requests.pod, minlength=PODS)
        jains.append(jain_index(counts.astype(float)))
        hits.append(float((done.requests.cached_tokens >= SHARED_TOKENS).mean()))
        row = row_of(done)
        work.append(row.jain)
        means.append(row.ttft_mean_s or 0.0)
        tails.append(row.ttft_p99_s or 0.0)
    return FairnessRow(
        strategy=strategy,
        jain=statistics.fmean(jains),
        work_jain=statistics.fmean(work),
        hit_rate=statistics.fmean(hits),
        ttft_mean_s=statistics.fmean(means),
        ttft_p99_s=statistics.fmean(tails),
        jain_by_seed=jains,
    )


def grid(rows: list[FairnessRow]) -> Grid:
    """The table."""
    return Grid(
        f"A hot prefix: {CALLERS} callers, {PODS} pods, 90 % of the requests",
        ("strategy", "Jain", "of work", "hits", "TTFT mean s", "p99 s", "seed: Jain", "hits"),
        [
            (
                row.strategy,
                f"{row.jain:.3f}",
                f"{row.work_jain:.3f}",
                f"{row.hit_rate:.1%}",
                f"{row.ttft_mean_s:.3f}",
                f"{row.ttft_p99_s:.2f}",
                published.said(published.JAIN.get(row.strategy), "{:.3f}"),
                published.said(published.HIT_RATE.get(row.strategy), "{:.0%}", "~"),
            )
            for row in rows
        ],
        f"{REQUESTS:,} requests with real leases, virtual time; Jain's index of requests per pod",
    )


def findings(rows: list[FairnessRow]) -> list[Finding]:
    """The bars."""
    judged = []
    for row in rows:
        if row.strategy in JUDGED:
            judged += [
                at_least(f"hot prefix, {row.strategy}: Jain", row.jain, MIN_JAIN),
                at_least(f"hot prefix, {row.strategy}: hit rate", row.hit_rate, MIN_HITS),
            ]
    return judged
