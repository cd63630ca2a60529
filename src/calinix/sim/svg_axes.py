"""The axes of charts: from values to places on the page, and where the ticks are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Kind = Literal["linear", "log", "percentile"]

MAX_TICKS = 6
LARGEST, SMALLEST = 1e100, 1e-100
"""What is beyond is not drawn, and what is nearer together is one value."""


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """What an axis shows. `log` shows values over 0, `percentile` shares in [0, 1).

    Percentiles are as far apart as their tails differ in size: 0, 0.9, 0.99 and 0.999 are at equal
    distances, so that the tail can be read.
    """

    name: str
    kind: Kind = "linear"
    least: float | None = None
    """Where it begins; by default at the least value, linear ones at 0 if that is near."""
    most: float | None = None

    def over(
        self, values: Sequence[Floats], begin: float, end: float, *, to_a_tick: bool = False
    ) -> Scale:
        """This axis for these values, drawn from `begin` to `end` on the page.

        `to_a_tick`: where nothing says where it ends, it goes on to the tick after the last value.
        """
        known = np.concatenate([np.asarray(v, float).ravel() for v in values] or [np.zeros(0)])
        known = known[np.abs(known) < LARGEST]
        if self.kind == "log":
            known = known[known > SMALLEST]
        low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
        if self.kind == "linear" and 0.0 <= low <= 0.5 * high:
            low = 0.0
        low = self.least if self.least is not None else low
        high = self.most if self.most is not None else high
        if self.kind == "log":
            low, high = (low, high) if 0.0 < low < high else _around(low or high or 1.0)
        elif high - low < max(SMALLEST, 1e-9 * abs(low)):
            high = low + max(abs(low), 1e-6)
        beyond = to_a_tick and self.most is None
        ticks = _TICKS[self.kind](low, high, beyond)
        return Scale(self.kind, low, max([high, *ticks]) if beyond else high, begin, end, ticks)


class Scale:
    """An axis with its bounds and the values of its ticks: from values to places on the page."""

    def __init__(
        self,
        kind: Kind,
        low: float,
        high: float,
        begin: float,
        end: float,
        ticks: Sequence[float],
    ):
        self._kind = kind
        self._low = low
        self._high = high
        self._begin = begin
        self._end = end
        self._ticks = ticks
        self._to: Callable[[Floats], Floats] = _TO[kind]
        bounds = self._to(np.array([low, high]))
        self._first, self._span = float(bounds[0]), float(bounds[1] - bounds[0]) or 1.0

    def places(self, values: Floats) -> Floats:
        """Places on the page, held within the axis; NaN stays NaN."""
        shown = np.asarray(values, float)
        with np.errstate(invalid="ignore"):
            shown = np.where(np.abs(shown) < LARGEST, shown, np.nan)
            share = (self._to(shown) - self._first) / self._span
        return self._begin + np.clip(share, 0.0, 1.0) * (self._end - self._begin)

    def ticks(self) -> list[tuple[float, str]]:
        """(place, what is written there)."""
        shown = [
            m for m in self._ticks if self._low - 1e-12 <= m <= self._high * (1 + 1e-12) + 1e-12
        ]
        places = self.places(np.array(shown, float)).tolist() if shown else []
        said = [f"p{100 * m:g}" if self._kind == "percentile" else f"{m:g}" for m in shown]
        return list(zip(places, said, strict=True))


def _tail(values: Floats) -> Floats:
    return np.asarray(-np.log10(1.0 - np.minimum(values, 1.0 - 1e-9)))


_TO: dict[Kind, Callable[[Floats], Floats]] = {
    "linear": lambda values: values,
    "log": lambda values: np.asarray(np.log10(np.where(values > SMALLEST, values, np.nan))),
    "percentile": _tail,
}


def _around(value: float) -> tuple[float, float]:
    return value / 2.0, value * 2.0


def _linear_ticks(low: float, high: float, beyond: bool) -> list[float]:
    """Within the bounds; with `beyond` also the next one, where none is at the upper bound."""
    step = 10.0 ** math.floor(math.log10((high - low) / 2.0))
    step *= next(m for m in (1.0, 2.0, 5.0, 10.0, 20.0) if (high - low) / (step * m) <= MAX_TICKS)
    first = math.ceil(low / step - 1e-9)
    last = math.ceil(high / step - 1e-9) if beyond else math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, beyond: bool) -> list[float]:
    """As _linear_ticks."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for within in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        marks = [float(f"{m * 10.0**d:.12g}") for d in decades for m in within]
        most = min(mark for mark in marks if mark >= high) if beyond else high
        ticks = [mark for mark in marks if low <= mark <= most]
        if len(ticks) <= MAX_TICKS + 2:
            break
    return ticks


def _percentile_ticks(low: float, high: float, beyond: bool) -> list[float]:  # noqa: ARG001
    return [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999]


_TICKS: dict[Kind, Callable[[float, float, bool], list[float]]] = {
    "linear": _linear_ticks,
    "log": _log_ticks,
    "percentile": _percentile_ticks,
}
