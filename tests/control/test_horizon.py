"""The full horizon: beside an interior-point reference, with degenerate states, and safe."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from calinix.control import MpcSettings, MpcState, QueueMPC, Status, horizon
from calinix.control.mpc import SolverMissing
from calinix.errors import CalinixError
from qp import minimise, random_state, terms, value


@pytest.mark.parametrize("steps", [5, 10, 20])
@pytest.mark.parametrize("pods", [2, 3, 16, 64, 256])
def test_it_is_the_optimum(pods: int, steps: int) -> None:
    """Many states in a row by one warm solver: feasible, gap to the reference below 1e-5."""
    rng = np.random.default_rng(pods * 100 + steps)
    settings = MpcSettings(horizon=steps)
    mpc = QueueMPC(settings)
    for _ in range(6 if pods < 100 else 2):
        state = random_state(rng, pods)
        found = mpc.solve(state, full=True)
        assert found.status is Status.SOLVED
        assert 0.1 <= found.weights.min() <= found.weights.max() <= 3.0
        assert np.abs(found.weights.mean(axis=1) - 1.0).max() < 1e-12
        hessian, linear = terms(state, settings)
        least = value(hessian, linear, minimise(hessian, linear, -0.9, min(3.0, pods) - 1.0))
        gap = value(hessian, linear, found.weights.T - 1.0) - least
        assert -1e-9 * abs(least) <= gap <= 1e-5 * abs(least)
        blocked = mpc.solve(state).weights
        assert gap <= value(hessian, linear, blocked.T - 1.0) - least + 1e-9 * abs(least)


def test_each_step_has_weights_of_its_own() -> None:
    """A long queue is avoided first and fed later, which one share over the horizon cannot do."""
    state = MpcState(np.array([12.0, 0.0]), np.array([4.0, 4.0]), 9.0)
    found = QueueMPC().solve(state, full=True).weights[:, 0]
    assert found[0] < 0.5 < found[-1]


def test_degenerate_states() -> None:
    """Nothing served, a pod stuck, floods, trickles, queues of any size: within all bounds."""
    zeros, some = np.zeros(8), np.linspace(0.5, 4.0, 8)
    stuck = np.where(np.arange(8) == 3, 0.0, some)
    queues = [zeros, some, some * 1e6, some * 1e12, np.where(np.arange(8) == 0, 1e6, 0.0)]
    mpc = QueueMPC()
    for queue, rate, arrival in itertools.product(
        queues, [zeros, stuck, some * 1e9], [1e-200, 1e-6, 20.0, 1e6, 1e12]
    ):
        found = mpc.solve(MpcState(queue, rate, arrival), full=True)
        assert found.status in (Status.SOLVED, Status.CLOSED_FORM)
        assert 0.1 <= found.weights.min() <= found.weights.max() <= 3.0
        assert np.abs(found.weights.mean(axis=1) - 1.0).max() < 1e-12
        assert np.isfinite(found.queues).all()
    idle = mpc.solve(MpcState(some, some, 0.0), full=True)
    assert (idle.status, set(idle.weights.ravel())) == (Status.IDLE, {1.0})


def test_pods_come_and_go() -> None:
    """The solver follows a pool that changes its size, and masked pods stay at 0."""
    rng = np.random.default_rng(5)
    mpc = QueueMPC()
    for pods in (4, 9, 9, 4, 2, 30):
        state = random_state(rng, pods)
        alive = np.arange(pods) != pods // 2
        masked = MpcState(state.queue, state.service_rate, state.arrival_rate, alive=alive)
        found = mpc.solve(masked, full=True)
        assert (found.weights[:, ~alive] == 0.0).all()
        fresh = QueueMPC().solve(masked, full=True)
        assert np.allclose(found.queues, fresh.queues, rtol=1e-3, atol=1e-3 * state.queue.max())


def test_a_solver_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without enough iterations the closed form is given and said so; then all is well again."""
    state = random_state(np.random.default_rng(6), 16)
    mpc = QueueMPC()
    with monkeypatch.context() as few:
        few.setattr(horizon, "MAX_ITERATIONS", 2)
        found = mpc.solve(state, full=True)
    assert found.status is Status.CLOSED_FORM
    assert np.array_equal(found.weights, mpc.solve(state).weights)
    assert mpc.solve(state, full=True).status is Status.SOLVED


def test_without_osqp(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install; everything else works."""
    monkeypatch.setitem(sys.modules, "osqp", None)
    mpc = QueueMPC()
    state = random_state(np.random.default_rng(7), 3)
    with pytest.raises(SolverMissing, match=r"calinix\[mpc\]") as caught:
        mpc.solve(state, full=True)
    assert isinstance(caught.value, CalinixError)
    assert mpc.solve(state).status is Status.SOLVED
