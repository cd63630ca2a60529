"""A storm of KV events and a storm of unique prompts together: memory, latency, leases.

    python benchmarks/bench_storm.py [--quick] [--json [FILE]]

A gateway serves 600 prompts of 2048 characters a second that never repeat, and streams beside
them, for 60 s; meanwhile its pods publish 20,000 block stores a second. Before that, a fresh
gateway of the same configuration serves the same load without events. Compared is p99 of the
prompts; the resident set is looked at five times a second. The streams are cut off in the middle
of their answers at the end: then no lease may be left.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from calinix.bench.results import Finding
from harness.contenders import calinix_contender, new_setup, started
from harness.kv_requests import STORM_PER_S, publish, stored
from harness.kv_storm import BLOCK_TOKENS, POD_BLOCKS
from harness.machine import BENCHMARKS, choose_cores, describe_machine, free_port, write_json
from harness.processes import BenchmarkError, Children, get, rss_mb
from harness.tables import new_console
from harness.tools import POD_COUNT, Load, Loadgen, build_tools, start_load, start_mock_pods

RESULTS = BENCHMARKS / "results" / "storm.json"
SECONDS, QUICK_SECONDS = 60.0, 12.0
PROMPTS = ("-c", "16", "-r", "600", "-n", "2048", "-S", "0")
STREAMS = ("-c", "8", "-s", "-t", "50", "-g", "20000", "-n", "512", "-S", "0", "-m", "streams")
CAPACITY_TOKENS = 2 * POD_BLOCKS * BLOCK_TOKENS
"""Of each pod: full after a few seconds of either storm."""
MAX_P99_RATIO = 2.0
GROWTH_MB = 4.0
"""How much more memory the last third of the run may show than the second."""
SAMPLE_S = 0.2
LEAST_SAMPLES = 12
LEASES_S = 5.0
OTHERS = 0.5
"""Cores that somebody else used meanwhile: from there on latencies prove nothing."""


class Seen(msgspec.Struct, frozen=True):
    """One run, with or without events."""

    prompts: Load
    streams: Load
    rss_mb: list[float]
    stored_per_s: float
    open_leases: int
    max_tick_lag_s: float
    sources: list[str]
    """By pod, what is believed of its cache stands on."""


class _State(msgspec.Struct, frozen=True, rename="camel"):
    open_leases: int
    inflight: int
    max_tick_lag_seconds: float


def measure(program: str, console: Console, seconds: float, *, storm: bool) -> Seen:
    """One run on a fresh gateway."""
    cores = choose_cores()
    if cores.warning:
        console.print(f"[bold red]Latencies are not to be trusted: {cores.warning}.[/bold red]")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    gateway = calinix_contender(
        program,
        kvEvents={"bind": endpoint, "apply": "blocks"},
        cacheRegistry={"kvCapacityTokens": CAPACITY_TOKENS},
    )
    words = f"{seconds:g} s {'with' if storm else 'without'} events"
    with (
        Children() as children,
        tempfile.TemporaryDirectory(prefix="calinix-bench-") as name,
        console.status(words),
    ):
        folder = Path(name)
        pods = start_mock_pods(children, cores, folder)
        setup = new_setup(pods.ports, folder / "gateway")
        with started(children, gateway, setup, cores.proxy) as proxy:
            if storm:
                publish(children, cores, folder, endpoint, seconds + 3)

            def load(name: str, arguments: tuple[str, ...], longer_s: float = 0.0) -> Loadgen:
                return start_load(
                    children, cores, folder, setup.port, seconds=seconds + longer_s,
                    warm_up_s=0.5, arguments=arguments, name=name, watched=proxy.pids(),
                )  # fmt: skip

            before, began = stored(setup.admin_port), time.monotonic()
            streams = load("streams", STREAMS, 60.0)
            prompts = load("prompts", PROMPTS)
            samples = []
            while prompts.is_running and time.monotonic() < began + seconds + 30.0:
                samples.append(rss_mb(proxy.pids()))
                time.sleep(SAMPLE_S)
            stored_per_s = (stored(setup.admin_port) - before) / (time.monotonic() - began)
            found, cut = prompts.result(), streams.stop()
            state = _settled(setup.admin_port)
            views = msgspec.json.decode(get(setup.admin_port, "/admin/pods")[1])["pods"]
    return Seen(
        found, cut, samples, round(stored_per_s), max(state.open_leases, state.inflight),
        state.max_tick_lag_seconds, [pod["kv"]["source"] for pod in views],
    )  # fmt: skip


def _settled(admin_port: int) -> _State:
    """The gateway's state when nothing is under way any more, or after a while."""
    deadline = time.monotonic() + LEASES_S
    while True:
        state = msgspec.json.decode(get(admin_port, "/admin/state")[1], type=_State)
        if state.open_leases == state.inflight == 0 or time.monotonic() > deadline:
            return state
        time.sleep(0.05)


def judge(calm: Seen, storm: Seen, seconds: float) -> list[Finding]:
    """What must hold, against what was seen."""
    faults = sum(seen.prompts.faults + seen.streams.bad for seen in (calm, storm))
    before, after = calm.prompts.p99, storm.prompts.p99
    is_noisy = max(calm.prompts.other, storm.prompts.other) > OTHERS
    holds = after <= MAX_P99_RATIO * before
    rss = storm.rss_mb
    second, last = rss[len(rss) // 3 : 2 * len(rss) // 3], rss[2 * len(rss) // 3 :]
    growth = max(last, default=0.0) - max(second, default=0.0)
    return [
        Finding(
            "every answer 200 and whole",
            f"{calm.prompts.requests:,} and {storm.prompts.requests:,} requests, {faults} faults",
            "0 faults",
            faults == 0 and storm.prompts.is_whole,
        ),
        Finding(
            "events are taken in as fast as they come",
            f"{storm.stored_per_s:,.0f} stored/s of {POD_COUNT} pods, "
            f"sources: {', '.join(sorted(set(storm.sources)))}",
            f">= {0.9 * STORM_PER_S:,.0f}, events",
            set(storm.sources) == {"events"} and storm.stored_per_s >= 0.9 * STORM_PER_S,
        ),
        Finding(
            f"p99 at {STORM_PER_S:,} stores/s and {storm.prompts.rps:,.0f} unique prompts/s",
            f"{after:.0f} us after {before:.0f} us: {after / before:.2f}",
            f"<= {MAX_P99_RATIO:g} times",
            None if is_noisy and not holds else holds,
        ),
        Finding(
            f"memory flat over {seconds:g} s",
            f"{growth:+.1f} MB from the second to the last third ({max(rss, default=0.0):.0f} MB; "
            f"{max(calm.rss_mb, default=0.0):.0f} without events)",
            f"{GROWTH_MB:+.1f} MB",
            len(rss) >= LEAST_SAMPLES and growth <= GROWTH_MB,
        ),
        Finding(
            "leases left, streams cut in the middle",
            f"{calm.open_leases} and {storm.open_leases}",
            "0",
            calm.open_leases == storm.open_leases == 0,
        ),
    ]


def main() -> int:
    """The command line; 1 when something does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="12 s each, not to be quoted")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, metavar="FILE")
    calinix = Path(sys.executable).with_name("calinix")
    parser.add_argument("--calinix", default=str(calinix), help="the gateway's command line")
    arguments = parser.parse_args()
    console = new_console()
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    try:
        build_tools()
        calm, storm = (
            measure(arguments.calinix, console, seconds, storm=storm) for storm in (False, True)
        )
    except BenchmarkError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130
    findings = judge(calm, storm, seconds)
    table = Table(title="Events and unique prompts together", title_justify="left")
    for name in ("must hold", "seen", "at most / at least", ""):
        table.add_column(name)
    verdicts = {True: "[green]holds[/green]", False: "[red]does not hold[/red]"}
    for one in findings:
        verdict = "[yellow]noisy[/yellow]" if one.holds is None else verdicts[one.holds]
        table.add_row(one.what, one.figure, one.limit, verdict)
    console.print(table)
    if arguments.json:
        head = {"method": __doc__, "machine": describe_machine(), "quick": arguments.quick}
        write_json(
            arguments.json,
            head | {"seconds": seconds, "findings": findings, "calm": calm, "storm": storm},
        )
    return int(any(one.holds is False for one in findings))


if __name__ == "__main__":
    sys.exit(main())
