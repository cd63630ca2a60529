"""How fast each pod prefills, measured: tokens per second from first tokens and prefill answers.

One sample is the work of a request and the time that the pod had for it: from its dispatch, or
from the pod's previous first token if that came later, so that waiting behind others does not
make a pod look slow. Sums with forgetting make a rate that follows a change within some tens of
requests, and that many first tokens at the same moment do not spoil.
"""

from __future__ import annotations

from collections.abc import Sequence

from calinix.core.columns import Column
from calinix.core.pods import Pod, Role

KEEP = 0.97
"""Weight of the past at each sample."""
REQUEST_TOKENS = 64.0
"""What a request costs beside its uncached tokens, in tokens."""
PRIOR_TOKENS_PER_S = 8000.0
"""Of a pool that nothing has been measured of."""


class PrefillRates:
    """Rates in tokens per second, by slot."""

    def __init__(self, slots: int):
        self._tokens = Column(slots)
        self._seconds = Column(slots)
        self._samples = Column(slots)
        self._last_s = Column(slots, float("-inf"))
        self._pool_tokens: dict[Role, float] = {}
        self._pool_seconds: dict[Role, float] = {}

    def learn(self, pod: Pod, tokens: float, dispatched_s: float, now: float) -> None:
        """The request with this uncached work, dispatched at that time, is prefilled."""
        slot = pod.slot
        seconds = now - max(dispatched_s, self._last_s.cells[slot])
        self._last_s.cells[slot] = now
        if seconds < 0.0:
            return
        work = tokens + REQUEST_TOKENS
        self._tokens.cells[slot] = KEEP * self._tokens.cells[slot] + work
        self._seconds.cells[slot] = KEEP * self._seconds.cells[slot] + seconds
        self._samples.cells[slot] = KEEP * self._samples.cells[slot] + 1.0
        role = pod.role
        self._pool_tokens[role] = KEEP * self._pool_tokens.get(role, 0.0) + work
        self._pool_seconds[role] = KEEP * self._pool_seconds.get(role, 0.0) + seconds

    def rate(self, pod: Pod) -> float:
        """Tokens per second: the pod's own, else its pool's, else PRIOR_TOKENS_PER_S."""
        seconds = self._seconds.cells[pod.slot]
        if seconds > 0.0:
            return self._tokens.cells[pod.slot] / seconds
        seconds = self._pool_seconds.get(pod.role, 0.0)
        if seconds > 0.0:
            return self._pool_tokens[pod.role] / seconds
        return PRIOR_TOKENS_PER_S

    def measured(self, slot: int) -> float | None:
        """The pod's own rate in tokens per second; None where there is none."""
        seconds = self._seconds.cells[slot]
        return self._tokens.cells[slot] / seconds if seconds > 0.0 else None

    def samples(self, slot: int) -> float:
        """How many samples the rate rests on, old ones counting less."""
        return self._samples.cells[slot]

    def mean_wait_s(self, slot: int) -> float:
        """Seconds per sample; 0 where there is none."""
        samples = self._samples.cells[slot]
        return self._seconds.cells[slot] / samples if samples else 0.0

    def forget(self, slot: int) -> None:
        """Another process, or a pod on trial: what was measured says nothing of it."""
        for column in (self._tokens, self._seconds, self._samples):
            column.cells[slot] = 0.0
        self._last_s.cells[slot] = float("-inf")

    def slow(
        self, slots: Sequence[int], factor: float, floor_s: float, samples: Sequence[float]
    ) -> list[int]:
        """Those that take `factor` times as long per token as the median of the others.

        Only pods with at least `samples[i]` samples are compared, and nobody whose mean wait is
        below `floor_s` is called slow: there, it would be noise.
        """
        times = {
            slot: self._seconds.cells[slot] / self._tokens.cells[slot]
            for slot, needed in zip(slots, samples, strict=True)
            if self._samples.cells[slot] >= needed and self._tokens.cells[slot] > 0.0
        }
        ordered = sorted(times.values())
        found = []
        for slot, time_s in times.items():
            if self.mean_wait_s(slot) >= floor_s and len(ordered) > 1:
                # `time_s` is above the median whenever the answer is yes: the median of the
                # others is then the lower of the middle ones, itself taken out.
                others = ordered.copy()
                others.remove(time_s)
                if time_s > factor * others[len(others) // 2]:
                    found.append(slot)
        return found
