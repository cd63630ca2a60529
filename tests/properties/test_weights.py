"""The controller's promises: within bounds whatever it is given, and settled after any step."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calinix.control import MpcSettings, PoolController, equal_delay_target
from calinix.control.model import Floats

SLOTS = 6
FLOATS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0.0, 100.0),
    st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e308, 5e-324]),
)
ARRAYS = st.lists(FLOATS, min_size=SLOTS, max_size=SLOTS).map(np.array)
STEPS = st.lists(
    st.tuples(
        st.one_of(st.floats(0.0, 5.0), FLOATS),
        st.one_of(st.floats(0.0, 3.0), FLOATS),
        st.sets(st.integers(0, SLOTS - 1)),
        ARRAYS,
        ARRAYS,
        FLOATS,
        st.none() | ARRAYS,
        st.none() | ARRAYS,
    ),
    min_size=1,
    max_size=8,
)


@given(STEPS, st.sampled_from(["convex", "literal"]), st.integers(1, 12))
def test_weights_keep_their_promises(steps: list[Any], mode: Any, horizon: int) -> None:
    """Any numbers at any time: finite, in [0.1, 3], mean 1 over the alive, 1 for the others."""
    pool = PoolController(MpcSettings(mode=mode, horizon=horizon), SLOTS)
    now = 0.0
    for elapsed, age_s, alive, queue, rate, arrival, target, confidence in steps:
        now += elapsed
        pool.step(now, now - age_s, sorted(alive), queue, rate, arrival, target, confidence)
        weights = pool.weights
        assert 0.1 <= weights.min() <= weights.max() <= 3.0
        if alive:
            assert weights[sorted(alive)].mean() == pytest.approx(1.0, abs=1e-12)
        assert all(weights[slot] == 1.0 for slot in range(SLOTS) if slot not in alive)
        report = pool.report(now)
        assert np.isfinite(np.array(report.queue_trajectory)).all()
        assert np.isfinite(np.array(report.service_rate)).all()


TICK_S = 0.1
STEP_AT_S = 30.0
SETTLED_S = 60.0
"""Stated: after any of the steps the weights are settled within this time. Most of it is what the
arrival estimate takes to forget, and in an overload what the queues take to drain."""
BAND = 0.05
"""Settled: no weight leaves its last value by more."""
POOLS = (
    (1.0, 1.0),
    (1.0, 0.2),
    (1.0,) * 8,
    (1.0,) * 4 + (0.3,) * 4,
    tuple(np.linspace(0.2, 2, 16)),
)


class Scene(NamedTuple):
    """A fluid pool, how late its state is seen, and what happens to it at STEP_AT_S."""

    speeds: tuple[float, ...]
    unit: float
    """What everything is counted in: requests, or tenths of them."""
    load: float
    delay_s: float
    load_by: float = 1.0
    """Arrivals become this many times as many."""
    speed_by: float = 1.0
    """A quarter of the pods becomes this much faster."""
    until_s: float = math.inf
    """When it is as before again."""
    equal_delays: bool = False


SCENES = st.builds(
    Scene,
    speeds=st.sampled_from(POOLS),
    unit=st.sampled_from([1.0, 10.0, 1000.0]),
    load=st.sampled_from([0.3, 0.6, 0.85]),
    delay_s=st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]),
    load_by=st.sampled_from([0.2, 0.5, 1.0, 1.15, 1.6]),
    speed_by=st.sampled_from([0.2, 0.6, 1.0, 3.0]),
    until_s=st.sampled_from([math.inf, STEP_AT_S + 5.0]),
    equal_delays=st.booleans(),
)


def weights_over_time(scene: Scene, mpc: MpcSettings, seconds: float = 110.0) -> Floats:
    """Weights of every period, shape [periods, pods].

    Queues are exact; speeds are measured with a lag of 2 s, arrivals with one of 10 s.
    """
    usual = scene.unit * np.array(scene.speeds)
    pods, arriving = len(usual), scene.load * float(usual.sum())
    queue, seen, seen_arriving = np.zeros(pods), usual.copy(), arriving
    pool = PoolController(mpc, pods)
    past: deque[tuple[float, Floats, Floats, float]] = deque()
    found = []
    every = round(mpc.dt_s / TICK_S)
    for tick in range(round(seconds / TICK_S)):
        now = tick * TICK_S
        speeds, arrival = usual, arriving
        if STEP_AT_S <= now < scene.until_s:
            arrival = arriving * scene.load_by
            speeds = usual * np.where(np.arange(pods) < max(pods // 4, 1), scene.speed_by, 1.0)
        shares = pool.weights / pool.weights.sum()
        queue = np.maximum(queue + TICK_S * (arrival * shares - speeds), 0.0)
        seen = seen + TICK_S / 2.0 * (speeds - seen)
        seen_arriving += TICK_S / 10.0 * (arrival - seen_arriving)
        past.append((now, queue, seen, seen_arriving))
        while len(past) > 1 and past[1][0] <= now - scene.delay_s + 1e-9:
            past.popleft()
        if tick % every == 0:
            then, late, rate, coming = past[0]
            target = equal_delay_target(late, rate) if scene.equal_delays else None
            pool.step(now, then, range(pods), late, rate, coming, target)
            found.append(pool.weights)
    return np.array(found)


def settles_after_s(scene: Scene, mpc: MpcSettings) -> float:
    """Seconds from the last change until no weight leaves the band around its last value again."""
    weights = weights_over_time(scene, mpc)
    assert 0.1 <= weights.min() <= weights.max() <= 3.0
    assert np.abs(weights.mean(axis=1) - 1.0).max() < 1e-12
    outside = (np.abs(weights - weights[-1]).max(axis=1) > BAND).nonzero()[0]
    changed_s = scene.until_s if scene.until_s < math.inf else STEP_AT_S
    return float(outside[-1] + 1) * mpc.dt_s - changed_s if outside.size else 0.0


@settings(max_examples=60)
@given(SCENES)
def test_weights_settle(scene: Scene) -> None:
    """Up to 3 s late, any step in load or speed: settled in 60 s, in bounds, mean 1 throughout."""
    assert settles_after_s(scene, MpcSettings(stale_periods=8.0)) <= SETTLED_S


def test_weights_are_not_settled_for_being_still() -> None:
    """They move: a pod at a fifth of its speed loses most of its share, and gets it back."""
    scene = Scene((1.0,) * 8, 10.0, 0.6, 3.0, speed_by=0.2, until_s=STEP_AT_S + 20.0)
    weights = weights_over_time(scene, MpcSettings(stale_periods=8.0))
    assert weights[90:100, 0].max() < 0.5
    assert weights[-1, 0] == pytest.approx(1.0, abs=BAND)


def test_a_horizon_too_short_for_the_delay_swings() -> None:
    """What settling is about can be missed: five steps look ahead less than 3 s of delay need."""
    scene = Scene((1.0, 1.0), 40.0, 0.85, 3.0, speed_by=0.25)
    short, usual = MpcSettings(horizon=5, stale_periods=8.0), MpcSettings(stale_periods=8.0)
    assert settles_after_s(scene, short) > SETTLED_S
    assert settles_after_s(scene, usual) <= SETTLED_S


def test_weights_of_their_own_for_every_step_swing() -> None:
    """The literal form, free to do all in its first step, swings once a second late."""
    scene = Scene((1.0, 1.0), 40.0, 0.85, 1.0, speed_by=0.25)
    literal = MpcSettings(mode="literal", stale_periods=8.0)
    assert settles_after_s(scene, literal) > SETTLED_S
    assert settles_after_s(scene._replace(delay_s=0.0), literal) < 10.0
    assert settles_after_s(scene, MpcSettings(stale_periods=8.0)) < 15.0


@settings(max_examples=8)
@given(SCENES.filter(lambda scene: scene.delay_s >= 2.0))
def test_state_older_than_promised_is_let_go(scene: Scene) -> None:
    """Unless told otherwise, state that is always older than 3 periods makes all equal."""
    weights = weights_over_time(scene, MpcSettings())
    assert np.allclose(weights[40:], 1.0, atol=1e-3)
