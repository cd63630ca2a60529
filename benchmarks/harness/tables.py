"""The figures as tables in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from harness.cases import CASES
from harness.compare import Ratio, Summary


def new_console() -> Console:
    """As wide as the terminal; wide enough for the tables where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def print_summaries(console: Console, summaries: Sequence[Summary]) -> None:
    """Each contender in each case."""
    table = Table(title="Medians (least to most)", title_justify="left")
    table.add_column("case", no_wrap=True)
    table.add_column("contender", no_wrap=True)
    for name in ("us", "", "req/s", "p50 us", "p99 us", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("notes")
    for case in CASES:
        mine = [one for one in summaries if one.case == case.name]
        headings = iter((case.name, case.unit))
        for one in mine:
            table.add_row(
                next(headings, ""),
                one.contender,
                f"{one.value.median:.1f}",
                f"({one.value.min:.1f}-{one.value.max:.1f})",
                f"{one.rps:,.0f}",
                f"{one.p50_us:,.0f}",
                f"{one.p99_us:,.0f}",
                f"{one.rss_mb:.0f}",
                _notes(one),
                end_section=one is mine[-1],
            )
    console.print(table)
    for case in CASES:
        if any(one.case == case.name for one in summaries):
            console.print(f"{case.name}: {case.what}", highlight=False)


def _notes(one: Summary) -> str:
    notes = []
    if one.faults:
        notes.append(f"[red]wrong answers in {one.faults} of {one.slices}[/red]")
    if one.noisy_slices:
        notes.append(f"[yellow]noisy: {one.noisy_slices} of {one.slices}[/yellow]")
    return ", ".join(notes)


def print_ratios(console: Console, ratios: Sequence[Ratio]) -> None:
    """Calinix over each peer, with the bar that is set for it."""
    if not ratios:
        return
    table = Table(title="Calinix over its peers", title_justify="left")
    table.add_column("case")
    table.add_column("peer")
    for name in ("ratio", "least", "most", "at most"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for one in ratios:
        verdict = {None: "", True: "[green]holds[/green]", False: "[red]does not hold[/red]"}
        noisy = " [yellow](noisy)[/yellow]" if one.noisy else ""
        table.add_row(
            one.case,
            one.peer,
            f"{one.ratio.median:.2f}",
            f"{one.ratio.min:.2f}",
            f"{one.ratio.max:.2f}",
            "" if one.limit is None else f"{one.limit:.2f}",
            verdict[one.holds] + noisy,
        )
    console.print(table)
