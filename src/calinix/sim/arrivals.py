"""When requests come: Poisson processes, steady or with a rate that changes over time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import cos, pi

import msgspec


class Steady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A Poisson process."""

    rate_per_s: float

    @property
    def peak_per_s(self) -> float:
        """The highest rate there is."""
        return self.rate_per_s

    def at(self, now: float) -> float:  # noqa: ARG002
        """Requests per second at `now`."""
        return self.rate_per_s


class Bursts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every `period_s` begins with `burst_s` of a higher rate."""

    rate_per_s: float
    burst_per_s: float
    period_s: float
    burst_s: float

    @property
    def peak_per_s(self) -> float:
        """The highest rate there is."""
        return max(self.rate_per_s, self.burst_per_s)

    def at(self, now: float) -> float:
        """Requests per second at `now`."""
        return self.burst_per_s if now % self.period_s < self.burst_s else self.rate_per_s


class Diurnal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A cosine around the mean, lowest at the beginning: a day of `period_s`."""

    mean_per_s: float
    swing: float
    """Share of the mean by which it goes up and down, up to 1."""
    period_s: float

    @property
    def peak_per_s(self) -> float:
        """The highest rate there is."""
        return self.mean_per_s * (1.0 + self.swing)

    def at(self, now: float) -> float:
        """Requests per second at `now`."""
        return self.mean_per_s * (1.0 - self.swing * cos(2.0 * pi * now / self.period_s))


class Ramp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From one rate to another in a straight line, then steady."""

    from_per_s: float
    to_per_s: float
    over_s: float

    @property
    def peak_per_s(self) -> float:
        """The highest rate there is."""
        return max(self.from_per_s, self.to_per_s)

    def at(self, now: float) -> float:
        """Requests per second at `now`."""
        share = min(1.0, now / self.over_s)
        return self.from_per_s + share * (self.to_per_s - self.from_per_s)


Rate = Steady | Bursts | Diurnal | Ramp


def times(rate: Rate, load: float, count: int, rng: random.Random) -> Iterator[float]:
    """`count` arrival times, in seconds; all rates are multiplied by `load`.

    Candidates come at the peak rate and are kept in proportion to the rate of their time.
    """
    now, peak = 0.0, rate.peak_per_s
    while count:
        now += rng.expovariate(peak * load)
        if rng.random() * peak < rate.at(now):
            count -= 1
            yield now
