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


def look(column: Values, slots: Slots, more: Values | None = None) -> tuple[Values, float]:
    """(the column's values at these slots, the largest of them); those of `more` are added.

    Raises ValueError where there is no slot, or one outside of a column.
    """
    values = array("d", taken(column, slots).tobytes())
    if more is not None:
        values = array("d", (np.asarray(values) + taken(more, slots)).tobytes())
    return values, max(values)


def taken(column: Values, slots: Slots) -> npt.NDArray[np.float64]:
    """The column at these slots, as an array. Raises ValueError as `look` does."""
    if not slots or min(slots) < 0 or max(slots) >= len(column):
        raise ValueError("no slots to look at, or one outside of the column")
    found: npt.NDArray[np.float64] = np.asarray(column)[np.asarray(slots)]
    return found


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


def near_highest(
    scores: Floats, loads: Floats, draw: float, slack: float, share: float, favourite: int = -1
) -> int:
    """The place of a score that is at most slack + share x |highest| below the highest.

    Of several the favourite (a place), else the one with the least load, else the one that `draw`,
    from [0, 1), falls on.
    """
    values, held = np.asarray(scores), np.asarray(loads)
    if not len(values) or len(held) != len(values) or not 0.0 <= draw < 1.0:
        raise ValueError("scores and loads have to be of one length, a draw in [0, 1)")
    highest = float(values.max())
    tied = np.flatnonzero(values >= highest - (slack + share * abs(highest)))
    if favourite in tied:
        return favourite
    tied = tied[held[tied] == held[tied].min()]
    return int(tied[int(draw * len(tied))])


def smooth_turn(owed: Values, weights: Values, slots: Slots) -> int:
    """Smooth weighted round robin: the place among `slots` whose turn it is; moves `owed` on.

    Every slot is owed its weight more, who is owed most is picked and pays the sum of the weights.
    """
    wanted = taken(weights, slots)
    if len(owed) != len(weights):
        raise ValueError("owed and weights have to be of one length")
    total, place = 0.0, 0
    for n, slot in enumerate(slots):
        owed[slot] += float(wanted[n])
        total += float(wanted[n])
        if owed[slot] > owed[slots[place]]:
            place = n
    owed[slots[place]] -= total
    return place


def drawn(weights: Values, slots: Slots, draw: float, without: int = -1) -> int:
    """A place among `slots`, as likely as its weight, that `draw`, from [0, 1), falls on.

    `without` is a place that is not drawn; there has to be another one.
    """
    wanted = taken(weights, slots)
    others = [n for n in range(len(wanted)) if n != without]
    if not others or not 0.0 <= draw < 1.0:
        raise ValueError("nobody to draw, or a draw outside of [0, 1)")
    total = 0.0
    for n in others:
        total += float(wanted[n])
    left = draw * total
    for n in others:
        left -= float(wanted[n])
        if left < 0.0:
            return n
    return others[-1]


def backlog_s(
    work: Values, paces: Values, slots: Slots, pace: float, more: Values | None = None
) -> tuple[Values, float]:
    """(seconds until what waits at each slot is worked off, their mean).

    `work` and `more` are in work tokens, `paces` in seconds per token; `pace` stands for a pod
    whose own is 0.
    """
    waiting = look(work, slots, more)[0]
    speeds = taken(paces, slots)
    values = array("d", bytes(8 * len(slots)))
    total = 0.0
    for n, speed in enumerate(speeds):
        values[n] = waiting[n] * float(speed if speed > 0.0 else pace)
        total += values[n]
    return values, total / len(slots)


def prefill_s(
    depths: Floats | None,
    paces: Values,
    slots: Slots,
    pace: float,
    tokens: float,
    block_tokens: float,
    cap_blocks: float,
    attention: float,
    fixed: float,
) -> Values:
    """Seconds to prefill a prompt of `tokens` at each slot, by how many blocks of it are there.

    The work of u uncached tokens behind c cached ones is u (1 + attention (c + u / 2)) + `fixed`.
    At most `cap_blocks` blocks of `block_tokens` help. `paces` and `pace` as in `backlog_s`.
    """
    speeds = taken(paces, slots)
    if depths is not None and len(depths) != len(slots):
        raise ValueError(f"slots and depths differ in length: {len(slots)} and {len(depths)}")
    values = array("d", bytes(8 * len(slots)))
    for n, speed in enumerate(speeds):
        depth = 0.0 if depths is None else float(depths[n])
        cached = min(depth, cap_blocks) * block_tokens
        uncached = max(tokens - cached, 0.0)
        work = uncached * (1.0 + attention * (cached + uncached * 0.5)) + fixed
        values[n] = work * float(speed if speed > 0.0 else pace)
    return values


def token_s(
    inflight: Floats,
    context: Values,
    slowness: Values,
    slots: Slots,
    base_s: float,
    request_s: float,
    context_s: float,
    more: Values | None = None,
) -> Values:
    """Seconds per output token at each slot, with one request more than it has.

    slowness x (base_s + request_s x (inflight + 1) + context_s x context), the context being the
    tokens in the KV cache that requests inflight use.
    """
    held = look(context, slots, more)[0]
    factors = taken(slowness, slots)
    if len(inflight) != len(slots):
        raise ValueError(f"slots and loads differ in length: {len(slots)} and {len(inflight)}")
    values = array("d", bytes(8 * len(slots)))
    for n, factor in enumerate(factors):
        step = base_s + request_s * (float(inflight[n]) + 1.0) + context_s * held[n]
        values[n] = float(factor) * step
    return values


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
        self.work: Values = array("d", bytes(8 * slots))
        """What is before its first token, in work tokens: what a rate is measured in."""
        self.context: Values = array("d", bytes(8 * slots))
        """Prompt and expected output tokens of the requests inflight on the pod that answers."""
        self.done: Values = array("d", bytes(8 * slots))
        """Requests completed since the start, by the pod that answered; a count, not a load."""
        self.busy_s: Values = array("d", bytes(8 * slots))
        """Seconds with any request inflight, up to the last time there was none."""
        self.busy_from: Values = array("d", bytes(8 * slots))
        """Since when there has been one, while there is."""

    def take(
        self,
        slot: int,
        prefill_slot: int,
        prefill_tokens: float,
        decode_tokens: float,
        work: float = 0.0,
        context: float = 0.0,
        now: float = 0.0,
    ) -> bool:
        """One more request, in dispatch mode (`prefill_slot` not -1) on both pods.

        True: one of them is full now. Raises IndexError for a slot that there is not.
        """
        prefiller = slot if prefill_slot < 0 else prefill_slot
        if slot < 0:
            raise IndexError(f"slot {slot} is negative")
        self.decode_tokens[slot] += decode_tokens
        self.context[slot] += context
        self.prefill_tokens[prefiller] += prefill_tokens
        self.work[prefiller] += work
        if self.inflight[slot] == 0.0:
            self.busy_from[slot] = now
        self.inflight[slot] += 1.0
        if prefill_slot >= 0:
            self.inflight[prefiller] += 1.0
        return any(self.inflight[one] >= self.bounds[one] for one in (slot, prefiller))

    def give_prefill(
        self, slot: int, prefill_tokens: float, request: bool, work: float = 0.0
    ) -> bool:
        """The prefill part goes back, in dispatch mode the `request` with it.

        True: a request was given back by a pod that was full.
        """
        if slot < 0:
            raise IndexError(f"slot {slot} is negative")
        self.prefill_tokens[slot] -= prefill_tokens
        self.work[slot] -= work
        if not request:
            return False
        was_full = self.inflight[slot] >= self.bounds[slot]
        self.inflight[slot] -= 1.0
        return was_full

    def give(
        self,
        slot: int,
        prefill_tokens: float,
        decode_tokens: float,
        work: float = 0.0,
        context: float = 0.0,
        now: float = 0.0,
        completed: bool = True,
    ) -> bool:
        """A request goes back, with what is left of its tokens. True: the pod was full."""
        if slot < 0:
            raise IndexError(f"slot {slot} is negative")
        was_full = self.inflight[slot] >= self.bounds[slot]
        self.prefill_tokens[slot] -= prefill_tokens
        self.work[slot] -= work
        self.decode_tokens[slot] -= decode_tokens
        self.context[slot] -= context
        self.inflight[slot] -= 1.0
        self.done[slot] += float(completed)
        if self.inflight[slot] == 0.0:
            self.busy_s[slot] += now - self.busy_from[slot]
        return was_full
