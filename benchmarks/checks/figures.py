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
    findings: list[_Finding]


def findings(script: str) -> Callable[[Context], list[Row]]:
    """A check that runs benchmarks/SCRIPT.py; its JSON lists what was found as `findings`."""
    return _findings(lambda context: _run(context, script))


def command_findings(name: str) -> Callable[[Context], list[Row]]:
    """The same of a command, `calinix NAME`."""
    return _findings(lambda context: _written(context, name, "-m", "calinix", name))


def _findings(
    run: Callable[[Context], tuple[Path | None, Row]],
) -> Callable[[Context], list[Row]]:
    def look(context: Context) -> list[Row]:
        results, why = run(context)
        if results is None:
            return [why]
        found = msgspec.json.decode(results.read_bytes(), type=_Findings).findings
        return [_row(one) for one in found]

    return look


def _row(one: _Finding) -> Row:
    figures = f"{one.figure}; bar: {one.limit}"
    if one.holds is None:
        return not_run(one.what, f"the machine was too noisy: {figures}")
    return row(one.what, one.holds, figures)


def peers(context: Context) -> list[Row]:
    """CPU and latency of the gateway over its peers', against each bar."""
    results, why = _run(context, "bench_peers")
    if results is None:
        return [why]
    rows = []
    compared = msgspec.json.decode(results.read_bytes(), type=_Ratios)
    for one in compared.ratios:
        if one.limit is None or one.holds is None:
            continue
        what = f"{one.case}: over {one.peer}"
        spread = one.ratio
        figures = f"{spread.median:.2f} ({spread.min:.2f} to {spread.max:.2f}), bar {one.limit:.2f}"
        if one.noisy:
            rows.append(not_run(what, f"the machine was too noisy: {figures}"))
        else:
            rows.append(row(what, one.holds, figures))
    rows += [_row(one) for one in compared.findings]
    return rows or [row("side by side", False, "nothing was compared")]


def _run(context: Context, script: str) -> tuple[Path | None, Row]:
    """The JSON file that the benchmark wrote, or none and a line that says why."""
    path = BENCHMARKS / f"{script}.py"
    if not path.exists():
        return None, not_run(script, "no such benchmark")
    return _written(context, script, str(path))


def _written(context: Context, name: str, *command: str) -> tuple[Path | None, Row]:
    """The same of what Python is told to run."""
    results = context.results / f"{name.removeprefix('bench_')}.json"
    results.unlink(missing_ok=True)
    arguments = [*command, "--json", str(results)]
    if context.quick:
        arguments.append("--quick")
    done = context.benchmark(name, *arguments, timeout_s=TIMEOUT_S)
    if results.exists():
        return results, row(name, True, "")
    return None, row(name, False, f"exit {done.status}: {done.last_line}")
