"""The queue model and what becomes of a state before anything is solved."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from calinix.control import MpcSettings, MpcState, equal_delay_target
from calinix.control.model import LARGEST, objective, rollout, settled, usable


def test_rollout_is_the_recursion() -> None:
    """q(k+1) = q(k) + dt (a p - mu), step by step, by hand."""
    state = MpcState(np.array([4.0, 0.0]), np.array([3.0, 1.0]), 8.0)
    shares = np.array([[0.5, 0.5], [0.25, 0.75]])
    assert rollout(state, shares, 0.5).tolist() == [[4.5, 1.5], [4.0, 4.0]]


def test_objective_by_hand() -> None:
    """Queues over their targets and weights off 1, squared and summed over pods and steps."""
    state = MpcState(np.array([4.0, 0.0]), np.array([3.0, 1.0]), 8.0)
    settings = MpcSettings(horizon=2, target_queue=1.0)
    weights = np.array([[1.0, 1.0], [0.5, 1.5]])
    queues = 3.5**2 + 0.5**2 + 3.0**2 + 3.0**2
    assert objective(state, weights, settings) == pytest.approx(queues + 0.5 * 0.5)
    aimed = MpcState(state.queue, state.service_rate, 8.0, np.array([4.0, 4.0]))
    assert objective(aimed, weights, settings) == pytest.approx(0.5**2 + 2.5**2 + 0.0 + 0.0 + 0.25)


def test_what_is_not_finite_becomes_the_mean() -> None:
    """NaN and infinities take the mean of the others; negatives 0; nothing is left to overflow."""
    assert settled(np.array([1.0, math.nan, 3.0, math.inf, -math.inf])).tolist() == [1, 2, 3, 2, 2]
    assert settled(np.array([-5.0, 1e300])).tolist() == [0.0, LARGEST]
    assert settled(np.full(3, math.nan)).tolist() == [0.0, 0.0, 0.0]
    assert settled(np.array([1.7e308, 1.7e308, math.nan])).tolist() == [LARGEST] * 3


def test_masked_pods_are_out_before_anything_else() -> None:
    """What a dead pod says does not even enter the means."""
    alive = np.array([True, False, True])
    state = MpcState(
        np.array([1.0, 500.0, math.nan]),
        np.array([math.nan, math.inf, 7.0]),
        3.0,
        np.array([2.0, 9.0, 4.0]),
        alive,
    )
    known = usable(state)
    assert known.queue.tolist() == [1.0, 1.0]
    assert known.service_rate.tolist() == [7.0, 7.0]
    assert known.target is not None
    assert known.target.tolist() == [2.0, 4.0]


def test_arrays_of_different_lengths_are_refused() -> None:
    """A state that does not fit together is the caller's error, not something to guess about."""
    with pytest.raises(ValueError, match="different lengths"):
        usable(MpcState(np.zeros(3), np.zeros(2), 1.0))
    with pytest.raises(ValueError, match="different lengths"):
        usable(MpcState(np.zeros(2), np.zeros(2), 1.0, alive=np.ones(3, bool)))


def test_equal_delay_targets() -> None:
    """The targets sum to the queues and mean the same wait everywhere; without rates all equal."""
    target = equal_delay_target(np.array([8.0, 2.0]), np.array([1.0, 4.0]))
    assert target.tolist() == [2.0, 8.0]
    assert equal_delay_target(np.array([8.0, 2.0]), np.zeros(2)).tolist() == [5.0, 5.0]
    assert equal_delay_target(np.array([4.0, math.nan]), np.full(2, math.nan)).tolist() == [4, 4]
    assert equal_delay_target(np.zeros(0), np.zeros(0)).size == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"horizon": 0},
        {"dt_s": 0.0},
        {"dt_s": math.nan},
        {"target_queue": -1.0},
        {"weight_min": 0.0},
        {"weight_min": 1.5},
        {"weight_max": 0.5},
        {"regularisation": 0.0},
        {"stale_periods": 0.0},
        {"mode": "other"},
    ],
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    """Settings that would make the problem unsolvable cannot be made; the error names them."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MpcSettings(**wrong)
