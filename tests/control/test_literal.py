"""The literal form: a local minimum of its own objective, and what it does differently."""

from __future__ import annotations

import numpy as np
import pytest

from calinix.control import MpcSettings, MpcState, QueueMPC, literal
from calinix.control.literal import _Problem, literal_weights
from calinix.control.model import objective
from qp import random_state


def test_value_and_gradient() -> None:
    """The value is the objective's, the gradient what differences of it say."""
    rng = np.random.default_rng(1)
    settings = MpcSettings(horizon=4, target_queue=3.0, mode="literal")
    state = MpcState(rng.uniform(0, 20, 5), rng.uniform(1, 4, 5), 11.0)
    problem = _Problem(state, settings)
    weights = rng.uniform(0.2, 2.5, (4, 5))
    at, slope = problem.at(weights)
    size = objective(state, weights, settings) / at
    for place in np.ndindex(4, 5):
        step = np.zeros((4, 5))
        step[place] = 1e-5
        up, down = (objective(state, weights + way * step, settings) for way in (1.0, -1.0))
        assert slope[place] * size == pytest.approx((up - down) / 2e-5, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("pods", [2, 8, 20])
def test_it_is_a_local_minimum(pods: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given time nothing pulls at a weight that is free to move; as it is, it is close to that."""
    rng = np.random.default_rng(pods)
    for horizon in (5, 20):
        settings = MpcSettings(horizon=horizon, mode="literal")
        for _ in range(3):
            state = random_state(rng, pods)
            start = np.ones((horizon, pods))
            found = literal_weights(state, settings, start)
            assert 0.1 <= found.min() <= found.max() <= 3.0
            with monkeypatch.context() as patient:
                patient.setattr(literal, "ITERATIONS", 5000)
                arrived = literal_weights(state, settings, found)
            problem = _Problem(state, settings)
            least, slope = problem.at(arrived)
            assert np.abs(np.clip(arrived - slope, 0.1, 3.0) - arrived).max() < 1e-4
            assert least <= problem.at(found)[0] <= 1.01 * least
            assert problem.at(found)[0] < problem.at(start)[0]


def test_more_time_is_never_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search may go up for a while; what it gives is the best that it has seen."""
    rng = np.random.default_rng(4)
    settings = MpcSettings(mode="literal")
    for _ in range(5):
        state = random_state(rng, 6)
        problem = _Problem(state, settings)
        values = []
        for iterations in range(25):
            monkeypatch.setattr(literal, "ITERATIONS", iterations)
            values.append(problem.at(literal_weights(state, settings, np.ones((10, 6))))[0])
        assert values == sorted(values, reverse=True)
        assert values[-1] < values[0]


def test_its_scale_is_not_pinned() -> None:
    """The mean of its weights is not 1, which is why the controller brings it there."""
    state = MpcState(np.array([60.0, 0.0]), np.array([2.0, 2.0]), 3.0)
    found = QueueMPC(MpcSettings(mode="literal")).solve(state)
    assert abs(found.weights[0].mean() - 1.0) > 0.05


def test_it_starts_from_its_last_solution() -> None:
    """A second look at the same state is no worse, also after the pool has changed its size."""
    rng = np.random.default_rng(9)
    settings = MpcSettings(mode="literal")
    mpc = QueueMPC(settings)
    for pods in (8, 3):
        drawn = random_state(rng, pods)
        state = MpcState(drawn.queue, drawn.service_rate, drawn.arrival_rate)
        values = [objective(state, mpc.solve(state).weights, settings) for _ in range(3)]
        assert values == sorted(values, reverse=True)


def test_one_target_for_all_overloads_the_slow() -> None:
    """It aims at equal queue lengths: more goes to the slow pod than when waits are to be equal."""
    queue, rate = np.array([10.0, 40.0]), np.array([1.0, 4.0])
    literal = QueueMPC(MpcSettings(mode="literal")).solve(MpcState(queue, rate, 5.0)).weights[0]
    delays = MpcState(queue, rate, 5.0, target=queue)
    convex = QueueMPC().solve(delays).weights[0]
    assert literal[0] / literal.sum() > 1.5 * convex[0] / convex.sum()
