"""Calinix side by side with nginx and the routers of the field, on the same pods and load.

    python benchmarks/bench_peers.py [--quick] [--json [FILE]]        (make bench-peers)

CPU per request and per streamed chunk, latencies at fixed rates, the highest rate on one core, both
with unified pods and with prefill and decode apart; cold start; memory after many requests; and
whether powerOfTwo picks as vllm-router's power_of_two does. Each slice is a fresh proxy process
alone on one core, contenders take turns, and disturbed slices are taken again. About 25 minutes on
a quiet machine with two cores. nginx comes from Debian, the routers from the Python package index
into venvs of their own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from calinix.bench.results import Finding
from harness import contenders as who
from harness import power_of_two
from harness.cases import CASES
from harness.compare import max_rates
from harness.contenders import Contender, calinix_contender, vllm_router
from harness.footprint import ColdStart, Footprint, Memory, regular
from harness.machine import BENCHMARKS, Cores, write_json
from harness.processes import Children
from harness.runs import (
    add_arguments,
    all_hold,
    finished,
    guarded,
    prepare,
    results_of,
    show,
    take_all,
)
from harness.slices import Bench
from harness.tables import new_console

REQUESTS, QUICK_REQUESTS = 100_000, 5_000
STARTS = 5
ROUNDS, ROUND_S = 3, 12
QUICK_ROUND_S = 5
METHOD = (
    " Cold start: from the start of the process to the first chat answer. Memory: resident, after "
    "that many 4 KB prompts in a closed loop. Power of two: pods that take 4 to 32 ms for an "
    "answer, 1600 requests a second through each contender in turn."
)


def main() -> int:
    """The command line; 1 when a bar does not hold or an answer was wrong."""
    arguments = _arguments()
    console = new_console()
    return guarded(lambda: run(arguments, console), console)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measures, prints, writes."""
    cores, contenders, plan = prepare(arguments, console)
    with Children() as children, tempfile.TemporaryDirectory(prefix="calinix-bench-") as folder:
        bench = Bench(plan, children, cores, Path(folder))
        slices = take_all(bench, contenders, console)
        show(console, slices)
        more: dict[str, object] = {}
        findings: list[Finding] = []
        if not arguments.only_slices:
            footprint = Footprint(children, cores, Path(folder), bench.pods(who.UNIFIED))
            more = _footprints(footprint, regular(contenders), arguments.quick, console)
            shares = _power_of_two(children, cores, Path(folder), arguments)
            findings = power_of_two.judge(shares)
            more["power_of_two"] = shares
            _print_shares(console, shares, findings)
    results = results_of(arguments, cores, contenders, plan, slices)
    results |= {"method": f"{results['method']}{METHOD}", "max_rate": max_rates(slices)}
    results |= more | {"findings": findings, "slices": slices}
    if arguments.json:
        write_json(arguments.json, results)
        console.print(f"written: {arguments.json}", highlight=False)
    return int(not all_hold(slices) or any(one.holds is False for one in findings))


def _footprints(
    footprint: Footprint, contenders: Sequence[Contender], quick: bool, console: Console
) -> dict[str, object]:
    starts: list[ColdStart] = []
    memory: list[Memory] = []
    table = Table(title="Cold start (to the first answer) and memory", title_justify="left")
    for name in ("contender", "start s", "least", "most", "idle MB", "after MB", "requests"):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for one in contenders:
        with console.status(f"cold start, memory: {one.name}"):
            starts.append(footprint.cold_start(one, 1 if quick else STARTS))
            memory.append(footprint.memory(one, QUICK_REQUESTS if quick else REQUESTS))
        seconds, held = starts[-1].seconds, memory[-1]
        figures = (f"{s:.2f}" for s in (seconds.median, seconds.min, seconds.max))
        sizes = (f"{held.idle_mb:.0f}", f"{held.after_mb:.0f}", f"{held.requests:,}")
        table.add_row(one.name, *figures, *sizes)
    console.print(table)
    return {"cold_start": starts, "memory": memory}


def _power_of_two(
    children: Children, cores: Cores, folder: Path, arguments: argparse.Namespace
) -> list[power_of_two.Share]:
    pair = [calinix_contender(arguments.calinix, "powerOfTwo"), vllm_router("power_of_two")]
    return power_of_two.measure(
        pair,
        children,
        cores,
        folder,
        rounds=1 if arguments.quick else ROUNDS,
        seconds=QUICK_ROUND_S if arguments.quick else ROUND_S,
    )


def _print_shares(
    console: Console, shares: Sequence[power_of_two.Share], findings: Sequence[Finding]
) -> None:
    table = Table(title="Power of two: shares of requests, % (error)", title_justify="left")
    table.add_column("a pod's ms")
    names = list(dict.fromkeys(one.contender for one in shares))
    for name in names:
        table.add_column(name, justify="right")
    for pod in sorted({one.pod for one in shares}):
        mine = [one for one in shares if one.pod == pod]
        figures = (f"{100 * one.share:.2f} ({100 * one.share_error:.2f})" for one in mine)
        table.add_row(f"{mine[0].service_ms:g}", *figures)
    console.print(table)
    for one in findings:
        verdict = {None: "too noisy to tell", True: "holds", False: "does not hold"}[one.holds]
        console.print(f"{one.what}: {one.figure} ({one.limit}): {verdict}", highlight=False)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(
        parser,
        contenders=who.ALL,
        cases=[case.name for case in CASES],
        seconds=2.0,
        warm_up_s=0.8,
        results=BENCHMARKS / "results" / "peers.json",
    )
    parser.add_argument("--only-slices", action="store_true", help="no cold start, memory, shares")
    return finished(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
