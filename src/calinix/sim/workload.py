"""What clients ask: requests with their arrival, sizes and prompt blocks. Workloads make them.

A prompt is known by its blocks: equal ids are equal tokens with equal tokens before them. The
router gets them as token ids, the pods as chains; both see the same prefixes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

_WORD_TOKENS = 2
"""Token ids that one block id fills when it is written out."""


class SimRequest:
    """One request."""

    __slots__ = (
        "arrival_s",
        "chain",
        "follow",
        "output_tokens",
        "prompt_tokens",
        "session_key",
        "streamed",
    )  # fmt: skip

    def __init__(
        self,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        chain: Sequence[int],
        session_key: str | None = None,
        follow: Callable[[float], SimRequest | None] | None = None,
    ):
        self.arrival_s = arrival_s
        """Seconds on the virtual clock."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """At least 1."""
        self.chain = chain
        """Ids of the full blocks of prompt and, where somebody may ask on, its answer."""
        self.session_key = session_key
        self.streamed = True
        self.follow = follow
        """Called with the time of its good end: what the same client asks next."""


class Workload(Protocol):
    """Makes requests."""

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the chains; even."""
        ...

    @property
    def requests(self) -> int:
        """How many there will be, follow-ups included; for progress only."""
        ...

    def arrivals(self, rng: random.Random, load: float) -> Iterator[SimRequest]:
        """Requests in order of arrival, at `load` times the workload's own rate."""
        ...


def prompt_bytes(chain: Sequence[int], prompt_tokens: int, block_tokens: int, tail: int) -> bytes:
    """The prompt as little-endian u32 token ids; `tail` fills what is no full block."""
    full = prompt_tokens // block_tokens
    repeats = block_tokens // _WORD_TOKENS
    parts = [block.to_bytes(8, "little") * repeats for block in chain[:full]]
    rest = prompt_tokens - full * block_tokens
    if rest:
        parts.append((tail & 0xFFFFFFFF).to_bytes(4, "little") * rest)
    return b"".join(parts)
