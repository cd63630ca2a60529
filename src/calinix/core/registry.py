"""What every pod's KV cache is believed to hold: PrefixRegistry, reference form.

The readable specification; `_native.pyx` is the same behaviour, compiled.

Prefix law: a slot shows a block only while it shows the block's parent, so what a slot holds of
a chain is always a prefix of it. A block that goes hides its descendants. Hidden blocks are
still counted (the engine has them), but they are not found until they are stored again.

Each slot is a mirror of one pod's cache: an LRU list bounded by the pod's capacity. A use moves
the path from the used block up to the root to the front, last block first, and a new block is
linked right behind its parent. So a parent is always ahead of its children, and whatever is
last in the list has none: eviction takes leaves.

Depths, capacities and what a slot holds are counted in widths (`Chain.depth`): where blocks grow
along a chain, a later one stands for several of the first.

A block made at routing time is speculative under the ticket of its request until an answer
(`confirm`) or an event (`stored`) says that it is there. Events count copies, since engines
publish a block twice when two copies of it exist.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import index
from typing import Final

import numpy as np
import numpy.typing as npt

from calinix.core.columns import Slots, Values
from calinix.core.hashing import Chain, checked_hash, width_of
from calinix.core.index import ShardedIndex
from calinix.core.mirror import Block, BlockState, Mirror

MAX_SLOTS: Final = 4096
MAX_SHARDS: Final = 65536
MAX_CAPACITY: Final = (1 << 31) - 1
MAX_COPIES: Final = 0xFFFF
EVICTIONS_PER_BLOCK: Final = 4
"""While a slot is over its capacity, each block that it gains evicts up to this many per width."""
EVICTIONS_AT_ONCE: Final = 4096
"""How many blocks a smaller capacity evicts at once; later stores do the rest."""


class PrefixRegistry:
    """Which slot holds which leading blocks of a chain.

    `max_pods` slots (at most 4096); every slot has to be opened before use. Wrong arguments
    (a slot out of range or not open, 0 or no u64 as a block, a ticket that is no u32) raise
    ValueError, wrong types TypeError, and nothing is changed.
    """

    def __init__(self, max_pods: int = 256, shards: int = 256):
        if not 1 <= index(max_pods) <= MAX_SLOTS:
            raise ValueError(f"max_pods must be in 1..{MAX_SLOTS}, not {max_pods}")
        if not 1 <= index(shards) <= MAX_SHARDS:
            raise ValueError(f"shards must be in 1..{MAX_SHARDS}, not {shards}")
        self._slots: list[Mirror | None] = [None] * max_pods
        self._index = ShardedIndex(shards)

    def __len__(self) -> int:
        """How many distinct blocks are shown."""
        return len(self._index)

    def open_slot(self, slot: int, capacity_blocks: int) -> None:
        """The slot starts cold, whatever it held before; a capacity is at most 2**31 - 1."""
        capacity = _checked_capacity(capacity_blocks)
        number = self._checked_slot(slot)
        if self._slots[number] is not None:
            self.clear(number)
        self._slots[number] = Mirror(capacity)

    def set_capacity(self, slot: int, capacity_blocks: int) -> None:
        """Changes the capacity; a smaller one evicts, see EVICTIONS_AT_ONCE."""
        pod = self._open(slot)
        pod.capacity = _checked_capacity(capacity_blocks)
        for _ in range(EVICTIONS_AT_ONCE):
            if pod.held <= pod.capacity:
                break
            self._delete(slot, pod, pod.ring.ahead)

    def close_slot(self, slot: int) -> None:
        """Forgets the slot and everything of it."""
        self.clear(slot)
        self._slots[slot] = None

    def is_open(self, slot: int) -> bool:
        """Whether the slot is open."""
        return self._slots[self._checked_slot(slot)] is not None

    def blocks(self, slot: int) -> int:
        """How much the slot holds, in widths, hidden blocks included."""
        return self._open(slot).held

    def sweep(self) -> bool:
        """Frees what closed and cleared slots left in one index shard; True: there is more.

        Only memory depends on it; this form leaves nothing behind.
        """
        return False

    def depths(
        self, chain: Chain, slots: npt.NDArray[np.int32], out: npt.NDArray[np.float64]
    ) -> int:
        """Writes into `out[i]` how deep `slots[i]` holds the chain; returns the largest.

        `slots` int32 and `out` float64, of the same length, one dimension each.
        """
        _checked_chain(chain)
        _checked_array(slots, np.int32)
        _checked_array(out, np.float64)
        if len(slots) != len(out):
            raise ValueError(f"slots and out differ in length: {len(slots)} and {len(out)}")
        candidates = 0
        for slot in slots.tolist():
            self._open(slot)
            candidates |= 1 << slot
        groups = self.match(chain, candidates)
        for i, slot in enumerate(slots.tolist()):
            out[i] = next(depth for depth, members in groups if members >> slot & 1)
        return max((depth for depth, _ in groups), default=0)

    def held(self, chain: Chain, slots: Slots) -> tuple[Values | None, int]:
        """(how deep each slot holds the chain, the largest of these); (None, 0): none at all."""
        found = array("d", bytes(8 * len(slots)))
        deepest = self.depths(chain, np.asarray(slots), np.asarray(found))
        return (found, deepest) if deepest else (None, 0)

    def match(self, chain: Chain, candidates: int) -> list[tuple[int, int]]:
        """Groups (depth, bitmap of slots), deepest first, depth 0 included.

        Together they are `candidates`; a slot that is not open holds nothing.
        """
        if not 0 <= index(candidates) < 1 << len(self._slots):
            raise ValueError(f"candidates outside of {len(self._slots)} slots")
        groups = self._index.match(list(_checked_chain(chain)), index(candidates))
        return [(chain.depth(blocks), slots) for blocks, slots in groups]

    def route(self, slot: int, chain: Chain, ticket: int) -> int:
        """The request with this ticket was sent to `slot`; returns how deep it was held there.

        What is there is used, what is missing is stored as speculative under `ticket`; a
        speculative block that is used again goes over to the newer ticket. Beyond the capacity
        the least recently used blocks go; of a chain longer than that, the head is stored.
        """
        pod = self._open(slot)
        if not 0 <= index(ticket) <= 0xFFFFFFFF:
            raise ValueError(f"not an unsigned 32-bit ticket: {ticket}")

        def own(block: Block, new: bool) -> None:
            block.speculative = block.speculative or new
            if block.speculative:
                block.ticket = ticket

        return self._use(slot, pod, _checked_chain(chain), own)

    def confirm(self, slot: int, chain: Chain) -> None:
        """The prompt is prefilled on `slot`: all blocks are there, and no longer speculative."""
        pod = self._open(slot)

        def settle(block: Block, new: bool) -> None:  # noqa: ARG001  same shape as route's
            block.speculative = False

        self._use(slot, pod, _checked_chain(chain), settle)

    def withdraw(self, slot: int, chain: Chain, ticket: int) -> None:
        """The request never got there: what is still speculative under its ticket goes."""
        pod = self._open(slot)
        if not 0 <= index(ticket) <= 0xFFFFFFFF:
            raise ValueError(f"not an unsigned 32-bit ticket: {ticket}")
        for value in reversed(list(_checked_chain(chain))):
            block = pod.blocks.get(value)
            if block is not None and block.speculative and block.ticket == ticket:
                self._delete(slot, pod, block)

    def stored(self, slot: int, parent: int | None, blocks: Sequence[int] | Chain) -> bool:
        """The engine stored `blocks`, in chain order, behind `parent` (None: at the root).

        One copy more of each. False, and nothing is stored, when the slot does not show
        `parent`.
        """
        values = [checked_hash(value) for value in blocks]
        root = None if parent is None else checked_hash(parent)
        pod = self._open(slot)
        above: Block | None = None
        if root is not None:
            above = pod.shown(root)
            if above is None:
                return False
        known = 0
        while known < len(values) and (block := pod.shown(values[known])) is not None:
            above = block
            known += 1
        if above is not None:
            self._touch(pod, above)

        def count(block: Block, new: bool) -> None:  # noqa: ARG001  same shape as route's
            block.speculative = False
            block.copies = min(block.copies + 1, MAX_COPIES)

        for value in values[:known]:
            count(pod.blocks[value], False)
        self._store(slot, pod, above, [(value, 1) for value in values[known:]], count)
        return True

    def removed(self, slot: int, blocks: Sequence[int] | Chain) -> None:
        """The engine dropped one copy of each block; without a copy left the block goes.

        A speculative block has no copy yet: it goes as well. Unknown blocks are ignored.
        """
        values = [checked_hash(value) for value in blocks]
        pod = self._open(slot)
        for value in values:
            block = pod.blocks.get(value)
            if block is None:
                continue
            if block.copies > 1:
                block.copies -= 1
            else:
                self._delete(slot, pod, block)

    def clear(self, slot: int) -> None:
        """The pod's cache is empty; the slot stays open."""
        pod = self._open(slot)
        for block in pod.blocks.values():
            self._index.discard(block.hash, slot)
        self._slots[slot] = Mirror(pod.capacity)

    def dump(self, slot: int) -> list[BlockState]:
        """The slot's blocks, most recently used first, for tests and people."""
        pod = self._open(slot)
        states: list[BlockState] = []
        block = pod.ring.behind
        while block is not pod.ring:
            states.append(block.state())
            block = block.behind
        return states

    def _use(
        self, slot: int, pod: Mirror, chain: Chain, mark: Callable[[Block, bool], None]
    ) -> int:
        """Touches what `slot` shows of `chain` and stores the rest; marks all of it."""
        ((known, _),) = self._index.match(list(chain), 1 << slot)
        above: Block | None = None
        if known:
            above = pod.blocks[chain[known - 1]]
            for block in self._touch(pod, above):
                mark(block, False)
        rest = [(chain[i], width_of(i, chain.steady)) for i in range(known, len(chain))]
        self._store(slot, pod, above, rest, mark)
        return chain.depth(known)

    def _touch(self, pod: Mirror, last: Block) -> list[Block]:
        """Moves the path from `last` up to the root to the front, `last` first; returns it."""
        path: list[Block] = []
        block: Block | None = last
        while block is not None:
            pod.unlink(block)
            pod.link(block, pod.ring)
            path.append(block)
            block = block.parent
        return path

    def _store(
        self,
        slot: int,
        pod: Mirror,
        above: Block | None,
        values: list[tuple[int, int]],
        mark: Callable[[Block, bool], None],
    ) -> None:
        """Makes the slot show (hash, width) each as the child of the one before, until full."""
        for value, width in values:
            block = pod.blocks.get(value)
            new = block is None
            if block is None:
                if not self._make_room(slot, pod, above, width):
                    return
                block = pod.blocks[value] = Block(value, width)
                pod.held += width
            elif block.hidden:
                pod.unlink(block)
                block.hidden = False
            else:
                # Only in a chain that contradicts an earlier one: the block stays where it is.
                mark(block, False)
                above = block
                continue
            pod.link(block, pod.ring if above is None else above)
            if above is not None:
                block.parent = above
                above.children[value] = block
            self._index.add(value, slot)
            mark(block, new)
            above = block

    def _make_room(self, slot: int, pod: Mirror, above: Block | None, width: int) -> bool:
        """Evicts until one more block fits; False when only the path to `above` is left."""
        for _ in range(EVICTIONS_PER_BLOCK * width):
            if pod.held + width <= pod.capacity:
                break
            last = pod.ring.ahead
            if last is pod.ring or last is above:
                return False
            self._delete(slot, pod, last)
        return True

    def _delete(self, slot: int, pod: Mirror, block: Block) -> None:
        """The block goes; its descendants are hidden and lose their place in the tree."""
        if block.parent is not None:
            del block.parent.children[block.hash]
        if not block.hidden:
            self._index.discard(block.hash, slot)
        pod.unlink(block)
        pod.held -= block.width
        del pod.blocks[block.hash]
        below = list(block.children.values())
        while below:
            descendant = below.pop()
            below.extend(descendant.children.values())
            self._index.discard(descendant.hash, slot)
            descendant.hidden = True
            descendant.parent = None
            descendant.children = {}

    def _checked_slot(self, slot: int) -> int:
        if not 0 <= index(slot) < len(self._slots):
            raise ValueError(f"slot {slot} is outside of 0..{len(self._slots) - 1}")
        return slot

    def _open(self, slot: int) -> Mirror:
        pod = self._slots[self._checked_slot(slot)]
        if pod is None:
            raise ValueError(f"slot {slot} is not open")
        return pod


def _checked_chain(chain: Chain) -> Chain:
    if not isinstance(chain, Chain):
        raise TypeError(f"expected a Chain, got {type(chain).__name__}")
    return chain


def _checked_capacity(capacity_blocks: int) -> int:
    if index(capacity_blocks) < 0:
        raise ValueError(f"a capacity must not be negative: {capacity_blocks}")
    return min(capacity_blocks, MAX_CAPACITY)


def _checked_array(array: npt.NDArray[np.generic], dtype: type[np.generic]) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"expected a numpy array, got {type(array).__name__}")
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"expected one dimension of {np.dtype(dtype)}, got {array.dtype}")
