"""The literal form: weights w_k of which the shares are quotients, p_i = w_i / sum of w.

The objective is summed over pods and steps as it is first written down: one target for all, the
service rate taken to be what it is said to be. It is not convex, w and 2 w give the same shares,
and only the price of (w - 1)^2 says which of them is meant. It is here to be compared with. The
constraint q >= 0 is left out: with more service than arrivals no weights meet it.

The minimum is looked for by projected gradients with spectral steps (Barzilai and Borwein) and a
search that may go up for a while, which needs nothing but the gradient and a bounded time.
"""

from __future__ import annotations

import numpy as np

from calinix.control.model import Floats, MpcSettings, MpcState

ITERATIONS = 80
HALVINGS = 12
MEMORY = 6
"""A step must be better than the worst of so many before it."""
ENOUGH = 1e-4
"""Part of the decrease promised by the gradient that a step must bring."""
STILL = 1e-6
"""Weights that move less than this have arrived."""


class _Problem:
    """The objective and its gradient, both divided by the size of the curvature."""

    def __init__(self, known: MpcState, settings: MpcSettings):
        steps = np.arange(1, settings.horizon + 1)[:, None]
        drain = settings.dt_s * known.service_rate
        self._arriving = settings.dt_s * known.arrival_rate
        self._price = settings.regularisation
        curvature = (self._arriving * settings.horizon / known.pods) ** 2
        self._scale = 1.0 / (self._price + curvature)
        self._free = known.queue - settings.target_queue - steps * drain
        """Queues over the target if nothing came."""

    def at(self, weights: Floats) -> tuple[float, Floats]:
        """Value and gradient [H, n]."""
        sums = weights.sum(axis=1, keepdims=True)
        shares = weights / sums
        off = self._free + self._arriving * shares.cumsum(axis=0)
        moved = weights - 1.0
        value = (off * off).sum() + self._price * (moved * moved).sum()
        # What a share does to this step's queue and to all later ones.
        later = off[::-1].cumsum(axis=0)[::-1] * (2.0 * self._arriving)
        slope = (later - (shares * later).sum(axis=1, keepdims=True)) / sums
        slope += (2.0 * self._price) * moved
        return float(value) * self._scale, slope * self._scale


def literal_weights(known: MpcState, settings: MpcSettings, start: Floats) -> Floats:
    """Weights [H, n] of a usable state, a local minimum near the start.

    Each within [weight_min, weight_max]; their mean is whatever the price makes it.
    """
    least, most = settings.weight_min, settings.weight_max
    problem = _Problem(known, settings)
    weights = np.minimum(np.maximum(start, least), most)
    value, slope = problem.at(weights)
    best, best_value = weights, value
    recent = [value]
    step = 1.0
    for _ in range(ITERATIONS):
        way = np.minimum(np.maximum(weights - step * slope, least), most) - weights
        if float(np.abs(way).max()) < STILL * min(step, 1.0):
            break
        promised = float((slope * way).sum())
        length = 1.0
        for _ in range(HALVINGS):
            tried = weights + length * way
            next_value, next_slope = problem.at(tried)
            if next_value <= max(recent) + ENOUGH * length * promised:
                break
            length *= 0.5
        moved, turned = tried - weights, next_slope - slope
        bent = float((moved * turned).sum())
        step = min(max(float((moved * moved).sum()) / bent, 1e-6), 1e6) if bent > 0.0 else 1.0
        weights, value, slope = tried, next_value, next_slope
        recent = [*recent[1 - MEMORY :], value]
        if value < best_value:
            best, best_value = weights, value
    return np.minimum(np.maximum(best, least), most)
