"""The model predictive controller: from a pool's state to weights over a horizon.

`QueueMPC.solve` is the one door; what decides is in shares.py (the closed form, which the
controller acts on), horizon.py (a weight of its own for each step) and literal.py (weights whose
quotients are the shares).
"""

from __future__ import annotations

import math

import numpy as np

from calinix.control.model import (
    Floats,
    MpcSettings,
    MpcSolution,
    MpcState,
    Status,
    rollout,
    settled,
    usable,
)
from calinix.control.shares import blocked_weights, closed_form

__all__ = ["MpcSettings", "MpcSolution", "MpcState", "QueueMPC", "Status", "closed_form"]


class QueueMPC:
    """Solves one pool's problem, period after period."""

    def __init__(self, settings: MpcSettings | None = None):
        self.settings = MpcSettings() if settings is None else settings

    def solve(self, state: MpcState) -> MpcSolution:
        """Weight trajectory, queue trajectory, status: every weight finite, whatever the state.

        Raises:
            ValueError: the arrays of the state differ in length.
        """
        known = usable(state)
        weights, status = self.decide(known)
        return self.spread(state, known, weights, status)

    def decide(self, known: MpcState) -> tuple[Floats, Status]:
        """Weights of a usable state, of shape [n] or [H, n], and how they came about."""
        if known.pods < 2:
            return np.ones(known.pods), Status.ALONE
        if known.arrival_rate <= 0.0:
            return np.ones(known.pods), Status.IDLE
        if not np.isfinite(known.arrival_rate):
            return np.ones(known.pods), Status.UNUSABLE
        return blocked_weights(known, self.settings), Status.SOLVED

    def spread(
        self, state: MpcState, known: MpcState, weights: Floats, status: Status
    ) -> MpcSolution:
        """The solution in the places of the state that `known` was made of."""
        shape = (self.settings.horizon, known.pods)
        weights = np.broadcast_to(weights, shape)
        shares = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
        arrival = known.arrival_rate if 0.0 < known.arrival_rate < math.inf else 0.0
        known = MpcState(known.queue, known.service_rate, arrival)
        queues = np.maximum(rollout(known, shares, self.settings.dt_s), 0.0)
        if state.alive is None or state.alive.all():
            return MpcSolution(weights.copy(), queues, status)
        idle = MpcState(settled(state.queue), settled(state.service_rate), 0.0)
        none = np.zeros((self.settings.horizon, state.pods))
        every, drained = none.copy(), np.maximum(rollout(idle, none, self.settings.dt_s), 0.0)
        every[:, state.alive], drained[:, state.alive] = weights, queues
        return MpcSolution(every, drained, status)
