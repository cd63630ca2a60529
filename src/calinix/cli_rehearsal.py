"""What `calinix simulate` does: runs strategies on a scenario, shows and writes what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from calinix.config import StrategyName
from calinix.sim import report as reports
from calinix.sim.baselines import BASELINES
from calinix.sim.batch import RunError, cores, run_all
from calinix.sim.measures import Outcome
from calinix.sim.report import COLUMNS, Report
from calinix.sim.scenarios import SCENARIOS, Scenario
from calinix.sim.svg import compact
from calinix.sim.tasks import Task, check, named


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, as it was written."""

    scenario: str
    strategies: str
    seeds: int
    load: float | None
    pods: int | None
    changes: str
    processes: int | None
    json: Path | None
    out: Path | None


def rehearse(wanted: Wanted) -> None:
    """All runs, their table and their files."""
    console = Console()
    chosen = _scenario(wanted.scenario)
    tasks = [
        Task(chosen.name, name, seed, wanted.load, wanted.pods, wanted.changes)
        for name in _strategies(wanted.strategies)
        for seed in range(1, wanted.seeds + 1)
    ]
    for task in tasks[:: wanted.seeds]:
        try:
            check(task)
        except ValueError as error:
            raise typer.BadParameter(f"{task.strategy}: {error}") from None
    try:
        outcomes = _run(console, tasks, wanted.processes)
    except RunError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    report = Report(
        scenario=chosen.name,
        description=chosen.description,
        config=_config(named(tasks[0])[1], outcomes, wanted.seeds),
        outcomes=outcomes,
    )
    console.print(_table(outcomes))
    try:
        if wanted.json is not None:
            wanted.json.write_bytes(reports.as_json(reports.results(report)))
        if wanted.out is not None:
            console.print(f"pictures: {reports.write(report, wanted.out)}")
    except OSError as error:
        typer.echo(f"cannot write: {error}", err=True)
        raise typer.Exit(1) from None


def _scenario(name: str) -> Scenario:
    if name in SCENARIOS:
        return SCENARIOS[name]
    said = f"{name!r} is none of" if name else "one of"
    raise typer.BadParameter(f"{said} {', '.join(SCENARIOS)}", param_hint="SCENARIO")


def _strategies(text: str) -> list[str]:
    """The strategies asked for, each once."""
    known = [*get_args(StrategyName), *BASELINES]
    found: dict[str, None] = {}
    for one in filter(None, (part.strip() for part in text.split(","))):
        name = one.partition(":")[0].strip()
        if one == "all":
            found |= dict.fromkeys(known)
        elif name in known:
            found[one] = None
        else:
            raise typer.BadParameter(
                f"{name!r} is none of {', '.join(known)}", param_hint="--strategy"
            )
    if not found:
        raise typer.BadParameter("names no strategy", param_hint="--strategy")
    return list(found)


def _run(console: Console, tasks: list[Task], processes: int | None) -> list[Outcome]:
    columns = (BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("simulate", total=1.0, said=f"0 of {len(tasks)} runs")

        def show(share: float, done: int) -> None:
            progress.update(bar, completed=share, said=f"{done} of {len(tasks)} runs")

        return run_all(tasks, show, processes or cores())


def _config(scenario: Scenario, outcomes: list[Outcome], seeds: int) -> dict[str, Any]:
    """What all runs have in common; the gateway's configuration without its strategy."""
    gateway = dict(outcomes[0].config)
    gateway["gateway"] = {k: v for k, v in gateway["gateway"].items() if k != "strategy"}
    return {
        "load": outcomes[0].row.load,
        "pods": len(outcomes[0].series.pods),
        "seeds": list(range(1, seeds + 1)),
        "strategies": list(dict.fromkeys(one.row.strategy for one in outcomes)),
        "model": {
            name: msgspec.to_builtins(getattr(scenario, name))
            for name in scenario.__struct_fields__
            if name not in ("name", "description", "workload", "settings", "load")
        },
        "gateway": gateway,
    }


def describe() -> None:
    """Shows the scenarios."""
    console = Console()
    table = Table("scenario", "pods", "what is seen in it", box=None, pad_edge=False)
    for one in SCENARIOS.values():
        table.add_row(f"[bold]{one.name}[/bold]", str(len(one.pods())), one.description)
    console.print(table)


def _table(outcomes: list[Outcome]) -> Table:
    by_strategy = reports.summary(outcomes)
    top = reports.best(by_strategy)
    row = outcomes[0].row
    many = max(len(values) for fields in by_strategy.values() for values in fields.values())
    title = f"{row.requests} requests, load {row.load:g}"
    if many > 1:
        title += f", mean of {many} seeds"
    table = Table(title=title, box=None, padding=(0, 1, 0, 0))
    table.add_column("strategy", overflow="fold", min_width=12)  # figures are never cut off
    for said, unit, _ in COLUMNS.values():
        first, _, second = said.partition(" ")
        heading = f"{first}\n{' '.join(filter(None, (second, unit)))}"
        table.add_column(heading, justify="right", no_wrap=True, min_width=4)
    for strategy, fields in by_strategy.items():
        cells = []
        for name in COLUMNS:
            mean = float(np.mean(fields[name])) if fields[name] else None
            said = "-" if mean is None else _figure(name, mean)
            is_best = mean is not None and top.get(name) == mean
            cells.append(f"[green]{said}[/green]" if is_best else said)
        table.add_row(strategy, *cells)
    return table


def _figure(name: str, value: float) -> str:
    """Three digits; the unit stands in the heading."""
    return compact(100 * value) if COLUMNS[name][1] == "%" else compact(value)
