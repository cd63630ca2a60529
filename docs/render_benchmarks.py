"""Renews the tables and pictures of docs/benchmarks.md from benchmarks/results/*.json.

    python docs/render_benchmarks.py [--results FOLDER] [--out FILE]

The files are written by the benchmarks; one that is not there leaves a line that says so. What
stands outside the markers is left as it is. Pictures go to a folder beside the page, of its name.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from benchmark_pictures import OURS, pictures

from calinix.bench import suite
from calinix.bench.results import Finding, Grid

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
HOW = {
    "seed": "calinix bench --json benchmarks/results/seed.json",
    "peers": "make bench-peers",
    "proxy": "python benchmarks/bench_proxy.py --json",
    "workers": "python benchmarks/bench_workers.py --json",
    "storm": "python benchmarks/bench_storm.py --json",
    "engine": "make test-engine",
    "engine_nixl": "make test-engine-nixl",
}
"""Result file: what writes it."""

_FIGURE = re.compile(r"[<>~]?=? ?-?[\d.,]*( \(.*\))?%?s?( us| noisy)?$").match
Results = dict[str, dict[str, Any]]
"""By the file's name, without .json; only those that are there."""


def load(folder: Path) -> Results:
    """The files that are there."""
    return {
        name: msgspec.json.decode(path.read_bytes())
        for name in HOW
        if (path := folder / f"{name}.json").exists()
    }


# ---- Markdown


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """As Markdown; columns of figures to the right."""
    body = [tuple(row) for row in rows]
    figures = [all(map(_FIGURE, column)) for column in zip(*body, strict=True)]
    lines = [headings, ["---:" if one else "---" for one in figures], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def judged(findings: Sequence[Finding]) -> str:
    """What must hold, and what came of it."""
    said = {True: "yes", False: "**no**", None: "too noisy to tell"}
    rows = [(one.what, one.figure, one.limit, said[one.holds]) for one in findings]
    return table(("bar", "seen", "limit", "holds"), rows)


def findings_of(result: dict[str, Any]) -> list[Finding]:
    """Of a result file."""
    return msgspec.convert(result["findings"], list[Finding], strict=False)


def of_grid(grid: Grid) -> str:
    """A table of `calinix bench`."""
    return f"{grid.title} ({grid.note}):\n\n{table(grid.headings, grid.rows)}"


def source(name: str, result: dict[str, Any]) -> str:
    """Where a section's figures come from."""
    machine = result["machine"]
    commit = f", commit {machine['commit']}" if "commit" in machine else ""
    quick = ", **quick: not for quoting**" if result.get("quick") else ""
    return f"`{HOW[name]}`, {machine['taken'][:10]}{commit}{quick}."


def absent(name: str) -> str:
    """The line in a section's place."""
    return f"Not measured: there is no `{name}.json` (`{HOW[name]}` makes it)."


def spread(value: dict[str, float], form: str) -> str:
    """Median, least and most."""
    middle, least, most = (form.format(value[name]) for name in ("median", "min", "max"))
    return f"{middle} ({least}-{most})"


# ---- sections


def setting(results: Results) -> str:
    """Machines, versions, programs that were compared."""
    rows = []
    for name, result in results.items():
        machine = result["machine"]
        build = machine.get("form", "compiled") if name in {"seed", "proxy", "peers"} else ""
        rows.append(
            (
                f"`{name}.json`",
                machine["taken"][:16].replace("T", " "),
                machine["cpu"],
                str(machine["cores"]),
                machine["python"],
                machine.get("commit", "-")
                + (" and more" * bool(machine.get("uncommittedChanges"))),
                build or "-",
            )
        )
    head = ("file", "taken, UTC", "CPU", "cores", "Python", "commit", "form")
    parts = [table(head, rows)]
    known = {
        (one["name"], one["version"], one["how"])
        for name in ("proxy", "peers")
        for one in results.get(name, {}).get("contenders", [])
    }
    if known:
        parts.append(table(("compared", "version", "how"), sorted(known)))
    return "\n\n".join(parts)


def side_by_side(name: str) -> Callable[[Results], str]:
    """The section of one run of contenders."""

    def section(results: Results) -> str:
        if name not in results:
            return absent(name)
        result = results[name]
        cases = {one["name"]: one for one in result["plan"]["cases"]}
        parts = [source(name, result)]
        for group in _alike(result["summaries"]):
            chosen = [case for case in cases if case in group]
            names = group[chosen[0]]
            parts.append(_absolute(result, cases, chosen, names))
            parts.append(_ratios(result, cases, chosen, names))
        bars = [one for one in result["ratios"] if one["limit"] is not None]
        if bars:
            parts.append("What must hold, CPU or time of Calinix over that of:\n\n" + _bars(bars))
        parts += [section for key, make in _MORE.items() if (section := make(result.get(key)))]
        if result.get("findings"):
            parts.append(judged(findings_of(result)))
        return "\n\n".join(parts)

    return section


def _alike(summaries: list[dict[str, Any]]) -> list[dict[str, list[str]]]:
    """Cases with their contenders, those with the same contenders together."""
    by_case: dict[str, list[str]] = {}
    for one in summaries:
        if one["contender"] != "direct":
            by_case.setdefault(one["case"], []).append(one["contender"])
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for case, names in by_case.items():
        groups.setdefault(tuple(sorted(names)), {})[case] = names
    return list(groups.values())


def _absolute(
    result: dict[str, Any], cases: dict[str, Any], chosen: list[str], names: list[str]
) -> str:
    cells = {(one["case"], one["contender"]): one for one in result["summaries"]}
    rows = [
        [
            cases[case]["what"],
            cells[case, names[0]]["unit"],
            *(f"{cells[case, name]['value']['median']:.1f}" for name in names),
        ]
        for case in chosen
    ]
    return "Medians:\n\n" + table(["", "unit", *names], rows)


def _ratios(
    result: dict[str, Any], cases: dict[str, Any], chosen: list[str], names: list[str]
) -> str:
    cells = {(one["case"], one["peer"]): one for one in result["ratios"]}
    peers = [name for name in names if name != OURS and (chosen[0], name) in cells]
    rows = [
        [cases[case]["what"], *(_ratio(cells.get((case, peer))) for peer in peers)]
        for case in chosen
    ]
    return "Calinix over each of them (least to most):\n\n" + table(["", *peers], rows)


def _ratio(one: dict[str, Any] | None) -> str:
    if one is None:
        return ""
    return spread(one["ratio"], "{:.2f}") + " noisy" * one["noisy"]


def _bars(bars: list[dict[str, Any]]) -> str:
    rows = []
    for one in bars:
        holds = "yes" if one["holds"] else "**no**"
        said = f"{holds}, but noisy" if one["noisy"] else holds
        figures = (f"{one['ratio']['median']:.2f}", f"<= {one['limit']:g}")
        rows.append((one["case"], one["peer"], *figures, said))
    return table(("case", "of", "seen", "limit", "holds"), rows)


def _rates(found: list[dict[str, Any]] | None) -> str:
    rows = [
        (
            one["case"],
            one["contender"],
            spread(one["requestsPerS"], "{:,.0f}"),
            f"{one['coreUsed']:.0%}",
        )
        for one in found or ()
    ]
    head = ("case", "contender", "requests a second", "of its core")
    return "The most on one core, in a closed loop:\n\n" + table(head, rows) if rows else ""


def _starts(found: list[dict[str, Any]] | None) -> str:
    rows = [(one["contender"], spread(one["seconds"], "{:.2f}")) for one in found or ()]
    title = "From the start of the process to the first answer, seconds:\n\n"
    return title + table(("contender", "seconds"), rows) if rows else ""


def _memory(found: list[dict[str, Any]] | None) -> str:
    rows = [
        (one["contender"], f"{one['idleMb']:.0f}", f"{one['afterMb']:.0f}", f"{one['requests']:,}")
        for one in found or ()
    ]
    head = ("contender", "idle", "after", "requests")
    return "Resident memory, MB:\n\n" + table(head, rows) if rows else ""


_MORE = {"max_rate": _rates, "cold_start": _starts, "memory": _memory}


def seed(results: Results) -> str:
    """`calinix bench`: every table, what the seed published beside it."""
    if "seed" not in results:
        return absent("seed")
    result = msgspec.convert(results["seed"], suite.Result)
    machine = result.machine
    lock = "with its global lock" if machine.gil else "without a global lock"
    parts = [
        source("seed", results["seed"]) + f" {machine.form}, Python {machine.python} {lock}.",
        *map(of_grid, suite.grids(result)),
        judged(result.findings),
    ]
    return "\n\n".join(parts)


def found_by(name: str) -> Callable[[Results], str]:
    """A section that is what its findings say."""

    def section(results: Results) -> str:
        if name not in results:
            return absent(name)
        return f"{source(name, results[name])}\n\n{judged(findings_of(results[name]))}"

    return section


def engines(results: Results) -> str:
    """Real vLLM pods: what is known of their caches, and pairs."""
    if "engine" not in results:
        return absent("engine")
    result = results["engine"]
    parts = [source("engine", result) + f" vLLM {result['vllm']}."]
    rows = []
    for one in result["agreements"]:
        for pod, (compared, equal, near) in one["by_pod"].items():
            rows.append((f"{one['name']}, {pod}", str(compared), str(equal), str(near)))
    head = ("predicted and counted cached tokens", "compared", "equal", "within a block")
    parts.append(table(head, rows))
    pairs = [
        (one, found["vllm"])
        for found in (result, results.get("engine_nixl", {"transferred": [], "vllm": ""}))
        for one in found["transferred"]
    ]
    rows = [
        (
            f"`{one['protocol']}`, vLLM {version}",
            f"{one['equal']} of {one['prompts']}",
            f"{one['moved_tokens']:.0f} of {one['prompt_tokens']}",
            f"{len(one['attacks'])}, " + ("both pods live" if one["alive"] else "a pod died"),
            one["unguarded"] or "-",
        )
        for one, version in pairs
    ]
    head = ("pairs", "answers as unified", "tokens moved", "forged handles", "sent past us")
    parts.append(table(head, rows))
    parts.append(judged([*findings_of(result), *_nixl(results)]))
    return "\n\n".join(parts)


def _nixl(results: Results) -> list[Finding]:
    return findings_of(results["engine_nixl"]) if "engine_nixl" in results else []


SECTIONS: dict[str, Callable[[Results], str]] = {
    "setting": setting,
    "peers": side_by_side("peers"),
    "proxy": side_by_side("proxy"),
    "seed": seed,
    "workers": found_by("workers"),
    "storm": found_by("storm"),
    "engines": engines,
}
"""Marker: what stands there."""


# ---- the page


def render(page: str, results: Results, folder: str = PAGE.stem) -> str:
    """The page with its sections made anew; its pictures lie in a folder beside it."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"there is no place for {name}")
        links = [
            f"![{title_of(svg)}]({folder}/{file})" for file, svg in pictures(name, results).items()
        ]
        section = "\n\n".join(filter(None, (make(results), "\n".join(links))))
        page = f"{before}{begin}{section}\n{end}{after}"
    return page


def title_of(svg: str) -> str:
    """What a picture says that it is."""
    return html.unescape(svg.partition('aria-label="')[2].partition('"')[0])


def main() -> int:
    """Writes the page and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE")
    arguments = parser.parse_args()
    results = load(arguments.results)
    folder = arguments.out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for section in SECTIONS:
        for name, svg in pictures(section, results).items():
            (folder / name).write_text(svg, "utf-8")
    page = render(PAGE.read_text("utf-8"), results, folder.name)
    arguments.out.write_text(page, "utf-8")
    print(f"written: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
