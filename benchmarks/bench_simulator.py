"""What a simulated request costs: CPU by strategy and number of pods, and memory of long runs.

    conversation  the hour of chats (12,031 requests) on 8 pods, whole run, seconds of CPU
    growth        microseconds of CPU per request from 16 to 256 pods, the load growing with them
    long          a million requests on 256 pods: CPU, and memory against a quarter of that

Each run has a process of its own. CPU time of the process, so that what else runs counts less;
of several rounds the lowest.

    python benchmarks/bench_simulator.py [--json FILE] [--quick] [--rounds N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

import msgspec

from calinix.sim.arrivals import Steady
from calinix.sim.prompts import Length, Level
from calinix.sim.scenarios import LARGE_POD, SCENARIOS, Group, Scenario
from calinix.sim.simulate import run
from calinix.sim.synthetic import SingleRequests
from harness.machine import describe_machine, write_json

CONVERSATION_BAR_S = 8.0
PODS = (16, 64, 256)
BYTES_BAR = 200.0
"""Of memory for a request that has ended; its line in the record is 54."""
LONG, QUICK_LONG = 1_000_000, 120_000


def long_run(requests: int) -> Scenario:
    """Shared prefixes on 256 pods whose caches are soon full."""
    figures = msgspec.structs.replace(LARGE_POD, offload_tokens=0, kv_capacity_tokens=65_536)
    return Scenario(
        name="long",
        description="Many requests, many pods.",
        workload=SingleRequests(
            rate=Steady(rate_per_s=700.0),
            requests=requests,
            question=Length(mean=700.0, most=8_000),
            answer=Length(mean=200.0, most=4_000),
            tree=(Level(choices=50, tokens=1024), Level(choices=20, tokens=1024)),
            block_tokens=512,
        ),
        groups=(Group(count=256, figures=figures),),
    )


def measured(
    scenario: Scenario, strategy: str, load: float | None, pods: int | None
) -> dict[str, float]:
    """One run in this process: requests, CPU seconds, most memory in MiB."""
    begin = time.process_time()
    found = run(scenario, strategy, 1, load=load, pods=pods)
    taken_s = time.process_time() - begin
    if not set(found.requests.status) == {200}:
        raise SystemExit(f"{scenario.name} with {strategy}: not every request was answered")
    most_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"requests": len(found.requests.status), "cpu_s": taken_s, "memory_mib": most_kib / 1024}


def apart(
    scenario: Scenario, strategy: str, load: float | None = None, pods: int | None = None
) -> dict[str, float]:
    """The same in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (scenario, strategy, load, pods))


def conversation(rounds: int) -> dict[str, float]:
    """Strategy -> lowest CPU seconds of the hour of chats."""
    found = {}
    for strategy in ("powerOfTwo", "cacheAware", "predictive", "smgCacheAware"):
        runs = [apart(SCENARIOS["mooncake-conversation"], strategy) for _ in range(rounds)]
        found[strategy] = min(one["cpu_s"] for one in runs)
        print(f"conversation, 8 pods, {strategy:<14}{found[strategy]:>8.2f} s", flush=True)
    return found


def growth(rounds: int) -> dict[str, dict[int, float]]:
    """Strategy -> pods -> lowest CPU microseconds per request."""
    found: dict[str, dict[int, float]] = {}
    scenario = SCENARIOS["azure-conversation"]
    for strategy in ("powerOfTwo", "predictive"):
        found[strategy] = {}
        for pods in PODS:
            runs = [apart(scenario, strategy, 5.0 * pods / 8, pods) for _ in range(rounds)]
            best = min(one["cpu_s"] / one["requests"] for one in runs) * 1e6
            found[strategy][pods] = best
            print(f"{pods:>3} pods, {strategy:<14}{best:>8.1f} us a request", flush=True)
    return found


def long_runs(requests: int) -> dict[str, Any]:
    """CPU and memory of a long run, and what each further request leaves behind."""
    part, whole = (apart(long_run(count), "predictive") for count in (requests // 4, requests))
    more = (whole["memory_mib"] - part["memory_mib"]) * 2**20
    per_request = more / (whole["requests"] - part["requests"])
    print(
        f"{requests} requests on 256 pods: {whole['cpu_s']:.0f} s, {whole['memory_mib']:.0f} MiB, "
        f"{per_request:.0f} bytes a request"
    )
    return {"part": part, "whole": whole, "bytes_per_request": per_request}


def findings(
    hour: dict[str, float], grown: dict[str, dict[int, float]], lasting: dict[str, Any]
) -> list[dict[str, Any]]:
    """The bars that the figures are held to."""
    ratio = PODS[-1] / PODS[0]
    found = [
        {
            "what": "12,031 conversation requests on 8 pods, predictive, s CPU",
            "figure": round(hour["predictive"], 2),
            "limit": f"<= {CONVERSATION_BAR_S}",
            "holds": hour["predictive"] <= CONVERSATION_BAR_S,
        }
    ]
    for strategy, by_pods in grown.items():
        times = by_pods[PODS[-1]] / by_pods[PODS[0]]
        found.append(
            {
                "what": f"cost per request, {PODS[-1]} pods over {PODS[0]}, {strategy}",
                "figure": round(times, 2),
                "limit": f"< {ratio:.0f}",
                "holds": times < ratio,
            }
        )
    found.append(
        {
            "what": f"memory that each further of {lasting['whole']['requests']} requests takes, B",
            "figure": round(lasting["bytes_per_request"]),
            "limit": f"<= {BYTES_BAR:.0f}",
            "holds": lasting["bytes_per_request"] <= BYTES_BAR,
        }
    )
    return found


def main() -> None:
    """Measures, prints, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, a shorter long run")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    hour, grown = conversation(rounds), growth(rounds)
    lasting = long_runs(QUICK_LONG if arguments.quick else LONG)
    if arguments.json is not None:
        results = {
            "benchmark": "simulator",
            "method": __doc__,
            "machine": describe_machine(),
            "findings": findings(hour, grown, lasting),
            "conversationCpuSeconds": hour,
            "microsecondsPerRequest": grown,
            "long": lasting,
        }
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()
