"""The pool's controller: what it holds, lets go, masks and repairs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from calinix.control import MpcSettings, MpcState, PoolController, Status, Steering, closed_form
from calinix.control.model import Floats

QUEUE = np.array([40.0, 0.0, 10.0, 5.0])
RATE = np.array([1.0, 4.0, 2.0, 3.0])
EVERYBODY = (0, 1, 2, 3)


def controller(mode: str = "convex", slots: int = 4) -> PoolController:
    """With the usual settings: a period of half a second."""
    return PoolController(msgspec.convert({"mode": mode}, MpcSettings), slots)


def step(
    pool: PoolController,
    now: float,
    alive: Sequence[int] = EVERYBODY,
    age_s: float = 0.0,
    arrival: float = 8.0,
) -> Floats:
    """One period with the pool above; gives the weights."""
    pool.step(now, now - age_s, alive, QUEUE, RATE, arrival)
    return pool.weights


def test_a_step_gives_the_closed_form() -> None:
    """Fresh weights are n times the closed form's shares; the report says where they are from."""
    pool = controller()
    assert pool.report(0.0).steering is Steering.STARTING
    weights = step(pool, 1.0)
    assert np.allclose(weights, 4.0 * closed_form(MpcState(QUEUE, RATE, 8.0), pool.settings))
    report = pool.report(1.5)
    assert (report.steering, report.status) == (Steering.FRESH, Status.SOLVED)
    assert (report.step_age_s, report.snapshot_age_s) == (0.5, 0.5)
    assert (report.steps, report.fallbacks) == (1, 0)


def test_weights_are_replaced_and_not_changed() -> None:
    """Weights that were read stay as they were, and nobody can change the controller's own."""
    pool = controller()
    before = step(pool, 1.0)
    kept = before.copy()
    pool.step(1.5, 1.5, EVERYBODY, QUEUE[::-1], RATE, 8.0)
    assert np.array_equal(before, kept)
    assert not np.array_equal(pool.weights, kept)
    with pytest.raises(ValueError, match="read-only"):
        pool.weights[0] = 9.0


def test_other_slots_and_other_arrays() -> None:
    """Arrays are by slot, and only alive slots are read; typed arrays of Python's do as well."""
    pool = controller(slots=9)
    queue, rate = array("d", [math.nan] * 9), array("d", [math.inf] * 9)
    for place, slot in enumerate((2, 4, 5, 8)):
        queue[slot], rate[slot] = QUEUE[place], RATE[place]
    pool.step(1.0, 1.0, [8, 2, 5, 4], queue, rate, 8.0)  # type: ignore[arg-type]  # On purpose.
    assert np.allclose(pool.weights[[2, 4, 5, 8]], step(controller(), 1.0))
    assert (pool.weights[[0, 1, 3, 6, 7]] == 1.0).all()
    assert pool.report(1.0).slots == [2, 4, 5, 8]
    with pytest.raises(IndexError):
        pool.step(1.5, 1.5, [9], queue, rate, 8.0)  # type: ignore[arg-type]  # As above.


@pytest.mark.parametrize("arrival", [math.nan, math.inf])
def test_without_a_solution_weights_are_held_then_let_go(arrival: float) -> None:
    """Two periods as they were, then half of the way to 1 in each; solved again: back at once."""
    pool = controller()
    first = step(pool, 1.0)
    for now in (1.5, 2.0):
        assert np.allclose(step(pool, now, arrival=arrival), first)
        assert pool.report(now).steering is Steering.HELD
    for number, now in enumerate((2.5, 3.0, 3.5), 1):
        weights = step(pool, now, arrival=arrival)
        assert np.allclose(weights, 1.0 + 0.5**number * (first - 1.0))
        assert pool.report(now).steering is Steering.DECAYING
        assert pool.report(now).status is Status.UNUSABLE
    assert np.allclose(step(pool, 4.0), first)
    assert pool.report(4.0).fallbacks == 5


def test_a_late_solver_is_waited_for_as_long() -> None:
    """A host that computes elsewhere says so when a period brought nothing: held, then let go."""
    pool = controller()
    pool.missed(0.5)
    assert (pool.weights == 1.0).all()
    first = step(pool, 1.0)
    for now, part in ((1.5, 1.0), (2.0, 1.0), (2.5, 0.5), (3.0, 0.25)):
        pool.missed(now)
        assert np.allclose(pool.weights, 1.0 + part * (first - 1.0)), now
    assert pool.report(3.0).steps == 6


def test_old_snapshots_let_go() -> None:
    """Three periods old is still used; older, and the weights go to 1 half-way in each period."""
    pool = controller()
    first = step(pool, 1.0)
    assert np.allclose(step(pool, 2.5, age_s=1.5), first)
    weights = step(pool, 3.0, age_s=2.0)
    assert np.allclose(weights, 1.0 + 0.5 * (first - 1.0))
    assert np.allclose(step(pool, 5.0, age_s=4.0), 1.0 + 0.5**5 * (first - 1.0))
    assert pool.report(5.0).steering is Steering.DECAYING


def test_rare_snapshots_are_not_old_ones() -> None:
    """Where facts come every three seconds, three of their periods count; silence still ends it."""
    pool = controller()
    for number in range(61):
        now = number * 0.5
        step(pool, now, age_s=now % 3.0)
        if now >= 3.0:
            assert pool.report(now).steering is Steering.FRESH, now
    last = 30.0
    for number in range(1, 40):
        pool.step(last + number * 0.5, last, EVERYBODY, QUEUE, RATE, 8.0)
        held = number * 0.5 <= 9.0
        assert pool.report(last).steering is (Steering.FRESH if held else Steering.DECAYING)
    assert np.allclose(pool.weights, 1.0, atol=1e-3)


def test_an_outage_is_not_taken_for_a_rhythm() -> None:
    """After a minute of silence snapshots are believed for fifteen seconds at most, not minutes."""
    pool = controller()
    step(pool, 1.0)
    step(pool, 61.0)
    for now in (61.5, 75.5):
        pool.step(now, 61.0, EVERYBODY, QUEUE, RATE, 8.0)
        assert pool.report(now).steering is Steering.FRESH
    pool.step(76.5, 61.0, EVERYBODY, QUEUE, RATE, 8.0)
    assert pool.report(76.5).steering is Steering.DECAYING


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_clocks_that_say_nothing(odd: float) -> None:
    """A time that is no number lets go of the weights, and does no harm to what comes after."""
    pool = controller()
    first = step(pool, 1.0)
    pool.step(1.5, odd, EVERYBODY, QUEUE, RATE, 8.0)
    assert np.allclose(pool.weights, 1.0 + 0.5 * (first - 1.0))
    pool.step(odd, 2.0, EVERYBODY, QUEUE, RATE, 8.0)
    assert np.isfinite(pool.weights).all()
    assert np.allclose(step(pool, 2.5), first)


def test_nothing_to_decide_is_weight_one_at_once() -> None:
    """No arrivals, or one pod: 1, with nothing held."""
    pool = controller()
    step(pool, 1.0)
    assert (step(pool, 1.5, arrival=0.0) == 1.0).all()
    assert pool.report(1.5).status is Status.IDLE
    step(pool, 2.0)
    assert (step(pool, 2.5, alive=[1]) == 1.0).all()
    assert pool.report(2.5).status is Status.ALONE
    assert (step(pool, 3.0, alive=[]) == 1.0).all()
    assert pool.report(3.0).weight_trajectory == [[]] * 10


def test_masked_pods_leave_and_come_back_at_one() -> None:
    """The rest shares as if it was alone; who returns has weight 1 for a period, then its own."""
    pool = controller()
    everybody = step(pool, 1.0)
    without = step(pool, 1.5, alive=[0, 2, 3])
    assert without[1] == 1.0
    assert without[[0, 2, 3]].mean() == pytest.approx(1.0)
    back = step(pool, 2.0)
    assert back[1] == pytest.approx(1.0)
    assert back[[0, 2, 3]].mean() == pytest.approx(1.0)
    others = MpcState(QUEUE[[0, 2, 3]], RATE[[0, 2, 3]], 8.0 * 3.0 / 4.0)
    assert np.allclose(back[[0, 2, 3]], 3.0 * closed_form(others, pool.settings))
    assert np.allclose(step(pool, 2.5), everybody)


def test_masking_while_nothing_is_solved() -> None:
    """Held weights are brought back to mean 1 when a pod leaves, and no bound is left."""
    pool = controller()
    step(pool, 1.0)
    left = step(pool, 1.5, alive=[0, 1], arrival=math.nan)
    assert left[:2].mean() == pytest.approx(1.0)
    assert 0.1 <= left.min() <= left.max() <= 3.0
    assert left[1] > left[0]


def test_unknown_rates_are_the_mean() -> None:
    """A pod that nothing was measured of is steered as one of the mean rate."""
    pool, same = controller(), controller()
    pool.step(1.0, 1.0, EVERYBODY, QUEUE, np.array([1.0, math.nan, 2.0, 3.0]), 8.0)
    same.step(1.0, 1.0, EVERYBODY, QUEUE, np.array([1.0, 2.0, 2.0, 3.0]), 8.0)
    assert np.array_equal(pool.weights, same.weights)
    assert pool.report(1.0).service_rate == [1.0, 2.0, 2.0, 3.0]


def test_rates_of_little_confidence_are_drawn_to_the_mean() -> None:
    """Half a confidence is half the way to the mean of what is known, none is all of it."""
    pool = controller()
    sure = np.array([1.0, 1.0, 0.5, 0.0])
    pool.step(1.0, 1.0, EVERYBODY, QUEUE, np.array([2.0, 4.0, 6.0, 99.0]), 8.0, confidence=sure)
    mean = (2.0 + 4.0 + 3.0) / 2.5
    report = pool.report(1.0)
    assert report.service_rate == pytest.approx([2.0, 4.0, (6.0 + mean) / 2.0, mean])
    assert report.service_confidence == sure.tolist()
    pool.step(1.5, 1.5, EVERYBODY, QUEUE, RATE, 8.0, confidence=np.full(4, math.nan))
    assert pool.report(1.5).service_rate == pytest.approx([RATE.mean()] * 4)


def test_the_report_shows_what_is_done_and_what_is_expected() -> None:
    """Trajectories follow the weights in use, held ones too; all of it is JSON."""
    pool = controller()
    weights = step(pool, 1.0)
    report = pool.report(1.0)
    assert report.weight_trajectory == [weights.tolist()] * 10
    first = QUEUE + 0.5 * (8.0 * weights / 4.0 - RATE)
    assert report.queue_trajectory[0] == pytest.approx(np.maximum(first, 0.0).tolist())
    assert (report.queue, report.arrival_rate) == (QUEUE.tolist(), 8.0)
    for now in (1.5, 2.0, 2.5):
        pool.missed(now)
    assert pool.report(2.5).weight_trajectory == [pool.weights.tolist()] * 10
    decoded = msgspec.json.decode(msgspec.json.encode(pool.report(2.5)))
    assert decoded["steering"] == "decaying"
    assert decoded["queue_trajectory"] == pool.report(2.5).queue_trajectory


def test_the_literal_form_is_as_safe() -> None:
    """Its weights of any scale are brought to mean 1 and into the bounds; its own path is shown."""
    pool = controller("literal")
    weights = step(pool, 1.0)
    assert weights.mean() == pytest.approx(1.0)
    assert 0.1 <= weights.min() <= weights.max() <= 3.0
    assert weights[0] < weights[1]
    path = np.array(pool.report(1.0).weight_trajectory)
    assert np.array_equal(path[0], weights)
    assert not np.allclose(path[0], path[-1])
    assert np.allclose(path.mean(axis=1), 1.0)
    assert path.min() >= 0.1
    assert path.max() <= 3.0
