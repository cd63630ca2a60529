"""The two forms of the prefix registry and its hashes, for tests that run against both."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from calinix.core import hashing, kv, registry
from calinix.core.hashing import Chain
from calinix.core.registry import PrefixRegistry


class Form(NamedTuple):
    """One form: its chain and registry classes and its hash functions."""

    name: str
    chain: type[Chain]
    registry: type[PrefixRegistry]
    seed_of: Callable[[bytes], int]
    hash_bytes: Callable[..., Chain]
    hash_words: Callable[..., Chain]


REFERENCE = Form(
    "reference",
    hashing.Chain,
    registry.PrefixRegistry,
    hashing.seed_of,
    hashing.hash_bytes,
    hashing.hash_words,
)
CHOSEN = Form("compiled", kv.Chain, kv.PrefixRegistry, kv.seed_of, kv.hash_bytes, kv.hash_words)
FORMS = [REFERENCE, CHOSEN] if kv.COMPILED else [REFERENCE]
"""What is there to test: without a C compiler the reference alone."""


class Bench:
    """A registry of one form with slots 0 (4 blocks) and 1 (100 blocks) open."""

    def __init__(self, form: Form, max_pods: int = 8, shards: int = 4):
        self.form = form
        self.registry: PrefixRegistry = form.registry(max_pods, shards)
        self.registry.open_slot(0, 4)
        self.registry.open_slot(1, 100)

    def chain(self, *blocks: int) -> Chain:
        """A chain of these blocks."""
        return self.form.chain.of(blocks)

    def shown(self, slot: int) -> list[int]:
        """The blocks that are shown, most recently used first."""
        return [state[0] for state in self.registry.dump(slot) if not state[5]]

    def hidden(self, slot: int) -> set[int]:
        """The blocks that are hidden."""
        return {state[0] for state in self.registry.dump(slot) if state[5]}


def depths(registry: PrefixRegistry, chain: Chain, slots: list[int]) -> list[int]:
    """`registry.depths` with lists; its return value must be the largest of them."""
    out = np.full(len(slots), -1.0)
    deepest = registry.depths(chain, np.array(slots, dtype=np.int32), out)
    assert deepest == max(out, default=0)
    return [int(depth) for depth in out]
