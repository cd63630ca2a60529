"""Charts as SVG text: lines, bars and heat maps, for reports and documents, with no other library.

Each chart stands alone: its colours are in it, and follow the reader's light or dark setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec
import numpy as np
import numpy.typing as npt

from calinix.sim.svg_axes import Axis

Floats = npt.NDArray[np.float64]

LIGHT = (
    "2f6bd8", "e4572e", "2a9d5c", "b07d00", "9b3fd0", "00a9b8", "d13f83", "1b1f24", "7d4526",
    "8f8b94",
)  # fmt: skip
DARK = (
    "6ea0ff", "ff8a66", "57cf8b", "e3b341", "c77dff", "35d0e0", "ff7fb5", "ffffff", "8a5028",
    "8f97a3",
)  # fmt: skip
COLOURS = len(LIGHT)
"""Of series; after these they come again, dashed."""


def _theme(text: str, dim: str, grid: str, paper: str, colours: Sequence[str]) -> str:
    # Plain rules, no variables: not every viewer of SVG knows those.
    series = "".join(
        f".cx .s{number}{{stroke:#{colour}}}.cx .f{number}{{fill:#{colour}}}"
        for number, colour in enumerate(colours)
    )
    return (
        f".cx text{{fill:#{text}}}.cx .d{{fill:#{dim}}}.cx .g{{stroke:#{grid}}}"
        f".cx .bg{{fill:#{paper}}}{series}"
    )


STYLE = (
    '.cx{font:12px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}'
    ".cx .t{font-weight:600;font-size:13px}.cx .g{stroke-width:1}"
    ".cx .p{fill:none;stroke-width:1.6;stroke-linejoin:round}"
    + _theme("1b1f24", "667080", "e6e9ee", "ffffff", LIGHT)
    + "@media(prefers-color-scheme:dark){"
    + _theme("e7eaee", "98a2b0", "2c333d", "14181d", DARK)
    + "}"
)

LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 30.0, 38.0
LEGEND_LINE = 18.0
CHAR_WIDTH = 7.0


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart; x and y of one shape (n,). Points that are not finite leave a gap."""

    name: str
    x: Floats
    y: Floats
    colour: int = 0
    is_forecast: bool = False
    """Thin and dashed, and not in the legend."""


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One bar."""

    name: str
    value: float
    colour: int = 0
    text: str = ""
    """Written at its end; by default the value."""


def line_chart(
    title: str, lines: Sequence[Line], x: Axis, y: Axis, *, width: float = 560, height: float = 300
) -> str:
    """Lines over one another, with a legend where there are several names."""
    drawn = [line for line in lines if len(line.x)]
    names = list({line.name: line for line in drawn if line.name and not line.is_forecast})
    legend, legend_height = _legend(drawn, names if len(names) > 1 else [], width)
    top, bottom = TOP + legend_height, height - BOTTOM
    across = x.over([line.x for line in drawn], LEFT, width - RIGHT)
    up = y.over([line.y for line in drawn], bottom, top, to_a_tick=True)
    parts = [legend, _grid(across.ticks(), up.ticks(), width, top, bottom, x.name, y.name)]
    for line in drawn:
        path = _path(across.places(line.x), up.places(line.y))
        if path:
            parts.append(f'<path {_stroke(line)} d="{path}"/>')
    if not drawn:
        parts.append(_text(width / 2, (top + bottom) / 2, "nothing to show", "d", "middle"))
    return _svg(title, "".join(parts), width, height)


def bar_chart(title: str, bars: Sequence[Bar], unit: str = "", *, width: float = 560) -> str:
    """Bars from left to right, one below the other; values of at least 0."""
    said = [f"{bar.text or compact(bar.value)} {unit}".strip() for bar in bars]
    left = 20 + CHAR_WIDTH * max((len(bar.name) for bar in bars), default=0)
    right = 20 + CHAR_WIDTH * max(map(len, said), default=0)
    row = 22.0
    height = TOP + row * len(bars) + 12
    most = max((bar.value for bar in bars if math.isfinite(bar.value)), default=0.0) or 1.0
    parts = []
    for number, bar in enumerate(bars):
        top = TOP + row * number
        value = bar.value if math.isfinite(bar.value) else 0.0
        length = (width - left - right) * value / most
        parts.append(_text(left - 8, top + 14, bar.name, "", "end"))
        parts.append(
            f'<rect x="{left:.1f}" y="{top + 3:.1f}" width="{max(length, 0.5):.1f}" '
            f'height="{row - 7:.1f}" rx="2" class="f{bar.colour % COLOURS}"/>'
        )
        parts.append(_text(left + length + 6, top + 14, said[number], "d"))
    return _svg(title, "".join(parts), width, height)


def heat_map(
    title: str,
    values: Floats,
    rows: Sequence[str],
    x: Axis,
    times: Floats,
    *,
    unit: str = "",
    width: float = 560,
) -> str:
    """One row per name: values[row, time] from pale (0) to full (the largest value)."""
    most = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
    row = max(3.0, min(18.0, 320.0 / max(1, len(rows))))
    height = TOP + row * len(rows) + BOTTOM + LEGEND_LINE
    bottom = TOP + row * len(rows)
    across = x.over([times], LEFT, width - RIGHT)
    column = (width - RIGHT - LEFT) / max(1, len(times))
    parts = [_grid(across.ticks(), [], width, TOP, bottom, x.name, "")]
    for number, name in enumerate(rows):
        top = TOP + row * number
        if row >= 11:
            parts.append(_text(LEFT - 6, top + row / 2 + 4, _short(name, 8), "d", "end"))
        for place in np.flatnonzero(np.nan_to_num(values[number]) > 0.01 * most):
            share = min(1.0, values[number, place] / most)
            parts.append(
                f'<rect x="{LEFT + column * place:.1f}" y="{top:.1f}" width="{column + 0.4:.1f}" '
                f'height="{row - 0.6:.1f}" class="f0" opacity="{share:.2f}"/>'
            )
    parts.append(
        _text(width - RIGHT, height - 6, f"full colour: {compact(most)} {unit}".strip(), "d", "end")
    )
    return _svg(title, "".join(parts), width, height)


def compact(value: float) -> str:
    """Three digits: 0.0123, 4.56, 789, 12.3k, 4.56M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _svg(title: str, body: str, width: float, height: float) -> str:
    name = escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="cx" role="img" aria-label="{name}" '
        f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
        f"<style>{STYLE}</style>"
        f'<rect class="bg" width="{width:g}" height="{height:g}" rx="6"/>'
        f'<text class="t" x="12" y="19">{name}</text>{body}</svg>'
    )


def _legend(lines: Sequence[Line], names: Sequence[str], width: float) -> tuple[str, float]:
    """The names with their colours, wrapped; and the height that this takes."""
    by_name = {line.name: line for line in lines if not line.is_forecast}
    parts, x, y = [], LEFT, TOP + 8
    for name in names:
        size = 24 + CHAR_WIDTH * len(name)
        if x > LEFT and x + size > width - RIGHT:
            x, y = LEFT, y + LEGEND_LINE
        stroke = _stroke(by_name[name])
        parts.append(f'<path {stroke} d="M{x:.1f} {y - 4:.1f}h14"/>')
        parts.append(_text(x + 18, y, name, ""))
        x += size + 10
    return "".join(parts), y - TOP + 10 if names else 0.0


def _grid(
    xs: Sequence[tuple[float, str]],
    ys: Sequence[tuple[float, str]],
    width: float,
    top: float,
    bottom: float,
    x_name: str,
    y_name: str,
) -> str:
    parts = []
    for place, said in ys:
        parts.append(f'<path class="g" d="M{LEFT:g} {place:.1f}H{width - RIGHT:g}"/>')
        parts.append(_text(LEFT - 6, place + 4, said, "d", "end"))
    for place, said in xs:
        parts.append(f'<path class="g" d="M{place:.1f} {top:.1f}V{bottom:.1f}"/>')
        # A label at the right edge must not leave the page.
        anchor = "end" if place + CHAR_WIDTH * len(said) / 2 > width - 2 else "middle"
        at = width - 2 if anchor == "end" else place
        parts.append(_text(at, bottom + 16, said, "d", anchor))
    parts.append(_text((LEFT + width - RIGHT) / 2, bottom + 32, x_name, "d", "middle"))
    middle = (top + bottom) / 2
    if y_name:
        parts.append(
            f'<text class="d" text-anchor="middle" '
            f'transform="translate(13 {middle:.1f}) rotate(-90)">{escape(y_name)}</text>'
        )
    return "".join(parts)


def _path(xs: Floats, ys: Floats) -> str:
    """Through the finite points; a gap where there is none."""
    parts, pen_down = [], False
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        if math.isfinite(x) and math.isfinite(y):
            parts.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
            pen_down = True
        else:
            pen_down = False
    return "".join(parts)


def _stroke(line: Line) -> str:
    """The attributes of its path."""
    said = f'class="p s{line.colour % COLOURS}"'
    if line.is_forecast:
        return said + ' stroke-dasharray="3 2" style="stroke-width:1;opacity:.6"'
    return said + (' stroke-dasharray="6 3"' if line.colour >= COLOURS else "")


def _text(x: float, y: float, said: str, kind: str, anchor: str = "") -> str:
    marks = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{marks}>{escape(said)}</text>'


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else "…" + name[1 - length :]
