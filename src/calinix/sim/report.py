"""The report of a simulation: results.json and one HTML file that needs nothing from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from calinix import __version__
from calinix.sim import pictures
from calinix.sim.measures import GOODPUT_TPOT_S, GOODPUT_TTFT_S, Outcome, Row
from calinix.sim.pictures import Picture
from calinix.sim.svg import compact

COLUMNS: dict[str, tuple[str, str, bool]] = {
    "ttft_mean_s": ("TTFT mean", "s", False),
    "ttft_p50_s": ("p50", "s", False),
    "ttft_p99_s": ("p99", "s", False),
    "e2e_mean_s": ("E2E mean", "s", False),
    "e2e_p99_s": ("p99", "s", False),
    "tpot_mean_s": ("TPOT", "s", False),
    "goodput_ratio": ("good", "%", True),
    "prefix_hit_ratio": ("hits", "%", True),
    "jain": ("Jain", "", True),
}
"""Field of a Row: (heading, unit, more is better)."""

_STYLE = """
:root{color-scheme:light dark;--fg:#1b1f24;--dim:#5b6573;--line:#dfe3e8;--bg:#f6f7f9;--card:#fff;
--good:#1c7c46}
@media(prefers-color-scheme:dark){:root{--fg:#e7eaee;--dim:#98a2b0;--line:#2c333d;--bg:#0e1115;
--card:#14181d;--good:#5fd394}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);
font:15px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1200px;margin:0 auto;padding:28px 20px 60px}
h1{margin:0 0 4px;font-size:26px}h2{margin:36px 0 8px;font-size:19px}
p{margin:4px 0 10px;max-width:75ch}.dim{color:var(--dim)}
code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px;text-align:right;white-space:nowrap}
th{color:var(--dim);font-weight:500;border-bottom:1px solid var(--line)}
td:first-child,th:first-child{text-align:left}tr+tr td{border-top:1px solid var(--line)}
td.best{color:var(--good);font-weight:600}small{color:var(--dim);display:block;font-size:11px}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(520px,100%),1fr))}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:6px}
figure svg{width:100%;height:auto;display:block}
details{margin-top:8px}pre{overflow-x:auto;background:var(--card);border:1px solid var(--line);
border-radius:8px;padding:12px;font-size:12px}
"""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one scenario."""

    scenario: str
    description: str
    config: dict[str, Any]
    """What the runs have in common, ready for JSON."""
    outcomes: Sequence[Outcome]
    """By strategy, then by seed."""
    note: str = ""
    """What else there is to say; plain text."""


def results(report: Report) -> dict[str, Any]:
    """The figures: scenario, version, config, rows."""
    return {
        "scenario": report.scenario,
        "version": __version__,
        "config": report.config,
        "rows": [one.row for one in report.outcomes],
    }


def as_json(tree: Mapping[str, Any]) -> bytes:
    """Indented, with an end of line."""
    return msgspec.json.format(msgspec.json.encode(tree), indent=2) + b"\n"


def write(report: Report, folder: Path) -> Path:
    """Writes report.html, its pictures as files of their own, and results.json with their numbers.

    Returns the HTML file. Raises OSError.
    """
    drawn = folder / "pictures"
    drawn.mkdir(parents=True, exist_ok=True)
    sections = _sections(report.outcomes)
    for _, _, found in sections:
        for picture in found:
            (drawn / f"{picture.name}.svg").write_text(picture.svg + "\n", "utf-8")
    figures = [
        {"strategy": one.row.strategy, "seed": one.row.seed, "series": one.series}
        for one in report.outcomes
    ]
    (folder / "results.json").write_bytes(as_json({**results(report), "figures": figures}))
    page = folder / "report.html"
    page.write_text(_html(report, sections), "utf-8")
    return page


def summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, list[float]]]:
    """Strategy -> field -> the seeds' values, those that are null left out."""
    found: dict[str, dict[str, list[float]]] = {}
    for one in outcomes:
        fields = found.setdefault(one.row.strategy, {name: [] for name in COLUMNS})
        for name in COLUMNS:
            value = getattr(one.row, name)
            if value is not None:
                fields[name].append(value)
    return found


def best(by_strategy: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Field -> the best of the strategies' means; only where there are several."""
    if len(by_strategy) < 2:
        return {}
    found = {}
    for name, (_, _, more_is_better) in COLUMNS.items():
        means = [float(np.mean(fields[name])) for fields in by_strategy.values() if fields[name]]
        if means:
            pick: Callable[[list[float]], float] = max if more_is_better else min
            found[name] = pick(means)
    return found


def shown(name: str, value: float) -> str:
    """A value of a column, for people."""
    unit = COLUMNS[name][1]
    if unit == "%":
        return f"{value:.1%}"
    if unit == "s":
        return f"{compact(value * 1e3)} ms" if abs(value) < 1.0 else f"{value:.2f} s"
    return f"{value:.3f}"


Section = tuple[str, str, Sequence[Picture]]
"""Heading, a few words, pictures."""


def _sections(outcomes: Sequence[Outcome]) -> list[Section]:
    firsts = list({one.row.strategy: one for one in reversed(outcomes)}.values())[::-1]
    controls = [picture for one in firsts for picture in pictures.control(one)]
    return [
        ("Latency", _TAILS, pictures.latencies(outcomes)),
        ("Over time", _FIRST, pictures.courses(outcomes)),
        ("Queues and weights", f"{_FIRST} {_EXPECTED}", controls),
        ("Load of the pods", _FIRST, pictures.loads(outcomes)),
    ]


def _html(report: Report, sections: Sequence[Section]) -> str:
    """The page."""
    outcomes = report.outcomes
    head = (
        f"<h1>{escape(report.scenario)}</h1><p>{escape(report.description)}</p>"
        f'<p class="dim">{escape(_facts(report, [one.row for one in outcomes]))}</p>'
    )
    if report.note:
        head += f"<p>{escape(report.note)}</p>"
    common = escape(as_json(report.config).decode())
    parts = [
        head,
        _table(outcomes),
        *(_section(*one) for one in sections),
        "<h2>Configuration</h2>",
        f"<details><summary>What the runs have in common</summary><pre>{common}</pre></details>",
        '<p class="dim">Every number of this page is in results.json.</p>',
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(report.scenario)} - calinix</title>"
        f"<style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


_TAILS = (
    "The further right, the rarer: p99 is the slowest request in a hundred. Lower is better. "
    "With several seeds: the mean of their curves."
)
_FIRST = "Of each strategy's first seed."
_EXPECTED = (
    "Expected queue: what the controller expects one step ahead; dashed, at some moments, its "
    "whole horizon. It counts in seconds of work where prompts are computed."
)


def _section(title: str, words: str, found: Sequence[Picture]) -> str:
    figures = "".join(f"<figure>{picture.svg}</figure>" for picture in found)
    return f'<h2>{title}</h2><p class="dim">{words}</p><div class="grid">{figures}</div>'


def _facts(report: Report, rows: Sequence[Row]) -> str:
    seeds = sorted({row.seed for row in rows})
    requests = max((row.requests for row in rows), default=0)
    load = rows[0].load if rows else 1.0
    pods = len(report.outcomes[0].series.pods) if report.outcomes else 0
    plural = "s" if len(seeds) != 1 else ""
    return (
        f"{requests} requests at load {load:g}, {pods} pods, "
        f"seed{plural} {', '.join(map(str, seeds))}; calinix {__version__}. "
        f"Good: first token within {GOODPUT_TTFT_S:g} s plus one prefill of its prompt, "
        f"tokens at most {GOODPUT_TPOT_S * 1e3:g} ms apart. Hits: prompt tokens found in a cache."
    )


def _table(outcomes: Sequence[Outcome]) -> str:
    by_strategy = summary(outcomes)
    top = best(by_strategy)
    head = "".join(f"<th>{escape(said)}</th>" for said, _, _ in COLUMNS.values())
    lines = []
    for strategy, fields in by_strategy.items():
        cells = [f"<td>{escape(strategy)}</td>"]
        for name in COLUMNS:
            values = fields[name]
            if not values:
                cells.append("<td>-</td>")
                continue
            mean = float(np.mean(values))
            mark = ' class="best"' if top.get(name) == mean else ""
            spread = (
                f"<small>{shown(name, min(values))} to {shown(name, max(values))}</small>"
                if len(values) > 1
                else ""
            )
            cells.append(f"<td{mark}>{shown(name, mean)}{spread}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr><th>strategy</th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
