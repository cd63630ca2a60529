"""`calinix simulate`: what may be asked of it; cli_rehearsal.py does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MOST_SEEDS = 1000
SIMULATE_NOTES = """\
Three strategies on an hour of public chat traffic, with pictures:

calinix simulate mooncake-conversation --strategy predictive,powerOfTwo,smgCacheAware --out run

Settings, of all runs or of one: --set scenario.noise=0.2, --strategy 'NAME:controller.mode=literal'

Of the scenario: requests, noise, streamedShare, gateways, syncS, lateS, speeds.

Baselines, for here only: smgCacheAware, dynamoCost, llmdDefault, aibrixPrefix, clairvoyant
"""


def simulate(
    scenario: Annotated[str, typer.Argument(help="One of those that --list shows.")] = "",
    strategy: Annotated[
        str, typer.Option(help="One or several, with commas between; `all` is all of them.")
    ] = "predictive,powerOfTwo",
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Runs of each.")] = 1,
    load: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="Times the workload's own rate.")
    ] = None,
    pods: Annotated[int | None, typer.Option(min=1, max=4096, help="Pods in all.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE of the gateway's file, or of the scenario; repeat."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures there.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for report.html and results.json.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=256, help="At a time; by default one a core.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Describe the scenarios.")] = False,
) -> None:
    """Rehearse routing on simulated pods: the router is the real one, only time is not.

    Equal seeds give equal results, on any number of processes.
    """
    # Not at the top: no other command needs what this one does.
    from calinix import cli_rehearsal as rehearsal  # noqa: PLC0415

    if list_:
        rehearsal.describe()
        return
    rehearsal.rehearse(
        rehearsal.Wanted(
            scenario=scenario,
            strategies=strategy,
            seeds=seeds,
            load=load,
            pods=pods,
            changes=";".join(set_ or ()),
            processes=processes,
            json=json,
            out=out,
        )
    )
