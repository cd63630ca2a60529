"""How fast each pod prefills, measured: tokens per second from first tokens and prefill answers.

One sample is the work of a request and the time that the pod had for it: from its dispatch, or
from the pod's previous first token if that came later, so that waiting behind others does not
make a pod look slow. Sums with forgetting make a rate that follows a change within some tens of
requests, and that many first tokens at the same moment do not spoil.
"""

from __future__ import annotations

from collections.abc import Sequence

from calinix.core.pods import ROLES, Pod, Role

KEEP = 0.97
"""Weight of the past at each sample."""
REQUEST_TOKENS = 64.0
"""What a request costs beside its uncached tokens, in tokens."""
PRIOR_TOKENS_PER_S = 8000.0
"""Of a pool that nothing has been measured of."""


class _Pace:
    """Sums over the samples of one pod, or of all pods of a role."""

    __slots__ = ("last_s", "samples", "seconds", "tokens")

    def __init__(self) -> None:
        self.tokens = 0.0
        self.seconds = 0.0
        self.samples = 0.0
        self.last_s = float("-inf")
        """When the last sample ended."""


class PrefillRates:
    """Rates in tokens per second, by slot."""

    def __init__(self, slots: int):
        self._pods = [_Pace() for _ in range(slots)]
        self._pools: dict[Role, _Pace] = {role: _Pace() for role in ROLES}

    def learn(self, pod: Pod, tokens: float, dispatched_s: float, now: float) -> None:
        """The request with this uncached work, dispatched at that time, is prefilled."""
        pace = self._pods[pod.slot]
        since_s = pace.last_s
        # A call of max() would cost more than the rest of this.
        seconds = now - (dispatched_s if dispatched_s > since_s else since_s)  # noqa: FURB136
        pace.last_s = now
        if seconds < 0.0:
            return
        work = tokens + REQUEST_TOKENS
        pace.tokens = KEEP * pace.tokens + work
        pace.seconds = KEEP * pace.seconds + seconds
        pace.samples = KEEP * pace.samples + 1.0
        pool = self._pools[pod.role]
        pool.tokens = KEEP * pool.tokens + work
        pool.seconds = KEEP * pool.seconds + seconds

    def rate(self, pod: Pod) -> float:
        """Tokens per second: the pod's own, else its pool's, else PRIOR_TOKENS_PER_S."""
        pace = self._pods[pod.slot]
        if pace.seconds > 0.0:
            return pace.tokens / pace.seconds
        pool = self._pools[pod.role]
        return pool.tokens / pool.seconds if pool.seconds > 0.0 else PRIOR_TOKENS_PER_S

    def measured(self, slot: int) -> float | None:
        """The pod's own rate in tokens per second; None where there is none."""
        pace = self._pods[slot]
        return pace.tokens / pace.seconds if pace.seconds > 0.0 else None

    def samples(self, slot: int) -> float:
        """How many samples the rate rests on, old ones counting less."""
        return self._pods[slot].samples

    def mean_wait_s(self, slot: int) -> float:
        """Seconds per sample; 0 where there is none."""
        pace = self._pods[slot]
        return pace.seconds / pace.samples if pace.samples else 0.0

    def forget(self, slot: int) -> None:
        """Another process, or a pod on trial: what was measured says nothing of it."""
        self._pods[slot] = _Pace()

    def slow(
        self, slots: Sequence[int], factor: float, floor_s: float, samples: Sequence[float]
    ) -> list[int]:
        """Those that take `factor` times as long per token as the median of the others.

        Only pods with at least `samples[i]` samples are compared, and nobody whose mean wait is
        below `floor_s` is called slow: there, it would be noise.
        """
        times = {
            slot: self._pods[slot].seconds / self._pods[slot].tokens
            for slot, needed in zip(slots, samples, strict=True)
            if self._pods[slot].samples >= needed and self._pods[slot].tokens > 0.0
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
