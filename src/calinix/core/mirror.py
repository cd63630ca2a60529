"""One pod's mirror, reference form: its blocks, and the list by which they are evicted."""

from __future__ import annotations

BlockState = tuple[int, int, int, int, bool, bool, int]
"""(hash, parent or 0, ticket, copies, speculative, hidden, width): one block of a `dump`."""


class Block:
    """One block in one slot. `ahead` and `behind` are its neighbours in the LRU list."""

    __slots__ = (
        "ahead", "behind", "children", "copies", "hash", "hidden", "parent", "speculative",
        "ticket", "width",
    )  # fmt: skip

    def __init__(self, block: int, width: int):
        self.hash = block
        self.width = width
        self.parent: Block | None = None
        self.children: dict[int, Block] = {}
        self.ahead: Block = self
        self.behind: Block = self
        self.ticket = 0
        self.copies = 0
        self.speculative = False
        self.hidden = False

    def state(self) -> BlockState:
        """What a `dump` tells of it."""
        parent = self.parent.hash if self.parent is not None else 0
        return (
            self.hash, parent, self.ticket, self.copies, self.speculative, self.hidden, self.width
        )  # fmt: skip


class Mirror:
    """The mirror of one pod. `ring` closes the LRU list: behind it the newest block."""

    __slots__ = ("blocks", "capacity", "held", "ring")

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.held = 0
        self.blocks: dict[int, Block] = {}
        self.ring = Block(0, 0)

    def link(self, block: Block, ahead: Block) -> None:
        """Puts `block` right behind `ahead` in the LRU list."""
        block.ahead, block.behind = ahead, ahead.behind
        ahead.behind.ahead = block
        ahead.behind = block

    def unlink(self, block: Block) -> None:
        """Takes `block` out of the LRU list."""
        block.ahead.behind, block.behind.ahead = block.behind, block.ahead

    def shown(self, block: int) -> Block | None:
        """The block, unless it is unknown or hidden."""
        found = self.blocks.get(block)
        return None if found is None or found.hidden else found
