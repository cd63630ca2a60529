"""A set of 256 pods in four forms: HostBitmap, a list of bool, a list of ints, a numpy array.

One operation is what a filter does: the candidates, those of them that are healthy and serve the
model, whether one pod is among them, and how many are left. Half of the pods are in each set. An
operation is timed by itself, the clock's own tenths of a microsecond included.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import msgspec
import numpy as np

from calinix.bench import published
from calinix.bench.results import Finding, Grid, at_most, quantile
from calinix.core import bitmap

PODS = 256
OPERATIONS, WARM_UP = 1000, 200
_PROBED = 77


class SetRow(msgspec.Struct, frozen=True, rename="camel"):
    """One form of a set."""

    form: str
    p50_us: float
    p99_us: float
    memory_bytes: int
    """Of one set of 128 pods, without the small ints and bools that Python shares."""


def measure(rounds: int) -> list[SetRow]:
    """Each form; of several rounds the one with the least p99."""
    rng = random.Random(1)
    picked = [rng.sample(range(PODS), PODS // 2) for _ in range(3)]
    return [
        _row(name, [make(slots) for slots in picked], work, rounds)
        for name, (make, work) in FORMS.items()
    ]


def _row(
    name: str, sets: list[Any], work: Callable[[Any, Any, Any], tuple[bool, int]], rounds: int
) -> SetRow:
    found = []
    for _ in range(rounds):
        taken = []
        for number in range(WARM_UP + OPERATIONS):
            began = perf_counter_ns()
            work(*sets)
            ended = perf_counter_ns()
            if number >= WARM_UP:
                taken.append(ended - began)
        found.append((quantile(taken, 0.99) / 1e3, quantile(taken, 0.5) / 1e3))
    p99_us, p50_us = min(found)
    return SetRow(name, p50_us, p99_us, sys.getsizeof(sets[0]))


def _bits(one: int, two: int, three: int) -> tuple[bool, int]:
    left = one & two & three
    return bitmap.contains(left, _PROBED), bitmap.count(left)


def _bools(one: list[bool], two: list[bool], three: list[bool]) -> tuple[bool, int]:
    left = [a and b and c for a, b, c in zip(one, two, three, strict=True)]
    return left[_PROBED], sum(left)


def _ints(one: list[int], two: list[int], three: list[int]) -> tuple[bool, int]:
    left = [slot for slot in one if slot in two and slot in three]
    return _PROBED in left, len(left)


def _array(one: Any, two: Any, three: Any) -> tuple[bool, int]:
    left = one & two & three
    return bool(left[_PROBED]), int(np.count_nonzero(left))


def _as_bools(slots: list[int]) -> list[bool]:
    return [slot in slots for slot in range(PODS)]


FORMS: dict[str, tuple[Callable[[list[int]], Any], Callable[[Any, Any, Any], tuple[bool, int]]]] = {
    "HostBitmap": (bitmap.of, _bits),
    "list of bool": (_as_bools, _bools),
    "list of ints": (sorted, _ints),
    "numpy array of bool": (lambda slots: np.array(_as_bools(slots)), _array),
}
"""(how it is made of slots, the operation)"""


def grid(rows: list[SetRow]) -> Grid:
    """The table."""
    first = rows[0]
    return Grid(
        f"A set of {PODS} pods: one filter step, in microseconds",
        ("form", "p50", "p99", "times", "bytes", "seed: p99", "bytes"),
        [
            (
                row.form,
                f"{row.p50_us:.2f}",
                f"{row.p99_us:.2f}",
                f"{row.p99_us / first.p99_us:.1f}",
                f"{row.memory_bytes:,}",
                published.said(published.SET_P99_US.get(row.form), "{:.3f}"),
                published.said(published.SET_BYTES.get(row.form)),
            )
            for row in rows
        ],
        "HostBitmap is a Python int here, four machine words in the compiled index",
    )


def findings(rows: list[SetRow]) -> list[Finding]:
    """HostBitmap is the quickest and the smallest."""
    first, others = rows[0], rows[1:]
    nearest = min(row.p99_us for row in others)
    smallest = min(row.memory_bytes for row in others)
    return [
        at_most("HostBitmap over the next form, p99", first.p99_us / nearest, 1.0),
        at_most("HostBitmap over the next form, bytes", first.memory_bytes / smallest, 1.0),
    ]
