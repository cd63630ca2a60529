"""The pickers that go by the controller's weights, and the one that goes by least cost."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import pytest

from calinix.core import pickers
from calinix.core.choice import Choice, Picker
from calinix.core.events import PodFacts, ReplicaFacts, RoleFacts
from calinix.core.state import State
from routing import make_config, make_router, pod_config, request

REQUEST = request()
COSTS = [-1.0, -0.4, -0.4, -0.7]
"""Scores: seconds below 0."""


def state_of(pods: int, seed: int = 1, **gateway: Any) -> State:
    """The state of a fresh router of so many pods."""
    return make_router(make_config(pods, **gateway), seed)._state


def choice_of(state: State, inflight: list[float], leave_out: int = 0) -> Choice:
    """A choice among the first pods, with this load; `leave_out` is a bitmap of some of them."""
    members = (1 << len(inflight)) - 1 & ~leave_out
    choice = Choice("single", 0, members, state.table.who)
    choice.candidates, choice.among = members, state.table.slot_set(members)
    loads = [load for slot, load in enumerate(inflight) if members >> slot & 1]
    choice.inflight, choice.busiest = array("d", loads), max(loads)
    return choice


def picks(
    picker: Picker, state: State, weights: list[float], count: int, inflight: list[float]
) -> Counter[int]:
    """How often each place is picked of so many times."""
    for slot, weight in enumerate(weights):
        state.weights[slot] = weight
    return Counter(picker(state, REQUEST, choice_of(state, inflight)) for _ in range(count))


# --- turns -------------------------------------------------------------------------------------


def test_turns_are_as_many_as_weights_say() -> None:
    """Whatever the load: over a round each pod has its weight in turns."""
    weights, inflight = [2.0, 1.0, 0.75, 0.25], [9.0, 0.0, 3.0, 1.0]
    found = picks(pickers.weighted_turn, state_of(4), weights, 160, inflight)
    assert [found[place] for place in range(4)] == pytest.approx([80, 40, 30, 10], abs=1)


def test_routers_that_begin_together_take_other_turns() -> None:
    """Else the requests of all of them would come to each pod at once."""
    firsts = set()
    for seed in range(20):
        state = state_of(4, seed)
        firsts.add(pickers.weighted_turn(state, REQUEST, choice_of(state, [0.0] * 4)))
    assert len(firsts) == 4


def test_deterministic_turns() -> None:
    """In deterministic mode no random number is needed, and turns begin with the first slot."""
    state = state_of(3, deterministic=True)
    choice = choice_of(state, [0.0] * 3)
    assert [pickers.weighted_turn(state, REQUEST, choice) for _ in range(6)] == [0, 1, 2] * 2


def test_turns_go_on_without_a_pod_and_take_it_in_again() -> None:
    """While a pod is no candidate the others have its turns; afterwards it makes up for nothing."""
    state = state_of(3, deterministic=True)
    away = choice_of(state, [0.0] * 3, leave_out=0b010)
    assert away.among is not None
    found = Counter(
        away.among.slots[pickers.weighted_turn(state, REQUEST, away)] for _ in range(60)
    )
    assert found == {0: 30, 2: 30}
    back = choice_of(state, [0.0] * 3)
    again = Counter(pickers.weighted_turn(state, REQUEST, back) for _ in range(60))
    assert all(18 <= count <= 22 for count in again.values())


# --- power of two ------------------------------------------------------------------------------


def test_pairs_are_drawn_by_weight() -> None:
    """Of four pods with load in proportion to their weights each gets its weight of the picks."""
    weights = [2.0, 1.0, 0.7, 0.3]
    inflight = [10.0 * weight - 1.0 for weight in weights]
    found = picks(pickers.less_loaded_of_two_weighted, state_of(4), weights, 4000, inflight)
    # Of two different ones the light are drawn more often than their weight; never the other way.
    assert [place for place, _ in found.most_common()] == [0, 1, 2, 3]
    assert found[3] < 700


def test_two_are_compared_by_load_over_weight() -> None:
    """With two pods both are always drawn: (q + 1) / w decides."""
    heavy, light = [1.5, 0.5], [1.0, 1.0]
    picker = pickers.less_loaded_of_two_weighted
    assert picks(picker, state_of(2), heavy, 50, [5.0, 2.0]) == {0: 50}  # 4 against 6
    assert picks(picker, state_of(2), heavy, 50, [5.0, 0.0]) == {1: 50}  # 4 against 2
    assert picks(picker, state_of(2), light, 50, [5.0, 2.0]) == {1: 50}


def test_the_only_candidate_is_picked() -> None:
    """One pod, whatever its weight."""
    for picker in (pickers.weighted_turn, pickers.less_loaded_of_two_weighted):
        assert picks(picker, state_of(1), [0.1], 3, [7.0]) == {0: 3}


def test_equal_costs_go_by_id_when_deterministic() -> None:
    """In deterministic mode the first id of the two, not the first slot."""
    config = make_config((pod_config("b"), pod_config("a")), deterministic=True)
    state = make_router(config)._state
    assert picks(pickers.less_loaded_of_two_weighted, state, [1.0, 1.0], 20, [2.0, 2.0]) == {1: 20}


# --- least cost --------------------------------------------------------------------------------


def cheapest(state: State, inflight: list[float], last: int | None = None) -> int:
    """The pick among pods with COSTS."""
    choice = choice_of(state, inflight)
    choice.scores = array("d", COSTS)
    if last is not None:
        choice.last = state.table.at[last]
    return pickers.cheapest(state, REQUEST, choice)


def test_near_costs_go_to_the_least_inflight() -> None:
    """Costs that hardly differ tie; of those the pod with less inflight, else anyone."""
    assert cheapest(state_of(4), [0.0, 2.0, 1.0, 0.0]) == 2
    found = Counter(cheapest(state_of(4, seed), [0.0, 1.0, 1.0, 0.0]) for seed in range(60))
    assert set(found) == {1, 2}


def test_near_costs_go_to_the_sessions_last_pod() -> None:
    """A session stays where it was as long as that costs nothing; it is not pinned."""
    assert cheapest(state_of(4), [0.0, 9.0, 0.0, 0.0], last=1) == 1
    assert cheapest(state_of(4), [0.0, 0.0, 1.0, 0.0], last=3) == 1


def test_near_costs_go_by_id_when_deterministic() -> None:
    """In deterministic mode the session's last pod, else the first id of those that tie."""
    named = tuple(pod_config(name) for name in ("a", "z", "y", "b"))
    state = make_router(make_config(named, deterministic=True))._state
    assert cheapest(state, [0.0, 0.0, 5.0, 0.0]) == 2
    assert cheapest(state, [0.0, 0.0, 5.0, 0.0], last=1) == 1


# --- not knowing enough ------------------------------------------------------------------------


def shared(unseen: float) -> State:
    """Others were routing ten requests a second; so many are unseen by 2 s."""
    state = state_of(4, deterministic=True)
    for now in (0.0, 1.0, 2.0 - unseen / 10.0):
        facts = (PodFacts("single-0", 1.0),)
        event = ReplicaFacts("b", facts, (RoleFacts("single", 10.0 * now, 0.0),))
        state.replicas.absorb(event, now)
    state.blind_weights[3] = 5.0
    return state


def rule_of(state: State, blocks: int = 0, deepest: float = 0.0) -> tuple[int, str]:
    """(pick, rule) for a prompt of which a pod holds `deepest` blocks."""
    choice = choice_of(state, [0.0] * 4)
    choice.blocks, choice.deepest, choice.now = blocks, deepest, 2.0
    choice.scores = array("d", COSTS)
    return pickers.cheapest(state, REQUEST, choice), choice.rule


def test_turns_where_too_much_is_unseen() -> None:
    """From 0.4 unseen requests a pod on, turns by the weights that are for that."""
    assert rule_of(shared(unseen=1.5)) == (1, "")
    assert rule_of(shared(unseen=1.7)) == (3, "weightedTurn")


def test_a_prefix_is_not_lost_to_turns() -> None:
    """A prompt of which a pod holds a tenth goes by cost even then."""
    assert rule_of(shared(unseen=5.0), 100, 9.0) == (3, "weightedTurn")
    assert rule_of(shared(unseen=5.0), 100, 10.0) == (1, "")
