"""What several workers keep of one worker's knowledge, what they cost, what a killed one leaves.

    python benchmarks/bench_workers.py [--quick] [--json [FILE]] [--only hits,bursts,cpu,ends]

hits     Cached prompt tokens over prompt tokens, as eight mock pods with bounded caches count
         them: 48 prefixes that do not all fit on one pod, sessions of three turns; 1, 2, 4 workers.
bursts   64 equal prompts that nobody has seen, on 64 connections at once: the busiest pod's share,
         and the times to first and last token. The pods' answers share their steps, as engines' do.
         predictive also on pods where any number of answers are as quick as one: there it may well
         let equal prompts wait for one prefill.
cpu      CPU of all processes per request, every worker under the same load: twice the requests and
         connections for two of them. All on one core, one and two workers in turn; the median of
         the ratios within a turn, and slices that others disturb are taken again.
ends     kill -9 of one of two workers under streams, then SIGTERM under streams.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from calinix.bench.results import Finding
from calinix.sim.load_traffic import Shape
from calinix.sim.loadgen import Plan, run_load
from calinix.sim.pod_model import PodFigures
from harness.contenders import new_setup, started
from harness.crews import Tools, answered, begin, fleet, gateway_of, is_whole, settled
from harness.machine import BENCHMARKS, choose_cores, describe_machine, write_json
from harness.processes import BenchmarkError, Children, get
from harness.tables import new_console
from harness.tools import POD_COUNT, Load, build_tools, start_load, start_mock_pods

RESULTS = BENCHMARKS / "results" / "workers.json"
HITS_LOST, MOST_SHARES, CPU_MORE = 0.03, 2.0, 0.15
NOISY_CORES = 0.3
RETRIES = 3
CPU_REPEATS = 5
BURST = 64
COUNTS = (1, 2, 4)
STRATEGIES = ("cacheAware", "predictive")
PODS = PodFigures(
    prefill_tokens_per_s=20_000.0, token_delay_s=0.003, kv_capacity_tokens=24_576, parallel=1
)
SLOW = PodFigures(prefill_tokens_per_s=20_000.0, token_delay_s=0.02, parallel=1)
SHARED = PodFigures(
    prefill_tokens_per_s=20_000.0,
    token_delay_s=0.01,
    sequence_s=0.0003,
    kv_token_s=2e-7,
    chunk_tokens=2048,
)
SHAPE = Shape(
    model="mock", prompt_tokens=1000, shared_prefix=0.8, prefixes=48, turns=3, max_tokens=8
)
OWN_PACE = "answers at their own pace"
CONNECTIONS = 32
"""Of the load generator, for each worker."""
CASES = {"200 B prompts": (200, 3000), "32 KB prompts": (32768, 1500)}
"""(bytes, requests a second for each worker)"""


# ---- hits


async def hits(tools: Tools) -> list[Finding]:
    """Hit ratio of 1, 2 and 4 workers under the same traffic, by each strategy."""
    findings = []
    for strategy in STRATEGIES:
        ratios: dict[int, list[float]] = {workers: [] for workers in COUNTS}
        for seed in range(1, 2 if tools.quick else 3):
            for workers, found in ratios.items():
                found.append(await _hit_ratio(tools, strategy, workers, seed))
        tools.measured.setdefault("hits", {})[strategy] = {str(n): r for n, r in ratios.items()}
        means = {workers: statistics.mean(found) for workers, found in ratios.items()}
        findings += [
            Finding(
                f"hit ratio with {workers} workers, {strategy}",
                f"{means[workers]:.1%}, one worker {means[1]:.1%}",
                f"at least {1 - HITS_LOST:.0%} of one worker's",
                means[workers] >= (1 - HITS_LOST) * means[1],
            )
            for workers in COUNTS[1:]
        ]
    return findings


async def _hit_ratio(tools: Tools, strategy: str, workers: int, seed: int) -> float:
    """Cached prompt tokens over all, as the pods count them."""
    plan = Plan(requests=600 if tools.quick else 1500, concurrency=48)
    async with fleet(tools, workers, PODS, strategy=strategy) as (setup, _, _pods):
        summary = await run_load(f"http://127.0.0.1:{setup.port}", SHAPE, plan, seed=seed)
    if summary.errors or summary.cached_token_ratio is None:
        raise BenchmarkError(f"{workers} workers: {summary.errors}")
    return summary.cached_token_ratio


# ---- bursts


class Burst(msgspec.Struct, frozen=True):
    """What became of one burst."""

    shares: float
    """What the busiest pod got over an equal share."""
    ttft_s: float
    """On average, as the client sees it; likewise:"""
    e2e_s: float


async def bursts(tools: Tools) -> list[Finding]:
    """Shares of the busiest pod in bursts of equal cold prompts, by each strategy."""
    cases = [(strategy, SHARED, strategy) for strategy in STRATEGIES]
    cases.append((f"predictive, {OWN_PACE}", SLOW, "predictive"))
    findings = []
    for what, figures, strategy in cases:
        found: dict[str, list[Burst]] = {}
        tools.measured.setdefault("bursts", {})[what] = found
        for workers in COUNTS:
            found[str(workers)] = await _bursts(tools, figures, strategy, workers)
            findings.append(_judge_bursts(what, workers, found[str(workers)]))
    return findings


def _judge_bursts(what: str, workers: int, found: Sequence[Burst]) -> Finding:
    worst = max(one.shares for one in found)
    mean = statistics.mean(one.shares for one in found)
    first_ms, last_ms = (
        1e3 * statistics.mean(getattr(one, name) for one in found) for name in ("ttft_s", "e2e_s")
    )
    # How one worker spreads equal prompts is its strategy's business.
    is_judged = workers > 1 or what == "cacheAware"
    return Finding(
        f"{BURST} equal cold prompts, workers: {workers}, {what}",
        f"the busiest pod has {worst:.2f} shares at most, {mean:.2f} on average; mean time to "
        f"first token {first_ms:.0f} ms, to last {last_ms:.0f} ms",
        f"{MOST_SHARES:.2f} shares" if is_judged else "none, reported",
        worst <= MOST_SHARES or not is_judged,
    )


async def _bursts(tools: Tools, figures: PodFigures, strategy: str, workers: int) -> list[Burst]:
    bursts = []
    async with fleet(tools, workers, figures, strategy=strategy) as (setup, _, _pods):
        for number in range(3 if tools.quick else 10):
            text = f"Burst {number}: " + "an equal and cold prompt, quite long. " * 60
            answers = await asyncio.gather(*(answered(setup.port, text) for _ in range(BURST)))
            most = max(Counter(one.pod for one in answers).values())
            bursts.append(
                Burst(
                    most / (BURST / POD_COUNT),
                    statistics.mean(one.ttft_s for one in answers),
                    statistics.mean(one.e2e_s for one in answers),
                )
            )
    kind = "steps" if figures.in_steps else "own pace"
    tools.measured.setdefault("bursts", {}).setdefault(f"{strategy}, {kind}", {})[str(workers)] = (
        bursts
    )
    return bursts


# ---- cpu


def cpu(tools: Tools) -> list[Finding]:
    """CPU per request of two workers over that of one."""
    build_tools()
    cores = choose_cores()
    pods = start_mock_pods(tools.children, cores, tools.folder)
    taken: dict[tuple[str, int], list[Load]] = {}

    def measure(name: str, workers: int) -> Load:
        setup = new_setup(pods.ports, tools.folder / f"cpu-{len(list(tools.folder.iterdir()))}")
        with started(tools.children, gateway_of(tools, workers), setup, cores.proxy) as proxy:
            settled(setup, workers)
            size, rate = CASES[name]
            arguments = ["-n", str(size), "-c", str(CONNECTIONS * workers)]
            arguments += ["-r", str(rate * workers)]
            return start_load(
                tools.children, cores, tools.folder, setup.port,
                seconds=1.5 if tools.quick else 2.0, warm_up_s=0.7, arguments=arguments,
                watched=proxy.pids(), mock_pid=pods.child.pid,
            ).result()  # fmt: skip

    for repeat in range(1 if tools.quick else CPU_REPEATS):
        for name in CASES:
            for workers in (1, 2) if repeat % 2 == 0 else (2, 1):
                load = measure(name, workers)
                for _ in range(0 if tools.quick else RETRIES):
                    if load.other <= NOISY_CORES:
                        break
                    load = min(load, measure(name, workers), key=lambda one: one.other)
                taken.setdefault((name, workers), []).append(load)
    return [_judge_cpu(tools, name, taken[name, 1], taken[name, 2]) for name in CASES]


def _judge_cpu(tools: Tools, name: str, one: list[Load], two: list[Load]) -> Finding:
    costs = [statistics.median(load.cpu_us_req for load in loads) for loads in (one, two)]
    noisy = sum(load.other > NOISY_CORES for load in (*one, *two))
    faults = sum(load.faults for load in (*one, *two))
    tools.measured.setdefault("cpu", {})[name] = {
        "one": [load.cpu_us_req for load in one],
        "two": [load.cpu_us_req for load in two],
        "noisySlices": noisy,
        "faults": faults,
    }
    ratio = statistics.median(
        pair[1].cpu_us_req / pair[0].cpu_us_req for pair in zip(one, two, strict=True)
    )
    good = ratio <= 1 + CPU_MORE and not faults
    return Finding(
        f"CPU per request with 2 workers, {name}",
        f"{ratio:.2f} of one worker's ({costs[1]:.1f} and {costs[0]:.1f} us); {noisy} of "
        f"{len(one) + len(two)} slices noisy, {faults} faults",
        f"{1 + CPU_MORE:.2f}",
        None if 2 * noisy > len(one) + len(two) and not good else good,
    )


# ---- ends


async def ends(tools: Tools) -> list[Finding]:
    """A worker is killed under load, then all are drained under load."""
    async with fleet(tools, 2, SLOW) as (setup, child, _pods):
        begun = [await begin(setup.port, f"stream {n}", 80) for n in range(32)]
        loop = asyncio.get_running_loop()

        async def state() -> Any:
            answer = await loop.run_in_executor(None, get, setup.admin_port, "/admin/state")
            return msgspec.json.decode(answer[1])

        before = (await state())["workers"]
        os.kill(before[0]["pid"], signal.SIGKILL)
        coming_back = loop.create_task(_until(state, _restarted))
        whole = sum(await asyncio.gather(*(is_whole(*stream[:2]) for stream in begun)))
        lost = len(begun) - whole
        came_back_s = await coming_back
        await _until(state, lambda one: bool(one["openLeases"] == 0))
        pods = msgspec.json.decode(
            (await loop.run_in_executor(None, get, setup.admin_port, "/admin/pods"))[1]
        )["pods"]
        load_left = sum(pod["inflight"] for pod in pods)
        begun = [await begin(setup.port, f"stream {n}", 40) for n in range(32)]
        child.process.send_signal(signal.SIGTERM)
        drained = sum(await asyncio.gather(*(is_whole(*stream[:2]) for stream in begun)))
        status = await loop.run_in_executor(None, child.process.wait)
    on_it = before[0]["inflight"]
    tools.measured["ends"] = {
        "onTheKilled": on_it, "lost": lost, "backAfterS": came_back_s, "loadLeft": load_left
    }  # fmt: skip
    return [
        Finding(
            "kill -9 of a worker",
            f"{lost} of 32 streams lost, {on_it} were on it; another after {came_back_s:.1f} s, "
            f"load left {load_left}",
            "only what was on it",
            lost == on_it and load_left == 0,
        ),
        Finding(
            "SIGTERM under load",
            f"{drained} of 32 streams whole, exit {status}",
            "32, exit 0",
            drained == 32 and status == 0,
        ),
    ]


def _restarted(state: Any) -> bool:
    return all(one["ready"] for one in state["workers"]) and state["workers"][0]["restarts"] == 1


async def _until(
    look: Callable[[], Coroutine[Any, Any, Any]], holds: Callable[[Any], bool]
) -> float:
    """Seconds until it holds."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while not holds(await look()):
        if loop.time() - began_s > 30.0:
            raise BenchmarkError("it did not come about within 30 s")
        await asyncio.sleep(0.02)
    return loop.time() - began_s


# ---- the command


PARTS: dict[str, Callable[[Tools], list[Finding]]] = {
    "hits": lambda tools: uvloop.run(hits(tools)),
    "bursts": lambda tools: uvloop.run(bursts(tools)),
    "cpu": cpu,
    "ends": lambda tools: uvloop.run(ends(tools)),
}


def main() -> int:
    """The command line; 1 when something does not hold."""
    arguments = _arguments()
    console = new_console()
    found: dict[str, list[Finding]] = {}
    measured: dict[str, Any] = {}
    try:
        with Children() as children, tempfile.TemporaryDirectory(prefix="calinix-bench-") as name:
            tools = Tools(children, Path(name), arguments.calinix, arguments.quick, measured)
            for part in arguments.only:
                found[part] = PARTS[part](tools)
    except BenchmarkError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130
    findings = [one for part in found.values() for one in part]
    _print(console, findings)
    if arguments.json:
        results = {
            "method": __doc__,
            "machine": describe_machine(),
            "quick": arguments.quick,
            **_with_kept(arguments.json, found, measured),
        }
        write_json(arguments.json, results)
        console.print(f"written: {arguments.json}", highlight=False)
    return int(any(one.holds is False for one in findings))


def _with_kept(
    path: Path, found: dict[str, list[Finding]], measured: dict[str, Any]
) -> dict[str, Any]:
    """What was found, with the parts that an earlier run left in the file."""
    parts: dict[str, Any] = {}
    if path.exists() and set(found) != set(PARTS):
        kept = msgspec.json.decode(path.read_bytes())
        parts, measured = kept["parts"], kept["measured"] | measured
    parts |= found
    ordered = {part: parts[part] for part in PARTS if part in parts}
    findings = [one for each in ordered.values() for one in each]
    return {"findings": findings, "parts": ordered, "measured": measured}


def _print(console: Console, findings: list[Finding]) -> None:
    table = Table(title="Workers", title_justify="left")
    for name in ("must hold", "seen", "limit", ""):
        table.add_column(name)
    for one in findings:
        verdict = "[yellow]noisy" if one.holds is None else "[red]does not hold"
        table.add_row(one.what, one.figure, one.limit, "[green]holds" if one.holds else verdict)
    console.print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    calinix = Path(sys.executable).with_name("calinix")
    parser.add_argument("--quick", action="store_true", help="short runs, not to be quoted")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, metavar="FILE")
    parser.add_argument("--calinix", default=str(calinix), help="the gateway's command line")
    parser.add_argument(
        "--only", default=list(PARTS), type=lambda text: text.split(","), metavar="hits,cpu"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
