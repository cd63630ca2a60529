"""The controller's problem written out a second time, and an interior-point solver of its own.

Nothing here is taken from the solvers that it judges: the matrices come from the queue model's
definition, and the solver is Mehrotra's predictor and corrector, to 1e-12.
"""

from __future__ import annotations

import numpy as np

from calinix.control.model import Floats, MpcSettings, MpcState


def random_state(rng: np.random.Generator, pods: int) -> MpcState:
    """Any load, pods of any speed, queues from a few to thousands, in any unit."""
    unit = 10.0 ** rng.uniform(-1, 3)
    rate = unit * rng.uniform(0.2, 5.0, pods)
    queue = unit * rng.exponential(10.0 ** rng.uniform(-1, 2.5), pods)
    arrival = rng.uniform(0.2, 1.6) * float(rate.sum())
    delays, others = queue.sum() * rate / rate.sum(), unit * rng.uniform(0.0, 5.0, pods)
    return MpcState(queue, rate, arrival, (None, delays, others)[rng.integers(3)])


def terms(state: MpcState, settings: MpcSettings) -> tuple[Floats, Floats]:
    """Hessian [H, H] of every pod and linear term [n, H] of the objective in v = w - 1."""
    steps = settings.horizon
    weight = settings.dt_s * state.arrival_rate / state.pods
    adds = weight * np.tril(np.ones((steps, steps)))
    target = settings.target_queue if state.target is None else state.target
    ahead = np.arange(1, steps + 1)
    start = (state.queue - target)[:, None]
    free = start + ahead * (weight - settings.dt_s * state.service_rate)[:, None]
    hessian = 2.0 * (adds.T @ adds + settings.regularisation * np.eye(steps))
    return hessian, 2.0 * free @ adds


def value(hessian: Floats, linear: Floats, moved: Floats) -> float:
    """The objective without its constant; `moved` [n, H]."""
    return float((0.5 * (moved @ hessian) * moved + linear * moved).sum())


def minimise(hessian: Floats, linear: Floats, least: float, most: float) -> Floats:
    """The v [n, H] of least value with sum over pods 0 in each step and least <= v <= most."""
    # Adding the same to every pod changes the value by a constant: the sums are fixed.
    linear = linear - linear.mean(axis=0)
    scale = max(float(np.abs(linear).max()), 1.0)
    at = Point(np.zeros_like(linear), np.zeros(linear.shape[1]), scale, least, most)
    for _ in range(60):
        at.look(hessian, linear)
        if max(at.gap, np.abs(at.slope).max()) < 1e-12 * scale:
            return at.v
        # Straight at the bounds shows how far one can get, and so what to aim at.
        dv, dy, low, high = at.towards(-at.under * at.low, -at.over * at.high)
        length = at.longest(dv, low, high)
        below = (at.under + length * dv) * (at.low + length * low)
        above = (at.over - length * dv) * (at.high + length * high)
        aim = at.gap * min((float((below + above).mean()) / (2.0 * at.gap)) ** 3, 1.0)
        dv, dy, low, high = at.towards(
            aim - at.under * at.low - dv * low, aim - at.over * at.high + dv * high
        )
        at.move(0.995 * at.longest(dv, low, high), dv, dy, low, high)
    raise AssertionError("the reference did not converge")


class Point:
    """An interior point: v, the sums' multipliers y, and the bounds' multipliers."""

    def __init__(self, v: Floats, y: Floats, price: float, least: float, most: float):
        self.v, self.y = v, y
        self.low = self.high = np.full(v.shape, price)
        # Kept beside v: a difference would round to 0 close to a bound.
        self.under, self.over = v - least, most - v

    def look(self, hessian: Floats, linear: Floats) -> None:
        """What Newton's step needs here."""
        self.slope = self.v @ hessian + linear + self.y - self.low + self.high
        self.gap = float((self.under * self.low + self.over * self.high).mean())
        barrier = (self.low / self.under + self.high / self.over)[:, :, None]
        self.inverse = np.linalg.inv(hessian + barrier * np.eye(len(self.y)))

    def towards(self, low: Floats, high: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """The step that changes the products of room and multiplier by so much."""
        right = low / self.under - high / self.over - self.slope
        free = np.einsum("ijk,ik->ij", self.inverse, right)
        sums = self.v.sum(axis=0) + free.sum(axis=0)
        dy = np.linalg.solve(self.inverse.sum(axis=0), sums)
        dv = free - self.inverse @ dy
        return dv, dy, (low - self.low * dv) / self.under, (high + self.high * dv) / self.over

    def longest(self, dv: Floats, low: Floats, high: Floats) -> float:
        """How far the step can go until something falls to 0, at most 1."""
        length = 1.0
        pairs = ((self.under, dv), (self.over, -dv), (self.low, low), (self.high, high))
        for at, way in pairs:
            falling = way < 0.0
            if falling.any():
                length = min(length, float((-at[falling] / way[falling]).min()))
        return length

    def move(self, length: float, dv: Floats, dy: Floats, low: Floats, high: Floats) -> None:
        """Takes the step."""
        self.v, self.y = self.v + length * dv, self.y + length * dy
        self.low, self.high = self.low + length * low, self.high + length * high
        self.under, self.over = self.under + length * dv, self.over - length * dv
