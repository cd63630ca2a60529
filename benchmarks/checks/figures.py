"""Must-holds that are figures: each benchmark is run, and its JSON read against the bars."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from harness.acceptance import Context, Row, not_run, row
from harness.compare import Ratio
from harness.machine import BENCHMARKS

TIMEOUT_S = 3600.0


class _Finding(msgspec.Struct, frozen=True):
    what: str
    figure: str | float
    limit: str | float
    holds: bool | None


class _Findings(msgspec.Struct, frozen=True):
    """The part of a benchmark's JSON that says what holds."""

    findings: list[_Finding]


class _Ratios(msgspec.Struct, frozen=True):
    ratios: list[Ratio]


def findings(script: str) -> Callable[[Context], list[Row]]:
    """A check that runs benchmarks/SCRIPT.py; its JSON lists what was found as `findings`."""

    def look(context: Context) -> list[Row]:
        results, why = _run(context, script)
        if results is None:
            return [why]
        found = msgspec.json.decode(results.read_bytes(), type=_Findings).findings
        rows = []
        for one in found:
            figures = f"{one.figure}; bar: {one.limit}"
            if one.holds is None:
                rows.append(not_run(one.what, f"the machine was too noisy: {figures}"))
            else:
                rows.append(row(one.what, one.holds, figures))
        return rows

    return look


def speed(context: Context) -> list[Row]:
    """CPU per request of the gateway over its peers', against each bar."""
    results, why = _run(context, "bench_proxy")
    if results is None:
        return [why]
    rows = []
    for one in msgspec.json.decode(results.read_bytes(), type=_Ratios).ratios:
        if one.limit is None or one.holds is None:
            continue
        what = f"{one.case}: CPU over that of {one.peer}"
        spread = one.ratio
        figures = f"{spread.median:.2f} ({spread.min:.2f} to {spread.max:.2f}), bar {one.limit:.2f}"
        if one.noisy:
            rows.append(not_run(what, f"the machine was too noisy: {figures}"))
        else:
            rows.append(row(what, one.holds, figures))
    return rows or [row("CPU per request", False, "nothing was compared")]


def _run(context: Context, script: str) -> tuple[Path | None, Row]:
    """The JSON file that the benchmark wrote, or none and a line that says why."""
    path = BENCHMARKS / f"{script}.py"
    results = context.results / f"{script.removeprefix('bench_')}.json"
    if not path.exists():
        return None, not_run(script, "no such benchmark")
    results.unlink(missing_ok=True)
    arguments = [str(path), "--json", str(results)]
    if context.quick:
        arguments.append("--quick")
    done = context.benchmark(script, *arguments, timeout_s=TIMEOUT_S)
    if results.exists():
        return results, row(script, True, "")
    return None, row(script, False, f"exit {done.status}: {done.last_line}")
