"""A pod's KV blocks: pinned by jobs, shared by prefix, kept as an LRU cache when nobody pins them.

Pure. A block is known by its chain hash: the hash of everything from the prompt's start to its
end, with model, LoRA and cache salt as the chain's first state.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol


class Watcher(Protocol):
    """Who is told what becomes of cached blocks."""

    def stored(self, chain: Sequence[int], position: int) -> None:
        """The block at this place of a chain is cached from now on."""
        ...

    def removed(self, block: int) -> None:
        """The block was evicted."""
        ...

    def cleared(self) -> None:
        """Nothing is cached any more."""
        ...


def chain_of(namespace: bytes, tokens: Sequence[int], block_size: int) -> list[int]:
    """The chain hashes of the full blocks of `tokens`. Nothing is shared across namespaces."""
    state = int.from_bytes(hashlib.blake2b(namespace, digest_size=8).digest(), "little")
    chain = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        state = hash((state, *tokens[start : start + block_size]))
        chain.append(state)
    return chain


class Block:
    """One block: its number, the jobs that hold it, and what it holds once that is computed."""

    __slots__ = ("chain_hash", "number", "pins")

    def __init__(self, number: int):
        self.number = number
        self.pins = 1
        self.chain_hash: int | None = None

    def __repr__(self) -> str:
        return f"Block({self.number}, pins={self.pins}, chain_hash={self.chain_hash})"


class KvBlocks:
    """A fixed number of blocks. Numbers start at 1: engines keep block 0 for themselves.

    Jobs can hold all of them, or at most `room`: what is more is a second tier (host memory)
    that only keeps what is cached.
    """

    def __init__(self, capacity: int, room: int | None = None):
        self.capacity = capacity
        self.room = capacity if room is None else min(room, capacity)
        self._fresh = 0
        self._numbers: list[int] = []
        self._known: dict[int, Block] = {}
        self.watcher: Watcher | None = None
        # Ordered: finding the first entry of a plain dict walks over all that were deleted.
        self._unpinned: OrderedDict[int, Block] = OrderedDict()

    @property
    def used(self) -> int:
        """Blocks that some job holds."""
        return self._fresh - len(self._numbers) - len(self._unpinned)

    @property
    def cached(self) -> int:
        """Blocks whose content is known, pinned or not."""
        return len(self._known)

    def match(self, chain: Sequence[int]) -> int:
        """How many leading blocks of the chain are here."""
        for depth, chain_hash in enumerate(chain):
            if chain_hash not in self._known:
                return depth
        return len(chain)

    def allocate(self, chain: Sequence[int], count: int) -> tuple[list[Block], int] | None:
        """Pins `count` blocks: the leading ones of `chain` that are here, then fresh ones.

        Returns them and the number of hits, or None (and nothing changed) when there is no room.
        """
        known = self._known
        hits = [known[chain_hash] for chain_hash in chain[: self.match(chain)]]
        fresh = count - len(hits)
        unpinned_hits = sum([block.pins == 0 for block in hits])
        if self.used + fresh + unpinned_hits > self.room:
            return None
        for block in hits:
            if block.pins == 0:
                assert block.chain_hash is not None
                del self._unpinned[block.chain_hash]
            block.pins += 1
        return hits + [Block(self._take_number()) for _ in range(fresh)], len(hits)

    def publish(self, blocks: Sequence[Block], chain: Sequence[int]) -> None:
        """The leading blocks are computed: from now on they are hits for others.

        A second copy of a block that is already known stays nameless and is freed at its end.
        """
        for position, (block, chain_hash) in enumerate(zip(blocks, chain, strict=False)):
            if block.chain_hash is None and chain_hash not in self._known:
                block.chain_hash = chain_hash
                self._known[chain_hash] = block
                if self.watcher is not None:
                    self.watcher.stored(chain, position)

    def release(self, blocks: Sequence[Block]) -> None:
        """Unpins the blocks. The tail of a chain becomes the first to be evicted."""
        for block in reversed(blocks):
            block.pins -= 1
            if block.pins == 0:
                if block.chain_hash is None:
                    self._numbers.append(block.number)
                else:
                    self._unpinned[block.chain_hash] = block

    def clear(self) -> None:
        """Forgets what is cached; blocks that jobs hold become nameless."""
        self._numbers.extend(block.number for block in self._unpinned.values())
        for block in self._known.values():
            block.chain_hash = None
        self._known.clear()
        self._unpinned.clear()
        if self.watcher is not None:
            self.watcher.cleared()

    def _take_number(self) -> int:
        if self._numbers:
            return self._numbers.pop()
        if self._fresh < self.capacity:
            self._fresh += 1
            return self._fresh
        oldest, block = self._unpinned.popitem(last=False)
        del self._known[oldest]
        if self.watcher is not None:
            self.watcher.removed(oldest)
        return block.number
