"""The pickers: each names one of the candidates.

To add one: write the function, and its line in PICKERS.
"""

# ruff: noqa: ARG001  one signature for all
from __future__ import annotations

from calinix.core import bitmap
from calinix.core.choice import Choice, Picker
from calinix.core.columns import Floats
from calinix.core.pods import SlotSet
from calinix.core.requests import RouteRequest
from calinix.core.state import State

_FEW = 16
"""Up to so many candidates lists are faster than arrays."""


def best(state: State, request: RouteRequest, choice: Choice) -> int:
    """The highest score. Ties: least inflight, then at random; by pod id if deterministic."""
    scores, among, inflight = choice.scores, choice.among, choice.inflight
    assert scores is not None
    assert among is not None
    assert inflight is not None
    if among.count <= _FEW:
        return _best_of_few(state, among, scores.tolist(), inflight)
    top = scores.argmax()
    # Beside an array of one element comparing is twice as fast as beside a number.
    tied = (scores == scores[top : top + 1]).nonzero()[0]
    if len(tied) == 1:
        return int(top)
    if state.deterministic:
        return int(tied[state.table.ranks[among.slots[tied]].argmin()])
    loads = inflight[tied]
    least = loads == loads[loads.argmin()]
    if not least.all():
        tied = tied[least]
    return int(tied[int(state.rng.random() * len(tied))])


def _best_of_few(state: State, among: SlotSet, scores: list[float], inflight: Floats) -> int:
    """The same, in half the time where there are few candidates."""
    top = max(scores)
    if scores.count(top) == 1:
        return scores.index(top)
    tied = [place for place, score in enumerate(scores) if score == top]
    if state.deterministic:
        ranks, slots = state.table.ranks, among.slots
        return min(tied, key=lambda place: ranks.item(slots.item(place)))
    loads = inflight.tolist()
    least = min([loads[place] for place in tied])
    tied = [place for place in tied if loads[place] == least]
    return tied[int(state.rng.random() * len(tied))]


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
