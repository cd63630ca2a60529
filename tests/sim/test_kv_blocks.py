"""The pod's KV blocks: sharing by prefix, eviction from the tail, never more than there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from calinix.sim.kv_blocks import Block, KvBlocks, chain_of


def test_chain_covers_full_blocks_only() -> None:
    """Seven tokens in blocks of three are two hashes; fewer than a block is none."""
    assert len(chain_of(b"m", range(7), 3)) == 2
    assert chain_of(b"m", [1, 2], 3) == []


def test_chain_is_a_prefix_chain_in_its_namespace() -> None:
    """Equal beginnings give equal hashes; another model, or an early change, gives all others."""
    one = chain_of(b"m", [1, 2, 3, 4, 5, 6], 2)
    assert chain_of(b"m", [1, 2, 3, 4, 9, 9], 2)[:2] == one[:2]
    assert not set(one) & set(chain_of(b"n", [1, 2, 3, 4, 5, 6], 2))
    assert not set(one) & set(chain_of(b"m", [9, 2, 3, 4, 5, 6], 2))


def test_blocks_are_numbered_from_one_and_shared() -> None:
    """The first job gets blocks 1, 2, 3; a second with the same prefix shares what is computed."""
    blocks = KvBlocks(8)
    chain = chain_of(b"m", range(6), 2)
    first = blocks.allocate(chain, 3)
    assert first is not None
    assert [block.number for block in first[0]] == [1, 2, 3]
    blocks.publish(first[0], chain)
    second = blocks.allocate(chain[:2], 4)
    assert second is not None
    assert second[1] == 2
    assert [block.number for block in second[0]] == [1, 2, 4, 5]
    assert blocks.used == 5


def test_what_is_not_computed_yet_is_no_hit() -> None:
    """Before `publish` a second job with the same prompt shares nothing."""
    blocks = KvBlocks(8)
    chain = chain_of(b"m", range(4), 2)
    assert blocks.allocate(chain, 2) is not None
    second = blocks.allocate(chain, 2)
    assert second is not None
    assert second[1] == 0


def test_eviction_takes_the_oldest_chain_from_its_tail() -> None:
    """Room is made from the end of the least recently used chain, so its beginning still hits."""
    blocks = KvBlocks(6)
    old, new = chain_of(b"m", range(6), 2), chain_of(b"m", range(100, 106), 2)
    for chain in (old, new):
        allocated = blocks.allocate(chain, 3)
        assert allocated is not None
        blocks.publish(allocated[0], chain)
        blocks.release(allocated[0])
    assert blocks.used == 0
    assert blocks.allocate([], 2) is not None
    assert (blocks.match(old), blocks.match(new)) == (1, 3)


def test_no_room_changes_nothing() -> None:
    """An allocation that does not fit is None, and its would-be hits stay evictable."""
    blocks = KvBlocks(4)
    chain = chain_of(b"m", range(4), 2)
    allocated = blocks.allocate(chain, 2)
    assert allocated is not None
    blocks.publish(allocated[0], chain)
    blocks.release(allocated[0])
    assert blocks.allocate(chain, 5) is None
    assert blocks.used == 0
    assert blocks.allocate([], 4) is not None
    assert blocks.match(chain) == 0


def test_clear_forgets_what_is_cached_and_keeps_what_is_held() -> None:
    """After `clear` nothing hits, and all blocks come back once their jobs are gone."""
    blocks = KvBlocks(4)
    held, free = chain_of(b"m", range(4), 2), chain_of(b"n", range(4), 2)
    kept = []
    for chain in (held, free):
        allocated = blocks.allocate(chain, 2)
        assert allocated is not None
        blocks.publish(allocated[0], chain)
        kept.append(allocated[0])
    blocks.release(kept[1])
    blocks.clear()
    assert (blocks.match(held), blocks.match(free), blocks.used) == (0, 0, 2)
    blocks.release(kept[0])
    assert blocks.allocate([], 4) is not None


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_a_longer_prompt_has_the_shorter_ones_chain(tokens: list[int], block_size: int) -> None:
    """The chain of any beginning is the beginning of the chain."""
    chain = chain_of(b"", tokens, block_size)
    for length in range(len(tokens) + 1):
        assert chain_of(b"", tokens[:length], block_size) == chain[: length // block_size]


CHAINS = [chain_of(b"", [a, a, b, b, c, c], 2) for a in (0, 1) for b in (0, 1) for c in (0, 1)]


class BlocksMachine(RuleBasedStateMachine):
    """Jobs come, are computed and go in any order."""

    @initialize(capacity=st.integers(1, 9))
    def begin(self, capacity: int) -> None:
        """An empty cache."""
        self.blocks = KvBlocks(capacity)
        self.jobs: list[tuple[list[Block], list[int]]] = []

    @rule(chain=st.sampled_from(CHAINS), extra=st.integers(0, 2))
    def allocate(self, chain: list[int], extra: int) -> None:
        """A job asks for room."""
        depth = self.blocks.match(chain)
        allocated = self.blocks.allocate(chain, 3 + extra)
        if allocated is not None:
            assert allocated[1] == depth
            assert len(allocated[0]) == 3 + extra
            self.jobs.append((allocated[0], chain))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), computed=st.booleans())
    def finish(self, data: st.DataObject, computed: bool) -> None:
        """A job goes, computed or not."""
        blocks, chain = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
        if computed:
            self.blocks.publish(blocks, chain)
            assert self.blocks.match(chain) == 3
        self.blocks.release(blocks)

    @rule()
    def clear(self) -> None:
        """The cache is reset."""
        self.blocks.clear()
        assert self.blocks.cached == 0

    @invariant()
    def numbers_are_held_once(self) -> None:
        """Two blocks never have one number, and used blocks are those that jobs hold."""
        held = {id(block): block.number for blocks, _ in self.jobs for block in blocks}
        assert len(set(held.values())) == len(held) == self.blocks.used
        assert self.blocks.used <= self.blocks.capacity
        assert all(1 <= number <= self.blocks.capacity for number in held.values())


TestBlocks = BlocksMachine.TestCase
