"""One number per pod or per candidate, and what is worked out over all candidates at once.

Reference form, with numpy; `calinix.core.kv` takes the compiled one where it was built. Columns
are arrays of doubles over the slots, values over the candidates are such arrays too: one of them
costs less than a numpy array, and `np.asarray(values)` is one over the same memory. Wherever
values are taken, any one-dimensional buffer of float64 will do, numpy's own included.
"""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from calinix.core import bitmap

Values: TypeAlias = "array[float]"
"""Doubles (typecode d): over all slots, or over the candidates."""
Slots: TypeAlias = "array[int]"
"""Slot numbers (typecode i), ascending."""
Floats: TypeAlias = "array[float] | npt.NDArray[np.float64]"
"""Values, or an array of numpy's."""
Term = tuple[Floats, float, float]
"""(values, scale, offset): the scores are values x scale + offset, in [0, 1], one per candidate.

A line through values that are there already costs nothing to write down; it is worked out as
part of the weighted sum.
"""


def slots_of(members: bitmap.HostBitmap) -> Slots:
    """The slots of a bitmap, ascending."""
    return array("i", bitmap.to_array(members).astype(np.int32).tobytes())


def look(column: Values, slots: Slots) -> tuple[Values, float]:
    """(the column's values at these slots, the largest of them).

    Raises ValueError where there is no slot, or one outside of the column.
    """
    if not slots or min(slots) < 0 or max(slots) >= len(column):
        raise ValueError("no slots to look at, or one outside of the column")
    values = array("d", np.asarray(column)[np.asarray(slots)].tobytes())
    return values, max(values)


def balanced(values: Floats, slots: Slots, factor: float, offset: float) -> bitmap.HostBitmap:
    """Bitmap of the slots whose values are at most factor x mean + offset.

    0 when that would be all of them, or none.
    """
    if len(values) != len(slots):
        raise ValueError(f"slots and values differ in length: {len(slots)} and {len(values)}")
    if not slots:
        return 0
    total = 0.0
    for value in values:
        total += float(value)
    bound = factor * total / len(slots) + offset
    kept = [slot for slot, value in zip(slots, values, strict=True) if value <= bound]
    return bitmap.of(kept) if len(kept) < len(slots) else 0


def weigh(terms: list[Term | None], weights: tuple[float, ...], count: int) -> Values:
    """The sum of weight x scale x values over the terms, one per candidate, offsets left out.

    None is a term that says nothing. Raises ValueError when a length does not fit.
    """
    total = array("d", bytes(8 * count))
    sums = np.asarray(total)
    for term, weight in zip(terms, weights, strict=True):
        if term is not None:
            values = np.asarray(term[0])
            if len(values) != count:
                raise ValueError(f"a term of {len(values)} values for {count} candidates")
            sums += values * (weight * term[1])
    return total


def only_highest(scores: Floats) -> int:
    """The place of the highest score; -1 when several have it. Raises ValueError for none."""
    values = np.asarray(scores)
    if not len(values):
        raise ValueError("there are no scores")
    top = int(values.argmax())
    return top if np.count_nonzero(values == values[top]) == 1 else -1


def least_of_highest(scores: Floats, loads: Floats, draw: float) -> int:
    """The place of the highest score; of several the one with the least load.

    Of several such again the one that `draw`, from [0, 1), falls on: all are alike.
    """
    values, held = np.asarray(scores), np.asarray(loads)
    if not len(values) or len(held) != len(values) or not 0.0 <= draw < 1.0:
        raise ValueError("scores and loads have to be of one length, a draw in [0, 1)")
    tied = np.flatnonzero(values == values.max())
    tied = tied[held[tied] == held[tied].min()]
    return int(tied[int(draw * len(tied))])


class Loads:
    """The columns of load, by slot; a pod is full from so many requests on as `bounds` says."""

    def __init__(self, slots: int):
        """All zero. Raises ValueError for fewer than 1 or more than 4096 slots."""
        if not 1 <= slots <= 4096:
            raise ValueError(f"slots must be in 1..4096, not {slots}")
        self.inflight: Values = array("d", bytes(8 * slots))
        """Requests."""
        self.prefill_tokens: Values = array("d", bytes(8 * slots))
        """Uncached prompt tokens whose first token is not there yet."""
        self.decode_tokens: Values = array("d", bytes(8 * slots))
        """Output tokens expected of the requests inflight."""
        self.bounds: Values = array("d", bytes(8 * slots))

    def take(
        self, slot: int, prefill_slot: int, prefill_tokens: float, decode_tokens: float
    ) -> bool:
        """One more request, in dispatch mode (`prefill_slot` not -1) on both pods.

        True: one of them is full now. Raises IndexError for a slot that there is not.
        """
        prefiller = slot if prefill_slot < 0 else prefill_slot
        if slot < 0:
            raise IndexError(f"slot {slot} is negative")
        self.decode_tokens[slot] += decode_tokens
        self.prefill_tokens[prefiller] += prefill_tokens
        self.inflight[slot] += 1.0
        if prefill_slot >= 0:
            self.inflight[prefiller] += 1.0
        return any(self.inflight[one] >= self.bounds[one] for one in (slot, prefiller))

    def give_prefill(self, slot: int, prefill_tokens: float, request: bool) -> bool:
        """The prefill part goes back, in dispatch mode the `request` with it.

        True: a request was given back by a pod that was full.
        """
        if slot < 0:
            raise IndexError(f"slot {slot} is negative")
        self.prefill_tokens[slot] -= prefill_tokens
        if not request:
            return False
        was_full = self.inflight[slot] >= self.bounds[slot]
        self.inflight[slot] -= 1.0
        return was_full

    def give(self, slot: int, prefill_tokens: float, decode_tokens: float) -> bool:
        """A request goes back, with what is left of its tokens. True: the pod was full."""
        if slot < 0:
            raise IndexError(f"slot {slot} is negative")
        was_full = self.inflight[slot] >= self.bounds[slot]
        self.prefill_tokens[slot] -= prefill_tokens
        self.decode_tokens[slot] -= decode_tokens
        self.inflight[slot] -= 1.0
        return was_full
