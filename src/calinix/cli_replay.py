"""`calinix replay`: a gateway's journal in a fresh Router, with the same strategy or another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from calinix import __version__
from calinix.config import Strategy, StrategyName
from calinix.edge.journal import JournalError, JournalReader, Planned
from calinix.errors import ConfigError
from calinix.sim.commands import write_json
from calinix.sim.journal_replay import Difference, Picks, Replay, Replayed

NO_GAIN = "This does not tell what would be gained: for that, use calinix simulate."
_SHOWN = 5


def replay(
    journal: Annotated[Path, typer.Argument(help="What `calinix serve --journal` wrote.")],
    strategy: Annotated[
        str | None, typer.Option(help="Say instead what this strategy would have picked.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write what was found there.")] = None,
) -> None:
    """Repeat every routing decision of a gateway, and say whether each comes out the same.

    Ends with 1 when one does not: then the version is another, or something has to be reported.

    With --strategy, requests take as long as they took; only who would have got them changes.

    For instance: calinix serve --journal day.jsonl, then calinix replay day.jsonl
    """
    wanted = None if strategy is None else Strategy(name=_strategy(strategy))
    console = Console()
    try:
        reader = JournalReader(journal)
        found = _run(console, reader, wanted, journal.stat().st_size)
    except JournalError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except ConfigError as error:
        typer.echo(f"{journal}:1: {error}", err=True)
        raise typer.Exit(2) from None
    except FileNotFoundError as error:
        raise typer.BadParameter(f"{journal}: {error.strerror}{_of_workers(journal)}") from None
    except OSError as error:
        raise typer.BadParameter(f"{journal}: {error.strerror}") from None
    _show(console, found)
    if json is not None:
        write_json(json, found)
    if not found.other and not found.holds:
        raise typer.Exit(1)


def _of_workers(journal: Path) -> str:
    """What to say where the journals of several workers lie beside one that is not there."""
    try:
        numbers = sorted(
            int(one.name.removeprefix(f"{journal.name}-"))
            for one in journal.parent.iterdir()
            if re.fullmatch(re.escape(journal.name) + "-[0-9]{1,3}", one.name)
        )
    except OSError:
        return ""
    names = ", ".join(f"{journal}-{number}" for number in numbers)
    return f"; written by several workers: replay each of {names}" if names else ""


def _strategy(name: str) -> StrategyName:
    for known in get_args(StrategyName):
        if known == name:
            return known  # type: ignore[no-any-return]
    names = ", ".join(get_args(StrategyName))
    raise typer.BadParameter(f"{name!r} is none of {names}", param_hint="--strategy")


def _run(
    console: Console, reader: JournalReader, strategy: Strategy | None, size_bytes: int
) -> Replayed:
    columns = (BarColumn(), TextColumn("{task.fields[said]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("replay", total=size_bytes, said="")
        try:
            return Replay(reader, strategy).run(
                lambda calls: progress.update(
                    task, completed=reader.read_bytes, said=f"{calls} calls"
                )
            )
        finally:
            reader.close()


def _show(console: Console, found: Replayed) -> None:
    if found.version != __version__:
        console.print(f"[yellow]written by calinix {found.version}, this is {__version__}[/yellow]")
    if found.ending is None:
        why = "its process died, or still writes; read up to there"
        console.print(f"[yellow]the journal has no end: {why}[/yellow]")
    elif found.ending == "full":
        console.print("[yellow]the journal ends at its bound, log.journalMaxBytes[/yellow]")
    if found.other:
        share = found.same_pod / found.routes if found.routes else 1.0
        console.print(
            f"{found.routes} routes; {found.strategy} would have sent {share:.1%} of them "
            "where they went"
        )
        console.print(_picks(found.recorded, found.replayed, found.strategy))
        console.print(NO_GAIN, style="dim", highlight=False)
        return
    verdict = "[green]all equal[/green]" if found.holds else "[red]not all are equal[/red]"
    console.print(f"{found.routes} routes, {found.equal} with the same plan: {verdict}")
    for one in found.differences[:_SHOWN]:
        console.print(_difference(one))


def _picks(recorded: Picks, replayed: Picks, strategy: str) -> Table:
    table = Table("", "recorded", strategy)
    for pod in sorted(recorded.pods.keys() | replayed.pods.keys()):
        table.add_row(pod, str(recorded.pods.get(pod, 0)), str(replayed.pods.get(pod, 0)))
    if recorded.refused or replayed.refused:
        table.add_row("refused", str(recorded.refused), str(replayed.refused))
    table.add_section()
    hits = (f"{picks.cached_token_ratio:.1%}" for picks in (recorded, replayed))
    table.add_row("prompt tokens believed cached", *hits)
    ttfts = (picks.predicted_ttft_mean_s for picks in (recorded, replayed))
    table.add_row(
        "mean TTFT predicted", *("-" if s is None else f"{s * 1e3:.1f} ms" for s in ttfts)
    )
    return table


def _difference(one: Difference) -> str:
    names = [
        name
        for name in Planned.__struct_fields__
        if getattr(one.recorded, name) != getattr(one.replayed, name)
    ]
    said = ", ".join(
        f"{name} {getattr(one.recorded, name)} -> {getattr(one.replayed, name)}" for name in names
    )
    return f"  route {one.route} ({one.request_id}, at {one.at_s:.3f} s): {said}"
