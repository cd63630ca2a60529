"""CPU per request of Calinix beside nginx and vllm-router: what to look at while working on it.

    python benchmarks/bench_proxy.py [--quick] [--contenders calinix,nginx] [--json [FILE]]

Each slice is a fresh proxy process alone on one core; the mock pods and the load generator have
the other. Contenders take turns within a repeat, so a drift of the machine meets all of them, and
only ratios within one run are worth quoting. A slice during which anybody else used more than half
a core is taken again, a few times; one that stays noisy is flagged. bench_peers.py takes more
cases, against more peers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from harness import cases, contenders
from harness.contenders import choose
from harness.machine import BENCHMARKS, write_json
from harness.processes import Children
from harness.profile import profile
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


def main() -> int:
    """The command line; 1 when a bar does not hold or an answer was wrong."""
    arguments = _arguments()
    console = new_console()
    return guarded(lambda: run(arguments, console), console)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measures, prints, writes."""
    cores, chosen, plan = prepare(arguments, console)
    with Children() as children, tempfile.TemporaryDirectory(prefix="calinix-bench-") as folder:
        bench = Bench(plan, children, cores, Path(folder))
        if arguments.profile:
            return _profile_all(bench, arguments.calinix, console)
        slices = take_all(bench, chosen, console)
    show(console, slices)
    if arguments.json:
        results = results_of(arguments, cores, chosen, plan, slices)
        write_json(arguments.json, results | {"slices": slices})
        console.print(f"written: {arguments.json}", highlight=False)
    return int(not all_hold(slices))


def _profile_all(bench: Bench, calinix: str, console: Console) -> int:
    for case in bench.plan.cases:
        report, load = profile(bench, case, choose([contenders.CALINIX], calinix)[0])
        console.print(f"{case.name}: {load.rps:,.0f} requests/s, see {report}", highlight=False)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(
        parser,
        contenders=contenders.SHORT_LIST,
        cases=cases.SHORT_LIST,
        seconds=5.0,
        warm_up_s=2.0,
        results=BENCHMARKS / "results" / "proxy.json",
    )
    parser.add_argument("--profile", action="store_true", help="Calinix alone under a profiler")
    return finished(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
