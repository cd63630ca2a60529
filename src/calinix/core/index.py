"""The sharded index, reference form: chain hash -> bitmap of the slots that hold the block.

A block's shard is found by Fibonacci hashing. In plain dicts the shards change nothing; in the
compiled form they keep every growth step, and every sweep, short.
"""

from __future__ import annotations

from collections.abc import Sequence

from calinix.core.hashing import GOLDEN, MASK


class ShardedIndex:
    """Chain hash -> bitmap. A block that no slot holds is not in it."""

    def __init__(self, shards: int):
        self._shards: list[dict[int, int]] = [{} for _ in range(shards)]

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards)

    def shard_of(self, block: int) -> int:
        """The shard that `block` lives in: the top of its product with 2**64 / golden ratio."""
        return (((block * GOLDEN) & MASK) * len(self._shards)) >> 64

    def slots(self, block: int) -> int:
        """Bitmap of the slots that hold `block`."""
        return self._shards[self.shard_of(block)].get(block, 0)

    def add(self, block: int, slot: int) -> None:
        """`slot` holds `block` from now on."""
        shard = self._shards[self.shard_of(block)]
        shard[block] = shard.get(block, 0) | (1 << slot)

    def discard(self, block: int, slot: int) -> None:
        """`slot` does not hold `block` any more."""
        shard = self._shards[self.shard_of(block)]
        left = shard.get(block, 0) & ~(1 << slot)
        if left:
            shard[block] = left
        else:
            shard.pop(block, None)

    def match(self, chain: Sequence[int], candidates: int) -> list[tuple[int, int]]:
        """Groups (leading blocks held, slots), deepest first; together they are `candidates`.

        Binary search over the chain. A probe splits the slots still together into those that
        hold the probed block and those that do not; by the prefix law the former hold all
        before it, and the latter nothing behind it.
        """
        groups: list[tuple[int, int]] = []
        open_ranges = [(0, len(chain), candidates)]
        while open_ranges:
            low, high, slots = open_ranges.pop()
            if not slots:
                continue
            if low == high:
                groups.append((low, slots))
                continue
            middle = (low + high + 1) // 2
            holders = slots & self.slots(chain[middle - 1])
            open_ranges.append((low, middle - 1, slots & ~holders))
            open_ranges.append((middle, high, holders))
        return groups
