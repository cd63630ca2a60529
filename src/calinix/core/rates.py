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
SURE: Final = 4.0
"""A pod's pace is its own from twice its standard error on; squared."""
WAITS_ALIKE: Final = 5.0
"""Whole waits in the same queue deviate together: so many of them say as much as one."""
LEAST_SPREAD: Final = 0.3
"""Standard deviation of a sample, in samples, that is reckoned with at least."""
STARVED_ROUNDS: Final = 30.0
"""A pod without a sample while its pool had so many for each pod has been avoided."""
STARVED_KEEP: Final = 0.98
"""From then on, what is left of its past at each further round: it is given another try."""
OVERDUE: Final = 2.0
"""Times its expected time after which a first token that does not come says that a pod is slow."""
REQUEST_TOKENS: Final = 64.0
"""What a request costs beside its uncached tokens, in tokens."""
PRIOR_TOKENS_PER_S: Final = 8000.0
"""Of a pool that nothing has been measured of."""


class _Pace:
    """Sums over the samples of one pod; those of a pool are the sums of its pods."""

    __slots__ = ("count", "last_s", "pool", "samples", "seconds", "seen", "squares", "tokens")

    def __init__(self, pool: _Pace | None = None) -> None:
        self.pool = pool
        """Of the pod's role, once there is a sample."""
        self.squares = 0.0
        """Of the samples' deviations from the pace, in seconds."""
        self.tokens = 0.0
        self.seconds = 0.0
        self.samples = 0.0
        self.last_s = float("-inf")
        """When the last sample ended."""
        self.count = 0.0
        """Of a pool: samples since the start."""
        self.seen = 0.0
        """Of a pod: its pool's `count` up to which its past is worth what it is."""


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
        pool = pace.pool
        if pool is None:
            pool = pace.pool = self._pools[pod.role]
        expected_s = work * (pace.seconds / pace.tokens if pace.tokens else seconds / work)
        square = (seconds - expected_s) ** 2
        pace.squares = KEEP * KEEP * pace.squares + (WAITS_ALIKE * square if is_wait else square)
        tokens, took_s = work - (1.0 - KEEP) * pace.tokens, seconds - (1.0 - KEEP) * pace.seconds
        pace.tokens += tokens
        pace.seconds += took_s
        pace.samples = KEEP * pace.samples + 1.0
        pool.count += 1.0
        pace.seen = pool.count
        pool.tokens += tokens
        pool.seconds += took_s
        self._set_pace(pod.slot)

    def share(self, tokens: Values | None, seconds: Values | None) -> None:
        """What other replicas have measured: sums by slot, that go with the own ones."""
        self._others_tokens, self._others_s = tokens, seconds
        for slot in range(len(self._pods)):
            self._set_pace(slot)

    def refresh(self, slots: Sequence[int]) -> None:
        """Lets the paces of one pool's pods follow it. To be called some times a second."""
        for slot in slots:
            self._fade(self._pods[slot], len(slots))
            self._set_pace(slot)

    def _fade(self, pace: _Pace, pods: int) -> None:
        """Forgets what was measured of a pod that is avoided: it may have recovered long since.

        By the pool's requests, not by the clock: a pool that rests overnight forgets nothing.
        """
        pool = pace.pool
        if pool is None or not pods:
            return
        rounds = (pool.count - pace.seen) / pods - STARVED_ROUNDS
        if rounds <= 0.0:
            return
        pace.seen += rounds * pods
        keep = STARVED_KEEP**rounds
        pool.tokens -= (1.0 - keep) * pace.tokens
        pool.seconds -= (1.0 - keep) * pace.seconds
        pace.tokens *= keep
        pace.seconds *= keep
        pace.squares *= keep  # fewer samples, each as far off: their mean is less certain
        pace.samples *= keep

    def sums(self, slot: int) -> tuple[float, float]:
        """(tokens, seconds) that the pod's own rate rests on, for other replicas."""
        pace = self._pods[slot]
        return pace.tokens, pace.seconds

    def _set_pace(self, slot: int) -> None:
        """The pod's own pace, as far as it differs from the pool's by more than chance.

        Of pods that are alike, the one that is thought the fastest would else get all the work of
        a pool with little to do. The ratio of two sums deviates from the true one by about the
        root of the samples' squared deviations, over the sum of their tokens.
        """
        pace = self._pods[slot]
        tokens, seconds = pace.tokens, pace.seconds + self._overdue_s[slot]
        if self._others_tokens is not None and self._others_s is not None:
            tokens += self._others_tokens[slot]
            seconds += self._others_s[slot]
        if tokens <= 0.0:
            self.paces[slot] = 0.0
            return
        own = seconds / tokens
        if pace.pool is None or pace.pool.seconds <= 0.0 or pace.pool.tokens <= 0.0:
            self.paces[slot] = own
            return
        pooled = pace.pool.seconds / pace.pool.tokens
        apart = (own - pooled) * tokens
        if pace.samples:
            least = LEAST_SPREAD * pace.seconds
            # The samples of others deviate as the own ones do.
            chance = SURE * max(pace.squares, least * least / pace.samples) * tokens / pace.tokens
        else:
            chance = 0.0
        self.paces[slot] = (
            pooled + (own - pooled) * (1.0 - chance / (apart * apart))
            if apart * apart > chance
            else pooled
        )

    def pace(self, pod: Pod) -> float:
        """Seconds per token: the pod's own, else its pool's."""
        return self.paces[pod.slot] or self.pool_pace(pod.role)

    def pool_pace(self, role: Role) -> float:
        """Seconds per token over all pods of a role, else by PRIOR_TOKENS_PER_S.

        Decode pods that have prefilled nothing yet are taken to be as fast as prefill pods.
        """
        pool = self._pools[role]
        if role == "decode" and pool.seconds <= 0.0:
            pool = self._pools["prefill"]
        if pool.seconds > 0.0 and pool.tokens > 0.0:
            return pool.seconds / pool.tokens
        return 1.0 / PRIOR_TOKENS_PER_S

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

    def last_s(self, slot: int) -> float:
        """When the last sample ended; minus infinity before the first."""
        return self._pods[slot].last_s

    def mean_wait_s(self, slot: int) -> float:
        """Seconds per sample; 0 where there is none."""
        pace = self._pods[slot]
        return pace.seconds / pace.samples if pace.samples else 0.0

    def forget(self, slot: int) -> None:
        """Another process, or a pod on trial: what was measured says nothing of it."""
        gone = self._pods[slot]
        if gone.pool is not None:
            gone.pool.tokens -= gone.tokens
            gone.pool.seconds -= gone.seconds
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
