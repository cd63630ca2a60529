"""The queue model of a pool of pods, and the records that its solvers read and give.

q_i(k+1) = q_i(k) + dt (a p_i(k) - mu_i): `a` is what arrives at the pool a second, p_i the share
that pod i gets of it, mu_i what the pod serves a second. Queues, `a` and mu may be in requests, in
tokens or in seconds of work, as long as all three are in the same.
"""

from __future__ import annotations

import enum
import math
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.intp]
Mode = Literal["convex", "literal"]

LARGEST = 1e12
"""Queues and rates are cut off here, so that no square of them overflows."""


class Status(enum.Enum):
    """How a solution came about."""

    SOLVED = "solved"
    """By the solver that was asked for."""
    CLOSED_FORM = "closedForm"
    """The full horizon was asked for, its solver failed: one share over the horizon instead."""
    ALONE = "alone"
    """Fewer than two pods: there is nothing to decide."""
    IDLE = "idle"
    """Nothing arrives: every weight is 1."""
    UNUSABLE = "unusable"
    """The arrival rate is not a number: every weight is 1."""


class MpcSettings(msgspec.Struct, frozen=True):
    """What the controller aims at, named as in docs/controller.md.

    Raises:
        ValueError: a value is out of its range.
    """

    horizon: int = 10
    """H: steps that are looked ahead, at least 1."""
    dt_s: float = 0.5
    """dt: length of a step, and the controller's period, in seconds."""
    target_queue: float = 0.0
    """Target_q: the queue to aim at, in the queues' unit, where the state brings no targets."""
    weight_min: float = 0.1
    """Least weight, in (0, 1]."""
    weight_max: float = 3.0
    """Largest weight, at least 1."""
    regularisation: float = 0.5
    """Price of (w - 1)^2 beside (q - target)^2, above 0."""
    mode: Mode = "convex"
    """`convex` decides shares; `literal` weights of which the shares are quotients."""
    stale_periods: float = 3.0
    """How many periods a snapshot may be old before the weights go back to 1. The period is dt, or
    that of the snapshots where they come less often."""

    def __post_init__(self) -> None:
        ranges = {
            "horizon": 1 <= self.horizon <= 1000,
            "dt_s": 0.0 < self.dt_s <= 3600.0,
            "target_queue": 0.0 <= self.target_queue <= LARGEST,
            "weight_min": 0.0 < self.weight_min <= 1.0,
            "weight_max": 1.0 <= self.weight_max <= 1000.0,
            "regularisation": 0.0 < self.regularisation <= LARGEST,
            "stale_periods": 1.0 <= self.stale_periods <= 1000.0,
            "mode": self.mode in ("convex", "literal"),
        }
        if wrong := [name for name, fits in ranges.items() if not fits]:
            raise ValueError(f"out of range: {', '.join(wrong)}")


class MpcState(msgspec.Struct, frozen=True, eq=False):
    """The pool as it is now: arrays of one length n, a place for every pod."""

    queue: Floats
    """q_i(0)."""
    service_rate: Floats
    """mu_i, in queue units a second; where it is not finite the pool's mean is taken."""
    arrival_rate: float
    """a, for the whole pool, in queue units a second."""
    target: Floats | None = None
    """Target_q of every pod; None: the setting's for all."""
    alive: Mask | None = None
    """Pods that may get something; None: all."""

    @property
    def pods(self) -> int:
        """How many places there are, masked ones included."""
        return len(self.queue)


class MpcSolution(msgspec.Struct, frozen=True, eq=False):
    """What to do over the horizon and what will come of it, by the model."""

    weights: Floats
    """w_0..w_{H-1}, shape [H, n]; 0 for a masked pod."""
    queues: Floats
    """q_1..q_H, shape [H, n], never below 0."""
    status: Status


def settled(values: Floats) -> Floats:
    """The values with the mean of the finite ones in place of the others, within [0, LARGEST]."""
    finite = np.isfinite(values)
    if not finite.all():
        known = values[finite]
        # Divided first: the sum of some that are near the largest double would overflow.
        mean = float((known / max(known.size, 1)).sum())
        values = np.where(finite, values, mean)
    return np.minimum(np.maximum(values, 0.0), LARGEST)


def cut_off(arrival_rate: float) -> float:
    """At most LARGEST, and not a number where it is not finite."""
    return min(float(arrival_rate), LARGEST) if math.isfinite(arrival_rate) else math.nan


def usable(state: MpcState) -> MpcState:
    """The state of the pods that are alive, every number finite but for an unusable arrival rate.

    Raises:
        ValueError: the arrays differ in length.
    """
    queue, rate, target = state.queue, state.service_rate, state.target
    lengths = {len(one) for one in (queue, rate, target, state.alive) if one is not None}
    if len(lengths) > 1:
        raise ValueError(f"arrays of different lengths: {sorted(lengths)}")
    if state.alive is not None and not state.alive.all():
        queue, rate = queue[state.alive], rate[state.alive]
        target = None if target is None else target[state.alive]
    return MpcState(
        settled(queue),
        settled(rate),
        cut_off(state.arrival_rate),
        None if target is None else settled(target),
    )


def equal_delay_target(queue: Floats, service_rate: Floats) -> Floats:
    """Targets with the same sum as the queues, in proportion to the rates: equal delay everywhere.

    One target for all equalises queue *lengths*, which overloads slow pods.
    """
    queue, rate = settled(queue), settled(service_rate)
    total = float(rate.sum())
    mean = queue.sum() / max(queue.size, 1)
    return queue.sum() * rate / total if total > 0.0 else np.full(queue.size, mean)


def rollout(state: MpcState, shares: Floats, dt_s: float) -> Floats:
    """q_1..q_H of the model under shares p_0..p_{H-1}, both of shape [H, n].

    Below 0 a queue is spare capacity. What people are shown is cut off at 0, what solvers see
    is not.
    """
    steps = dt_s * (state.arrival_rate * shares - state.service_rate)
    queues: Floats = state.queue + np.cumsum(steps, axis=0)
    return queues


def objective(state: MpcState, weights: Floats, settings: MpcSettings) -> float:
    """Sum over k and i of (q_i(k+1) - target)^2 + regularisation (w_i(k) - 1)^2.

    Of a usable state and weights of shape [H, n]; the shares are the weights over their sums.
    """
    shares = weights / weights.sum(axis=1, keepdims=True)
    target = settings.target_queue if state.target is None else state.target
    off = rollout(state, shares, settings.dt_s) - target
    return float((off**2).sum() + settings.regularisation * ((weights - 1.0) ** 2).sum())
