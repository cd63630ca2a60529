"""The model predictive controller: from a pool's state to weights over a horizon.

`QueueMPC.solve` is the one door; what decides is in shares.py (the closed form, which the
controller acts on), horizon.py (a weight of its own for each step) and literal.py (weights whose
quotients are the shares).
"""

from __future__ import annotations

import math

import numpy as np

from calinix.control.horizon import FullHorizon, SolverMissing
from calinix.control.literal import literal_weights
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

__all__ = [
    "MpcSettings",
    "MpcSolution",
    "MpcState",
    "QueueMPC",
    "SolverMissing",
    "Status",
    "closed_form",
]


class QueueMPC:
    """Solves one pool's problem, period after period."""

    def __init__(self, settings: MpcSettings | None = None):
        self.settings = MpcSettings() if settings is None else settings
        self._full: FullHorizon | None = None
        self._last = np.ones((self.settings.horizon, 0))
        """The literal form's last weights: where it starts from."""

    def solve(self, state: MpcState, *, full: bool = False) -> MpcSolution:
        """Weight trajectory, queue trajectory, status: every number finite, whatever the state.

        In mode `convex` the weights are the closed form's, the same in every step; with `full`
        each step has its own, by OSQP (milliseconds; by one thread at a time).

        Raises:
            SolverMissing: `full`, and OSQP is not installed.
            ValueError: the arrays of the state differ in length.
        """
        known = usable(state)
        weights, status = self.decide(known, full=full)
        return self.spread(state, known, weights, status)

    def decide(self, known: MpcState, *, full: bool = False) -> tuple[Floats, Status]:
        """Weights of a usable state, of shape [n] or [H, n], and how they came about."""
        ones = np.ones(known.pods)
        if known.pods < 2:
            return ones, Status.ALONE
        if math.isnan(known.arrival_rate):
            return ones, Status.UNUSABLE
        if known.arrival_rate <= 0.0:
            return ones, Status.IDLE
        if full:
            if self._full is None:
                self._full = FullHorizon(self.settings)
            return self._full.decide(known)
        if self.settings.mode == "literal":
            return self._literal(known), Status.SOLVED
        return blocked_weights(known, self.settings), Status.SOLVED

    def _literal(self, known: MpcState) -> Floats:
        start = self._last
        if start.shape[1] != known.pods:
            start = np.ones((self.settings.horizon, known.pods))
        self._last = literal_weights(known, self.settings, start)
        return self._last

    def spread(
        self, state: MpcState, known: MpcState, weights: Floats, status: Status
    ) -> MpcSolution:
        """The solution in the places of the state that `known` was made of."""
        shape = (self.settings.horizon, known.pods)
        weights = np.broadcast_to(weights, shape).copy()
        queues = self._ahead(known, weights)
        if state.alive is None or state.alive.all():
            return MpcSolution(weights, queues, status)
        every = np.zeros((self.settings.horizon, state.pods))
        everywhere = self._ahead(
            MpcState(settled(state.queue), settled(state.service_rate), 0.0), np.ones_like(every)
        )
        every[:, state.alive], everywhere[:, state.alive] = weights, queues
        return MpcSolution(every, everywhere, status)

    def _ahead(self, known: MpcState, weights: Floats) -> Floats:
        """The queues under these weights, cut off at 0; both of shape [H, n]."""
        if known.pods == 0:
            return np.zeros_like(weights)
        arriving = known.arrival_rate if known.arrival_rate > 0.0 else 0.0  # noqa: FURB136  # NaN.
        fed = MpcState(known.queue, known.service_rate, arriving)
        shares = weights / weights.sum(axis=1, keepdims=True)
        return np.maximum(rollout(fed, shares, self.settings.dt_s), 0.0)
