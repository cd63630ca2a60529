"""The pods' health: one state machine per pod, driven by events and by time.

Probes decide whether a pod is alive. Answers to real requests may eject it for a while (a row
of failures, or first tokens far slower than its peers'); after its rest one request may try it
again (half-open). 429 and 503 only cool a pod: it is asked last for a moment. 4xx says nothing.
A pod that nothing is heard of is silent: what it was believed to cache is not counted on.

Health never touches load: the columns of the ledger belong to leases alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from calinix.config import Health
from calinix.core import bitmap
from calinix.core.bitmap import HostBitmap

COOL_S: Final = 0.5
"""First pause of a pod that answered 429 or 503; it doubles with each further refusal."""
COOL_LEVELS: Final = 4
COOL_DECAY_S: Final = 4.0
"""Without a refusal, one doubling is taken back after this."""
SILENT_INTERVALS: Final = 3
"""A pod is silent when nothing was heard for this many probe intervals and a time-out."""
MAX_REASON_CHARS: Final = 200
NEVER: Final = float("inf")


class PodHealth:
    """What is known of one pod."""

    __slots__ = (
        "bad", "cool_level", "cooled_s", "eject_reason", "ejections", "gone", "good", "healthy",
        "heard_s", "probe_reason", "rest_s", "returned_s", "started", "streak", "trial",
        "until_s", "was_slow",
    )  # fmt: skip

    def __init__(self) -> None:
        self.started = False
        """It has been healthy once."""
        self.healthy = False
        """The probes' verdict."""
        self.good = 0
        self.bad = 0
        """Probes in a row."""
        self.probe_reason = ""
        """Why the last probe failed, if it did."""
        self.streak = 0
        """Failed requests in a row."""
        self.ejections = 0
        """In a row, without a good time between that was as long as the rest."""
        self.rest_s = 0.0
        self.until_s = NEVER
        """End of the rest while ejected."""
        self.returned_s = -NEVER
        self.eject_reason = ""
        self.was_slow = False
        self.trial = 0
        """Lease of the one request that tries a half-open pod; 0: none."""
        self.cool_level = 0
        self.cooled_s = -NEVER
        """When it was last refused."""
        self.heard_s = NEVER
        """Last sign of life; NEVER before the first one."""
        self.gone = False
        """Nobody listened there: whoever answers next is another process."""


class HealthTable:
    """The health of all pods by slot, and what follows from it as bitmaps."""

    def __init__(self, max_pods: int, rules: Health, stale_ttl_s: float):
        self._pods = [PodHealth() for _ in range(max_pods)]
        self._stale_ttl_s = stale_ttl_s
        self._known: HostBitmap = 0
        self.alive: HostBitmap = 0
        """Probes are good."""
        self.ejected: HostBitmap = 0
        """At rest."""
        self.half_open: HostBitmap = 0
        """May be tried by one request."""
        self.trying: HostBitmap = 0
        """Half-open, and that request is under way."""
        self.cooling: HostBitmap = 0
        """Refused with 429 or 503 a moment ago."""
        self.silent: HostBitmap = 0
        """Nothing heard of for too long."""
        self.usable: HostBitmap = 0
        """alive & ~ejected & ~trying."""
        self.due_s = NEVER
        """When `advance` has something to do."""
        self.adopt(rules)

    def adopt(self, rules: Health) -> None:
        """Other settings; what is known of the pods stays."""
        self.rules = rules
        self._silent_after_s = min(
            (SILENT_INTERVALS * rules.interval_ms + rules.timeout_ms) / 1e3, self._stale_ttl_s
        )

    def of(self, slot: int) -> PodHealth:
        """What is known of the pod in this slot."""
        return self._pods[slot]

    def reset(self, slot: int, *, known: bool) -> None:
        """A new pod in the slot, or (not `known`) none any more."""
        mark = 1 << slot
        self._pods[slot] = PodHealth()
        self._known = self._known | mark if known else self._known & ~mark
        self.alive &= ~mark
        self.ejected &= ~mark
        self.half_open &= ~mark
        self.trying &= ~mark
        self.cooling &= ~mark
        self.silent &= ~mark
        self._refresh()

    # --- signs of life -----------------------------------------------------------------------

    def heard(self, slot: int, now: float) -> bool:
        """A sign of life. True: it may be another process, so nothing is cached there."""
        pod = self._pods[slot]
        cold = now - pod.heard_s > self._stale_ttl_s
        pod.heard_s = now
        pod.gone = False
        if self.silent:
            self.silent &= ~(1 << slot)
        return cold

    def refused_connection(self, slot: int) -> bool:
        """Nobody listens there. True the first time: what was cached is gone with the process."""
        pod = self._pods[slot]
        first = not pod.gone
        pod.gone = True
        return first

    def look_for_silence(self, now: float) -> None:
        """Finds the pods that have not been heard of for too long."""
        for slot in bitmap.iterate(self._known & ~self.silent):
            if now - self._pods[slot].heard_s > self._silent_after_s:
                self.silent |= 1 << slot

    # --- probes ------------------------------------------------------------------------------

    def probe_succeeded(self, slot: int) -> None:
        """The health endpoint answered well; at start once is enough."""
        pod = self._pods[slot]
        pod.bad = 0
        pod.probe_reason = ""
        pod.good += 1
        if not pod.healthy and (not pod.started or pod.good >= self.rules.healthy_threshold):
            pod.started = pod.healthy = True
            self.alive |= 1 << slot
            self._refresh()

    def probe_failed(self, slot: int, reason: str = "") -> None:
        """The health endpoint did not answer well."""
        pod = self._pods[slot]
        pod.probe_reason = reason[:MAX_REASON_CHARS]
        pod.good = 0
        pod.bad += 1
        if pod.healthy and pod.bad >= self.rules.unhealthy_threshold:
            pod.healthy = False
            self.alive &= ~(1 << slot)
            self._refresh()

    # --- answers to real requests ------------------------------------------------------------

    def begin_trial(self, slot: int, lease_id: int) -> None:
        """A half-open pod gets its one request."""
        self._pods[slot].trial = lease_id
        self.trying |= 1 << slot
        self._refresh()

    def first_token(self, slot: int, lease_id: int, now: float) -> None:
        """A request came through that far: a trial is passed, but one more failure ejects."""
        pod = self._pods[slot]
        if pod.trial and pod.trial == lease_id:
            pod.streak = max(0, self.rules.passive.failures - 1)
            self._come_back(slot, pod, now)

    def succeeded(self, slot: int, lease_id: int, now: float) -> None:
        """A whole good answer."""
        pod = self._pods[slot]
        pod.streak = 0
        if pod.trial and pod.trial == lease_id:
            self._come_back(slot, pod, now)
        if pod.ejections and now - pod.returned_s >= pod.rest_s:
            pod.ejections = 0
            pod.was_slow = False

    def neutral(self, slot: int, lease_id: int) -> None:
        """An end that says nothing of the pod: a trial may be tried again."""
        pod = self._pods[slot]
        if pod.trial and pod.trial == lease_id:
            pod.trial = 0
            self.trying &= ~(1 << slot)
            self._refresh()

    def failed(self, slot: int, lease_id: int, now: float, peers: HostBitmap) -> None:
        """A request failed by the pod's fault. `peers`: the pods of its role."""
        pod = self._pods[slot]
        pod.streak += 1
        passive = self.rules.passive
        if not passive.enabled:
            return
        if pod.trial and pod.trial == lease_id:
            self._eject(slot, pod, now, pod.eject_reason)
        elif self.half_open >> slot & 1:
            return  # of before the rest: only the trial counts now
        elif pod.streak >= passive.failures and self.may_eject(slot, peers):
            self._eject(slot, pod, now, f"{pod.streak} failures in a row")

    def refused(self, slot: int, now: float) -> None:
        """429 or 503: asked last for a moment, and longer the more often it happens."""
        pod = self._pods[slot]
        decayed = int((now - pod.cooled_s) / COOL_DECAY_S) if pod.cool_level else 0
        pod.cool_level = min(max(0, pod.cool_level - decayed) + 1, COOL_LEVELS)
        pod.cooled_s = now
        self.cooling |= 1 << slot
        self.due_s = min(self.due_s, now + _cool_s(pod))

    def may_eject(self, slot: int, peers: HostBitmap) -> bool:
        """Whether at least half of `peers` would be left; probes alone may take out more."""
        mark = 1 << slot
        out = self.ejected | self.half_open
        return not out & mark and (out & peers | mark).bit_count() * 2 <= peers.bit_count()

    def eject_slow(self, slot: int, now: float) -> None:
        """Its first tokens take far longer than its peers'."""
        pod = self._pods[slot]
        pod.was_slow = True
        self._eject(slot, pod, now, "much slower than its peers")

    # --- time --------------------------------------------------------------------------------

    def advance(self, now: float, half_opened: Callable[[int], None]) -> None:
        """Ends rests and pauses whose time is over; `half_opened` hears of each rest's end."""
        if now < self.due_s:
            return
        due_s = NEVER
        for slot in bitmap.iterate(self.ejected | self.cooling):
            pod, mark = self._pods[slot], 1 << slot
            if self.ejected & mark:
                if now >= pod.until_s:
                    self.ejected &= ~mark
                    self.half_open |= mark
                    half_opened(slot)
                else:
                    due_s = min(due_s, pod.until_s)
            if self.cooling & mark:
                until_s = pod.cooled_s + _cool_s(pod)
                if now >= until_s:
                    self.cooling &= ~mark
                else:
                    due_s = min(due_s, until_s)
        self.due_s = due_s
        self._refresh()

    def state(self, slot: int) -> str:
        """For people: starting, unhealthy, ejected, halfOpen or healthy."""
        pod, mark = self._pods[slot], 1 << slot
        if not pod.healthy:
            return "unhealthy" if pod.started else "starting"
        if self.ejected & mark:
            return "ejected"
        return "halfOpen" if self.half_open & mark else "healthy"

    def reason(self, slot: int) -> str:
        """For people: why it is in this state; of a healthy one, why it was ejected last."""
        pod = self._pods[slot]
        if pod.healthy:
            return pod.eject_reason
        if pod.probe_reason:
            return f"its probe failed: {pod.probe_reason}"
        if pod.started:
            return f"{pod.good} of {self.rules.healthy_threshold} good probes in a row"
        return "no probe has ended yet"

    def _eject(self, slot: int, pod: PodHealth, now: float, reason: str) -> None:
        mark = 1 << slot
        passive = self.rules.passive
        # The exponent is bounded so that a long outage cannot overflow.
        longest_s = passive.max_eject_ms / 1e3
        pod.rest_s = min(passive.eject_ms / 1e3 * 2 ** min(pod.ejections, 20), longest_s)
        pod.ejections += 1
        pod.until_s = now + pod.rest_s
        pod.eject_reason = reason
        pod.trial = 0
        self.ejected |= mark
        self.half_open &= ~mark
        self.trying &= ~mark
        self.due_s = min(self.due_s, pod.until_s)
        self._refresh()

    def _come_back(self, slot: int, pod: PodHealth, now: float) -> None:
        mark = 1 << slot
        pod.trial = 0
        pod.returned_s = now
        pod.until_s = NEVER
        self.half_open &= ~mark
        self.trying &= ~mark
        self._refresh()

    def _refresh(self) -> None:
        self.usable = self.alive & ~self.ejected & ~self.trying


def _cool_s(pod: PodHealth) -> float:
    return COOL_S * float(2 ** (pod.cool_level - 1))
