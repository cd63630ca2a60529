"""The index under contention: many threads that read it while others write to it.

The gateway has one thread, and no lock. This is the seed's scenario: 128 threads match prompts of
16 blocks against an index of 256 shards, each 1,000 times, while 32 threads store 250 prompts each.
With Python's global lock one thread runs at a time, and a call into the compiled index is never
interrupted: a figure is what one call takes, and, in the tail, that a thread lost its turn in the
middle of being timed. No bar is set. The index in Python is written to under a lock of its own.
"""

from __future__ import annotations

import random
import threading
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns

import msgspec

from calinix.bench import published
from calinix.bench.results import Grid, quantile
from calinix.core.kv import COMPILED, Chain, PrefixRegistry

READERS, WRITERS = 128, 32
READS, WRITES = 1000, 250
SHARDS, PODS = 256, 16
BLOCKS, PREFIX = 16, 12
"""Of a prompt, and of these as many as other prompts have too."""
KNOWN = 4096
"""Prompts that are stored before."""
CAPACITY_BLOCKS = 100_000


class IndexRow(msgspec.Struct, frozen=True, rename="camel"):
    """One kind of call, over all threads, in microseconds."""

    call: str
    threads: int
    calls: int
    p50_us: float
    p99_us: float
    max_us: float


def measure() -> list[IndexRow]:
    """Readers and writers at the same time."""
    rng = random.Random(1)
    registry = PrefixRegistry(256, SHARDS)
    for slot in range(PODS):
        registry.open_slot(slot, CAPACITY_BLOCKS)
    prefixes = [[rng.getrandbits(64) | 1 for _ in range(PREFIX)] for _ in range(256)]

    def chain() -> Chain:
        own = [rng.getrandbits(64) | 1 for _ in range(BLOCKS - PREFIX)]
        return Chain.of(rng.choice(prefixes) + own)

    known = [chain() for _ in range(KNOWN)]
    for number, one in enumerate(known):
        registry.route(number % PODS, one, number + 1)
    guard: AbstractContextManager[object] = nullcontext() if COMPILED else threading.Lock()
    together = threading.Barrier(READERS + WRITERS)
    reads: list[list[int]] = [[] for _ in range(READERS)]
    writes: list[list[int]] = [[] for _ in range(WRITERS)]
    threads = [
        threading.Thread(target=_read, args=(registry, known, number * 31, together, taken))
        for number, taken in enumerate(reads)
    ]
    for number, taken in enumerate(writes):
        fresh = [chain() for _ in range(WRITES)]
        threads.append(
            threading.Thread(
                target=_write, args=(registry, fresh, number % PODS, together, guard, taken)
            )
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [_row("match", reads), _row("store", writes)]


def _read(
    registry: PrefixRegistry,
    known: list[Chain],
    first: int,
    together: threading.Barrier,
    taken: list[int],
) -> None:
    everybody = (1 << PODS) - 1
    together.wait()
    for number in range(READS):
        one = known[(first + number * 7) % len(known)]
        began = perf_counter_ns()
        registry.match(one, everybody)
        taken.append(perf_counter_ns() - began)


def _write(
    registry: PrefixRegistry,
    fresh: list[Chain],
    slot: int,
    together: threading.Barrier,
    guard: AbstractContextManager[object],
    taken: list[int],
) -> None:
    together.wait()
    for number, one in enumerate(fresh):
        began = perf_counter_ns()
        with guard:
            registry.route(slot, one, KNOWN + number + 1)
        taken.append(perf_counter_ns() - began)


def _row(call: str, taken: list[list[int]]) -> IndexRow:
    every = [one for thread in taken for one in thread]
    return IndexRow(
        call=call,
        threads=len(taken),
        calls=len(every),
        p50_us=quantile(every, 0.5) / 1e3,
        p99_us=quantile(every, 0.99) / 1e3,
        max_us=max(every) / 1e3,
    )


def grid(rows: list[IndexRow], *, gil: bool) -> Grid:
    """The table."""
    seed = {"match": published.READ_US, "store": published.WRITE_US}
    lock = (
        "with Python's global lock: one thread runs at a time, so nothing here is parallel access"
        if gil
        else "without a global lock"
    )
    return Grid(
        "The index, readers and writers at once: microseconds a call",
        ("call", "threads", "calls", "p50", "p99", "most", "seed"),
        [
            (
                f"{row.call} {BLOCKS} blocks",
                str(row.threads),
                f"{row.calls:,}",
                f"{row.p50_us:.2f}",
                f"{row.p99_us:.2f}",
                f"{row.max_us:,.0f}",
                published.said(seed.get(row.call), about="< "),
            )
            for row in rows
        ],
        lock,
    )
