"""What the controller costs: CPU of a step, of each solver, and of an estimator's calls.

    step         PoolController.step with the closed form: estimates to weights of all pods
    closed form  the solver alone: weights that stay the same over the horizon
    literal      the same, of the literal form (projected gradients, warm)
    full         the full horizon by OSQP, warm, with the projection to the bounds
    full, cold   its first solution, set-up included

Medians over many random states (loads from 0.2 to 1.6, queues from none to hundreds, pods of any
speed), each different from the one before; of several rounds the lowest. The horizon is 10; the
full one is taken at 5 and 20 as well. CPU time of the process, so that what else runs counts less.

    python benchmarks/bench_controller.py [--json FILE] [--quick] [--pods 2 8 16 64 256]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from calinix.control import (
    ArrivalRate,
    BusyRate,
    MpcSettings,
    MpcState,
    PoolController,
    QueueMPC,
    ServiceRate,
    TpotModel,
)
from harness.machine import describe_machine, write_json

BARS_MS = {64: 0.2, 256: 1.0}
CALL_BAR_US = 1.0
CALLS = 20_000


def states(pods: int, count: int) -> list[MpcState]:
    """Random states of a pool of this size."""
    rng = np.random.default_rng(pods)
    found = []
    for _ in range(count):
        rate = rng.uniform(0.2, 5.0, pods)
        queue = rng.exponential(10.0 ** rng.uniform(-1.0, 2.5), pods)
        found.append(MpcState(queue, rate, rng.uniform(0.2, 1.6) * float(rate.sum())))
    return found


def median_ms(run: Callable[[MpcState], object], over: Sequence[MpcState]) -> float:
    """CPU milliseconds of a call."""
    taken = []
    for state in over:
        begin = time.process_time_ns()
        run(state)
        taken.append(time.process_time_ns() - begin)
    return statistics.median(taken) / 1e6


def solvers(pods: int, count: int) -> dict[str, float]:
    """One round: CPU milliseconds of each, for a pool of this size."""
    drawn = states(pods, count)
    pool, mpc = PoolController(MpcSettings(), pods), QueueMPC()
    literal = QueueMPC(MpcSettings(mode="literal"))
    everybody, clock = list(range(pods)), iter(range(1, 1_000_000))

    def step(state: MpcState) -> None:
        now = next(clock) * 0.5
        pool.step(now, now, everybody, state.queue, state.service_rate, state.arrival_rate)

    few = drawn[: max(count // 10, 5)]
    row = {
        "step": median_ms(step, drawn),
        "closed form": median_ms(mpc.solve, drawn),
        "literal": median_ms(literal.solve, few),
        "full, cold": median_ms(lambda state: QueueMPC().solve(state, full=True), few[:5]),
    }
    for horizon in (5, 10, 20):
        full = QueueMPC(MpcSettings(horizon=horizon))
        full.solve(drawn[-1], full=True)
        row[f"full, H={horizon}"] = median_ms(partial(full.solve, full=True), few)
    return row


def calls_us() -> dict[str, float]:
    """CPU microseconds of the estimators' calls, the loop included."""
    arrivals, service, busy, times = ArrivalRate(), ServiceRate(), BusyRate(), TpotModel(64)
    steps: dict[str, Callable[[int], object]] = {
        "ArrivalRate.add": lambda k: arrivals.add(k * 0.01, 5.0),
        "ArrivalRate.rate": lambda k: arrivals.rate(k * 0.01),
        "ServiceRate.first_token": lambda k: service.first_token(k * 0.01, k * 0.01 - 0.02, 50.0),
        "ServiceRate.rate": lambda _: service.rate(),
        "BusyRate.began": lambda k: busy.began(k * 0.01),
        "BusyRate.ended": lambda k: busy.ended(k * 0.01),
        "TpotModel.add": lambda k: times.add(k * 0.01, k % 64, k % 17, 0.01),
        "TpotModel.tpot_s": lambda k: times.tpot_s(k % 64, 7.0),
    }
    taken = {}
    for name, step in steps.items():
        begin = time.process_time()
        for k in range(CALLS):
            step(k)
        taken[name] = (time.process_time() - begin) / CALLS * 1e6
    return taken


def lowest(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of every figure the lowest of the rounds: what else runs only adds."""
    return {name: min(one[name] for one in rounds) for name in rounds[0]}


def findings(rows: Sequence[dict[str, Any]], calls: dict[str, float]) -> list[dict[str, Any]]:
    """The bars that the figures are held to."""
    found = [
        {
            "what": f"a controller step, {row['pods']} pods, ms CPU",
            "figure": round(row["step"], 3),
            "limit": f"<= {BARS_MS[row['pods']]}",
            "holds": row["step"] <= BARS_MS[row["pods"]],
        }
        for row in rows
        if row["pods"] in BARS_MS
    ]
    slowest = max(calls, key=lambda name: calls[name])
    return [
        *found,
        {
            "what": f"the slowest call of an estimator ({slowest}), us CPU",
            "figure": round(calls[slowest], 2),
            "limit": f"<= {CALL_BAR_US}",
            "holds": calls[slowest] <= CALL_BAR_US,
        },
    ]


def main() -> None:
    """Measures, prints the tables, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--pods", type=int, nargs="+", default=[2, 8, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--states", type=int, default=200, help="in a round")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.states, arguments.rounds = 60, 2
    rows: list[dict[str, Any]] = []
    for pods in arguments.pods:
        best = lowest([solvers(pods, arguments.states) for _ in range(arguments.rounds)])
        if not rows:
            print(f"{'pods':>5}" + "".join(f"{name:>13}" for name in best) + "   ms of CPU")
        rows.append({"pods": pods, **best})
        print(f"{pods:>5}" + "".join(f"{best[name]:>13.3f}" for name in best), flush=True)
    calls = lowest([calls_us() for _ in range(arguments.rounds)])
    for name, taken in calls.items():
        print(f"{name:<26}{taken:>6.2f} us")
    if arguments.json is not None:
        results = {
            "benchmark": "controller",
            "method": __doc__,
            "machine": describe_machine(),
            "numpy": np.__version__,
            "findings": findings(rows, calls),
            "rows": rows,
            "callsUs": calls,
        }
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()
