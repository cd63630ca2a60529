"""`calinix bench`: what may be asked of it; cli_scenarios.py does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BENCH_NOTES = """\
decision: microseconds from enqueue to plan, for 1 to 128 callers on one loop, 16 to 256 pods

index: 128 threads read it while 32 write to it; bitmap: a set of pods in four forms

fairness: 90 % of the requests share a prefix; staleness: load that is known late (both simulated)

A minute for all of it; some seconds for one: calinix bench --only decision --quick

Bars are for the compiled form, as pip installs it where there is a C compiler.
"""


def bench(
    only: Annotated[
        str, typer.Option(help="Scenarios, with commas between; by default all.")
    ] = "decision,index,bitmap,fairness,staleness",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds and seeds; not for quoting.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the figures there.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="End with 1 when a bar does not hold.")
    ] = False,
) -> None:
    """Time routing decisions in this process, with the first Calinix's figures beside them.

    Nothing is sent anywhere: the router is the real one, pods are names or simulated.
    """
    # Not at the top: no other command needs what this one does.
    from calinix.cli_scenarios import run  # noqa: PLC0415

    run(only, quick=quick, json=json, check=check)
