"""The controller of one pool: every period a step, from estimates to weights, and never without.

What it promises, whatever it is given: weights are finite and within [weight_min, weight_max],
with mean 1 over the pods that are alive. See docs/controller.md for what it falls back on.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from calinix.control.model import (
    Floats,
    Mask,
    MpcSettings,
    MpcSolution,
    MpcState,
    Slots,
    Status,
    cut_off,
    settled,
)
from calinix.control.mpc import QueueMPC
from calinix.control.shares import bounded_weights

HELD_PERIODS = 2
"""After a step that brought no weights the last ones are kept for so many periods."""
NO_SOLUTION = (Status.UNUSABLE,)
MAX_RHYTHM_S = 5.0
"""Snapshots that come less often are not waited for."""


class Steering(enum.Enum):
    """Where the weights in use come from."""

    FRESH = "fresh"
    """From this period's step."""
    HELD = "held"
    """From an earlier step: the last ones brought none."""
    DECAYING = "decaying"
    """On their way to 1: too many steps brought none, or the snapshot is too old."""
    STARTING = "starting"
    """There was no step yet: every weight is 1."""


class ControllerReport(msgspec.Struct, frozen=True):
    """What the controller knows and does, for people. Lists are by alive pod, as `slots` is."""

    steering: Steering
    status: Status | None
    """Of the last solution; None where there was none."""
    steps: int
    fallbacks: int
    """Steps that brought no fresh weights."""
    step_age_s: float
    """Seconds since the last step."""
    snapshot_age_s: float
    """Seconds since what the last step saw was true."""
    slots: list[int]
    weights: list[float]
    weight_trajectory: list[list[float]]
    """w_0..w_{H-1}."""
    queue_trajectory: list[list[float]]
    """q_1..q_H."""
    queue: list[float]
    service_rate: list[float]
    """As used: with the pool's mean where it was not known."""
    service_confidence: list[float]
    """As given; 1 where none was given."""
    arrival_rate: float


class PoolController:
    """Steers one pool of up to `slots` pods. Arrays are by slot."""

    def __init__(self, settings: MpcSettings, slots: int):
        self.settings = settings
        self.weights: Floats = _frozen(np.ones(slots))
        """By slot: mean 1 over the alive pods, 1 for everybody else. Never changed, but replaced
        by every step: who reads it once has weights that belong together."""
        self._mpc = QueueMPC(settings)
        self._slots = slots
        self._alive = np.zeros(0, np.intp)
        """Slots, in order."""
        self._was_alive = np.zeros(slots, bool)
        self._known: MpcState | None = None
        """Of the alive pods, as the last step saw it."""
        self._confidence = np.ones(0)
        self._ahead = np.ones((1, 0))
        """Weights of the alive pods over the horizon, one row where they are to stay."""
        self._steering = Steering.STARTING
        self._status: Status | None = None
        self._steps = self._fallbacks = self._without = 0
        self._step_s = self._snapshot_s = -math.inf
        self._rhythm_s = settings.dt_s

    def step(
        self,
        now: float,
        snapshot_s: float,
        slots_alive: Sequence[int],
        queue: Floats,
        service_rate: Floats,
        arrival_rate: float,
        target: Floats | None = None,
        confidence: Floats | None = None,
    ) -> None:
        """One period: weights from what was true at `snapshot_s`.

        `queue`, `service_rate`, `target` and `confidence` (of the service rates, 0 to 1) are by
        slot; only those of `slots_alive` are read. A rate that is not finite is taken to be the
        pool's mean, one of little confidence is drawn to it. Pods that were not alive before get
        weight 1 for this period.

        Raises:
            IndexError: a slot is not one of the pool's, or an array is too short.
        """
        mask = np.zeros(self._slots, bool)
        mask[list(slots_alive)] = True
        alive = self._alive = mask.nonzero()[0]
        rates = settled(_of(service_rate, alive))
        sure = np.ones(alive.size) if confidence is None else _unit(_of(confidence, alive))
        if confidence is not None and alive.size:
            mean = float((sure * rates).sum() / sure.sum()) if sure.any() else float(rates.mean())
            rates = sure * rates + (1.0 - sure) * mean
        known = MpcState(
            settled(_of(queue, alive)),
            rates,
            cut_off(arrival_rate),
            None if target is None else settled(_of(target, alive)),
        )
        self._known, self._confidence = known, sure
        periods = self._elapsed_periods(now)
        old = self._too_old(now, snapshot_s)
        newcomers = ~self._was_alive[alive]
        weights = None if old or not alive.size else self._solved(known, newcomers)
        if weights is None:
            weights = self._kept(periods, old=old)
        else:
            self._without, self._steering = 0, Steering.FRESH
        self._use(now, weights)
        self._was_alive = mask

    def missed(self, now: float) -> None:
        """A period passed and brought nothing: a solver elsewhere was late, or failed."""
        self._use(now, self._kept(self._elapsed_periods(now), old=False))

    def _use(self, now: float, weights: Floats) -> None:
        self._steps += 1
        self._step_s = now
        every = np.ones(self._slots)
        every[self._alive] = weights
        self.weights = _frozen(every)

    def _solved(self, known: MpcState, newcomers: Mask) -> Floats | None:
        """Weights of the alive pods, one or more; None when there is no solution to trust."""
        veterans = ~newcomers
        if newcomers.any() and veterans.any():
            share = float(veterans.sum()) / known.pods
            known = MpcState(
                known.queue[veterans],
                known.service_rate[veterans],
                known.arrival_rate * share,
                None if known.target is None else known.target[veterans],
            )
        else:
            veterans = np.ones(newcomers.size, bool)
        found, self._status = self._mpc.decide(known)
        if self._status in NO_SOLUTION or not np.isfinite(found).all():
            return None
        # The literal form's weights have any mean; only their quotients are meant.
        rows = np.atleast_2d(found)
        self._ahead = np.ones((len(rows), newcomers.size))
        self._ahead[:, veterans] = rows / rows.mean(axis=1, keepdims=True)
        self._ahead = np.array([self._bounded(row) for row in self._ahead])
        first: Floats = self._ahead[0]
        return first

    def _kept(self, periods: float, *, old: bool) -> Floats:
        """The last weights, after some periods on their way to 1."""
        self._fallbacks += 1
        self._without += 1
        weights = self.weights[self._alive]
        if old or self._without > HELD_PERIODS:
            self._steering = Steering.DECAYING
            weights = 1.0 + (weights - 1.0) * 0.5**periods
        elif self._steering is not Steering.STARTING:
            self._steering = Steering.HELD
        return self._bounded(weights)

    def _bounded(self, weights: Floats) -> Floats:
        """The nearest with mean 1 and within the bounds."""
        if weights.size < 2:
            return np.ones(weights.size)
        return bounded_weights(weights, self.settings.weight_min, self.settings.weight_max)

    def _elapsed_periods(self, now: float) -> float:
        """Since the last step; 1 before there was one or where the clock says nothing."""
        elapsed_s = now - self._step_s
        return min(elapsed_s / self.settings.dt_s, 60.0) if 0.0 < elapsed_s < math.inf else 1.0

    def _too_old(self, now: float, snapshot_s: float) -> bool:
        """Whether the snapshot missed three of its own periods, or of the controller's.

        Where facts come every few seconds, a snapshot between two of them is not too old.
        """
        if not math.isfinite(snapshot_s):
            return True
        gap_s = snapshot_s - self._snapshot_s
        if gap_s > 0.0:
            if gap_s < math.inf:
                gap_s = min(gap_s, MAX_RHYTHM_S)
                learned_s = max(gap_s, 0.5 * (self._rhythm_s + gap_s))
                self._rhythm_s = max(learned_s, self.settings.dt_s)
            self._snapshot_s = snapshot_s
        age_s = now - snapshot_s
        return not age_s <= self.settings.stale_periods * self._rhythm_s * (1.0 + 1e-9)

    def predict(self) -> MpcSolution | None:
        """The trajectories of the alive pods under the weights in use, both of shape [H, n].

        None before the first step.
        """
        if self._known is None or self._status is None:
            return None
        weights = self._ahead if self._steering is Steering.FRESH else self.weights[self._alive]
        return self._mpc.spread(self._known, self._known, weights, self._status)

    def report(self, now: float) -> ControllerReport:
        """What people are shown."""
        known, ahead = self._known, self.predict()
        return ControllerReport(
            steering=self._steering,
            status=self._status,
            steps=self._steps,
            fallbacks=self._fallbacks,
            step_age_s=now - self._step_s,
            snapshot_age_s=now - self._snapshot_s,
            slots=self._alive.tolist(),
            weights=self.weights[self._alive].tolist(),
            weight_trajectory=[] if ahead is None else ahead.weights.tolist(),
            queue_trajectory=[] if ahead is None else ahead.queues.tolist(),
            queue=[] if known is None else known.queue.tolist(),
            service_rate=[] if known is None else known.service_rate.tolist(),
            service_confidence=self._confidence.tolist(),
            arrival_rate=0.0 if known is None else known.arrival_rate,
        )


def _of(values: Floats, slots: Slots) -> Floats:
    """Of these slots, as doubles, whatever kind of array it was."""
    found: Floats = np.asarray(values, np.float64)[slots]
    return found


def _unit(values: Floats) -> Floats:
    """Within [0, 1]; what is not a number is 0."""
    return np.minimum(np.maximum(np.nan_to_num(values, nan=0.0), 0.0), 1.0)


def _frozen(array: Floats) -> Floats:
    array.flags.writeable = False
    return array
