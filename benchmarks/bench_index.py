"""Memory and time of the prefix registry: chains, index and the mirrors of the pods.

    python benchmarks/bench_index.py [--quick] [--json [FILE]]

Every figure is taken in a fresh process. Memory is the growth of its resident set while distinct
blocks are stored, chains of 256 blocks each, mirrors and all tables included, divided by the
blocks. Times are CPU time of the best of several rounds, since anybody else on the machine only
adds to them; the median round stands beside it. The prompt is 32 KB in blocks of 128 bytes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from calinix.bench.results import Finding
from calinix.core import hashing, kv, registry
from calinix.core.hashing import Chain
from harness.machine import BENCHMARKS, describe_machine, write_json
from harness.tables import new_console

RESULTS = BENCHMARKS / "results" / "index.json"
PROMPT_BYTES, BLOCK_BYTES, CHAIN = 32_768, 128, 256
NEW_BLOCKS = 51
"""A fifth of the prompt is new, as in the proxy's benchmark."""
BLOCKS = 1_000_000
MAX_BYTES_PER_BLOCK = 128.0
MIN_STORES_PER_S = 3_000_000.0
MAX_HASH_US, MAX_ROUTE_US, MAX_DEPTHS_US, MAX_PAUSE_MS = 6.0, 15.0, 1.5, 2.0
NOISY = 1.25
"""When the median round takes this many times the best one, a missed limit proves nothing."""


class Figure(msgspec.Struct, frozen=True):
    """What one part came to."""

    best: float
    median: float


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _chains(count: int) -> list[Chain]:
    """Distinct chains of CHAIN blocks."""
    rng = random.Random(1)
    prompt = rng.randbytes(PROMPT_BYTES)
    return [kv.hash_bytes(rng.getrandbits(64), prompt, BLOCK_BYTES) for _ in range(count)]


def _memory(pods: int, quick: bool) -> Figure:
    """Bytes per block, the blocks spread evenly over the pods."""
    chains = _chains(BLOCKS // CHAIN // (10 if quick else 1))
    index = kv.PrefixRegistry(256, 256)
    for slot in range(pods):
        index.open_slot(slot, BLOCKS)
    before = _rss_bytes()
    for ticket, chain in enumerate(chains):
        index.route(ticket % pods, chain, ticket)
    figure = (_rss_bytes() - before) / (len(chains) * CHAIN)
    return Figure(figure, figure)


def memory_one(quick: bool) -> Figure:
    """Bytes per block, all blocks on one pod."""
    return _memory(1, quick)


def memory_ten(quick: bool) -> Figure:
    """Bytes per block, the blocks on ten pods."""
    return _memory(10, quick)


def _stores(capacity: int, quick: bool) -> Figure:
    """Blocks stored per second, from an empty registry on, growth included."""
    chains = _chains(BLOCKS // CHAIN // (10 if quick else 1))
    rates = []
    for _ in range(3 if quick else 7):
        index = kv.PrefixRegistry(256, 256)
        index.open_slot(0, capacity)
        began = time.thread_time()
        for ticket, chain in enumerate(chains):
            index.route(0, chain, ticket)
        rates.append(len(chains) * CHAIN / (time.thread_time() - began))
    return Figure(max(rates), statistics.median(rates))


def stores_growing(quick: bool) -> Figure:
    """Nothing is evicted: the tables grow all the time."""
    return _stores(BLOCKS, quick)


def stores_evicting(quick: bool) -> Figure:
    """The mirror is full after a tenth: each store evicts."""
    return _stores(BLOCKS // 10, quick)


def _time_us(call: Callable[[], object], quick: bool, seconds: float = 0.02) -> Figure:
    """CPU time of one call: best and median of many rounds."""
    began = time.thread_time()
    call()
    calls = max(1, int(seconds / max(time.thread_time() - began, 1e-6)))
    rounds = []
    for _ in range(15 if quick else 60):
        began = time.thread_time()
        for _ in range(calls):
            call()
        rounds.append((time.thread_time() - began) / calls * 1e6)
    return Figure(min(rounds), statistics.median(rounds))


def hash_prompt(quick: bool) -> Figure:
    """The chain of a 32 KB prompt."""
    prompt = random.Random(2).randbytes(PROMPT_BYTES)
    return _time_us(lambda: kv.hash_bytes(1, prompt, BLOCK_BYTES), quick)


def hash_prompt_reference(quick: bool) -> Figure:
    """The same without the compiled part."""
    prompt = random.Random(2).randbytes(PROMPT_BYTES)
    return _time_us(lambda: hashing.hash_bytes(1, prompt, BLOCK_BYTES), quick)


def _route(form: type[registry.PrefixRegistry], make: type[Chain], quick: bool) -> Figure:
    """Routing chains whose last NEW_BLOCKS blocks are new, into a mirror that is full."""
    rng = random.Random(3)
    shared = [rng.getrandbits(64) | 1 for _ in range(CHAIN - NEW_BLOCKS)]
    chains = [
        make.of(shared + [rng.getrandbits(64) | 1 for _ in range(NEW_BLOCKS)]) for _ in range(3_000)
    ]
    index = form(256, 256)
    index.open_slot(0, 100_000 if form is kv.PrefixRegistry else 10_000)
    rounds = []
    for number, _ in enumerate(range(4 if quick else 12)):
        began = time.thread_time()
        for ticket, chain in enumerate(chains):
            index.route(0, chain, ticket)
        if number > 0:
            rounds.append((time.thread_time() - began) / len(chains) * 1e6)
    assert index.blocks(0) > 5_000
    return Figure(min(rounds), statistics.median(rounds))


def route(quick: bool) -> Figure:
    """256 blocks, 51 of them new."""
    return _route(kv.PrefixRegistry, kv.Chain, quick)


def route_reference(quick: bool) -> Figure:
    """The same without the compiled part."""
    return _route(registry.PrefixRegistry, hashing.Chain, quick)


def _depths(
    form: type[registry.PrefixRegistry], make: type[Chain], groups: int, quick: bool
) -> Figure:
    """Looks up a chain of 256 blocks for 16 slots that hold `groups` different depths of it."""
    rng = random.Random(4)
    chain = make.of(rng.getrandbits(64) | 1 for _ in range(CHAIN))
    index = form(256, 256)
    for slot in range(16):
        index.open_slot(slot, 10_000)
        index.route(slot, chain.head(205 - slot % groups * 12), 1)
    slots, out = np.arange(16, dtype=np.int32), np.zeros(16)
    return _time_us(lambda: index.depths(chain, slots, out), quick)


def depths(quick: bool) -> Figure:
    """16 slots, four different depths."""
    return _depths(kv.PrefixRegistry, kv.Chain, 4, quick)


def depths_apart(quick: bool) -> Figure:
    """16 slots, no two of the same depth."""
    return _depths(kv.PrefixRegistry, kv.Chain, 16, quick)


def depths_reference(quick: bool) -> Figure:
    """16 slots, four depths, without the compiled part."""
    return _depths(registry.PrefixRegistry, hashing.Chain, 4, quick)


def pause(quick: bool) -> Figure:
    """The longest store of one block, in ms, on the way to 10^6 blocks: the calmest run counts."""
    clock = time.thread_time_ns
    chains = _chains(BLOCKS // CHAIN // (10 if quick else 1))
    longest = []
    for _ in range(3):
        index = kv.PrefixRegistry(256, 256)
        index.open_slot(0, BLOCKS)
        worst = 0
        for chain in chains:
            parent = None
            for block in chain:
                began = clock()
                index.stored(0, parent, (block,))
                worst = max(worst, clock() - began)
                parent = block
        longest.append(worst / 1e6)
    return Figure(min(longest), statistics.median(longest))


class Row(msgspec.Struct, frozen=True):
    """One line of the table: a part, how to show it, and its limit if it has one."""

    what: str
    part: Callable[[bool], Figure]
    unit: str
    form: str
    limit: float | None = None
    at_least: bool = False


ROWS = (
    Row("memory, one pod", memory_one, "bytes/block", "{:.1f}", MAX_BYTES_PER_BLOCK),
    Row("memory, ten pods", memory_ten, "bytes/block", "{:.1f}", MAX_BYTES_PER_BLOCK),
    Row("stores, growing", stores_growing, "blocks/s", "{:,.0f}", MIN_STORES_PER_S, True),
    Row("stores, evicting", stores_evicting, "blocks/s", "{:,.0f}", MIN_STORES_PER_S, True),
    Row("longest store of a block", pause, "ms", "{:.2f}", MAX_PAUSE_MS),
    Row("hash 32 KB", hash_prompt, "us", "{:.1f}", MAX_HASH_US),
    Row("route 256 blocks, 51 new", route, "us", "{:.1f}", MAX_ROUTE_US),
    Row("depths, 16 slots", depths, "us", "{:.2f}", MAX_DEPTHS_US),
    Row("depths, 16 slots apart", depths_apart, "us", "{:.2f}", MAX_DEPTHS_US),
    Row("hash 32 KB, uncompiled", hash_prompt_reference, "us", "{:,.0f}"),
    Row("route, uncompiled", route_reference, "us", "{:,.0f}"),
    Row("depths, 16 slots, uncompiled", depths_reference, "us", "{:,.1f}"),
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
    findings = judge(figures)
    table = Table(title="The prefix registry", title_justify="left")
    for name in ("", "best", "median", "unit", "bar", ""):
        table.add_column(name, justify="left" if name in {"", "unit"} else "right")
    verdicts = {True: "[green]holds[/green]", False: "[red]does not hold[/red]"}
    by_what = {one.what: one for one in findings}
    for row, figure in zip(ROWS, figures, strict=True):
        found = by_what.get(row.what)
        verdict = "" if found is None else verdicts.get(found.holds is True, "")
        if found is not None and found.holds is None:
            verdict = "[yellow]noisy[/yellow]"
        shown = (row.form.format(value) for value in (figure.best, figure.median))
        table.add_row(row.what, *shown, row.unit, "" if found is None else found.limit, verdict)
    console.print(table)
    if not kv.COMPILED:
        console.print("The compiled part is missing: bars are for the compiled form.", style="red")
    if arguments.json:
        results = {
            "method": __doc__,
            "machine": describe_machine(),
            "quick": arguments.quick,
            "compiled": kv.COMPILED,
            "findings": findings,
            "figures": {row.what: figure for row, figure in zip(ROWS, figures, strict=True)},
        }
        write_json(arguments.json, results)
        console.print(f"written: {arguments.json}", highlight=False)
    return int(any(one.holds is False for one in findings))


def _measure(number: int, quick: bool) -> Figure:
    command = [sys.executable, __file__, "--part", str(number), *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Figure)


def judge(figures: Sequence[Figure]) -> list[Finding]:
    """What must hold, against what was seen."""
    findings = []
    for row, figure in zip(ROWS, figures, strict=True):
        if row.limit is None:
            continue
        holds: bool | None = figure.best <= row.limit
        if row.at_least:
            holds = figure.best >= row.limit
        spread = max(figure.best, figure.median) / min(figure.best, figure.median)
        if not holds and spread > NOISY:
            holds = None
        bar = f"{'>=' if row.at_least else '<='} {row.form.format(row.limit)}"
        shown = f"{row.form.format(figure.best)} {row.unit}"
        findings.append(Finding(row.what, shown, bar, holds))
    return findings


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short rounds, not to be quoted")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, metavar="FILE")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
