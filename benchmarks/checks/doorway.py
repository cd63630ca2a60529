"""The doorway: what a stranger types first, in a fresh clone in an empty folder."""

from __future__ import annotations

from pathlib import Path

from harness.acceptance import Context, Row, not_run, row, test_counts
from harness.machine import output_of

MAKE_TIMEOUT_S = 1500.0
DEMO_TIMEOUT_S = 120.0
SECOND_TIME_S = 5.0


def fresh_clone(context: Context) -> list[Row]:
    """Clones what is committed, then `make test`, the second make, and the demo."""
    clone = context.scratch / "clone"
    cloned = context.run("clone", ("git", "clone", "--quiet", ".", str(clone)), timeout_s=120)
    if cloned.status != 0:
        return [not_run("make test", f"git clone: {cloned.last_line}")]
    changed = output_of("git", "status", "--porcelain")
    commit = output_of("git", "rev-parse", "--short", "HEAD")
    where = f"commit {commit}" + (" (the tree has more than that)" if changed else "")
    tests = context.run("make-test", ("make", "test"), timeout_s=MAKE_TIMEOUT_S, folder=clone)
    said = test_counts(tests.output) or tests.last_line
    rows = [
        row("make test", tests.status == 0, f"{said}, {tests.seconds:.0f} s from nothing, {where}")
    ]
    if not (clone / ".venv" / "bin" / "calinix").exists():
        return [*rows, not_run("make demo", "no environment was built")]
    again = context.run("make-again", ("make", ".venv/.ready"), timeout_s=300, folder=clone)
    quick = again.status == 0 and again.seconds < SECOND_TIME_S
    rows.append(row("the second make is quick", quick, f"{again.seconds:.1f} s"))
    return [*rows, _demo(context, clone)]


def _demo(context: Context, clone: Path) -> Row:
    command: tuple[str, ...] = ("make", "demo")
    if context.quick:
        command = (str(clone / ".venv" / "bin" / "calinix"), "demo", "--seconds", "10")
    done = context.run("demo", command, timeout_s=DEMO_TIMEOUT_S, folder=clone)
    # Whatever the demo started lives in the clone's environment.
    left = output_of("pgrep", "-f", str(clone / ".venv" / "bin")).split()
    figures = f"exit {done.status} after {done.seconds:.0f} s, {len(left)} processes left"
    return row("demo", done.status == 0 and not left, figures)
