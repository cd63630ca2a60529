"""Real vLLM pods on this machine's CPU, and what must hold of the gateway before them.

    python benchmarks/real_engines.py [--build] [--nixl] [--quick] [--json [FILE]] [--minutes 10]

Two unified pods that publish KV events, and a tiny random model. Mixed requests (prefixes shared,
forked, salted, repeated, evicted; some cancelled) go through a gateway with exact tokens, from
several clients at once. For each one the cached tokens that its decision predicted are compared
with those that the engine counted: with KV events, then by routing history alone. In between a pod
is killed and started again, and caches are emptied. Then a prefill and a decode pod take the
unified pods' place, and their answers are compared token for token.

CALINIX_ENGINE_VENV names a venv that has vLLM; else the one in build/engine is used, which --build
makes where it is missing (`make test-engine`). Logs of all pods are in build/engine/run. --nixl
runs the prefill and decode pods over NIXL, and nothing else: slow and erratic on a CPU, so by hand.
"""

from __future__ import annotations

import argparse
import http.client
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calinix.bench.results import Finding
from harness.machine import BENCHMARKS, describe_machine, write_json
from harness.processes import BenchmarkError, Child, Children
from harness.tables import new_console
from realpods.agreement import Agreement, Run, forget_prefixes
from realpods.gateway import gateway, pair, unified
from realpods.install import HOME, VARIABLE, build_python, find_python, nixl_folder
from realpods.lives import Forgotten, reset, restart
from realpods.model import make_model
from realpods.transfer import (
    Transferred,
    answers_of,
    attack_directly,
    check_pair,
    example_pair,
    nixl_pair,
)
from realpods.vllm_pods import Engine, PodSpec, call, new_spec, start_pod, wait_for_pods

RESULTS = BENCHMARKS / "results"
REQUESTS, QUICK_REQUESTS, ALONE = 580, 120, 100
CLIENTS = 4
BLOCKS = 160
MIN_COMPARED, MIN_EVICTED = 500, 50
MIN_HITS, MIN_EQUAL, MIN_NEAR = 0.60, 0.99, 0.90


class Report(msgspec.Struct, frozen=True):
    """All that was found; a part that was not run is empty."""

    vllm: str
    agreements: list[Agreement] = []
    alone: Agreement | None = None
    """With KV events, and one request at a time: nothing comes between."""
    forgotten: dict[str, Forgotten] = {}
    transferred: list[Transferred] = []


class Work:
    """One run of the program: starts pods, looks, ends them."""

    def __init__(self, children: Children, engine: Engine, console: Console, quick: bool):
        self._children = children
        self._engine = engine
        self._console = console
        self._requests = QUICK_REQUESTS if quick else REQUESTS
        self._began = time.monotonic()

    def all(self) -> Report:
        """Unified pods, then a pair over shared storage."""
        specs = [new_spec(name, BLOCKS) for name in ("pod-1", "pod-2")]
        pods = self._start(specs)
        version = str(call(specs[0].port, "GET", "/version").json()["version"])
        forgotten: dict[str, Forgotten] = {}
        with gateway(
            self._children, self._engine, "gateway-events", unified(specs, events=True)
        ) as front:
            self._say(f"{self._requests} requests, with KV events")
            known = Run(front, 1, CLIENTS).compare("with KV events", self._requests, specs)
            self._say(f"{ALONE} requests, one at a time")
            alone = Run(front, 3, 1).compare("with KV events, one at a time", ALONE, specs)
            names = [spec.name for spec in specs]
            for spec in specs:
                others = [name for name in names if name != spec.name]
                self._say(f"the prefix cache of {spec.name} is emptied")
                forgotten[f"reset of {spec.name}"] = reset(front, spec, others)
            first = specs[0].name
            self._say(f"{first} is killed and started again")
            forgotten[f"restart of {first}"], pods[first] = restart(
                self._children,
                self._engine,
                front,
                {spec.name: (spec, pods[spec.name]) for spec in specs},
            )
        for spec in specs:
            forget_prefixes(spec)
        with gateway(
            self._children, self._engine, "gateway-history", unified(specs, events=False)
        ) as front:
            self._say(f"{self._requests} requests, by routing history")
            guessed = Run(front, 2, CLIENTS).compare("by history", self._requests, specs)
        expected = answers_of(specs[0].port)
        for child in pods.values():
            self._children.end(child)
        store = self._engine.folder / "store"
        store.mkdir()
        moved = self._pair("plain", example_pair(BLOCKS, store), expected)
        return Report(version, [known, guessed], alone, forgotten, [moved])

    def nixl(self) -> Report:
        """A pair over NIXL, beside one unified pod's answers."""
        spec = new_spec("pod-1", BLOCKS)
        pods = self._start([spec])
        version = str(call(spec.port, "GET", "/version").json()["version"])
        expected = answers_of(spec.port)
        self._children.end(pods[spec.name])
        moved = self._pair("nixl", nixl_pair(BLOCKS, nixl_folder()), expected)
        return Report(version, transferred=[moved])

    def _pair(
        self, protocol: str, specs: tuple[PodSpec, PodSpec], expected: list[list[int]]
    ) -> Transferred:
        pods = self._start(specs)
        upstreams = pair(protocol, *specs)
        with gateway(self._children, self._engine, f"gateway-{protocol}", upstreams) as front:
            moved = check_pair(front, protocol, specs, expected, self._say)
        if protocol == "nixl" and moved.alive:
            self._say("the attack once more, without the gateway")
            moved = msgspec.structs.replace(moved, unguarded=attack_directly(specs[1]))
        for child in pods.values():
            self._children.end(child)
        return moved

    def _start(self, specs: list[PodSpec] | tuple[PodSpec, ...]) -> dict[str, Child]:
        self._say(f"{' and '.join(spec.name for spec in specs)} start")
        pods = [(spec, start_pod(self._children, self._engine, spec)) for spec in specs]
        wait_for_pods(pods)
        return {spec.name: child for spec, child in pods}

    def _say(self, words: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._began:4.0f} s[/dim] {escape(words)}")


def findings(report: Report, quick: bool) -> Iterator[Finding]:
    """What must hold, and whether it does."""
    least = 0 if quick else MIN_COMPARED
    for run in report.agreements:
        known = bool(run.evicted_blocks)
        figure = f"{run.compared} of {run.requests}, {run.cancelled} cancelled"
        yield Finding(f"{run.name}: compared", figure, f">= {least}", run.compared >= least)
        hits = run.share(run.hits)
        yield Finding(
            f"{run.name}: with a true hit", f"{hits:.1%}", f">= {MIN_HITS:.0%}", hits >= MIN_HITS
        )
        for pod, evicted in run.evicted_blocks.items():
            yield Finding(
                f"{run.name}: blocks evicted by {pod}",
                f"{evicted}",
                f">= {MIN_EVICTED}",
                evicted >= MIN_EVICTED,
            )
        for pod, (compared, equal, near) in run.by_pod.items():
            count, bar = (equal, MIN_EQUAL) if known else (near, MIN_NEAR)
            share = count / compared if compared else 0.0
            yield Finding(
                f"{run.name}: {pod}, predicted = counted{'' if known else ', within a block'}",
                f"{count} of {compared} ({share:.1%})",
                f">= {bar:.0%}",
                share >= bar,
            )
    if report.alone is not None:
        run = report.alone
        figure = f"{run.equal} of {run.compared}"
        yield Finding(f"{run.name}: predicted = counted", figure, "all", run.equal == run.compared)
    for name, lost in report.forgotten.items():
        figure = (
            f"before: {lost.warm_predicted} predicted, {lost.warm_actual} counted; "
            f"after: {lost.predicted} and {lost.actual}"
        )
        yield Finding(name, figure, "0 and 0", lost.holds)
    for moved in report.transferred:
        yield from _of_pair(moved)


def _of_pair(moved: Transferred) -> Iterator[Finding]:
    yield Finding(
        f"{moved.protocol}: answers are the unified pod's, token for token",
        f"{moved.equal} of {moved.prompts}, {moved.apart} made by both pods",
        "all",
        moved.equal == moved.apart == moved.prompts,
    )
    yield Finding(
        f"{moved.protocol}: prompt tokens that the decode pod got (external_kv_transfer)",
        f"{moved.moved_tokens:g} of {moved.prompt_tokens}",
        "> 0",
        moved.moved_tokens > 0,
    )
    words = ", ".join(f"{name}: {end}" for name, end in moved.attacks.items())
    yield Finding(
        f"{moved.protocol}: clients that send fields of the transfer do no harm",
        f"{words}; both pods {'live' if moved.alive else 'do NOT live'}",
        "200 each",
        moved.alive and set(moved.attacks.values()) == {"200"},
    )


def main() -> int:
    """The command line; 1 when something does not hold."""
    arguments = _arguments()
    console = new_console()
    try:
        python = find_python()
        if python is None and arguments.build:
            python = build_python()
        if python is None:
            raise BenchmarkError(f"no venv with vLLM: --build makes one, {VARIABLE} names one")
        if arguments.nixl:
            nixl_folder()
    except BenchmarkError as error:
        console.print("SKIPPED: real engines were NOT tested", style="bold yellow")
        console.print(f"  {error}", markup=False)
        return 0
    began = time.monotonic()
    signal.signal(signal.SIGALRM, _over)
    try:
        with Children() as children:
            signal.setitimer(signal.ITIMER_REAL, 60.0 * arguments.minutes)
            work = Work(children, _engine(python), console, arguments.quick)
            report = work.nixl() if arguments.nixl else work.all()
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except (BenchmarkError, OSError, http.client.HTTPException) as error:
        console.print(f"real engines: {error!s:.4000}", style="bold red", markup=False)
        return 1
    found = list(findings(report, arguments.quick))
    _print(console, found, report)
    if arguments.json is not None:
        seconds = round(time.monotonic() - began, 1)
        head = {"machine": describe_machine(), "quick": arguments.quick, "seconds": seconds}
        method = " ".join((__doc__ or "").split("\n\n")[2].split())
        write_json(
            arguments.json,
            head | {"method": method, "findings": found} | msgspec.structs.asdict(report),
        )
    return int(not all(one.holds for one in found))


def _engine(python: Path) -> Engine:
    """A fresh folder for logs, and the model."""
    folder = HOME / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_model(HOME / "model")
    return Engine(python, HOME / "model", folder)


def _over(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise BenchmarkError("not done in time: --minutes gives more")


def _print(console: Console, found: list[Finding], report: Report) -> None:
    table = Table(title=f"Real engines: vLLM {report.vllm}", title_justify="left")
    for name in ("what", "figure", "must be", ""):
        table.add_column(name)
    for one in found:
        verdict = "[green]holds[/green]" if one.holds else "[red]does not hold[/red]"
        table.add_row(escape(one.what), escape(one.figure), one.limit, verdict)
    console.print(table)
    alone = [] if report.alone is None else [report.alone]
    for run in [*report.agreements, *alone]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in run.kinds.items())
        console.print(f"{run.name}: {kinds}", highlight=False)
        for reason, count in run.reasons.items():
            console.print(f"  {count} not equal: {reason}", highlight=False)
        for odd in run.rest:
            console.print(
                f"    {odd.number}, {odd.kind}, {odd.pod}: {odd.predicted} predicted, "
                f"{odd.actual} counted of {odd.prompt_tokens}"
                f"{', beside another request' if odd.overlapped else ''}",
                highlight=False,
            )
    for moved in report.transferred:
        if moved.unguarded:
            console.print(f"{moved.protocol}, without the gateway: {moved.unguarded}")
        for difference in moved.differences:
            console.print(f"  {moved.protocol}: {difference}", markup=False, highlight=False)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", action="store_true", help="make the venv where there is none")
    parser.add_argument("--nixl", action="store_true", help="the pair over NIXL, nothing else")
    parser.add_argument("--quick", action="store_true", help="fewer requests, not to be quoted")
    parser.add_argument("--minutes", type=float, default=10.0, help="end after this (default 10)")
    parser.add_argument("--json", type=Path, nargs="?", const=Path(), metavar="FILE")
    arguments = parser.parse_args()
    if arguments.json == Path():
        arguments.json = RESULTS / ("engine_nixl.json" if arguments.nixl else "engine.json")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
