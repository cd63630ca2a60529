"""How fast each pod prefills, measured: tokens per second from first tokens and prefill answers.

One sample is the work of a request and the time that the pod had for it: from its dispatch, or
from the pod's previous first token if that came later, so that waiting behind others does not
make a pod look slow. Sums with forgetting make a rate that follows a change within some tens of
requests, and that many first tokens at the same moment do not spoil.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from calinix.core.columns import Values
from calinix.core.pods import ROLES, Pod, Role

KEEP: Final = 0.97
"""Weight of the past at each sample."""
OVERDUE: Final = 2.0
"""Times its expected time after which a first token that does not come says that a pod is slow."""
REQUEST_TOKENS: Final = 64.0
"""What a request costs beside its uncached tokens, in tokens."""
PRIOR_TOKENS_PER_S: Final = 8000.0
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
        self.paces: Values = array("d", bytes(8 * slots))
        """Seconds per token by slot; 0: not known."""
        self._overdue_s = [0.0] * slots
        self._others_tokens: Values | None = None
        self._others_s: Values | None = None

    def learn(
        self, pod: Pod, work: float, dispatched_s: float, now: float, *, is_wait: bool = False
    ) -> None:
        """Prefills of so much work, in tokens with REQUEST_TOKENS for each request, have ended.

        The pod had them from `dispatched_s` on. `is_wait`: the work is all that it did since then.
        """
        pace = self._pods[pod.slot]
        since_s = dispatched_s if is_wait else pace.last_s
        # A call of max() would cost more than the rest of this.
        seconds = now - (dispatched_s if dispatched_s > since_s else since_s)  # noqa: FURB136
        pace.last_s = now
        if seconds < 0.0 or work <= 0.0:
            return
        self._overdue_s[pod.slot] = 0.0
        pace.tokens = KEEP * pace.tokens + work
        pace.seconds = KEEP * pace.seconds + seconds
        pace.samples = KEEP * pace.samples + 1.0
        self._set_pace(pod.slot)
        pool = self._pools[pod.role]
        pool.tokens = KEEP * pool.tokens + work
        pool.seconds = KEEP * pool.seconds + seconds

    def share(self, tokens: Values | None, seconds: Values | None) -> None:
        """What other replicas have measured: sums by slot, that go with the own ones."""
        self._others_tokens, self._others_s = tokens, seconds
        for slot in range(len(self._pods)):
            self._set_pace(slot)

    def sums(self, slot: int) -> tuple[float, float]:
        """(tokens, seconds) that the pod's own rate rests on, for other replicas."""
        pace = self._pods[slot]
        return pace.tokens, pace.seconds

    def _set_pace(self, slot: int) -> None:
        pace = self._pods[slot]
        tokens, seconds = pace.tokens, pace.seconds + self._overdue_s[slot]
        if self._others_tokens is not None and self._others_s is not None:
            tokens += self._others_tokens[slot]
            seconds += self._others_s[slot]
        self.paces[slot] = seconds / tokens if tokens > 0.0 else 0.0

    def pace(self, pod: Pod) -> float:
        """Seconds per token: the pod's own, else its pool's."""
        return self.paces[pod.slot] or self.pool_pace(pod.role)

    def pool_pace(self, role: Role) -> float:
        """Seconds per token over all pods of a role, else by PRIOR_TOKENS_PER_S."""
        pool = self._pools[role]
        return pool.seconds / pool.tokens if pool.seconds > 0.0 else 1.0 / PRIOR_TOKENS_PER_S

    def wait(self, slot: int, work: float, dispatched_s: float, now: float) -> None:
        """The request that the pod has had longest has this work, and no first token yet.

        From the moment that it takes OVERDUE times as long as the pace says, what it has waited
        counts as time of the pod, until a first token says more: a pod that stands still gets
        slower and slower instead of keeping the pace it had.
        """
        pace = self._pods[slot]
        if not pace.tokens or not pace.seconds:
            return
        waited_s = now - max(dispatched_s, pace.last_s)
        is_overdue = waited_s * pace.tokens > OVERDUE * work * pace.seconds
        if is_overdue or self._overdue_s[slot]:
            self._overdue_s[slot] = waited_s if is_overdue else 0.0
            self._set_pace(slot)

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
        self._overdue_s[slot] = 0.0
        self._set_pace(slot)

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
