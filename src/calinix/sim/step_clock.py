"""A pod's steps over time, exact between two events.

Everything in an engine advances in steps. The time of a step grows with the KV tokens that it
reads, and these grow by one per sequence and step: it is linear in the number of steps done. So
the time of n steps is quadratic in n, and both directions have a closed form.
"""

from __future__ import annotations

from math import sqrt


class StepClock:
    """Steps (a real number) against seconds, from an anchor on."""

    __slots__ = ("_growth_s", "_step_s", "at_s", "steps")

    def __init__(self) -> None:
        self.at_s = 0.0
        """Time of the anchor."""
        self.steps = 0.0
        """Steps done at the anchor."""
        self._step_s = 0.0
        self._growth_s = 0.0

    def anchor(self, at_s: float, steps: float, step_s: float, growth_s: float) -> None:
        """From here on a step takes `step_s`, and `growth_s` more with each step done.

        `step_s` 0: no step is under way, the clock stands still.
        """
        self.at_s = at_s
        self.steps = steps
        self._step_s = step_s
        self._growth_s = growth_s

    @property
    def step_s(self) -> float:
        """How long a step takes at the anchor; 0 while the clock stands still."""
        return self._step_s

    def steps_at(self, now: float) -> float:
        """Steps done at `now`, not before the anchor."""
        elapsed_s, step_s = now - self.at_s, self._step_s
        if elapsed_s <= 0.0 or step_s <= 0.0:
            return self.steps
        growth_s = self._growth_s
        if growth_s <= 0.0:
            return self.steps + elapsed_s / step_s
        # The root in the form that does not lose digits where growth is small.
        root = sqrt(step_s * step_s + 2.0 * growth_s * elapsed_s)
        return self.steps + 2.0 * elapsed_s / (step_s + root)

    def time_of(self, steps: float) -> float:
        """When so many steps are done, not before the anchor."""
        ahead = steps - self.steps
        if ahead <= 0.0:
            return self.at_s
        return self.at_s + ahead * (self._step_s + 0.5 * self._growth_s * ahead)
