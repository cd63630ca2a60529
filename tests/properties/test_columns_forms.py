"""Both forms of what is worked out over the candidates give the same, step by step."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from calinix.core import columns, hashing, kv
from kvforms import CHOSEN, REFERENCE

NUMBERS = st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.7, 1.0, 3.0, 17.0, -2.5, 1e30])
MEMBERS = st.sets(st.integers(0, 255), min_size=1, max_size=40)


@given(MEMBERS, st.data())
def test_decisions_agree(members: set[int], data: st.DataObject) -> None:
    """Slots, loads, imbalance, weighted sums and picks: equal to the last bit."""
    bitmap = sum(1 << slot for slot in members)
    slots = columns.slots_of(bitmap)
    assert kv.slots_of(bitmap) == slots
    draw = data.draw
    column = array("d", draw(st.lists(NUMBERS, min_size=256, max_size=256)))
    loads, largest = columns.look(column, slots)
    assert kv.look(column, slots) == (loads, largest)
    whole = array("d", [float(int(load) % 50) for load in loads])
    factor, offset = draw(st.sampled_from([0.0, 0.5, 1.5])), draw(st.sampled_from([0.0, 4.0]))
    assert kv.balanced(whole, slots, factor, offset) == columns.balanced(
        whole, slots, factor, offset
    )
    count = len(slots)
    values = st.lists(NUMBERS, min_size=count, max_size=count).map(lambda some: array("d", some))
    term = st.none() | st.tuples(values, NUMBERS, NUMBERS)
    terms: list[Any] = draw(st.lists(term, max_size=4))
    weights = tuple(draw(NUMBERS) for _ in terms)
    scores = columns.weigh(terms, weights, count)
    assert kv.weigh(terms, weights, count) == scores
    as_arrays = [one and (np.asarray(one[0]), one[1], one[2]) for one in terms]
    assert kv.weigh(as_arrays, weights, count) == scores
    assert kv.only_highest(scores) == columns.only_highest(scores)
    chance = draw(st.floats(0.0, 1.0, exclude_max=True))
    assert kv.least_of_highest(scores, loads, chance) == columns.least_of_highest(
        scores, loads, chance
    )


@given(MEMBERS, st.data())
def test_costs_agree(members: set[int], data: st.DataObject) -> None:
    """Backlogs, prefills, token times, turns, draws and near ties: equal to the last bit."""
    slots = columns.slots_of(sum(1 << slot for slot in members))
    draw, count = data.draw, len(slots)
    sizes = st.sampled_from([0.0, 0.1, 1 / 3, 1.0, 17.0, 4096.0, 123456.0])
    whole = st.lists(sizes, min_size=256, max_size=256).map(lambda some: array("d", some))
    own = st.lists(sizes, min_size=count, max_size=count).map(lambda some: array("d", some))
    work, paces, values = draw(whole), draw(whole), draw(own)
    more = draw(st.none() | whole)
    assert kv.look(work, slots, more) == columns.look(work, slots, more)
    assert kv.backlog_s(work, paces, slots, 0.3, more) == columns.backlog_s(
        work, paces, slots, 0.3, more
    )
    depths = draw(st.none() | own)
    prompt = (draw(sizes), 32.3, draw(sizes), draw(st.sampled_from([0.0, 1e-5])), 64.0)
    assert kv.prefill_s(depths, paces, slots, 0.3, *prompt) == columns.prefill_s(
        depths, paces, slots, 0.3, *prompt
    )
    model = (0.012, 2e-5, 2.5e-8, more)
    assert kv.token_s(values, work, paces, slots, *model) == columns.token_s(
        values, work, paces, slots, *model
    )
    chance = draw(st.floats(0.0, 1.0, exclude_max=True))
    tie = (chance, draw(sizes), draw(sizes), draw(st.integers(-1, count - 1)))
    assert kv.near_highest(values, values, *tie) == columns.near_highest(values, values, *tie)
    turns = array("d", work), array("d", work)
    assert kv.smooth_turn(turns[0], paces, slots) == columns.smooth_turn(turns[1], paces, slots)
    assert turns[0] == turns[1]
    without = draw(st.integers(-1, count - 1)) if count > 1 else -1
    assert kv.drawn(work, slots, chance, without) == columns.drawn(work, slots, chance, without)


SLOT, TOKENS = st.integers(0, 5), st.integers(0, 1000).map(float)
STEP = st.one_of(
    st.tuples(st.just("take"), SLOT, st.integers(-1, 5), *[TOKENS] * 5),
    st.tuples(st.just("give_prefill"), SLOT, TOKENS, st.booleans(), TOKENS),
    st.tuples(st.just("give"), SLOT, *[TOKENS] * 5, st.booleans()),
)


@given(st.lists(st.integers(0, 4), min_size=6, max_size=6), st.lists(STEP, max_size=60))
def test_loads_agree(bounds: list[int], steps: list[tuple[Any, ...]]) -> None:
    """After any steps both forms hold the same and said the same of who is full."""
    forms = columns.Loads(6), kv.Loads(6)
    for loads in forms:
        for slot, bound in enumerate(bounds):
            loads.bounds[slot] = float(bound)
    for name, *arguments in steps:
        said = [getattr(loads, name)(*arguments) for loads in forms]
        assert said[0] == said[1]
        for column in ("inflight", "prefill_tokens", "decode_tokens", "bounds", "work", "context",
                       "done", "busy_s", "busy_from"):  # fmt: skip
            assert getattr(forms[0], column) == getattr(forms[1], column)


@given(st.lists(st.text(max_size=20) | st.binary(max_size=20), max_size=12))
def test_joins_agree(pieces: list[str | bytes]) -> None:
    """Any texts and bytes give the same bytes."""
    assert kv.join(pieces) == hashing.join(pieces)


@given(
    st.lists(st.tuples(SLOT, st.integers(1, 8), st.integers(0, 2)), max_size=20),
    st.sets(SLOT),
    st.integers(0, 2),
)
def test_what_slots_hold_agrees(
    routes: list[tuple[int, int, int]], asked: set[int], kind: int
) -> None:
    """`held` is the same in both forms, and says what `depths` says."""
    slots = array("i", sorted(asked))
    found = []
    for form in (REFERENCE, CHOSEN):
        registry = form.registry(6, 4)
        for slot in range(6):
            registry.open_slot(slot, 10)
        for ticket, (slot, blocks, branch) in enumerate(routes):
            of = [branch * 100 + block for block in range(1, blocks + 1)]
            registry.route(slot, form.chain.of(of), ticket)
        chain = form.chain.of([kind * 100 + block for block in range(1, 9)])
        depths = np.full(len(slots), -1.0)
        deepest = registry.depths(chain, np.asarray(slots), depths)
        held = registry.held(chain, slots)
        assert held == ((array("d", depths), deepest) if deepest else (None, 0))
        found.append(held)
    assert found[0] == found[1]
