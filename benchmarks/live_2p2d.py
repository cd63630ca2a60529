"""Two prefill and two decode pods of unequal speed on real sockets, beside the same in simulation.

The pods are mock pods, the gateway is the real one, requests come as a Poisson process over HTTP.
roundRobin and powerOfTwo run in turn, each without the controller and with it (weightedRoundRobin,
weightedPowerOfTwo). Half-way the fast decode pod takes five times as long per token, and then
recovers. `calinix.sim` plays the very same requests on the same pods in virtual time.

What must agree is the order of the strategies: where two differ clearly in the simulation
(MARGINS), the same one is better on sockets. Ends with 1 where that does not hold.

    python benchmarks/live_2p2d.py [--out FOLDER] [--seconds 25] [--seed 1]    (make 2p2d)

Everything but the network runs in this one process, which wakes up HOPS times before a first token
is out. On a busy machine it wakes up late each time: that is measured (`lag`), and first tokens are
compared only where what the strategies differ by is more than that. Ends are seconds away, and are
compared always.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from calinix.config import Log
from calinix.sim.faults import SlowPod
from calinix.sim.measures import Outcome, Row, outcome_of
from calinix.sim.prompts import Length
from calinix.sim.report import COLUMNS, Report, as_json, results, shown, write
from calinix.sim.scenarios import SCENARIOS, Scenario
from calinix.sim.simulate import run
from calinix.sim.synthetic import SingleRequests
from calinix.telemetry import configure_logging
from harness.field import field_of

STRATEGIES = ("roundRobin", "weightedRoundRobin", "powerOfTwo", "weightedPowerOfTwo")
FAST_DECODE = 2
"""Index of the pod that slows down: prefill 0 and 1, decode 2 and 3."""
SLOW_FACTOR = 5.0
MARGINS = {"ttft_mean_s": 1.25, "e2e_mean_s": 1.1, "e2e_p99_s": 1.25}
"""Pairs whose simulated figures are further apart than this must not be reversed."""
HOPS = 8.0
"""Client, gateway, prefill pod, gateway, decode pod, prefill pod (redeems), gateway, client."""
MOST_ANSWER_TOKENS = 256
"""So that a run does not wait for one long answer on the slow pod."""


def scenario_of(seconds: float, most_answer_tokens: int = MOST_ANSWER_TOKENS) -> Scenario:
    """The second seed's scenario, shorter, with the step in one decode delay."""
    base = SCENARIOS["seed-2p2d"]
    workload = base.workload
    assert isinstance(workload, SingleRequests)
    replace = msgspec.structs.replace
    answer = Length(mean=workload.answer.mean, most=most_answer_tokens)
    return replace(
        base,
        name="2p2d",
        description="Two prefill and two decode pods, one of each five to six times as slow; "
        f"half-way the fast decode pod takes {SLOW_FACTOR:g} times as long per token, for a "
        "fifth of the time.",
        workload=replace(workload, requests=round(40 * seconds), answer=answer),
        faults=(
            SlowPod(
                pods=(FAST_DECODE,), factor=SLOW_FACTOR, at_s=0.45 * seconds, for_s=0.2 * seconds
            ),
        ),
    )


async def live(scenario: Scenario, strategy: str, seed: int) -> tuple[Outcome, float]:
    """One strategy on sockets; and the loop's lag."""
    workload = scenario.workload
    asked = list(workload.arrivals(random.Random(f"{seed}/arrivals"), scenario.load))
    async with field_of(scenario, strategy, seed) as (field, config):
        await field.play(asked)
        return outcome_of(field.run(strategy, seed, config)), field.lag_s


def disagreements(
    simulated: Sequence[Row], measured: Sequence[Row], lag_s: float
) -> tuple[list[str], int]:
    """(pairs that came out the other way round on sockets, how many were compared)."""
    wrong, compared = [], 0
    both = list(zip(simulated, measured, strict=True))
    for field, margin in MARGINS.items():
        for (sim_a, live_a), (sim_b, live_b) in itertools.permutations(both, 2):
            better, worse = getattr(sim_a, field), getattr(sim_b, field)
            if worse < margin * better or worse - better < HOPS * lag_s:
                continue
            compared += 1
            seen = getattr(live_b, field) / getattr(live_a, field)
            if seen < 1.0:
                wrong.append(
                    f"{field}: {sim_b.strategy} / {sim_a.strategy} is {seen:.2f}, "
                    f"simulated {worse / better:.2f}"
                )
    return wrong, compared


def say(words: str = "") -> None:
    """To the terminal, at once."""
    print(words, flush=True)


def table(simulated: Sequence[Row], measured: Sequence[Row]) -> None:
    """Both, side by side."""
    shows = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s")
    say(f"{'':20}" + "".join(f"{COLUMNS[name][0]:>22}" for name in shows))
    say(f"{'':20}" + f"{'sockets':>11}{'simulated':>11}" * len(shows))
    for sim, real in zip(simulated, measured, strict=True):
        cells = (f"{shown(name, getattr(row, name)):>11}" for name in shows for row in (real, sim))
        say(f"{sim.strategy:20}" + "".join(cells))


def main() -> int:
    """The experiment. The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/2p2d"))
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals, per strategy")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    configure_logging(Log(level="error"))
    scenario = scenario_of(options.seconds)
    simulated = [outcome_of(run(scenario, name, options.seed)) for name in STRATEGIES]
    measured, lag_s = [], 0.0
    for name in STRATEGIES:
        say(f"{name}: {simulated[0].row.requests} requests over HTTP ...")
        outcome, late_s = uvloop.run(live(scenario, name, options.seed))
        say(f"    {outcome.series.t_s[-1]:.0f} s, lag {late_s * 1e3:.1f} ms")
        measured.append(outcome)
        lag_s = max(lag_s, late_s)
    sim_rows, live_rows = [one.row for one in simulated], [one.row for one in measured]
    say()
    table(sim_rows, live_rows)
    wrong, compared = disagreements(sim_rows, live_rows, lag_s)
    say()
    say(f"{compared} pairs compared; {'all agree' if not wrong else 'these do NOT agree:'}")
    for line in wrong:
        say(f"    {line}")
    keep(scenario, simulated, measured, wrong, options)
    return 1 if wrong else 0


def keep(
    scenario: Scenario,
    simulated: list[Outcome],
    measured: list[Outcome],
    wrong: list[str],
    options: argparse.Namespace,
) -> None:
    """The pictures of both, and all figures in one file."""
    config = {
        "seconds": options.seconds,
        "seed": options.seed,
        "faults": msgspec.to_builtins(scenario.faults),
        "pods": [msgspec.to_builtins(pod) for pod in scenario.pods()],
    }
    for name, outcomes in (("simulated", simulated), ("sockets", measured)):
        report = Report(
            scenario=f"2p2d, {name}",
            description=scenario.description,
            config=config,
            outcomes=outcomes,
        )
        say(f"pictures: {write(report, options.out / name)}")
    whole = results(Report(scenario="2p2d", description="", config=config, outcomes=measured))
    more = {"simulated": [one.row for one in simulated], "disagreements": wrong}
    (options.out / "results.json").write_bytes(as_json({**whole, **more}))


if __name__ == "__main__":
    sys.exit(main())
