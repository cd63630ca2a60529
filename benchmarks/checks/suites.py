"""Must-holds that are test suites: pytest runs them, and their counts are the figures."""

from __future__ import annotations

from collections.abc import Callable

from harness.acceptance import Context, Row, not_run, row, test_counts
from harness.machine import ROOT

NO_TESTS = 5
"""pytest's exit status when nothing was collected."""
TIMEOUT_S = 900.0


def suite(name: str, folder: str, keyword: str = "") -> Callable[[Context], list[Row]]:
    """A check that runs the tests of a folder, of a keyword if one is given."""
    what = f"pytest {folder}" + (f" -k {keyword}" if keyword else "")

    def look(context: Context) -> list[Row]:
        if not any((ROOT / folder).rglob("test_*.py")):
            return [not_run(what, "no such tests")]
        arguments = ["-m", "pytest", folder, "-q", "-p", "no:cacheprovider"]
        if keyword:
            arguments += ["-k", keyword]
        done = context.python(name, *arguments, timeout_s=TIMEOUT_S)
        if done.status == NO_TESTS:
            return [not_run(what, "no test has that keyword")]
        if done.status is None:
            return [row(what, False, f"not done within {TIMEOUT_S:.0f} s")]
        said = test_counts(done.output) or done.last_line
        return [row(what, done.status == 0, f"{said} in {done.seconds:.0f} s")]

    return look
