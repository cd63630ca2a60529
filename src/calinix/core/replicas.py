"""What the other routers of the same pods have there: sums by slot, how old they are, their flow.

Only scoring looks at it. Between two reports what the others route is not seen; `unseen` says how
much that will be.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from calinix.core.columns import Values
from calinix.core.events import PodFacts, ReplicaFacts, RoleFacts
from calinix.core.pods import PodTable, Role

MAX_REPLICAS = 64
"""One more than these is not listened to."""
SILENT_S = 10.0
"""A replica that says nothing for so long, or for four of its periods, is gone with its load."""
WORKER_SYNC_S = 0.1
"""Who reports as often as this is a worker of this gateway: its clients are like those here."""
ECHO_S: Final = 0.04
"""A worker that has routed something says so within half of this: after it, silence means none."""
RATES_S = 0.25
"""How often the measured rates of such reports are taken in."""
FLOW_S = 0.5
"""Shortest time over which a flow is measured."""
START_SYNC_S = 1.0
"""How often a replica is taken to report until it has done so twice."""
MOST: Final = 1e15
"""What is more than this, or negative, or no number, is taken as 0."""
_LOADS: Final = 3
_COLUMNS: Final = 5
_KEEP = 0.7


class _Echo:
    """What another worker is taken to have routed to a pod since its last report."""

    __slots__ = ("began_s", "requests", "routed", "work")

    def __init__(self, began_s: float):
        self.began_s = began_s
        self.requests = 0
        """Those that it may be about to route are among them; not so here:"""
        self.routed = 0
        self.work = 0.0
        """In tokens."""


class _Replica:
    """The last report of one replica, and what several of them say."""

    __slots__ = (
        "columns", "echoed", "flow", "gateways", "said", "said_s", "slots", "sync_s", "true_s",
    )  # fmt: skip

    def __init__(self, slots: int):
        self.columns: list[Values] = [array("d", bytes(8 * slots)) for _ in range(_COLUMNS)]
        """Inflight requests, work, context; tokens and seconds of the rates."""
        self.slots: list[int] = []
        """Those that its last report speaks of; all others are 0."""
        self.echoed: dict[int, _Echo] = {}
        """By slot, if it is a worker: what was routed here since its last report."""
        self.said: dict[Role, RoleFacts] = {}
        self.flow: dict[Role, tuple[float, float]] = {}
        """Role -> (requests a second, work tokens a second)."""
        self.said_s = float("-inf")
        """When `said` was true."""
        self.true_s = float("-inf")
        """When its last report was true."""
        self.sync_s = 0.0
        self.gateways = 0

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker of this gateway."""
        return 0.0 < self.sync_s <= WORKER_SYNC_S


class Replicas:
    """The other replicas. Columns are by slot, and None as long as there is no other replica."""

    def __init__(self, table: PodTable):
        self._table = table
        self._known: dict[str, _Replica] = {}
        self.in_workers: Values | None = None
        """Requests of other workers of this gateway: what they say, and their echoes of ours."""
        self.moved: list[int] = []
        """Slots where the last call of `absorb` or `lapse` changed that."""
        self.inflight: Values | None = None
        """Of all others, and what those workers are taken to have done since. Likewise:"""
        self.work: Values | None = None
        self.context: Values | None = None
        self.rate_tokens: Values | None = None
        self.rate_s: Values | None = None
        self.lapse_s = float("inf")
        """When some of what workers are taken to have done has to be given up."""
        self._workers: list[_Replica] = []
        """Those of this gateway: what it does, each of them is doing as well."""
        self._rates_s = float("-inf")

    def __len__(self) -> int:
        """How many others there are."""
        stated = max((one.gateways for one in self._known.values()), default=0)
        return max(len(self._known), stated - 1)

    @property
    def sync_s(self) -> float:
        """Seconds between two reports of a replica, the longest of all; 0 without replicas."""
        return max((one.sync_s or START_SYNC_S for one in self._known.values()), default=0.0)

    def absorb(self, event: ReplicaFacts, now: float) -> bool:
        """Takes in a report; True: the rates of the others are to be looked at anew.

        Pods that are not configured here are left out.
        """
        one = self._known.get(event.replica)
        if one is None:
            if len(self._known) >= MAX_REPLICAS:
                return False
            one = self._known[event.replica] = _Replica(self._table.max_pods)
        was_worker = one.is_worker
        true_s = now - max(event.age_s, 0.0)
        elapsed_s = true_s - one.true_s
        if 0.0 < elapsed_s < float("inf"):
            measured_s = _KEEP * (one.sync_s or elapsed_s) + (1.0 - _KEEP) * elapsed_s
            one.sync_s = event.sync_s or measured_s
        elif event.sync_s > 0.0:
            one.sync_s = event.sync_s
        over_s = true_s - one.said_s
        if event.sync_s == 0.0 or event.sync_s > WORKER_SYNC_S or over_s >= FLOW_S:
            if 0.0 < over_s < float("inf"):
                self._flow(one, event.roles, over_s)
            one.said = {facts.role: facts for facts in event.roles}
            one.said_s = true_s
        one.true_s, one.gateways = true_s, event.gateways
        if self.inflight is None or one.is_worker != was_worker:
            one.echoed = {}
            self._sum()
        self._take(one, event.pods, now)
        if one.is_worker and now < self._rates_s:
            return False
        self._rates_s = now + RATES_S
        self._sum_rates()
        return True

    def echo(self, slot: int, work_tokens: float, now: float) -> None:
        """A request was routed to the slot: until the other workers report, they did the same.

        Without it a burst that reaches all of them at once would find each of them choosing as if
        it were alone, and fill what room there is. It lasts as long as the request, and at most
        ECHO_S.
        """
        if self.inflight is None or self.work is None or self.in_workers is None:
            return
        self.lapse_s = min(self.lapse_s, now + ECHO_S)
        for one in self._workers:
            found = one.echoed.get(slot)
            if found is None:
                found = one.echoed[slot] = _Echo(now)
            self.inflight[slot] += _supposed(found.requests + 1) - _supposed(found.requests)
            self.work[slot] += work_tokens
            self.in_workers[slot] += 1.0
            found.requests += 1
            found.routed += 1
            found.work += work_tokens

    def over(self, slot: int, began_s: float) -> None:
        """A request that was routed to the slot has ended, and what it let suppose of others."""
        if self.inflight is None or self.in_workers is None:
            return
        for one in self._workers:
            found = one.echoed.get(slot)
            if found is not None and found.routed and began_s >= found.began_s:
                self.inflight[slot] += _supposed(found.requests - 1) - _supposed(found.requests)
                self.in_workers[slot] -= 1.0
                found.requests -= 1
                found.routed -= 1

    def lapse(self, now: float) -> None:
        """Workers that have not spoken for ECHO_S have had nothing to tell."""
        self.lapse_s, self.moved = float("inf"), []
        for one in self._workers:
            for slot, found in list(one.echoed.items()):
                due_s = found.began_s + ECHO_S
                if due_s <= now:
                    self._give_up(one, slot)
                else:
                    self.lapse_s = min(self.lapse_s, due_s)

    def _give_up(self, one: _Replica, slot: int) -> None:
        """It is not taken to have done what was routed to the slot here."""
        found = one.echoed.pop(slot)
        if self.inflight is not None and self.work is not None and self.in_workers is not None:
            self.inflight[slot] -= _supposed(found.requests)
            self.work[slot] -= found.work
            self.in_workers[slot] -= found.routed
            self.moved.append(slot)

    def forget(self, replica: str) -> None:
        """It has ended."""
        if self._known.pop(replica, None) is not None:
            self._sum()
            self._sum_rates()

    def refresh(self, now: float) -> bool:
        """Drops replicas that are gone, and adds up anew; True: somebody was dropped.

        To be called some times a second: sums that only ever follow changes drift.
        """
        gone = [
            name
            for name, one in self._known.items()
            if now - one.true_s > max(SILENT_S, 4.0 * one.sync_s)
        ]
        for name in gone:
            del self._known[name]
        if self._known or gone:
            self._sum()
            self._sum_rates()
        return bool(gone)

    def unseen(self, role: Role, now: float) -> float:
        """Requests that the others have probably routed to the role since their last reports.

        Workers that have been silent for longer than ECHO_S have routed nothing.
        """
        return sum(
            min(max(now - one.true_s, 0.0), ECHO_S if one.is_worker else float("inf"))
            * one.flow.get(role, (0.0, 0.0))[0]
            for one in self._known.values()
        )

    def flow(self, role: Role) -> tuple[float, float]:
        """(requests a second, work tokens a second) that the others route to the role."""
        flows = [one.flow.get(role, (0.0, 0.0)) for one in self._known.values()]
        return sum(requests for requests, _ in flows), sum(work for _, work in flows)

    def _flow(self, one: _Replica, said: Sequence[RoleFacts], elapsed_s: float) -> None:
        for facts in said:
            before = one.said.get(facts.role)
            if before is None or facts.requests < before.requests:
                continue  # its first report, or it began anew
            fresh = (
                (facts.requests - before.requests) / elapsed_s,
                max(facts.work_tokens - before.work_tokens, 0.0) / elapsed_s,
            )
            old = one.flow.get(facts.role, fresh)
            one.flow[facts.role] = (
                _KEEP * old[0] + (1.0 - _KEEP) * fresh[0],
                _KEEP * old[1] + (1.0 - _KEEP) * fresh[1],
            )

    def _take(self, one: _Replica, pods: Sequence[PodFacts], now: float) -> None:
        """Its columns say this, and nothing of what they said before; the sums follow."""
        rate_tokens, rate_s = one.columns[_LOADS:]
        before, one.slots, self.moved = one.slots, [], []
        for facts in pods:
            pod = self._table.find(facts.pod_id)
            if pod is not None:
                slot = pod.slot
                one.slots.append(slot)
                rate_tokens[slot] = _sane(facts.rate_tokens)
                rate_s[slot] = _sane(facts.rate_s)
                self._move(one, slot, (facts.inflight, facts.work_tokens, facts.context_tokens))
        if before != one.slots:
            for slot in set(before).difference(one.slots):
                rate_tokens[slot] = rate_s[slot] = 0.0
                self._move(one, slot, (0.0, 0.0, 0.0))
        # What it is about to do now is in no report; it may well go where it went just before.
        for slot, found in list(one.echoed.items()):
            self._give_up(one, slot)
            if found.requests > 1 and self.inflight is not None:
                again = one.echoed[slot] = _Echo(now)
                again.requests = 1
                self.inflight[slot] += _supposed(1)

    def _move(self, one: _Replica, slot: int, loads: tuple[float, float, float]) -> None:
        """What it has on one pod, and with it the sums."""
        sums, in_workers = (self.inflight, self.work, self.context), self.in_workers
        for index, said in enumerate(loads):
            column, total = one.columns[index], sums[index]
            change = _sane(said) - column[slot]
            if change and total is not None:
                column[slot] += change
                total[slot] += change
                if index == 0 and in_workers is not None and one.is_worker:
                    in_workers[slot] += change
                    self.moved.append(slot)

    def _sum(self) -> None:
        """Adds up what all of them have, from nothing."""
        known = self._known.values()
        self._workers = [one for one in known if one.is_worker]
        if not self._known:
            self.in_workers = self.inflight = self.work = self.context = None
            return
        loads = self._added(0, _LOADS)
        self.in_workers = None
        if self._workers:
            self.in_workers = array("d", bytes(8 * self._table.max_pods))
        for one in self._workers:
            if self.in_workers is not None:
                for slot in one.slots:
                    self.in_workers[slot] += one.columns[0][slot]
            for slot, found in one.echoed.items():
                loads[0][slot] += _supposed(found.requests)
                loads[1][slot] += found.work
                if self.in_workers is not None:
                    self.in_workers[slot] += found.routed
        self.inflight, self.work, self.context = loads

    def _sum_rates(self) -> None:
        if not self._known:
            self.rate_tokens = self.rate_s = None
            return
        self.rate_tokens, self.rate_s = self._added(_LOADS, _COLUMNS)

    def _added(self, first: int, end: int) -> list[Values]:
        """The sums of these columns over all replicas."""
        sums = [array("d", bytes(8 * self._table.max_pods)) for _ in range(first, end)]
        for one in self._known.values():
            for total, column in zip(sums, one.columns[first:end], strict=True):
                for slot in one.slots:
                    total[slot] += column[slot]
        return sums


def _sane(value: float) -> float:
    return value if 0.0 <= value < MOST else 0.0


def _supposed(requests: int) -> float:
    """What another worker is taken to have on a pod where so many were routed from here.

    From two on it is a burst: there its next one is counted as well, since whoever asks whether
    one more is too much for a pod has to ask for all of them.
    """
    return requests + 1.0 if requests > 1 else float(requests)
