"""The pickers: each names one of the candidates.

To add one: write the function, and its line in PICKERS. A place is an index among the candidates
(`choice.among.slots`, and every array of the choice); a slot is one in the table of all pods.
"""

# ruff: noqa: ARG001  one signature for all
from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from calinix.core import bitmap
from calinix.core.choice import Choice, Picker
from calinix.core.columns import Values
from calinix.core.kv import (
    drawn,
    least_of_highest,
    near_highest,
    only_highest,
    smooth_turn,
)
from calinix.core.requests import RouteRequest
from calinix.core.state import State

NEAR_S, NEAR_SHARE = 0.001, 0.02
"""Costs that differ by less than these, together, tie: measured paces are not more exact."""
BLIND: Final = 0.4
"""Unseen requests per pod, on average, from which on the others' load is not to be compared by."""
LITTLE_OVERLAP: Final = 0.1
"""Best share of a prompt that any pod holds, up to which there is nothing to lose by a turn."""


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


def weighted_turn(state: State, request: RouteRequest, choice: Choice) -> int:
    """Smooth round robin: each candidate in turn, as often as its weight says."""
    return _turn(state, choice, state.weights)


def less_loaded_of_two_weighted(state: State, request: RouteRequest, choice: Choice) -> int:
    """Two different candidates drawn by weight, and of these the one with the less (q + 1) / w."""
    among = choice.among
    assert among is not None
    assert choice.inflight is not None
    slots, weights, rng = among.slots, state.weights, state.rng
    one = drawn(weights, slots, rng.random())
    if among.count == 1:
        return one
    other = drawn(weights, slots, rng.random(), one)
    loads = choice.inflight
    cost = (loads[one] + 1.0) / weights[slots[one]]
    against = (loads[other] + 1.0) / weights[slots[other]]
    if cost == against and state.deterministic:
        return min(one, other, key=lambda place: state.table.ranks.item(slots[place]))
    return one if cost <= against else other


def cheapest(state: State, request: RouteRequest, choice: Choice) -> int:
    """The least cost. Near ties: the session's last pod, the least inflight, at random.

    Where several routers share the pods, and so much was probably routed since they last told each
    other that the comparison would herd, a weighted turn instead, if no pod holds the prompt.
    """
    scores, among, inflight = choice.scores, choice.among, choice.inflight
    assert scores is not None
    assert among is not None
    assert inflight is not None
    shares = state.replicas.inflight is not None and state.strategy.predictive.fallback
    if shares and is_blind(state, choice):
        choice.rule = "weightedTurn"
        return _turn(state, choice, state.blind_weights)
    last = choice.last
    favourite = -1
    if last is not None and choice.candidates >> last.slot & 1:
        favourite = among.index(last.slot)
    if state.deterministic:
        values, ranks = np.asarray(scores), state.table.ranks
        top = float(values.max())
        near = np.flatnonzero(values >= top - (NEAR_S + NEAR_SHARE * abs(top)))
        if favourite in near:
            return favourite
        return int(near[ranks[np.asarray(among.slots)[near]].argmin()])
    draw = state.rng.random()
    return near_highest(scores, inflight, draw, NEAR_S, NEAR_SHARE, favourite)


def is_blind(state: State, choice: Choice) -> bool:
    """Whether too much is unseen of what the other replicas have routed, and no prefix is lost."""
    among = choice.among
    assert among is not None
    if choice.blocks and choice.deepest >= LITTLE_OVERLAP * choice.blocks:
        return False
    return state.replicas.unseen(choice.role, choice.now) >= BLIND * among.count


def _turn(state: State, choice: Choice, weights: Values) -> int:
    among = choice.among
    assert among is not None
    owed = state.owed.get(choice.role)
    if owed is None:
        owed = state.owed[choice.role] = array("d", bytes(8 * len(weights)))
        if not state.deterministic:
            # Routers that begin together are not to take the same turns.
            for slot in range(len(owed)):
                owed[slot] = state.rng.random()
    return smooth_turn(owed, weights, among.slots)


PICKERS: dict[str, Picker] = {
    "best": best,
    "random": at_random,
    "nextInTurn": next_in_turn,
    "lessLoadedOfTwo": less_loaded_of_two,
    "weightedTurn": weighted_turn,
    "lessLoadedOfTwoWeighted": less_loaded_of_two_weighted,
    "cheapest": cheapest,
}
