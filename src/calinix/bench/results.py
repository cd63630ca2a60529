"""What a scenario of `calinix bench` gives back: rows of its own, grids to show, what must hold."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

NOISY = 1.25
"""Where the median round takes this many times the best one, a limit that is missed proves
nothing."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that must hold, with the figure it was judged by."""

    what: str
    figure: str
    limit: str
    holds: bool | None
    """None: the machine was too noisy to tell."""


class Grid(msgspec.Struct, frozen=True):
    """A table, ready to be shown: headings, and rows of as many cells. The first cell is a name."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""
    """What a reader has to know to read it."""


def at_most(what: str, figure: float, limit: float, unit: str = "", spread: float = 1.0) -> Finding:
    """A bar from above; `spread` is the median round over the best one."""
    return _judge(what, figure, f"<= {limit:g}", figure <= limit, unit, spread)


def at_least(
    what: str, figure: float, limit: float, unit: str = "", spread: float = 1.0
) -> Finding:
    """A bar from below."""
    return _judge(what, figure, f">= {limit:,g}", figure >= limit, unit, spread)


def spread_of(rounds: Sequence[float]) -> float:
    """The median round over the best, where less is better; 1 for none."""
    return statistics.median(rounds) / min(rounds) if rounds and min(rounds) > 0.0 else 1.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _judge(what: str, figure: float, limit: str, holds: bool, unit: str, spread: float) -> Finding:
    said = f"{figure:,.0f}" if figure >= 1000 else f"{figure:.3g}"
    verdict = None if not holds and spread > NOISY else holds
    return Finding(what, f"{said} {unit}".strip(), f"{limit} {unit}".strip(), verdict)
