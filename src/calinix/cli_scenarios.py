"""What `calinix bench` does: runs scenarios, shows their tables and what holds, writes figures."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from calinix.bench.results import Finding, Grid
from calinix.bench.setting import Setting
from calinix.bench.suite import SCENARIOS, Result, grids, steps
from calinix.bench.suite import run as run_scenarios
from calinix.sim.commands import write_json

_VERDICTS = {
    True: "[green]holds[/green]",
    False: "[red]does not hold[/red]",
    None: "[yellow]too noisy to tell[/yellow]",
}


def run(only: str, *, quick: bool, json: Path | None, check: bool) -> None:
    """All of it; ends with 1 where a bar does not hold and `check` is set."""
    names = _names(only)
    console = Console()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=steps(names))
        result = run_scenarios(
            names, lambda done: progress.update(bar, advance=1, description=done), quick=quick
        )
    _show(console, result)
    if json is not None:
        write_json(json, result)
        console.print(f"written: {json}", highlight=False)
    if check and any(one.holds is False for one in result.findings):
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    """Those asked for, in the order in which they are run."""
    asked = [part.strip() for part in text.split(",") if part.strip()]
    for one in asked:
        if one not in SCENARIOS:
            known = ", ".join(SCENARIOS)
            raise typer.BadParameter(f"{one!r} is none of {known}", param_hint="--only")
    if not asked:
        raise typer.BadParameter("names no scenario", param_hint="--only")
    return [name for name in SCENARIOS if name in asked]


def _show(console: Console, result: Result) -> None:
    for grid in grids(result):
        console.print(_table(grid))
        console.print(f"{grid.note}\n", style="dim", highlight=False)
    if result.findings:
        console.print(_bars(result.findings))
    console.print(
        "seed: what the first Calinix, in Rust, published of its own machine; -: nothing",
        style="dim",
        highlight=False,
    )
    console.print(_head(result.machine), highlight=False)
    if result.machine.form != "compiled":
        console.print(
            "[yellow]The bars are for the compiled form: an ordinary `pip install` where there is "
            "a C compiler.[/yellow]"
        )
    if result.quick:
        console.print("[yellow]Quick: not for quoting.[/yellow]")


def _head(machine: Setting) -> str:
    lock = "with its global lock" if machine.gil else "without a global lock"
    return (
        f"calinix {machine.calinix}, {machine.form}; Python {machine.python} {lock}, numpy "
        f"{machine.numpy}; {machine.cpu}, {machine.cores} cores, {machine.system}"
    )


def _table(grid: Grid) -> Table:
    table = Table(title=grid.title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for number, heading in enumerate(grid.headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    previous = ""
    for name, *cells in grid.rows:
        table.add_row("" if name == previous else name, *cells)
        previous = name
    return table


def _bars(findings: list[Finding]) -> Table:
    table = Table(title="What must hold", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("", "seen", "bar", ""):
        table.add_column(heading)
    for one in findings:
        table.add_row(one.what, one.figure, one.limit, _VERDICTS[one.holds])
    return table
