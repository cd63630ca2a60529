"""The experiment on real sockets: its requests are the simulator's, and so are their times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kit
from calinix.sim.measures import Row
from calinix.sim.simulate import run

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "live_2p2d.py"


@pytest.fixture(scope="module")
def program() -> Any:
    """The program as a module."""
    return kit.program(PROGRAM)


def row(strategy: str, ttft_s: float, e2e_s: float) -> Row:
    """One strategy's figures."""
    return Row(
        strategy=strategy, seed=1, load=1.0, requests=1, ttft_mean_s=ttft_s, ttft_p50_s=ttft_s,
        ttft_p99_s=ttft_s, e2e_mean_s=e2e_s, e2e_p99_s=e2e_s, tpot_mean_s=0.01, goodput_ratio=1.0,
        prefix_hit_ratio=0.0, jain=1.0,
    )  # fmt: skip


def test_on_sockets_as_in_simulation(program: Any) -> None:
    """A second of requests over HTTP: all answered, by the pods' own times, weights in use."""
    scenario = program.scenario_of(1.0, 40)
    outcome, _ = kit.run(program.live(scenario, "weightedPowerOfTwo", 1))
    simulated = run(scenario, "weightedPowerOfTwo", 1).requests
    live = outcome.row
    assert live.requests == len(simulated.arrival_s) == 40
    assert live.goodput_ratio > 0.0
    # A busy machine only adds.
    assert 0.7 * simulated.e2e_s.mean() < live.e2e_mean_s < 2.0 * simulated.e2e_s.mean()
    assert live.ttft_mean_s > 0.8 * simulated.ttft_s.mean()
    shares = {pod.id: pod.requests for pod in outcome.series.pods}
    assert shares["prefill-000"] > shares["prefill-001"]
    assert sum(shares.values()) == 80
    assert outcome.series.forecasts


def test_the_order_is_compared_where_it_is_clear(program: Any) -> None:
    """Reversed pairs are told; those that the simulation or the machine blurs are left out."""
    simulated = [row("a", 0.010, 2.0), row("b", 0.020, 2.1)]
    same = [row("a", 0.020, 3.0), row("b", 0.030, 2.9)]
    assert program.disagreements(simulated, same, 0.0) == ([], 1)
    reversed_ = [row("a", 0.030, 2.0), row("b", 0.020, 2.0)]
    wrong = ["ttft_mean_s: b / a is 0.67, simulated 2.00"]
    assert program.disagreements(simulated, reversed_, 0.001) == (wrong, 1)
    assert program.disagreements(simulated, reversed_, 0.010) == ([], 0)
