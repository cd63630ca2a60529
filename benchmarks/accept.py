"""Runs everything that must hold and can run unattended; prints PASS, FAIL or NOT RUN (why).

    python benchmarks/accept.py [--only 4,5] [--quick] [--results FOLDER]

A check is one function that is given a Context and returns rows, and one line of CHECKS. Logs and
raw JSON go to accept-results/.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from checks import doorway, engines
from checks.figures import command_findings, findings, peers
from checks.suites import suite
from harness.acceptance import Check, Context, Row, Verdict
from harness.machine import ROOT, describe_machine, write_json
from harness.processes import BenchmarkError, Children
from harness.tables import new_console

CHECKS = (
    Check("1", "the doorway, in a fresh clone", doorway.fresh_clone),
    Check("2", "the openai client, both modes", suite("openai", "tests/e2e", "openai")),
    Check("3", "real vLLM, its caches known", engines.correctness),
    Check("3", "real vLLM pods", engines.shared_prefixes),
    Check("3", "a real prefill and decode pair", engines.prefill_and_decode),
    Check("4", "side by side with its peers", peers),
    Check("4", "memory of the index", findings("bench_index")),
    Check("4", "the seed's scenarios", command_findings("bench")),
    Check("4", "speed of KV events", findings("bench_events")),
    Check("4", "cost of the controller", findings("bench_controller")),
    Check("4", "cost of a simulated request", findings("bench_simulator")),
    Check("4", "what exact tokens take of the loop", findings("bench_tokenizer")),
    Check("5", "the strategies, in simulation", findings("bench_policies")),
    Check("5", "unique prompts at full speed", findings("bench_memory")),
    Check("5", "events and unique prompts together", findings("bench_storm")),
    Check("5", "several workers", findings("bench_workers")),
    Check("6", "properties", suite("properties", "tests/properties")),
    Check("7", "faults", suite("faults", "tests/e2e", "fault and not default")),
)
COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.NOT_RUN: "yellow"}


class Result(msgspec.Struct, frozen=True):
    """What one check came to."""

    number: str
    check: str
    seconds: float
    rows: list[Row]


def main() -> int:
    """The command line; 1 when anything failed."""
    arguments = _arguments()
    console = new_console()
    wanted = [check for check in CHECKS if not arguments.only or check.number in arguments.only]
    arguments.results.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    try:
        with (
            Children() as children,
            tempfile.TemporaryDirectory(prefix="calinix-accept-") as scratch,
        ):
            context = Context(children, arguments.results, Path(scratch), arguments.quick)
            for check in wanted:
                result = _look(check, context, console)
                results.append(result)
    except KeyboardInterrupt:
        console.print("interrupted", style="red")
        return 130
    finally:
        _print(console, results)
        _write(arguments, results)
    rows = [row for result in results for row in result.rows]
    return int(any(row.verdict is Verdict.FAIL for row in rows))


def _look(check: Check, context: Context, console: Console) -> Result:
    began = time.monotonic()
    with console.status(f"{check.number}: {check.what}"):
        try:
            rows = check.look(context)
        except (BenchmarkError, OSError, msgspec.MsgspecError) as error:
            # One broken check must not hide the others.
            rows = [Row(check.what, Verdict.FAIL, f"the check itself: {error}")]
    for row in rows:
        colour = COLOURS[row.verdict]
        console.print(f"[{colour}]{row.verdict.value}[/{colour}] {check.number} {escape(row.what)}")
    return Result(check.number, check.what, round(time.monotonic() - began, 1), rows)


def _print(console: Console, results: Sequence[Result]) -> None:
    table = Table(title="What must hold", title_justify="left")
    for name in ("", "what", "verdict", "figures"):
        table.add_column(name)
    for result in results:
        for row in result.rows:
            colour = COLOURS[row.verdict]
            verdict = f"[{colour}]{row.verdict.value}[/{colour}]"
            last = row is result.rows[-1]
            what, figures = escape(row.what), escape(row.figures)
            table.add_row(result.number, what, verdict, figures, end_section=last)
    console.print(table)


def _write(arguments: argparse.Namespace, results: Sequence[Result]) -> None:
    summary = {"machine": describe_machine(), "quick": arguments.quick, "results": results}
    write_json(arguments.results / "summary.json", summary)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = list(dict.fromkeys(check.number for check in CHECKS))
    parser.add_argument("--only", metavar="4,5", help=f"of {', '.join(numbers)}")
    parser.add_argument("--quick", action="store_true", help="short runs, not to be quoted")
    parser.add_argument("--results", type=Path, default=ROOT / "accept-results", metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.only is not None:
        arguments.only = {number.strip() for number in arguments.only.split(",")}
        if unknown := arguments.only - set(numbers):
            parser.error(f"no such number: {', '.join(sorted(unknown))}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
