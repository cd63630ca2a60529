"""The pickers: each names one of the candidates.

To add one: write the function, and its line in PICKERS.
"""

from __future__ import annotations

import numpy as np

from calinix.core import bitmap
from calinix.core.choice import Choice, Picker
from calinix.core.state import State


def best(state: State, choice: Choice) -> int:
    """The highest score. Ties: least inflight, then at random; by pod id if deterministic."""
    scores, among, inflight = choice.scores, choice.among, choice.inflight
    assert scores is not None
    assert among is not None
    assert inflight is not None
    top = scores.argmax()
    tie = scores == scores[top]
    if np.count_nonzero(tie) == 1:
        return int(top)
    tied = tie.nonzero()[0]
    if state.deterministic:
        return int(tied[state.table.ranks[among.slots[tied]].argmin()])
    loads = inflight[tied]
    least = loads == loads[loads.argmin()]
    if np.count_nonzero(least) != len(tied):
        tied = tied[least]
    return int(tied[int(state.rng.random() * len(tied))])


def at_random(state: State, choice: Choice) -> int:
    """Any candidate, all alike."""
    assert choice.among is not None
    return int(state.rng.random() * choice.among.count)


def next_in_turn(state: State, choice: Choice) -> int:
    """The candidate in the next slot after the last one picked."""
    assert choice.among is not None
    after = choice.candidates >> (state.turns[choice.role] + 1) << (state.turns[choice.role] + 1)
    slot = bitmap.first(after or choice.candidates)
    state.turns[choice.role] = slot
    return choice.among.index(slot)


def less_loaded_of_two(state: State, choice: Choice) -> int:
    """Two different candidates at random, and of these the one with less inflight."""
    assert choice.among is not None
    assert choice.inflight is not None
    count = choice.among.count
    one = int(state.rng.random() * count)
    if count == 1:
        return one
    # The other is drawn from the rest, so that all pairs are equally likely.
    other = int(state.rng.random() * (count - 1))
    other += other >= one
    loads = choice.inflight
    if loads.item(one) == loads.item(other) and state.deterministic:
        ranks, slots = state.table.ranks, choice.among.slots
        return min(one, other, key=lambda place: ranks.item(slots.item(place)))
    return one if loads.item(one) <= loads.item(other) else other


PICKERS: dict[str, Picker] = {
    "best": best,
    "random": at_random,
    "nextInTurn": next_in_turn,
    "lessLoadedOfTwo": less_loaded_of_two,
}
