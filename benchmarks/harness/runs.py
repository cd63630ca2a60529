"""A run of slices from the command line to its results: what the benchmarks of proxies share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness import contenders as who
from harness.cases import BARS, CASES
from harness.compare import Slice, ratios, summarise
from harness.contenders import Contender, choose
from harness.machine import Cores, choose_cores, describe_machine
from harness.processes import BenchmarkError
from harness.slices import Bench, Plan
from harness.tables import print_ratios, print_summaries
from harness.tools import build_tools

METHOD = (
    "A fresh proxy process for each slice, pinned to one core; 8 mock pods and the load generator "
    "on the other. Contenders take turns within a repeat. CPU is the time of every process of the "
    "proxy over the requests (chunks) answered meanwhile. Every answer is checked: status 200 and "
    "the bytes that the mock sent, streams to their last event. `other` is what anybody else used "
    "of the machine, in cores. A ratio is taken within a repeat: median, least and most of them."
)


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    contenders: Sequence[str],
    cases: Sequence[str],
    seconds: float,
    warm_up_s: float,
    results: Path,
) -> None:
    """The options of a run, with these defaults; read them through `finished`."""
    calinix = Path(sys.executable).with_name("calinix")
    every_case = [case.name for case in CASES]
    add = parser.add_argument
    add("--contenders", type=_names(who.ALL), default=list(contenders), metavar="A,B")
    add("--cases", type=_names(every_case), default=list(cases), metavar="A,B")
    add("--repeats", type=int, help="slices of each; without it as many as the case is worth")
    add("--seconds", type=float, help=f"length of a slice, {seconds:g} by default")
    add("--warm-up", type=float, help="seconds before it that do not count")
    add("--retries", type=int, help="how often a noisy slice is redone, 3 by default")
    add("--quick", action="store_true", help="one short slice of each")
    add("--json", type=Path, nargs="?", const=results, metavar="FILE")
    add("--calinix", default=str(calinix), help="the gateway's command line")
    parser.set_defaults(usual_seconds=seconds, usual_warm_up=warm_up_s)


def finished(arguments: argparse.Namespace) -> argparse.Namespace:
    """Fills in what was not given."""
    quick = arguments.quick
    arguments.repeats = arguments.repeats or (1 if quick else None)
    arguments.seconds = arguments.seconds or (1.0 if quick else arguments.usual_seconds)
    if arguments.retries is None:
        arguments.retries = 0 if quick else 3
    if arguments.warm_up is None:
        arguments.warm_up = 0.5 if quick else arguments.usual_warm_up
    return arguments


def guarded(run: Callable[[], int], console: Console) -> int:
    """Runs a benchmark; 2 when it cannot go on, with the reason in red."""
    try:
        return run()
    except BenchmarkError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130


def prepare(arguments: argparse.Namespace, console: Console) -> tuple[Cores, list[Contender], Plan]:
    """Cores, contenders with their programs installed, and what is to be measured."""
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
    return cores, contenders, plan


def take_all(bench: Bench, contenders: Sequence[Contender], console: Console) -> list[Slice]:
    """Every slice of the plan, with a bar that shows how far it is."""
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


def show(console: Console, slices: Sequence[Slice]) -> None:
    """The tables of the slices."""
    print_summaries(console, summarise(slices))
    print_ratios(console, ratios(slices))


def results_of(
    arguments: argparse.Namespace,
    cores: Cores,
    contenders: Sequence[Contender],
    plan: Plan,
    slices: Sequence[Slice],
) -> dict[str, object]:
    """What is written for people and programs, without the single slices."""
    return {
        "method": METHOD,
        "machine": describe_machine() | {"coresUsed": cores},
        "quick": arguments.quick,
        "plan": plan,
        "contenders": [
            {"name": one.name, "version": one.version, "how": one.how} for one in contenders
        ],
        "bars": BARS,
        "ratios": ratios(slices),
        "summaries": summarise(slices),
    }


def all_hold(slices: Sequence[Slice]) -> bool:
    """Whether every answer was right and every bar holds."""
    wrong = any(not one.load.is_whole for one in slices)
    return not wrong and all(one.holds is not False for one in ratios(slices))


def _names(known: Sequence[str]) -> type[list[str]]:
    """An argparse type: names with commas between them, each one of `known`, or the start of it."""

    class Names(list[str]):
        def __init__(self, text: str):
            chosen = []
            for part in text.split(","):
                found = [name for name in known if name == part.strip()] or [
                    name for name in known if name.startswith(part.strip())
                ]
                if not found or not part.strip():
                    raise argparse.ArgumentTypeError(f"'{part}': one of {', '.join(known)}")
                chosen += found
            super().__init__(dict.fromkeys(chosen))

    return Names
