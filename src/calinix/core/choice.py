"""One choice of one pod: what the stages find out on the way, and what they are made of.

A Choice is filled by the stages in order and then kept by the Explanation, arrays and all: what
explains a decision is what made it. It holds nothing of the request: prompts are not kept.
The recipe says which functions do the stages' work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from calinix.core.bitmap import HostBitmap
from calinix.core.columns import Floats
from calinix.core.pods import Pod, Role, SlotSet
from calinix.core.requests import RouteRequest

if TYPE_CHECKING:
    from calinix.core.state import State


Term = tuple[Floats, float, float]
"""(values, scale, offset): the scores are values x scale + offset, in [0, 1], one per candidate.

A line through values that are there already costs nothing to write down; it is worked out as
part of the weighted sum.
"""


class Choice(msgspec.Struct, eq=False, gc=False):
    """The way to one pod. Arrays have one entry per candidate, in the order of `among.slots`."""

    role: Role
    blocks: int
    """Of the prompt; 0: nothing to look up."""
    pool: HostBitmap
    """The pods of the role."""
    who: tuple[Pod | None, ...]
    """Pod by slot, at that time."""
    near: Pod | None = None
    """Decode: the prefill pod that was picked."""
    last: Pod | None = None
    """The session's last pod."""
    candidates: HostBitmap = 0
    """Who is left."""
    dropped: tuple[tuple[str, HostBitmap], ...] = ()
    """(filter, whom it dropped), in order."""
    among: SlotSet | None = None
    inflight: Floats | None = None
    """Requests of each candidate, before this one."""
    busiest: float = 0.0
    """The largest of these."""
    depths: Floats | None = None
    """Leading blocks of the prompt that each candidate holds; None: not looked up."""
    deepest: float = 0.0
    """The largest of these."""
    silent: HostBitmap = 0
    """Candidates not heard of for too long: their depths count as 0."""
    terms: tuple[tuple[str, float, Term], ...] = ()
    """(scorer, weight, its scores)."""
    scores: Floats | None = None
    """The weighted sum without the terms' offsets; None where the picker needs none."""
    index: int = -1
    """Place of the pick among the candidates."""
    pod: Pod | None = None
    """The pick; None when nobody was left."""

    def drop(self, reason: str, kept: HostBitmap) -> None:
        """Leaves only `kept` among the candidates."""
        self.dropped = (*self.dropped, (reason, self.candidates & ~kept))
        self.candidates &= kept


Filter = Callable[["State", RouteRequest, Choice], HostBitmap]
"""Whom to keep; may hold slots that are no candidates."""
Scorer = Callable[["State", RouteRequest, Choice], "Term | None"]
"""None: nothing to say, as if all scores were 0."""
Picker = Callable[["State", RouteRequest, Choice], int]
"""Place of the pick among the candidates."""


class Recipe(msgspec.Struct, frozen=True):
    """How one role's pod is chosen."""

    filters: tuple[tuple[str, Filter], ...]
    """After those that always apply; with their names."""
    scorers: tuple[tuple[str, float, Scorer], ...]
    """(name, weight, scorer)."""
    picker: Picker
    uses_cache: bool
    """A scorer needs to know how much of the prompt each candidate holds."""
