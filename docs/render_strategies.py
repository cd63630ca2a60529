"""Renews the tables of docs/strategies.md from benchmarks/results/policies.json.

    python docs/render_strategies.py

That file is written by `benchmarks/bench_policies.py --json`; what stands outside the markers is
left as it is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "strategies.md"
RESULTS = ROOT / "benchmarks" / "results" / "policies.json"
MEASURES = {
    "Time to first token, mean / p99 in seconds": ("ttft_mean_s", "ttft_p99_s"),
    "Time to last token, mean / p99 in seconds": ("e2e_mean_s", "e2e_p99_s"),
}
CACHES = ("mooncake-conversation", "hot-prefix", "heterogeneous-4p4d")
"""Scenarios in which prompts share anything."""


def short(value: float) -> str:
    """Three digits, and thousandths at most."""
    if value >= 99.5:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}" if value >= 0.095 else f"{value:.3f}"


def pair(cell: dict[str, Any], mean: str, tail: str) -> str:
    """Mean and tail of one strategy in one scenario."""
    return f"{short(cell[mean])} / {short(cell[tail])}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """As Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def seeds(part: dict[str, Any]) -> str:
    """Of which runs the means are."""
    return "seed 1" if part["seeds"] == 1 else f"means over seeds 1 to {part['seeds']}"


def side_by_side(results: dict[str, Any]) -> str:
    """Strategies by scenario, one table for each measure."""
    part = results["parts"]["tables"]
    found = part["cells"]
    cells = {(one["scenario"], one["strategy"]): one for one in found}
    settings = dict.fromkeys(one["scenario"] for one in found)
    strategies = dict.fromkeys(one["strategy"] for one in found)
    parts = []
    for title, (mean, tail) in MEASURES.items():
        rows = [
            [f"`{name}`", *(pair(cells[at, name], mean, tail) for at in settings)]
            for name in strategies
        ]
        parts.append(
            f"{title}, {seeds(part)}:\n\n" + table(["", *(f"`{at}`" for at in settings)], rows)
        )
    rows = [
        [f"`{name}`", *(f"{100 * cells[at, name]['prefix_hit_ratio']:.0f}" for at in CACHES)]
        for name in strategies
    ]
    head = ["", *(f"`{at}`" for at in CACHES)]
    parts.append("Prompt tokens found in caches, %:\n\n" + table(head, rows))
    return "\n\n".join(parts)


def bars(results: dict[str, Any]) -> str:
    """What is promised, and what came of it."""
    rows = [
        [
            one["what"],
            f"{one['figure']:g}",
            one["limit"],
            "yes" if one["holds"] else "**no**",
            str(part["seeds"]),
        ]
        for part in results["parts"].values()
        for one in part["findings"]
        if one["limit"] != "-"
    ]
    return table(["figure", "measured", "promised", "holds", "seeds"], rows)


def render(page: str, results: dict[str, Any]) -> str:
    """The page with its tables made anew."""
    for name, text in (("tables", side_by_side(results)), ("bars", bars(results))):
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"there is no place for {name}")
        page = f"{before}{begin}{text}\n{end}{after}"
    return page


def main() -> int:
    """Writes the page anew."""
    PAGE.write_text(
        render(PAGE.read_text("utf-8"), json.loads(RESULTS.read_text("utf-8"))), "utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
