"""Replay of public traces: arrivals, sizes and, where the trace has them, prompt blocks.

The files are carried in the package (data/traces), each with its licence and source.
"""

from __future__ import annotations

import csv
import functools
import lzma
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib import resources
from typing import Literal

import msgspec

from calinix.sim.workload import SimRequest

TraceName = Literal[
    "conversation_trace.jsonl",
    "synthetic_trace.jsonl",
    "AzureLLMInferenceTrace_conv.csv",
    "AzureLLMInferenceTrace_code.csv",
]
MOONCAKE_BLOCK_TOKENS = 512
_TICK_S = 3.0
"""Mooncake's timestamps are rounded down to this."""
_OWN_BLOCKS = 1 << 40
"""Ids from here on are nobody else's."""


class Row(msgspec.Struct, frozen=True):
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of its prompt's blocks, the last of which may be partial; empty: not known."""


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@functools.lru_cache(maxsize=2)
def rows_of(trace: TraceName) -> tuple[Row, ...]:
    """The rows of a trace in the package, in order of time."""
    packed = resources.files("calinix").joinpath(f"data/traces/{trace}.xz").read_bytes()
    text = lzma.decompress(packed)
    return _mooncake(text) if trace.endswith(".jsonl") else _azure(text.decode())


def _mooncake(text: bytes) -> tuple[Row, ...]:
    read = msgspec.json.Decoder(_Line).decode
    return tuple(
        Row(line.timestamp / 1e3, line.input_length, line.output_length, line.hash_ids)
        for line in map(read, text.splitlines())
    )


def _azure(text: str) -> tuple[Row, ...]:
    lines = csv.reader(text.splitlines()[1:])
    found = [(_seconds(at), int(prompt), int(output)) for at, prompt, output in lines]
    first_s = found[0][0]
    return tuple(Row(at_s - first_s, max(1, p), max(1, o)) for at_s, p, o in found)


def _seconds(text: str) -> float:
    """`2023-11-16 18:17:03.9799600` in seconds; the seventh decimal is beyond datetime."""
    return datetime.fromisoformat(f"{text[:26]}+00:00").timestamp()


class TraceWorkload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A trace, its time compressed by the load.

    Mooncake's arrivals come in ticks of three seconds: each is moved by a seeded U(0, 3) s.
    Requests of a trace without blocks share nothing.
    """

    trace: TraceName
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    limit: int | None = None
    """Only the first so many requests."""

    @property
    def requests(self) -> int:
        """How many there will be."""
        count = len(rows_of(self.trace))
        return count if self.limit is None else min(count, self.limit)

    def arrivals(self, rng: random.Random, load: float) -> Iterator[SimRequest]:
        """Requests in order of arrival."""
        rows = rows_of(self.trace)[: self.limit]
        tick_s = _TICK_S if rows[0].blocks else 0.0
        timed = [(row.at_s + tick_s * rng.random(), number) for number, row in enumerate(rows)]
        timed.sort()
        size = self.block_tokens
        next_block = _OWN_BLOCKS
        for at_s, number in timed:
            row = rows[number]
            full = row.prompt_tokens // size
            chain: Sequence[int] = row.blocks[:full]
            if not row.blocks:
                chain = range(next_block, next_block + full)
                next_block += full
            yield SimRequest(at_s / load, row.prompt_tokens, max(1, row.output_tokens), chain)
