"""The figures as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from harness.compare import CASES, Ratio, Summary

WHAT = {case.name: case.what for case in CASES}


def print_summaries(console: Console, summaries: Sequence[Summary]) -> None:
    """Each contender in each case."""
    table = Table(title="Medians (least to most)", title_justify="left")
    table.add_column("case")
    table.add_column("contender")
    for name in ("CPU or p50", "", "requests/s", "p50 us", "p99 us", "RSS MB", "notes"):
        table.add_column(name, justify="left" if name in ("", "notes") else "right")
    last = ""
    for one in summaries:
        if last and one.case != last:
            table.add_section()
        value = f"{one.value.median:.1f} ({one.value.min:.1f} to {one.value.max:.1f})"
        table.add_row(
            "" if one.case == last else WHAT[one.case],
            one.contender,
            value,
            one.unit,
            f"{one.rps:,.0f}",
            f"{one.p50_us:,.0f}",
            f"{one.p99_us:,.0f}",
            f"{one.rss_mb:.0f}",
            _notes(one),
        )
        last = one.case
    console.print(table)


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
        table.add_column(name, justify="right")
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
