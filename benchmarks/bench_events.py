"""Speed of KV events: block stores a second on one core, and what a storm of them costs requests.

    python benchmarks/bench_events.py [--quick] [--json [FILE]]

First, in a fresh process each, batches (one event of 8 blocks of 16 tokens, and the removals that
make room for them) go from their bytes to the index: decode, order, mirror, router. CPU time; the
best of several rounds counts, the median stands beside it. Memory is what the resident set grows
by while mirrors and index fill, per engine block.

Then a gateway serves a paced load while another process publishes 20,000 block stores a second of
its pods, and the same without events, in turns. The medians of their p99 are compared.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from calinix.bench.results import Finding
from calinix.config import CacheRegistry, Config, KvEvents, PodConfig, SingleUpstream, Upstreams
from calinix.core import kv
from calinix.core.router import Router
from calinix.engines.kv_events import Dialect, Message
from calinix.engines.kv_names import Namespaces
from calinix.engines.kv_pod import KvPod, KvPodSettings
from harness.kv_requests import LOADS, STORM_PER_S, Slice, storms
from harness.kv_storm import BLOCK_TOKENS, EVENT_BLOCKS, POD_BLOCKS, Pod
from harness.machine import BENCHMARKS, describe_machine, write_json
from harness.processes import BenchmarkError
from harness.tables import new_console

RESULTS = BENCHMARKS / "results" / "events.json"
PODS = 256
MIN_STORES_PER_S = 200_000.0
MAX_P99_RATIO = 2.0
NOISY = 1.25
OTHERS = 0.5
"""Cores that somebody else used during a slice: from there on it proves nothing."""


class Figure(msgspec.Struct, frozen=True):
    """What one part came to."""

    best: float
    median: float


def _told(pods: int) -> list[KvPod]:
    """Pods whose events reach a router."""
    configs = tuple(PodConfig(id=f"pod-{at}", url=f"http://p:{at + 1}") for at in range(pods))
    capacity = 2 * POD_BLOCKS * BLOCK_TOKENS
    router = Router(
        Config(
            upstreams=Upstreams(single=SingleUpstream(pods=configs)),
            cache_registry=CacheRegistry(kv_capacity_tokens=capacity),
            kv_events=KvEvents(apply="blocks"),
        ),
        random.Random(1),
    )
    namespaces = Namespaces(BLOCK_TOKENS)

    class Silent:
        def ask(self, first: int) -> bool:
            del first
            return False

        def hang_up(self) -> None:
            pass

        def waits(self) -> bool:
            return False

    def made(pod_id: str) -> KvPod:
        settings = KvPodSettings(
            pod_id=pod_id, model="bench", ranks=1, capacity_tokens=capacity, check_s=5.0,
            clears_only=False,
        )  # fmt: skip
        return KvPod(
            settings,
            namespaces,
            lambda event: router.observe(event, 1.0),
            lambda: router.epoch(pod_id),
            lambda _: Silent(),
        )

    return [made(pod.id) for pod in configs]


def _stores(quick: bool, pods: int, event_blocks: int, dialect: Dialect) -> Figure:
    """Block stores a second, caches full."""
    told = _told(pods)
    makers = [Pod(seed, event_blocks) for seed in range(pods)]
    fill = POD_BLOCKS // event_blocks * pods
    rounds = 3 if quick else 9
    count = 20_000 // (4 if quick else 1)
    at = 0

    def feed(batches: int) -> float:
        nonlocal at
        payloads = [makers[(at + n) % pods].batch(dialect) for n in range(batches)]
        messages = [Message(b"", (at + n) // pods, one) for n, one in enumerate(payloads)]
        began = time.thread_time()
        for number, message in enumerate(messages):
            told[(at + number) % pods].live(0, message, 1.0)
        took = time.thread_time() - began
        at += batches
        return took

    for _ in range(0, fill, count):
        feed(count)
    rates = [count * event_blocks / feed(count) for _ in range(rounds)]
    views = [pod.view() for pod in told]
    assert sum(view.stored for view in views) == at * event_blocks
    assert sum(view.orphans + view.malformed + view.lost_batches for view in views) == 0
    assert sum(view.removed for view in views) > 0
    return Figure(max(rates), statistics.median(rates))


def stores(quick: bool) -> Figure:
    """8 pods, 8 blocks an event."""
    return _stores(quick, 8, EVENT_BLOCKS, "maps")


def stores_many(quick: bool) -> Figure:
    """256 pods."""
    return _stores(quick, 16 if quick else PODS, EVENT_BLOCKS, "maps")


def stores_arrays(quick: bool) -> Figure:
    """The other dialect."""
    return _stores(quick, 8, EVENT_BLOCKS, "arrays")


def stores_single(quick: bool) -> Figure:
    """One block an event: most of the work is per event."""
    return _stores(quick, 8, 1, "maps")


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory(quick: bool) -> Figure:
    """Bytes per engine block, index included."""
    pods = 16 if quick else 128
    told = _told(pods)
    makers = [Pod(seed) for seed in range(pods)]
    before = _rss_bytes()
    batches = POD_BLOCKS // EVENT_BLOCKS
    for number in range(batches):
        for pod, maker in zip(told, makers, strict=True):
            pod.live(0, Message(b"", number, maker.batch()), 1.0)
    names = 8 * 4 + 120 / EVENT_BLOCKS
    figure = (_rss_bytes() - before) / (pods * POD_BLOCKS) - names
    return Figure(figure, figure)


class Row(msgspec.Struct, frozen=True):
    """One line of the table: a part, how to show it, and its limit if it has one."""

    what: str
    part: Callable[[bool], Figure]
    unit: str
    limit: float | None = None


ROWS = (
    Row("stores, 8 pods, 8 blocks an event", stores, "blocks/s", MIN_STORES_PER_S),
    Row("stores, 256 pods", stores_many, "blocks/s", MIN_STORES_PER_S),
    Row("stores, arrays as SGLang's", stores_arrays, "blocks/s", MIN_STORES_PER_S),
    Row("stores, 1 block an event", stores_single, "blocks/s"),
    Row("memory, mirror and index", memory, "bytes/block"),
)


def main() -> int:
    """The command line; 1 when something does not hold."""
    arguments = _arguments()
    if arguments.part is not None:
        figure = ROWS[arguments.part].part(arguments.quick)
        sys.stdout.buffer.write(msgspec.json.encode(figure))
        return 0
    console = new_console()
    figures = []
    for number, row in enumerate(ROWS):
        with console.status(row.what):
            figures.append(_measure(number, arguments.quick))
    findings = [
        _judge_stores(row, figure)
        for row, figure in zip(ROWS, figures, strict=True)
        if row.limit is not None
    ]
    slices: list[Slice] = []
    if not arguments.no_requests:
        try:
            slices = storms(arguments.calinix, console, quick=arguments.quick)
        except BenchmarkError as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            return 2
        findings += [_judge_requests(name, slices) for name, _ in LOADS]
    _print(console, figures, findings)
    if arguments.json:
        results = {
            "method": __doc__,
            "machine": describe_machine(),
            "quick": arguments.quick,
            "compiled": kv.COMPILED,
            "findings": findings,
            "figures": {row.what: figure for row, figure in zip(ROWS, figures, strict=True)},
            "slices": slices,
        }
        write_json(arguments.json, results)
        console.print(f"written: {arguments.json}", highlight=False)
    return int(any(one.holds is False for one in findings))


def _measure(number: int, quick: bool) -> Figure:
    command = [sys.executable, __file__, "--part", str(number), *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Figure)


def _judge_stores(row: Row, figure: Figure) -> Finding:
    assert row.limit is not None
    holds: bool | None = figure.best >= row.limit
    if not holds and figure.best / figure.median > NOISY:
        holds = None
    return Finding(row.what, f"{figure.best:,.0f} {row.unit}", f">= {row.limit:,.0f}", holds)


def _judge_requests(name: str, slices: list[Slice]) -> Finding:
    """The medians of p99, with a storm and without."""
    calm = [one for one in slices if one.load == name and not one.storm]
    storm = [one for one in slices if one.load == name and one.storm]
    before = statistics.median([one.p99_us for one in calm])
    after = statistics.median([one.p99_us for one in storm])
    stored = statistics.median([one.stored_per_s for one in storm])
    holds: bool | None = after <= MAX_P99_RATIO * before
    whole = not any(one.faults for one in slices) and stored > 0.8 * STORM_PER_S
    if not whole:
        holds = False
    elif not holds and statistics.median([one.other for one in slices]) > OTHERS:
        holds = None
    return Finding(
        f"p99 at {STORM_PER_S:,} stores/s, {name} load",
        f"{after:.0f} us after {before:.0f} us: {after / before:.2f} ({stored:,.0f} stored/s)",
        f"<= {MAX_P99_RATIO:g} times",
        holds,
    )


def _print(console: Console, figures: list[Figure], findings: list[Finding]) -> None:
    table = Table(title="KV events", title_justify="left")
    for name in ("", "best", "median", "unit", "bar", ""):
        table.add_column(name, justify="left" if name in {"", "unit"} else "right")
    verdicts = {True: "[green]holds[/green]", False: "[red]does not hold[/red]"}
    by_what = {one.what: one for one in findings}
    for row, figure in zip(ROWS, figures, strict=True):
        found = by_what.pop(row.what, None)
        verdict = "" if found is None else verdicts.get(found.holds is True, "")
        limit = "" if found is None else found.limit
        table.add_row(
            row.what, f"{figure.best:,.0f}", f"{figure.median:,.0f}", row.unit, limit, verdict
        )
    for found in by_what.values():
        verdict = "[yellow]noisy[/yellow]" if found.holds is None else verdicts[found.holds is True]
        table.add_row(found.what, found.figure, "", "", found.limit, verdict)
    console.print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short rounds, not to be quoted")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, metavar="FILE")
    parser.add_argument("--no-requests", action="store_true", help="only the stores")
    parser.add_argument(
        "--calinix",
        default=str(Path(sys.executable).with_name("calinix")),
        help="the gateway's command line",
    )
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
