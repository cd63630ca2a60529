"""The pictures of docs/benchmarks.md, drawn from the figures in benchmarks/results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from calinix.bench import published, suite
from calinix.sim.svg import Bar, Line, bar_chart, line_chart
from calinix.sim.svg_axes import Axis

CASES = {"chat-200": "200 B prompts", "chat-32k": "32 KB prompts", "stream": "Streams"}
"""Of the side by side, those that are drawn."""
OURS = "calinix"
PUBLISHED = "published: the Rust seed, another machine"
WIDTH = 640.0


def pictures(section: str, results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """File name: SVG, of the pictures that belong to a section of the page."""
    if section not in results:
        return {}
    if section in {"peers", "proxy"}:
        # The same cases: those of the run with more contenders are drawn.
        if section == "proxy" and "peers" in results:
            return {}
        found = results[section]
        return {
            f"{case}.svg": _bars_of(found, case, what)
            for case, what in CASES.items()
            if any(one["case"] == case for one in found["summaries"])
        }
    if section == "seed":
        result = msgspec.convert(results["seed"], suite.Result)
        return {
            "decisions.svg": _decisions(result),
            "fairness.svg": _fairness(result),
            "staleness.svg": _staleness(result),
        }
    return {"storm.svg": _storm(results["storm"])} if section == "storm" else {}


def _bars_of(result: dict[str, Any], case: str, what: str) -> str:
    found = [one for one in result["summaries"] if one["case"] == case]
    bars = [
        Bar(
            name=one["contender"],
            value=one["value"]["median"],
            colour=int(one["contender"] != OURS),
        )
        for one in sorted(found, key=lambda one: one["value"]["median"])
        if one["contender"] != "direct"
    ]
    return bar_chart(f"{what}: {found[0]['unit']}", bars, "us", width=WIDTH)


def _decisions(result: suite.Result) -> str:
    lines = []
    for colour, one in enumerate(result.decision):
        mine = [row for row in one.callers if (row.prompt, row.pods) == ("100 words", 16)]
        lines.append(_line(one.strategy, colour, [(row.callers, row.avg_us) for row in mine]))
    lines.append(_line(PUBLISHED, len(lines), list(published.DECISION_AVG_US.items())))
    x, y = Axis(name="callers", kind="log"), Axis(name="microseconds, average", kind="log")
    return line_chart("Routing decisions, from enqueue to plan", lines, x, y, width=WIDTH)


def _fairness(result: suite.Result) -> str:
    bars = [Bar(name=row.strategy, value=row.jain) for row in result.fairness]
    bars += [
        Bar(name=f"{name}, published", value=value, colour=1)
        for name, value in published.JAIN.items()
    ]
    return bar_chart("A hot prefix: Jain's index of requests per pod", bars, width=WIDTH)


def _staleness(result: suite.Result) -> str:
    names = dict.fromkeys(row.strategy for row in result.staleness)
    lines = [
        _line(
            name,
            colour,
            [
                (row.lag_ms, 100 * row.misrouted_ratio)
                for row in result.staleness
                if row.strategy == name
            ],
        )
        for colour, name in enumerate(names)
    ]
    x, y = Axis(name="ms that the known load is old"), Axis(name="% misrouted", least=0.0)
    return line_chart("Load that is known late", lines, x, y, width=WIDTH)


def _storm(result: dict[str, Any]) -> str:
    lines = []
    for colour, (name, part) in enumerate((("calm", "calm"), ("20,000 stores a second", "storm"))):
        held = result[part]["rss_mb"]
        seconds = np.linspace(0.0, result["seconds"], len(held))
        lines.append(Line(name=name, x=seconds, y=np.array(held), colour=colour))
    y = Axis(name="resident memory, MB", least=0.0)
    return line_chart("A storm of KV events", lines, Axis(name="seconds"), y, width=WIDTH)


def _line(name: str, colour: int, points: Sequence[tuple[float, float]]) -> Line:
    x, y = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    return Line(name=name, x=x, y=y, colour=colour)
