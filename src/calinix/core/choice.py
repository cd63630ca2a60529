"""One choice of one pod: what the stages find out on the way, and what they are made of.

A Choice is filled by the stages in order and then kept by the Explanation, arrays and all: what
explains a decision is what made it. It holds nothing of the request: prompts are not kept.
The recipe says which functions do the stages' work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from calinix.core.bitmap import HostBitmap
from calinix.core.columns import Floats, Term, Values
from calinix.core.kv import weigh
from calinix.core.pods import Pod, Role, SlotSet
from calinix.core.requests import RouteRequest

if TYPE_CHECKING:
    from calinix.core.state import State


class Choice:
    """The way to one pod. Arrays have one entry per candidate, in the order of `among.slots`."""

    # Not a Struct: the stages set many of these, which is seven times faster on plain slots.
    __slots__ = (
        "among", "answer_tokens", "block_tokens", "blocks", "busiest", "candidates", "cap_blocks",
        "deepest", "depths", "dropped", "index", "inflight", "last", "names", "near", "now",
        "other_way_s", "own_s", "pod", "pool", "request_s", "role", "rule", "scores", "silent",
        "terms", "tokens", "trusts", "weights", "who",
    )  # fmt: skip

    def __init__(
        self,
        role: Role,
        blocks: int,
        pool: HostBitmap,
        who: tuple[Pod | None, ...],
        near: Pod | None = None,
        now: float = 0.0,
    ):
        self.role = role
        self.blocks = blocks
        """Of the prompt; 0: nothing to look up."""
        self.pool = pool
        """The pods of the role."""
        self.who = who
        """Pod by slot, at that time."""
        self.near = near
        """Decode: the prefill pod that was picked."""
        self.candidates: HostBitmap = 0
        """Who is left."""
        self.among: SlotSet | None = None
        self.inflight: Floats | None = None
        """Requests of each candidate, before this one; the largest of these:"""
        self.busiest = 0.0
        self.depths: Floats | None = None
        """Leading blocks of the prompt that each candidate holds; None: not looked up. Most:"""
        self.deepest = 0.0
        self.dropped: tuple[tuple[str, HostBitmap], ...] = ()
        """(filter, whom it dropped), in order."""
        self.silent: HostBitmap = 0
        """Candidates not heard of for too long: their depths count as 0."""
        self.trusts: Values | None = None
        """By what share the depths of doubted candidates are less; None: nobody is doubted."""
        self.last: Pod | None = None
        """The session's last pod."""
        self.answer_tokens = 0.0
        """Tokens of the answer that it gave, as far as it is still the session's last one."""
        self.now = now
        """When, in seconds."""
        self.tokens = 0.0
        """Engine tokens of the prompt, estimated; likewise of one block; most that can help:"""
        self.block_tokens = 0.0
        self.cap_blocks = 0
        self.own_s: Floats | None = None
        """Seconds to prefill what each candidate does not hold; None: not worked out."""
        self.request_s = 0.0
        """Seconds to prefill the pool's mean request; of the other way, whole or split, if >= 0:"""
        self.other_way_s = -1.0
        self.rule = ""
        """By which the pick was made; empty: the recipe's own."""
        self.names: tuple[str, ...] = ()  # of the scorers, as the following
        self.weights: tuple[float, ...] = ()
        self.terms: Sequence[Term | None] = ()
        """What each of them said."""
        self.scores: Floats | None = None
        """The weighted sum without the terms' offsets, for the picker; see `weighed`."""
        self.index = -1
        """Place of the pick among the candidates."""
        self.pod: Pod | None = None
        """The pick; None when nobody was left."""

    @property
    def by_seconds(self) -> bool:
        """Whether candidates are compared by seconds: costs weigh -1, a score is minus seconds."""
        return bool(self.weights) and all(weight == -1.0 for weight in self.weights)

    def weighed(self) -> Floats | None:
        """The scores, worked out anew from the terms; None where the picker needed none.

        That they are not kept saves an array per decision, and they are seldom asked for.
        """
        if not self.names or self.among is None:
            return None
        return weigh([*self.terms], self.weights, self.among.count)

    def drop(self, reason: str, kept: HostBitmap) -> None:
        """Leaves only `kept` among the candidates."""
        self.dropped = (*self.dropped, (reason, self.candidates & ~kept))
        self.candidates &= kept


Filter = Callable[["State", RouteRequest, Choice], HostBitmap]
"""Whom to keep; may hold slots that are no candidates."""
Scorer = Callable[["State", RouteRequest, Choice], Term | None]
"""A score in [0, 1], or a cost in seconds. None: nothing to say, as if all were 0."""
Picker = Callable[["State", RouteRequest, Choice], int]
"""Place of the pick among the candidates."""


class Recipe:
    """How one role's pod is chosen."""

    __slots__ = ("filters", "names", "picker", "scorers", "uses_cache", "weights")

    def __init__(
        self,
        picker: Picker,
        scorers: tuple[tuple[str, float, Scorer], ...] = (),
        filters: tuple[tuple[str, Filter], ...] = (),
        uses_cache: bool = False,
    ):
        self.picker = picker
        self.scorers = scorers
        """(name, weight, scorer). Weights of -1: they are costs in seconds."""
        self.names = tuple(name for name, _, _ in scorers)
        self.weights = tuple(weight for _, weight, _ in scorers)
        self.filters = filters
        """After those that always apply; with their names."""
        self.uses_cache = uses_cache
        """A scorer needs to know how much of the prompt each candidate holds."""
