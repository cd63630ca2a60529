"""The pickers: each names one of the candidates.

To add one: write the function, and its line in PICKERS.
"""

# ruff: noqa: ARG001  one signature for all
from __future__ import annotations

import numpy as np

from calinix.core import bitmap
from calinix.core.choice import Choice, Picker
from calinix.core.kv import least_of_highest, only_highest
from calinix.core.requests import RouteRequest
from calinix.core.state import State


def best(state: State, request: RouteRequest, choice: Choice) -> int:
    """The highest score. Ties: least inflight, then at random; by pod id if deterministic."""
    scores, among, inflight = choice.scores, choice.among, choice.inflight
    assert scores is not None
    place = only_highest(scores)
    if place >= 0:
        return place
    assert among is not None
    assert inflight is not None
    if state.deterministic:
        values, ranks = np.asarray(scores), state.table.ranks
        tied = np.flatnonzero(values == values.max())
        return int(tied[ranks[np.asarray(among.slots)[tied]].argmin()])
    return least_of_highest(scores, inflight, state.rng.random())


def at_random(state: State, request: RouteRequest, choice: Choice) -> int:
    """Any candidate, all alike."""
    assert choice.among is not None
    return int(state.rng.random() * choice.among.count)


def next_in_turn(state: State, request: RouteRequest, choice: Choice) -> int:
    """The candidate in the next slot after the last one picked."""
    assert choice.among is not None
    after = choice.candidates >> (state.turns[choice.role] + 1) << (state.turns[choice.role] + 1)
    slot = bitmap.first(after or choice.candidates)
    state.turns[choice.role] = slot
    return choice.among.index(slot)


def less_loaded_of_two(state: State, request: RouteRequest, choice: Choice) -> int:
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
    loads, slots = choice.inflight, choice.among.slots
    if loads[one] == loads[other] and state.deterministic:
        return min(one, other, key=lambda place: state.table.ranks.item(slots[place]))
    return one if loads[one] <= loads[other] else other


PICKERS: dict[str, Picker] = {
    "best": best,
    "random": at_random,
    "nextInTurn": next_in_turn,
    "lessLoadedOfTwo": less_loaded_of_two,
}
