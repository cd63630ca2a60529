"""The closed form is the optimum of the move-blocked problem, for any pool."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from calinix.control import MpcSettings, MpcState, QueueMPC, Status, closed_form
from calinix.control.model import objective, usable
from calinix.control.shares import blocked_weights, bounded_weights
from qp import minimise, random_state, terms, value


@pytest.mark.parametrize("horizon", [5, 10, 20])
@pytest.mark.parametrize("pods", [2, 3, 7, 16, 64, 256])
def test_it_is_the_optimum_of_the_blocked_problem(pods: int, horizon: int) -> None:
    """Beside an interior-point solution: feasible to rounding, gap below 1e-9, same weights."""
    rng = np.random.default_rng(pods * 100 + horizon)
    settings = MpcSettings(horizon=horizon)
    for _ in range(8):
        state = random_state(rng, pods)
        shares = closed_form(state, settings)
        assert shares.sum() == pytest.approx(1.0, abs=1e-12)
        weights = shares * pods
        assert weights.min() >= 0.1 * (1 - 1e-12)
        assert weights.max() <= 3.0 * (1 + 1e-12)
        hessian, linear = terms(state, settings)
        blocked = hessian.sum().reshape(1, 1), linear.sum(axis=1)[:, None]
        best = minimise(*blocked, -0.9, min(3.0, pods) - 1.0)
        assert np.abs(weights - 1.0 - best[:, 0]).max() < 1e-4
        least = value(*blocked, best)
        size = max(abs(least), 1e-9)
        assert abs(value(*blocked, (weights - 1.0)[:, None]) - least) < 1e-9 * size


def test_the_terms_are_those_of_the_objective() -> None:
    """The matrices that solutions are judged by give the objective, up to its constant."""
    rng = np.random.default_rng(3)
    settings = MpcSettings(horizon=6, target_queue=2.0)
    for pods in (2, 5, 40):
        state = random_state(rng, pods)
        moved = rng.uniform(-0.9, 1.0, (pods, 6))
        moved -= moved.mean(axis=0)
        found = objective(state, 1.0 + moved.T, settings)
        still = objective(state, np.ones((6, pods)), settings)
        assert found - still == pytest.approx(
            value(*terms(state, settings), moved), rel=1e-9, abs=1e-9 * still
        )


@pytest.mark.parametrize("pods", [1, 2, 5, 30, 256])
def test_bounded_weights_are_the_nearest(pods: int) -> None:
    """Beside a bisection for the multiplier, for wanted weights of any spread."""
    rng = np.random.default_rng(pods)
    for spread in 10.0 ** np.arange(-3.0, 7.0):
        wanted = rng.normal(size=pods) * spread
        weights = bounded_weights(wanted, 0.1, 3.0)
        most = min(3.0, pods)
        low, high = wanted.min() - most - 1.0, wanted.max() + 1.0
        for _ in range(200):
            middle = (low + high) / 2.0
            if np.clip(wanted - middle, 0.1, most).sum() > pods:
                low = middle
            else:
                high = middle
        assert np.allclose(weights, np.clip(wanted - high, 0.1, most), atol=1e-9 + 1e-14 * spread)
        assert weights.sum() == pytest.approx(pods, rel=1e-13)


def test_bounded_weights_where_digits_run_out() -> None:
    """Wanted weights too far apart to tell the small ones from another still give mean 1."""
    for wanted in ([1e17, 0.0, 1.0], [0.0, -1e300, 1e300], [5.0] * 3, [1e17, 1e17 + 16, -1e17]):
        weights = bounded_weights(np.array(wanted), 0.1, 3.0)
        assert weights.sum() == pytest.approx(3.0, rel=1e-14)
        assert 0.1 <= weights.min() <= weights.max() <= 3.0
    assert bounded_weights(np.array([9.0, -9.0]), 1.0, 1.0).tolist() == [1.0, 1.0]


def test_longer_queues_and_slower_pods_get_less() -> None:
    """The order of the weights is the order of queues where rates are equal, and of rates."""
    settings = MpcSettings()
    by_queue = closed_form(MpcState(np.array([1.0, 4.0, 9.0]), np.full(3, 2.0), 6.0), settings)
    by_rate = closed_form(MpcState(np.zeros(3), np.array([1.0, 2.0, 4.0]), 5.0), settings)
    assert by_queue.tolist() == sorted(by_queue, reverse=True)
    assert by_rate.tolist() == sorted(by_rate)
    assert len(set(by_queue.tolist())) == len(set(by_rate.tolist())) == 3


def test_units_do_not_matter_but_for_the_price() -> None:
    """Everything counted in thousandths and the price in millionths: the same weights."""
    state = MpcState(np.array([3.0, 0.0, 8.0]), np.array([2.0, 3.0, 1.0]), 5.0)
    small = MpcState(state.queue / 1e3, state.service_rate / 1e3, state.arrival_rate / 1e3)
    one = closed_form(state, MpcSettings(regularisation=0.5))
    assert np.allclose(one, closed_form(small, MpcSettings(regularisation=0.5e-6)), atol=1e-12)


def test_a_target_for_each_pod() -> None:
    """Pods under their targets get more than those over them."""
    queue, rate = np.array([4.0, 4.0]), np.array([2.0, 2.0])
    shares = closed_form(MpcState(queue, rate, 4.0, np.array([8.0, 0.0])), MpcSettings())
    assert shares[0] > 0.6


def test_masked_pods_get_nothing() -> None:
    """The others share as if the masked one was not there; nobody alive: nobody gets anything."""
    queue, rate = np.array([1.0, 0.0, 5.0]), np.array([2.0, 9.0, 1.0])
    alive = np.array([True, False, True])
    shares = closed_form(MpcState(queue, rate, 3.0, alive=alive), MpcSettings())
    pair = closed_form(MpcState(queue[alive], rate[alive], 3.0), MpcSettings())
    assert shares[1] == 0.0
    assert shares[alive].tolist() == pair.tolist()
    nobody = closed_form(MpcState(queue, rate, 3.0, alive=np.zeros(3, bool)), MpcSettings())
    assert nobody.tolist() == [0.0, 0.0, 0.0]


ODD = [0.0, 1e-300, 5.0, 1e6, 1e12, 1e308, -3.0, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("mode", ["convex", "literal"])
def test_no_state_gives_bad_weights(mode: str) -> None:
    """Queues, rates and arrivals of every odd kind: finite, within bounds, mean 1, queues too."""
    settings = MpcSettings(mode=mode)  # type: ignore[arg-type]  # The parameters are both modes.
    mpc = QueueMPC(settings)
    for queue, rate, arrival in itertools.product(ODD, ODD, ODD):
        state = MpcState(np.array([queue, 1.0, 2.0]), np.array([1.0, rate, 2.0]), arrival)
        found = mpc.solve(state)
        assert found.weights.shape == found.queues.shape == (10, 3)
        assert 0.1 <= found.weights.min() <= found.weights.max() <= 3.0
        assert np.isfinite(found.queues).all()
        assert found.queues.min() >= 0.0
        if mode == "convex":
            assert np.allclose(found.weights.mean(axis=1), 1.0, atol=1e-12)
        if not arrival > 0.0 or math.isinf(arrival):
            assert found.status in (Status.IDLE, Status.UNUSABLE)
            assert (found.weights == 1.0).all()


def test_pools_too_small_to_decide() -> None:
    """One pod or none alive: weight 1, and 0 for the masked; their queues drain."""
    mpc = QueueMPC(MpcSettings(horizon=2))
    one = mpc.solve(MpcState(np.array([3.0]), np.array([2.0]), 1.0))
    assert (one.status, one.weights.tolist()) == (Status.ALONE, [[1.0], [1.0]])
    assert one.queues.tolist() == [[2.5], [2.0]]
    state = MpcState(np.array([3.0, 1.0]), np.array([2.0, 4.0]), 1.0, alive=np.zeros(2, bool))
    none = mpc.solve(state)
    assert (none.status, none.weights.tolist()) == (Status.ALONE, [[0.0, 0.0]] * 2)
    assert none.queues.tolist() == [[2.0, 0.0], [1.0, 0.0]]
    empty = mpc.solve(MpcState(np.zeros(0), np.zeros(0), 1.0))
    assert empty.weights.shape == empty.queues.shape == (2, 0)


def test_the_solution_is_what_the_closed_form_says() -> None:
    """solve() gives the closed form's weights in every step, and the queues that follow."""
    state = MpcState(np.array([30.0, 0.0, 3.0]), np.array([2.0, 3.0, 1.0]), 5.0)
    settings = MpcSettings(horizon=3)
    found = QueueMPC(settings).solve(state)
    assert found.status is Status.SOLVED
    assert np.allclose(found.weights, 3.0 * closed_form(state, settings))
    assert np.allclose(found.weights, blocked_weights(usable(state), settings))
    first = state.queue + 0.5 * (5.0 * found.weights[0] / 3.0 - state.service_rate)
    assert np.allclose(found.queues[0], np.maximum(first, 0.0))
    # Below 0 a queue is spare capacity: it is not shown, but what comes later knows of it.
    assert np.allclose(found.queues[2], np.maximum(state.queue + 3.0 * (first - state.queue), 0.0))
