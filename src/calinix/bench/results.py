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


def at_most(
    what: str, figure: float, limit: float, unit: str = "", *, doubtful: bool = False
) -> Finding:
    """A bar from above; one that is missed is undecided where the figure is doubtful."""
    return _judge(what, figure, f"<= {limit:g}", figure <= limit, unit, doubtful)


def at_least(
    what: str, figure: float, limit: float, unit: str = "", *, doubtful: bool = False
) -> Finding:
    """A bar from below."""
    return _judge(what, figure, f">= {limit:,g}", figure >= limit, unit, doubtful)


def is_noisy(rounds: Sequence[float]) -> bool:
    """Whether the median round took so much longer than the best that others must have run."""
    return bool(rounds) and statistics.median(rounds) > NOISY * min(rounds)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _judge(what: str, figure: float, limit: str, holds: bool, unit: str, doubtful: bool) -> Finding:
    said = f"{figure:,.0f}" if figure >= 1000 else f"{figure:.3g}"
    verdict = None if not holds and doubtful else holds
    return Finding(what, f"{said} {unit}".strip(), f"{limit} {unit}".strip(), verdict)
