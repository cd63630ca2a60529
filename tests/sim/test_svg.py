"""Charts are whole SVG documents, stand alone, and show what they are given."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.sim.svg import DARK, LIGHT, Bar, Floats, Line, bar_chart, compact, heat_map, line_chart
from calinix.sim.svg_axes import Axis, Kind

X, Y = Axis(name="seconds"), Axis(name="requests")
SVG = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ET.Element:
    """The chart as XML; it refers to nothing outside."""
    assert not re.search(r"(href|src|url|@import)\s*[=(]", text)
    return ET.fromstring(text)


def texts(root: ET.Element) -> list[str]:
    """What is written in it."""
    return ["".join(one.itertext()) for one in root.iter(f"{SVG}text")]


def line(name: str, *points: float, **settings: object) -> Line:
    """A line through these heights, one second apart."""
    y = np.array(points, dtype=float)
    x = np.arange(len(y), dtype=float)
    return Line(name=name, x=x, y=y, **settings)  # type: ignore[arg-type]


def test_a_line_chart_names_its_lines_and_axes() -> None:
    """Title, axes, ticks and a legend where there are several names; a forecast is in none."""
    lines = [line("one", 1, 2, 3), line("two", 3, 2, 1), line("later", 1, 2, is_forecast=True)]
    said = texts(parsed(line_chart("Queue <1>", lines, X, Y)))
    assert {"Queue <1>", "seconds", "requests", "one", "two", "0", "3"} <= set(said)
    assert "later" not in said
    alone = texts(parsed(line_chart("Queue", lines[:1], X, Y)))
    assert "one" not in alone


def test_heights_are_where_the_axis_says() -> None:
    """The least value is at the bottom, the largest at the top, and in between it is linear."""
    root = parsed(line_chart("t", [line("a", 0, 5, 10)], X, Y))
    path = next(p.attrib["d"] for p in root.iter(f"{SVG}path") if "p s0" in p.attrib["class"])
    heights = [float(pair.split()[1]) for pair in re.split("[ML]", path)[1:]]
    assert heights[0] > heights[1] > heights[2]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


@pytest.mark.parametrize(
    ("kind", "highest", "label"),
    [("linear", 31.0, "40"), ("linear", 30.0, "30"), ("log", 92.0, "100"), ("log", 2.1, "3")],
)
def test_the_highest_value_is_between_two_labels(kind: Kind, highest: float, label: str) -> None:
    """The axis of heights ends at a label, at or over the highest value."""
    axis = Axis(name="s", kind=kind)
    root = parsed(line_chart("t", [line("a", 0.1, 1, highest)], X, axis))
    marks = [one for one in root.iter(f"{SVG}text") if one.attrib.get("text-anchor") == "end"]
    highest_mark = min(marks, key=lambda one: float(one.attrib["y"]))
    assert highest_mark.text == label
    assert float(highest_mark.attrib["y"]) - 4 == pytest.approx(30, abs=0.1)


def test_an_end_that_is_asked_for_stays() -> None:
    """An axis that is said to end somewhere ends there, tick or not."""
    scale = Axis(name="s", most=0.95).over([np.array([0.1, 0.5])], 0.0, 100.0, to_a_tick=True)
    assert scale.places(np.array([0.95])).tolist() == [100.0]


@pytest.mark.parametrize("kind", ["linear", "log"])
@given(low=st.floats(1e-6, 1e6), factor=st.floats(1.0, 1e6))
def test_any_axis_can_end_at_a_tick(kind: Kind, low: float, factor: float) -> None:
    """Whatever the range: the last tick is the end, nothing is cut, and ticks stay few."""
    values = np.array([low, low * factor])
    scale = Axis(name="s", kind=kind).over([values], 0.0, 100.0, to_a_tick=True)
    ticks = scale.ticks()
    assert ticks[-1][0] == pytest.approx(100.0, abs=0.01)
    assert len(ticks) <= 14
    plain = Axis(name="s", kind=kind).over([values], 0.0, 100.0)
    assert scale.places(values)[1] <= plain.places(values)[1] + 1e-6


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_no_two_series_look_alike(colours: tuple[str, ...]) -> None:
    """Any two colours of one picture are far apart as eyes see it (distance in CIE Lab)."""
    for one, other in itertools.combinations(colours, 2):
        assert np.linalg.norm(lab(one) - lab(other)) > 35, (one, other)


def lab(colour: str) -> Floats:
    """An sRGB colour as hexadecimal digits in CIE Lab, under D65."""
    rgb = np.array([int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    shares = np.array(to_xyz) @ linear / [0.95047, 1.0, 1.08883]
    x, y, z = np.where(shares > 0.008856, np.cbrt(shares), 7.787 * shares + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_what_is_not_known_leaves_a_gap() -> None:
    """NaN and infinities break the line and are nowhere in the file."""
    text = line_chart("t", [line("a", 1, float("nan"), 2, float("inf"), 3)], X, Y)
    root = parsed(text)
    assert not re.search(r"nan|inf", "".join(p.attrib["d"] for p in root.iter(f"{SVG}path")))
    path = next(p.attrib["d"] for p in root.iter(f"{SVG}path") if "p s0" in p.attrib["class"])
    assert path.count("M") == 3


@pytest.mark.parametrize("kind", ["linear", "log", "percentile"])
@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20))
def test_any_numbers_make_a_chart(kind: Kind, values: list[float]) -> None:
    """Whatever is measured, there is a picture of it, and all of it is on the page."""
    axis = Axis(name="v", kind=kind, **({"least": 0.0, "most": 0.999} if kind[0] == "p" else {}))
    root = parsed(line_chart("t", [line("a", *values)], X, axis))
    for path in root.iter(f"{SVG}path"):
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.attrib["d"]):
            assert 0 <= float(x) <= 560
            assert 0 <= float(y) <= 300


def test_percentiles_are_spread_by_their_tails() -> None:
    """On a percentile axis p90 to p99 is as far as p99 to p99.9."""
    scale = Axis(name="p", kind="percentile", least=0.0, most=0.999).over([], 0.0, 300.0)
    assert scale.places(np.array([0.9, 0.99, 0.999])).tolist() == pytest.approx([100, 200, 300])
    assert [said for _, said in scale.ticks()] == ["p0", "p50", "p90", "p99", "p99.9"]


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e6))
def test_log_ticks_are_few_and_within(low: float, factor: float) -> None:
    """Any range has ticks inside of it, and not too many to read."""
    ticks = Axis(name="s", kind="log").over([np.array([low, low * factor])], 0, 100).ticks()
    assert len(ticks) <= 14
    assert all(0 <= place <= 100 for place, _ in ticks)
    if factor > 10:
        assert ticks


def test_bars_are_as_long_as_their_values() -> None:
    """Twice the value is twice the length; the value is written at the end."""
    root = parsed(bar_chart("Work", [Bar(name="a", value=2000), Bar(name="b", value=1000)], "tok"))
    widths = [float(r.attrib["width"]) for r in root.iter(f"{SVG}rect") if "rx" in r.attrib][1:]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01)
    assert {"a", "b", "2k tok", "1k tok"} <= set(texts(root))


def test_a_heat_map_is_as_full_as_its_values() -> None:
    """Cells of nothing are not drawn, the largest is full."""
    values = np.array([[0.0, 1.0], [2.0, np.nan]])
    root = parsed(heat_map("Queue", values, ["a", "b"], X, np.array([0.0, 1.0]), unit="req"))
    shares = [float(r.attrib["opacity"]) for r in root.iter(f"{SVG}rect") if "opacity" in r.attrib]
    assert shares == [0.5, 1.0]
    assert "full colour: 2 req" in texts(root)


@pytest.mark.parametrize(
    ("value", "said"), [(0.0123456, "0.0123"), (789.0, "789"), (12_345.0, "12.3k"), (2e9, "2G")]
)
def test_numbers_have_three_digits(value: float, said: str) -> None:
    """As people read them."""
    assert compact(value) == said


def test_nothing_is_shown_as_such() -> None:
    """A chart without data says so."""
    assert "nothing to show" in texts(parsed(line_chart("t", [], X, Y)))
