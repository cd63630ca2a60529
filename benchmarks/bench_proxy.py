"""CPU per request of Calinix beside nginx and vllm-router, all in one run on this machine.

    python benchmarks/bench_proxy.py [--quick] [--contenders calinix,nginx] [--json [FILE]]

Each slice is a fresh proxy process alone on one core; the mock pods and the load generator have
the other. Contenders take turns within a repeat, so a drift of the machine meets all of them, and
only ratios within one run are worth quoting. A slice during which anybody else used more than half
a core is taken again, a few times; one that stays noisy is flagged.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness import contenders as who
from harness.compare import BARS, CASES, Slice, ratios, summarise
from harness.contenders import Contender, choose
from harness.machine import BENCHMARKS, choose_cores, describe_machine, write_json
from harness.processes import BenchmarkError, Children
from harness.profile import profile
from harness.slices import Bench, Plan
from harness.tables import new_console, print_ratios, print_summaries
from harness.tools import build_tools

RESULTS = BENCHMARKS / "results" / "proxy.json"
METHOD = (
    "A fresh proxy process for each slice, pinned to one core; 8 mock pods and the load generator "
    "on the other. Contenders take turns within a repeat. CPU is the time of every process of the "
    "proxy over the requests (chunks) answered meanwhile. Every answer is checked: status 200 and "
    "the bytes that the mock sent, streams to their last event. `other` is what anybody else used "
    "of the machine, in cores. A ratio is taken within a repeat: median, least and most of them."
)


def main() -> int:
    """The command line; 1 when a bar does not hold or an answer was wrong."""
    arguments = _arguments()
    console = new_console()
    try:
        return run(arguments, console)
    except BenchmarkError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measures, prints, writes."""
    cores = choose_cores()
    if cores.warning:
        console.print(f"[bold red]Not quotable: {cores.warning}.[/bold red]")
    build_tools()
    contenders = choose(arguments.contenders, arguments.calinix)
    for contender in contenders:
        console.print(f"{contender.name} {contender.version}: {contender.how}", highlight=False)
    plan = Plan(
        cases=tuple(case for case in CASES if case.name in arguments.cases),
        repeats=arguments.repeats,
        seconds=arguments.seconds,
        warm_up_s=arguments.warm_up,
        retries=arguments.retries,
    )
    with Children() as children, tempfile.TemporaryDirectory(prefix="calinix-bench-") as folder:
        bench = Bench(plan, children, cores, Path(folder))
        if arguments.profile:
            return _profile_all(bench, arguments.calinix, console)
        slices = _take_all(bench, contenders, console)
    print_summaries(console, summarise(slices))
    found = ratios(slices)
    print_ratios(console, found)
    if arguments.json:
        results = {
            "method": METHOD,
            "machine": describe_machine() | {"coresUsed": cores},
            "quick": arguments.quick,
            "plan": plan,
            "contenders": [
                {"name": one.name, "version": one.version, "how": one.how} for one in contenders
            ],
            "bars": BARS,
            "ratios": found,
            "summaries": summarise(slices),
            "slices": slices,
        }
        write_json(arguments.json, results)
        console.print(f"written: {arguments.json}", highlight=False)
    wrong = any(not one.load.is_whole for one in slices)
    return int(wrong or any(one.holds is False for one in found))


def _take_all(bench: Bench, contenders: Sequence[Contender], console: Console) -> list[Slice]:
    schedule = list(bench.schedule(contenders))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    slices = []
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(schedule))
        for repeat, case, contender in schedule:
            name = contender.name if contender else who.DIRECT
            progress.update(task, description=f"{case.name}: {name}")
            one = bench.take(repeat, case, contender)
            slices.append(one)
            if not one.load.is_whole:
                console.print(
                    f"[red]{name}, {case.name}: {one.load.errs} errors, {one.load.bad} wrong "
                    f"bodies, {one.load.requests} requests[/red]"
                )
            progress.advance(task)
    return slices


def _profile_all(bench: Bench, calinix: str, console: Console) -> int:
    for case in bench.plan.cases:
        report, load = profile(bench, case, choose([who.CALINIX], calinix)[0])
        console.print(f"{case.name}: {load.rps:,.0f} requests/s, see {report}", highlight=False)
    return 0


def _names(known: Sequence[str]) -> type[list[str]]:
    """An argparse type: names with commas between them, each one of `known`, or the start of it."""

    class Names(list[str]):
        def __init__(self, text: str):
            chosen = []
            for part in text.split(","):
                found = [name for name in known if name.startswith(part.strip())]
                if not found or not part.strip():
                    raise argparse.ArgumentTypeError(f"'{part}': one of {', '.join(known)}")
                chosen += found
            super().__init__(dict.fromkeys(chosen))

    return Names


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    calinix = Path(sys.executable).with_name("calinix")
    every_case = [case.name for case in CASES]
    parser.add_argument("--contenders", type=_names(who.ALL), default=list(who.ALL), metavar="A,B")
    parser.add_argument("--cases", type=_names(every_case), default=every_case, metavar="A,B")
    parser.add_argument("--repeats", type=int, help="slices of each, 5 by default")
    parser.add_argument("--seconds", type=float, help="length of a slice, 5 by default")
    parser.add_argument("--warm-up", type=float, help="seconds before it that do not count")
    parser.add_argument("--retries", type=int, default=3, help="how often a noisy slice is redone")
    parser.add_argument("--quick", action="store_true", help="one short slice of each")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, metavar="FILE")
    parser.add_argument("--calinix", default=str(calinix), help="the gateway's command line")
    parser.add_argument("--profile", action="store_true", help="Calinix alone under a profiler")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.repeats = arguments.repeats or (1 if quick else 5)
    arguments.seconds = arguments.seconds or (1.5 if quick else 5.0)
    if arguments.warm_up is None:
        arguments.warm_up = 0.7 if quick else 2.0
    return arguments


if __name__ == "__main__":
    sys.exit(main())
