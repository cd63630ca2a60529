"""What the first Calinix, a Rust program, published of the same scenarios, to stand beside ours.

16 synthetic pods, an index of 256 shards, 1,000 operations per level, on a machine that it does not
name: figures of two machines side by side say how large things are, not which machine is faster.
"""

from __future__ import annotations

DECISION_AVG_US = {1: 273.0, 12: 534.0, 128: 2451.0}
"""Mean latency of a routing decision, by callers."""
DECISION_P50_US = {128: 454.0}
DECISIONS_PER_S = 18_000.0
"""About, with 12 callers and more."""
READ_US, WRITE_US = 2.0, 70.0
"""Of the index, with 128 readers and 32 writers: less than these."""
SET_P99_US = {"HostBitmap": 1.042, "list of bool": 3.521, "list of ints": 6.060}
"""Its own [u64; 4], [bool; 256] and Vec<usize>."""
SET_BYTES = {"HostBitmap": 32, "list of bool": 256, "list of ints": 2048}
JAIN = {"cacheAware": 0.751, "cacheOnly": 0.076}
"""Of requests per pod, nine tenths of them with one prefix."""
HIT_RATE = {"cacheAware": 1.0}
"""About."""


def said(value: float | None, form: str = "{:,.0f}", about: str = "") -> str:
    """A published figure in a table; a dash where none was published."""
    return "-" if value is None else about + form.format(value)
