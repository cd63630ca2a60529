"""Estimates out of single events: arrivals, service rates, time per output token.

They sit on the request path: a call is a few additions. Each knows when it last learned something
(`age_s`) and how far it can be trusted (`confidence`, 0 to 1: few samples and old ones count less).
A rate that nothing is known of is NaN, which the controller reads as the pool's mean.
"""

from __future__ import annotations

from math import exp, inf, nan

FADES_S = 60.0
"""Age at which half of the confidence is gone."""
SAMPLES = 5.0
"""Samples that make half of the confidence."""
MAX_B1_S = 0.002
"""Largest slope of the time per output token that is believed."""
SLOWNESS_NEW = 0.1
"""Weight of a new answer in a pod's slowness."""
RIDGE = 1.0
"""Draws the slope to 0 while the load has hardly varied, in requests squared."""


def trust(samples: float, age_s: float) -> float:
    """Confidence in [0, 1] of an estimate that rests on so many samples, so old."""
    if not samples > 0.0:
        return 0.0
    return samples / (samples + SAMPLES) * FADES_S / (FADES_S + age_s)


class ArrivalRate:
    """What arrives a second (requests, tokens or whatever is added), as an exponential mean."""

    __slots__ = ("_last_s", "_rate", "_samples", "_seen", "_tau_s")

    def __init__(self, tau_s: float = 10.0):
        self._tau_s = tau_s
        self._last_s = -inf
        """When the sums below are of."""
        self._rate = 0.0
        self._seen = 0.0
        """Share of the kernel that was watched: the rest is not known to be empty."""
        self._samples = 0.0

    def add(self, now: float, amount: float = 1.0) -> None:
        """So much arrives now."""
        if not 0.0 < amount < inf:
            return
        elapsed_s = now - self._last_s
        if elapsed_s > 0.0:
            self._pass(now, elapsed_s)
        self._rate += amount / self._tau_s
        self._samples += 1.0

    def _pass(self, now: float, elapsed_s: float) -> None:
        keep = exp(-elapsed_s / self._tau_s)
        if self._last_s == -inf:
            # Of a stream that is first heard of at its first arrival, a second is taken as seen.
            keep = exp(-1.0 / self._tau_s)
        self._rate *= keep
        self._samples *= keep
        self._seen = 1.0 - keep * (1.0 - self._seen)
        self._last_s = now

    def rate(self, now: float) -> float:
        """Amount per second; 0 before the first arrival."""
        if self._seen == 0.0:
            return 0.0
        elapsed_s = now - self._last_s
        keep = exp(-elapsed_s / self._tau_s) if elapsed_s > 0.0 else 1.0
        return self._rate * keep / (1.0 - keep * (1.0 - self._seen))

    def age_s(self, now: float) -> float:
        """Seconds since the last arrival; infinite before the first."""
        return max(now - self._last_s, 0.0)

    def confidence(self, now: float) -> float:
        """Of `rate`; that nothing arrives is knowledge too, so only the watched time counts."""
        if self._seen == 0.0:
            return 0.0
        elapsed_s = max(now - self._last_s, 0.0)
        return 1.0 - exp(-elapsed_s / self._tau_s) * (1.0 - self._seen)


class ServiceRate:
    """How much work a pod does a second, from the gaps between its first tokens.

    One sample is the work of a request and the time that the pod had for it: from its dispatch, or
    from the pod's previous first token where that came later, so that waiting in the queue does not
    make a pod look slow. Sums with forgetting follow a change within some tens of requests.
    """

    __slots__ = ("_keep", "_last_s", "_overdue_s", "_samples", "_seconds", "_work")

    def __init__(self, keep: float = 0.97):
        self._keep = keep
        self._work = 0.0
        self._seconds = 0.0
        self._samples = 0.0
        self._last_s = -inf
        self._overdue_s = 0.0
        """Of a request that should long have had its first token: time in which nothing was done,
        though no sample says so yet."""

    def first_token(self, now: float, dispatched_s: float, work: float) -> None:
        """The request with this work, dispatched at that time, has its first token."""
        last_s = self._last_s
        seconds = now - (dispatched_s if dispatched_s > last_s else last_s)  # noqa: FURB136
        if not (0.0 <= seconds < inf and 0.0 <= work < inf):
            return
        keep = self._keep
        self._work = keep * self._work + work
        self._seconds = keep * self._seconds + seconds
        self._samples = keep * self._samples + 1.0
        self._last_s = now
        self._overdue_s = 0.0

    def waiting(self, now: float, dispatched_s: float, work: float, factor: float = 2.0) -> bool:
        """The oldest request without a first token has this work: is it overdue, and if so, count.

        Overdue is what takes `factor` times as long as the rate says. The time that it has waited
        counts as time of the pod from then on, until its first token makes it a sample or
        `abandoned` a fact: a pod that stands still gets slower and slower instead of keeping the
        rate it had.
        """
        waited_s = now - max(dispatched_s, self._last_s)
        if not (self._seconds > 0.0 and self._work > 0.0 and 0.0 < waited_s < inf):
            self._overdue_s = 0.0
            return False
        overdue = waited_s * self._work > factor * work * self._seconds
        self._overdue_s = waited_s if overdue else 0.0
        return overdue

    def none_waiting(self) -> None:
        """No request waits for its first token."""
        self._overdue_s = 0.0

    def abandoned(self, now: float, dispatched_s: float) -> None:
        """A request was given up without a first token: time that brought nothing."""
        seconds = now - max(dispatched_s, self._last_s)
        if 0.0 < seconds < inf:
            self._seconds += seconds
            self._last_s = now
        self._overdue_s = 0.0

    def rate(self) -> float:
        """Work per second; NaN until something is known."""
        seconds = self._seconds + self._overdue_s
        if self._samples == 0.0 or seconds <= 0.0:
            return nan
        return self._work / seconds

    def age_s(self, now: float) -> float:
        """Seconds since the last sample; infinite before the first."""
        return max(now - self._last_s, 0.0)

    def confidence(self, now: float) -> float:
        """Of `rate`."""
        return trust(self._samples, max(now - self._last_s, 0.0))


class BusyRate:
    """Requests that a pod completes per second in which it has any.

    Completions per second of the clock would be what the pod was *given*: whatever the weights
    are, they would seem right. Only what it does while busy says what it could do.
    """

    __slots__ = ("_busy_s", "_done", "_inflight", "_last_s", "_learned_s", "_samples", "_tau_s")

    def __init__(self, tau_busy_s: float = 10.0):
        self._tau_s = tau_busy_s
        self._inflight = 0
        self._done = 0.0
        self._busy_s = 0.0
        """Completions and busy seconds, both forgotten with tau in busy seconds."""
        self._samples = 0.0
        self._last_s = -inf
        self._learned_s = -inf

    def _pass(self, now: float) -> None:
        elapsed_s = now - self._last_s
        if elapsed_s <= 0.0:
            return
        if self._inflight > 0:
            keep = exp(-elapsed_s / self._tau_s)
            self._done *= keep
            self._samples *= keep
            self._busy_s = self._busy_s * keep + self._tau_s * (1.0 - keep)
        self._last_s = now

    def began(self, now: float) -> None:
        """The pod has one request more."""
        self._pass(now)
        self._inflight += 1

    def ended(self, now: float, *, completed: bool = True) -> None:
        """The pod has one request less; one that was not completed only ends."""
        self._pass(now)
        if self._inflight > 0:
            self._inflight -= 1
            if completed:
                self._done += 1.0
                self._samples += 1.0
                self._learned_s = now

    def rate(self, now: float) -> float:
        """Completions per busy second; NaN until the first one, towards 0 while none comes."""
        if self._learned_s == -inf:
            return nan
        self._pass(now)
        return self._done / self._busy_s if self._busy_s > 0.0 else nan

    def age_s(self, now: float) -> float:
        """Seconds since the last completion; infinite before the first."""
        return max(now - self._learned_s, 0.0)

    def confidence(self, now: float) -> float:
        """Of `rate`: as much as of the kernel was watched, and less the longer nothing was done."""
        return self._busy_s / self._tau_s * trust(self._samples, self.age_s(now))


class TpotModel:
    """Time per output token of a pool's pods: tpot = slowness_i (b0 + b1 inflight).

    b0 and b1 by recursive least squares with forgetting, over all pods together. The recursion
    keeps weighted means and (co)variances rather than their inverse: nothing grows without bound
    while the load stays the same. What a single pod is slower or faster by is a mean of its own.
    """

    __slots__ = ("_forget", "_last_s", "_slow", "_weight", "_x", "_xx", "_xy", "_y", "b0_s", "b1_s")

    def __init__(self, slots: int, forget: float = 0.998):
        self._forget = forget
        self._weight = 0.0
        self._x = self._y = 0.0
        """Weighted means of inflight and tpot."""
        self._xx = self._xy = 0.0
        """Weighted sums of squares and products about the means."""
        self.b0_s = 0.0
        """Seconds per output token with nothing inflight; 0 before the first answer."""
        self.b1_s = 0.0
        """Seconds per output token for each request inflight, within [0, MAX_B1_S]."""
        self._slow = [1.0] * slots
        self._last_s = -inf

    def add(self, now: float, slot: int, inflight: float, tpot_s: float) -> None:
        """An answer of this pod took so long per output token, with so many requests inflight."""
        if not (0.0 < tpot_s < inf and 0.0 <= inflight < inf):
            return
        expected_s = self.b0_s + self.b1_s * inflight
        if expected_s > 0.0:
            # One answer that stalled says little of the pod: it counts as ten times too slow.
            seen = min(tpot_s / expected_s, 10.0)
            self._slow[slot] += SLOWNESS_NEW * (seen - self._slow[slot])
        keep = self._forget
        weight = self._weight = keep * self._weight + 1.0
        x, y = inflight - self._x, tpot_s - self._y
        self._x += x / weight
        self._y += y / weight
        left = 1.0 - 1.0 / weight
        self._xx = keep * self._xx + left * x * x
        self._xy = keep * self._xy + left * x * y
        slope = self._xy / (self._xx + RIDGE)
        self.b1_s = slope = 0.0 if slope < 0.0 else min(slope, MAX_B1_S)
        self.b0_s = max(self._y - slope * self._x, 0.0)
        self._last_s = now

    def slowness(self, slot: int) -> float:
        """Of this pod, in proportion to the pool: above 1 is slower."""
        return self._slow[slot]

    def tpot_s(self, slot: int, inflight: float) -> float:
        """Expected seconds per output token; 0 before the first answer."""
        return self._slow[slot] * (self.b0_s + self.b1_s * inflight)

    def forget(self, slot: int) -> None:
        """Another process: what was measured says nothing of it."""
        self._slow[slot] = 1.0

    def age_s(self, now: float) -> float:
        """Seconds since the last answer; infinite before the first."""
        return max(now - self._last_s, 0.0)

    def confidence(self, now: float) -> float:
        """Of b0 and b1."""
        return trust(self._weight, max(now - self._last_s, 0.0))
