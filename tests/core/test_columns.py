"""What is worked out over all candidates, and the columns of load: both forms, the same limits."""

from __future__ import annotations

from array import array
from types import ModuleType

import numpy as np
import pytest

from calinix.core import columns, hashing, kv

FORMS: list[ModuleType] = [columns, kv] if kv.COMPILED else [columns]
SLOTS = array("i", [1, 3, 64, 200])


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def form(request: pytest.FixtureRequest) -> ModuleType:
    """The reference, and what is compiled where it is."""
    found: ModuleType = request.param
    return found


def test_slots_of_a_bitmap(form: ModuleType) -> None:
    """Ascending, over all words of the bitmap."""
    assert list(form.slots_of(0)) == []
    assert list(form.slots_of(1 | 1 << 63 | 1 << 64 | 1 << 255)) == [0, 63, 64, 255]
    assert form.slots_of(0b110).typecode == "i"


def test_look_takes_values_and_the_largest(form: ModuleType) -> None:
    """The values stand in the order of the slots; a slot outside is refused, as is none at all."""
    column = array("d", range(256))
    values, largest = form.look(column, SLOTS)
    assert list(values) == [1.0, 3.0, 64.0, 200.0]
    assert largest == 200.0
    for wrong in ([], [256], [-1]):
        with pytest.raises(ValueError, match="slot"):
            form.look(column, array("i", wrong))
    more = array("d", [9.0] + [0.5] * 255)
    assert form.look(column, SLOTS, more) == (array("d", [1.5, 3.5, 64.5, 200.5]), 200.5)
    with pytest.raises(ValueError, match="slot"):
        form.look(column, SLOTS, array("d", [1.0]))


def test_balanced_names_who_is_not_far_above_the_mean(form: ModuleType) -> None:
    """The bound is factor x mean + offset; 0 where it would keep all of them, or none."""
    assert form.balanced(array("d", [0, 0, 0, 9]), SLOTS, 1.0, 2.0) == 1 << 1 | 1 << 3 | 1 << 64
    assert form.balanced(np.array([9.0, 0, 0, 0]), SLOTS, 1.0, 2.0) == 1 << 3 | 1 << 64 | 1 << 200
    assert form.balanced(array("d", [5, 5, 5, 5]), SLOTS, 1.0, 0.0) == 0
    assert form.balanced(array("d", [5, 5, 5, 5]), SLOTS, 0.0, 0.0) == 0
    assert form.balanced(array("d"), array("i"), 1.0, 0.0) == 0
    with pytest.raises(ValueError, match="length"):
        form.balanced(array("d", [1]), SLOTS, 1.0, 0.0)


def test_weigh_sums_the_terms(form: ModuleType) -> None:
    """Weight x scale x values, offsets left out; a term may say nothing, or be an array."""
    terms = [(array("d", [1, 2]), 0.5, 9.0), None, (np.array([4.0, 0.0]), -1.0, 1.0)]
    assert list(form.weigh(terms, (2.0, 5.0, 0.5), 2)) == [-1.0, 2.0]
    assert list(form.weigh([None], (1.0,), 3)) == [0.0, 0.0, 0.0]
    for wrong, weights in (([(array("d", [1]), 1.0, 0.0)], (1.0,)), ([None], ())):
        with pytest.raises(ValueError, match=r"term|zip"):
            form.weigh(wrong, weights, 2)


def test_the_highest(form: ModuleType) -> None:
    """Its place when it stands alone, else -1; ties go to the least load, then to the draw."""
    assert form.only_highest(array("d", [0.1, 0.7, 0.3])) == 1
    assert form.only_highest(np.array([-2.0, -1.0])) == 1
    assert form.only_highest(array("d", [0.7, 0.1, 0.7])) == -1
    scores, loads = array("d", [7, 1, 7, 7]), array("d", [2, 0, 1, 1])
    assert [form.least_of_highest(scores, loads, draw) for draw in (0.0, 0.49, 0.5, 0.99)] == [
        2, 2, 3, 3,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no scores"):
        form.only_highest(array("d"))
    for wrong in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="draw"):
            form.least_of_highest(scores, loads, wrong)
    with pytest.raises(ValueError, match="length"):
        form.least_of_highest(scores, array("d", [1]), 0.0)


def test_near_the_highest(form: ModuleType) -> None:
    """Within slack and share: the favourite, else the least load, else the draw decides."""
    scores, loads = array("d", [-1.0, -1.04, -1.1, -2.0]), array("d", [2, 1, 1, 0])
    assert form.near_highest(scores, loads, 0.9, 0.0, 0.0) == 0
    assert form.near_highest(scores, loads, 0.9, 0.05, 0.0) == 1
    assert form.near_highest(scores, loads, 0.4, 0.0, 0.11) == 1
    assert form.near_highest(scores, loads, 0.6, 0.05, 0.06) == 2
    assert form.near_highest(scores, loads, 0.6, 0.05, 0.06, favourite=0) == 0
    assert form.near_highest(scores, loads, 0.6, 0.05, 0.06, favourite=3) == 2
    for wrong in ((scores, loads, 1.0), (scores, array("d", [1.0]), 0.0), (array("d"),) * 2 + (0,)):
        with pytest.raises(ValueError, match="length"):
            form.near_highest(*wrong, 0.0, 0.0)


def test_turns_go_by_weight_and_spread_out(form: ModuleType) -> None:
    """Over a round each slot is picked as often as its weight says, never in one lump."""
    owed, weights = array("d", bytes(8 * 256)), array("d", bytes(8 * 256))
    for slot, weight in zip(SLOTS, (3.0, 0.5, 0.25, 0.25), strict=True):
        weights[slot] = weight
    turns = [form.smooth_turn(owed, weights, SLOTS) for _ in range(16)]
    assert [turns.count(place) for place in range(4)] == [12, 2, 1, 1]
    assert turns.index(1) < 8 < len(turns) - 1 - turns[::-1].index(1)
    assert not any(owed)
    with pytest.raises(ValueError, match=r"length|long"):
        form.smooth_turn(array("d", [0.0]), weights, SLOTS)
    with pytest.raises(ValueError, match="slots"):
        form.smooth_turn(owed, weights, array("i"))


def test_drawn_by_weight(form: ModuleType) -> None:
    """The draw falls on places as their weights cut [0, 1); one place may be left out."""
    weights = array("d", range(256))
    slots = array("i", [1, 2, 5])
    assert [form.drawn(weights, slots, draw) for draw in (0.0, 0.13, 0.37, 0.38, 0.999)] == [
        0, 1, 1, 2, 2,
    ]  # fmt: skip
    assert [form.drawn(weights, slots, draw, 2) for draw in (0.0, 0.34, 0.99)] == [0, 1, 1]
    assert form.drawn(array("d", [0.0, 0.0]), array("i", [0, 1]), 0.5) == 1
    for wrong in ((slots, 1.0, -1), (array("i", [3]), 0.5, 0)):
        with pytest.raises(ValueError, match="draw"):
            form.drawn(weights, *wrong)


def test_seconds_of_the_backlog(form: ModuleType) -> None:
    """Work times pace, with the pool's pace for a pod that has none, and others' work on top."""
    work, paces = array("d", [100, 200, 0, 50]), array("d", [0.01, 0.0, 1.0, 0.02])
    slots = array("i", [0, 1, 3])
    assert form.backlog_s(work, paces, slots, 0.1) == (array("d", [1.0, 20.0, 1.0]), 22.0 / 3)
    more = array("d", [100, 0, 0, 0])
    assert form.backlog_s(work, paces, slots, 0.1, more)[0] == array("d", [2.0, 20.0, 1.0])
    for wrong in (array("i", [4]), array("i")):
        with pytest.raises(ValueError, match="slot"):
            form.backlog_s(work, paces, wrong, 0.1)
    with pytest.raises(ValueError, match="slot"):
        form.backlog_s(work, array("d"), slots, 0.1)


def test_seconds_of_the_own_prefill(form: ModuleType) -> None:
    """What is not cached counts; with an attention constant by what stands before it, too."""
    paces, slots = array("d", [0.5, 0.0]), array("i", [0, 1])
    depths = array("d", [2.0, 9.0])
    linear = form.prefill_s(depths, paces, slots, 2.0, 100.0, 10.0, 5.0, 0.0, 8.0)
    assert linear == array("d", [(80.0 + 8.0) * 0.5, (50.0 + 8.0) * 2.0])
    curved = form.prefill_s(depths, paces, slots, 2.0, 100.0, 10.0, 5.0, 0.01, 8.0)
    assert list(curved) == pytest.approx([(80 * 1.6 + 8) * 0.5, (50 * 1.75 + 8) * 2.0])
    assert form.prefill_s(None, paces, slots, 2.0, 4.0, 10.0, 5.0, 0.0, 1.0)[0] == 2.5
    assert form.prefill_s(depths, paces, slots, 2.0, 4.0, 10.0, 5.0, 0.0, 1.0)[0] == 0.5
    with pytest.raises(ValueError, match="length"):
        form.prefill_s(array("d", [1.0]), paces, slots, 2.0, 4.0, 10.0, 5.0, 0.0, 1.0)


def test_seconds_of_an_output_token(form: ModuleType) -> None:
    """A base, so much for each request and each cached token, times the pod's slowness."""
    context, slowness = array("d", [0.0, 1000.0]), array("d", [1.0, 2.0])
    slots, inflight = array("i", [0, 1]), array("d", [0.0, 3.0])
    found = form.token_s(inflight, context, slowness, slots, 0.01, 0.001, 1e-6)
    assert list(found) == pytest.approx([0.011, 2 * (0.01 + 0.004 + 0.001)])
    more = array("d", [5000.0, 0.0])
    more_s = form.token_s(inflight, context, slowness, slots, 0.01, 0.001, 1e-6, more)
    assert list(more_s) == pytest.approx([0.016, 0.03])
    with pytest.raises(ValueError, match="length"):
        form.token_s(array("d", [1.0]), context, slowness, slots, 0.01, 0.001, 1e-6)


def test_wrong_buffers_are_refused(form: ModuleType) -> None:
    """Integers, two dimensions and what is no buffer at all are never read as doubles."""
    if form is columns:
        return  # numpy takes what it is given
    for wrong in (np.zeros(4, np.int64), np.zeros((2, 2)), array("f", [1.0]), b"12345678"):
        with pytest.raises(ValueError, match="float64"):
            form.only_highest(wrong)
    with pytest.raises(TypeError):
        form.only_highest([0.1, 0.2])
    with pytest.raises(ValueError, match="a term is"):
        form.weigh([(array("d", [1, 2]), 1.0)], (1.0,), 2)
    with pytest.raises(ValueError, match="typecode"):
        form.look(array("d", [1.0]), array("l", [0]))


def test_loads_are_taken_and_given_back(form: ModuleType) -> None:
    """One request on one pod or on two, the prefill part first; full pods are told."""
    loads = form.Loads(4)
    loads.bounds[1], loads.bounds[2] = 2.0, 1.0
    assert not loads.take(1, -1, 100.0, 10.0)
    assert loads.take(1, 2, 50.0, 5.0)
    assert list(loads.inflight) == [0.0, 2.0, 1.0, 0.0]
    assert list(loads.prefill_tokens) == [0.0, 100.0, 50.0, 0.0]
    assert list(loads.decode_tokens) == [0.0, 15.0, 0.0, 0.0]
    assert loads.give_prefill(2, 50.0, True)
    assert not loads.give_prefill(1, 60.0, False)
    assert loads.give(1, 40.0, 10.0)
    assert not loads.give(1, 0.0, 5.0)
    assert not any((*loads.inflight, *loads.prefill_tokens, *loads.decode_tokens))


def test_loads_keep_work_context_and_time(form: ModuleType) -> None:
    """Work goes with the prefill part, context with the end; a pod is busy while it has any."""
    loads = form.Loads(3)
    loads.take(0, -1, 100.0, 10.0, 164.0, 105.0, 1.0)
    loads.take(0, 2, 50.0, 5.0, 114.0, 55.0, 2.0)
    assert list(loads.work) == [164.0, 0.0, 114.0]
    assert list(loads.context) == [160.0, 0.0, 0.0]
    loads.give_prefill(2, 50.0, True, 114.0)
    loads.give(0, 100.0, 10.0, 164.0, 105.0, 3.0)
    assert (list(loads.work), loads.context[0]) == ([0.0, 0.0, 0.0], 55.0)
    loads.give(0, 0.0, 5.0, 0.0, 55.0, 4.5)
    loads.take(0, -1, 0.0, 0.0, 0.0, 0.0, 10.0)
    loads.give(0, 0.0, 0.0, 0.0, 0.0, 11.0, False)
    assert (loads.busy_s[0], loads.done[0], loads.context[0]) == (4.5, 2.0, 0.0)


def test_loads_have_bounds(form: ModuleType) -> None:
    """No slot but those that there are, and the columns keep their length."""
    loads = form.Loads(2)
    for slot in (-1, 2):
        with pytest.raises(IndexError):
            loads.take(slot, -1, 0.0, 0.0)
        with pytest.raises(IndexError):
            loads.give_prefill(slot, 0.0, True)
        with pytest.raises(IndexError):
            loads.give(slot, 0.0, 0.0)
    for wrong in (0, 4097):
        with pytest.raises(ValueError, match="4096"):
            form.Loads(wrong)
    assert list(loads.inflight) == [0.0, 0.0]
    if form is not columns:
        with pytest.raises(BufferError):
            loads.inflight.append(1.0)


@pytest.mark.parametrize("module", [hashing, kv], ids=["reference", "chosen"])
def test_texts_and_bytes_are_joined(module: ModuleType) -> None:
    """Texts become UTF-8, bytes stay; a text that is no Unicode is refused."""
    assert module.join([b"\xff", "a", "", "ü\U0001f600", b""]) == b"\xffa" + "ü\U0001f600".encode()
    assert module.join([]) == b""
    with pytest.raises(UnicodeEncodeError):
        module.join(["a\ud800"])
