"""Load: what is taken from the pods when a request is routed, and given back exactly once.

A lease holds, on the pod that answers, one inflight request and the decode tokens expected; and
on the pod that prefills, the uncached prompt tokens (in dispatch mode one inflight request of
that pod too). The prefill part goes back with the first token or the prefill's answer, the rest
at the end. All amounts are whole numbers, so that the columns come back to exactly zero.
Nothing but leases changes these columns: no probe, no event of a pod.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from calinix.core.bitmap import HostBitmap, iterate
from calinix.core.columns import Values
from calinix.core.kv import Loads
from calinix.core.pods import ROLES, Pod, PodTable
from calinix.core.requests import Work

if TYPE_CHECKING:
    from calinix.core.explain import Explanation
    from calinix.core.prepare import Prompt
    from calinix.core.sessions import Session

_MAX_STALE_RELEASES: Final = 1024
_MAX_WAITING: Final = 4096
"""Requests of a pod that are remembered in the order in which it prefills them."""


class Lease:
    """What one request holds. Changed only by the Ledger and the Router."""

    __slots__ = (
        "ahead",
        "confirmed",
        "context",
        "crowd",
        "decode_tokens",
        "effort",
        "effort_held",
        "explanation",
        "hidden",
        "id",
        "opened_s",
        "pod",
        "prefill",
        "prefill_held",
        "prefill_tokens",
        "prefilled",
        "prefilled_s",
        "prompt",
        "session",
        "work",
        "work_tokens",
    )  # fmt: skip

    def __init__(
        self,
        id: int,  # noqa: A002
        pod: Pod,
        prefill: Pod | None,
        work: Work,
        opened_s: float,
        prefill_tokens: float,
        decode_tokens: float,
        prefill_held: bool,
        prompt: Prompt,
        explanation: Explanation,
        work_tokens: float,
        effort: float = 0.0,
        context: float = 0.0,
        confirmed: bool = False,
        prefilled: bool = False,
    ):
        self.id = id
        self.pod = pod
        """The pod that answers: single or decode."""
        self.prefill = prefill
        """The prefill pod, in dispatch mode."""
        self.work = work
        self.opened_s = opened_s
        self.prefill_tokens = prefill_tokens
        """Uncached prompt tokens still held; 0 when given back."""
        self.decode_tokens = decode_tokens
        self.prefill_held = prefill_held
        """The prefill pod's inflight request is still held."""
        self.prompt = prompt
        self.explanation = explanation
        self.work_tokens = work_tokens
        """The uncached prompt tokens taken at first."""
        self.effort = effort
        """The work of its prefill, in work tokens; what rates are learned from."""
        self.effort_held = effort
        """What of it is still held; 0 when given back."""
        self.context = context
        """Tokens that it keeps in the KV cache of the pod that answers."""
        self.ahead = 0.0
        """All that the pod had to prefill until its first token, that of other replicas included;
        0 where there are none."""
        self.prefilled_s = 0.0
        """When its prefill leg was answered, in dispatch mode."""
        self.crowd = 0.0
        """Requests that the pod had at its first token."""
        self.hidden = False
        """Its first token is not seen."""
        self.session: Session | None = None
        """The session it belongs to."""
        self.confirmed = confirmed
        """The prompt's blocks are known to be on the pod that answers."""
        self.prefilled = prefilled
        """Likewise on the prefill pod."""


class Ledger:
    """Columns of load by slot, and the open leases."""

    def __init__(self, table: PodTable):
        self._table = table
        self.leases: dict[int, Lease] = {}
        """The open leases by id."""
        self._last_id = 0
        self._releases: list[tuple[float, int]] = []
        self.next_release_s = float("inf")
        """When `release_due` has something to do."""
        self._holders = [0] * table.max_pods
        self._waiting: list[deque[Lease] | None] = [None] * table.max_pods
        self.unseen: dict[int, tuple[float, float]] = {}
        """Slot -> (effort, since): prefills that ended unseen since the pod's last first token."""
        self.loads = Loads(table.max_pods)
        """The columns, for taking the load of many pods at once."""
        self.inflight = np.asarray(self.loads.inflight)
        """Requests by slot, shape (max_pods,); likewise:"""
        self.prefill_tokens = np.asarray(self.loads.prefill_tokens)
        """Uncached prompt tokens whose first token is not there yet."""
        self.decode_tokens = np.asarray(self.loads.decode_tokens)
        """Output tokens expected of the requests inflight."""
        self.full: HostBitmap = 0
        """Pods with inflight >= maxConns."""
        self.others: Values | None = None
        """Requests by slot that other workers of this gateway have there, or are taken to have."""

    def __len__(self) -> int:
        """How many leases are open."""
        return len(self.leases)

    def is_idle(self, slot: int) -> bool:
        """Whether no open lease speaks of the slot."""
        return not self._holders[slot]

    def open(
        self,
        pod: Pod,
        prefill: Pod | None,
        work: Work,
        now: float,
        prefill_tokens: float,
        decode_tokens: float,
        prompt: Prompt,
        explanation: Explanation,
        effort: float = 0.0,
        context: float = 0.0,
    ) -> Lease:
        """Takes the load; token counts are rounded to whole tokens."""
        tokens = (prefill_tokens + 0.5) // 1.0
        output = (decode_tokens + 0.5) // 1.0
        effort = (effort + 0.5) // 1.0
        context = (context + 0.5) // 1.0
        self._last_id = lease_id = self._last_id + 1
        self.leases[lease_id] = lease = Lease(
            lease_id,
            pod,
            prefill,
            work,
            now,
            tokens,
            output,
            prefill is not None,
            prompt,
            explanation,
            tokens,
            effort,
            context,
        )
        slot = pod.slot
        self._holders[slot] += 1
        if prefill is None:
            if self.loads.take(slot, -1, tokens, output, effort, context, now):
                self.recheck(slot)
        else:
            self._holders[prefill.slot] += 1
            if self.loads.take(slot, prefill.slot, tokens, output, effort, context, now):
                self.recheck(slot)
                self.recheck(prefill.slot)
            slot = prefill.slot
        if effort:
            self._line_up(slot, lease)
        return lease

    def _line_up(self, slot: int, lease: Lease) -> None:
        waiting = self._waiting[slot]
        if waiting is None:
            waiting = self._waiting[slot] = deque(maxlen=_MAX_WAITING)
        while waiting and not waiting[0].effort_held:
            waiting.popleft()
        waiting.append(lease)
        if self.unseen and self.loads.work[slot] == lease.effort:
            # Nothing waited: time in which a pod had nothing to do says nothing of its speed.
            self.unseen.pop(slot, None)

    def oldest(self, slot: int) -> Lease | None:
        """The request that the pod has had longest without its first token."""
        waiting = self._waiting[slot]
        while waiting and not waiting[0].effort_held:
            waiting.popleft()
        return waiting[0] if waiting else None

    def pass_line(self, slot: int, lease: Lease) -> None:
        """The pod has prefilled `lease`, so also what it got before and does not tell of."""
        waiting = self._waiting[slot]
        while waiting and waiting[0].id <= lease.id:
            earlier = waiting.popleft()
            if earlier.hidden and earlier.effort_held:
                self.release_prefill(earlier)

    def hide(self, lease: Lease, due_s: float) -> None:
        """Its first token will not be seen: it is believed there at `due_s` at the latest."""
        lease.hidden = True
        self.release_prefill_at(lease, due_s)

    def take_unseen(self, slot: int, dispatched_s: float) -> tuple[float, float]:
        """(effort, since): `unseen` of the slot, begun anew; `since` is never after dispatched."""
        effort, since_s = self.unseen.pop(slot, (0.0, dispatched_s))
        return effort, since_s if since_s < dispatched_s else dispatched_s  # noqa: FURB136

    def release_prefill(self, lease: Lease) -> None:
        """The prompt is prefilled: that part goes back. Harmless the second time."""
        tokens, prefill, effort = lease.prefill_tokens, lease.prefill, lease.effort_held
        if prefill is None:
            if tokens or effort:
                slot = lease.pod.slot
                lease.prefill_tokens = lease.effort_held = 0.0
                self.loads.give_prefill(slot, tokens, False, effort)
                if lease.hidden:
                    self._end_unseen(slot, lease)
        elif tokens or effort or lease.prefill_held:
            slot, held = prefill.slot, lease.prefill_held
            lease.prefill_tokens = lease.effort_held = 0.0
            lease.prefill_held = False
            if self.loads.give_prefill(slot, tokens, held, effort):
                self.recheck(slot)

    def _end_unseen(self, slot: int, lease: Lease) -> None:
        done, since_s = self.unseen.get(slot, (0.0, lease.opened_s))
        self.unseen[slot] = (done + lease.effort, min(since_s, lease.opened_s))

    def close(self, lease_id: int, now: float = 0.0, is_lost: bool = False) -> Lease | None:
        """Gives back all that is still held; None for an unknown or closed lease.

        `is_lost`: it ended without an answer, so nobody knows whether it was prefilled.
        """
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return None
        slot, prefill = lease.pod.slot, lease.prefill
        self._holders[slot] -= 1
        tokens, effort = 0.0, 0.0
        if prefill is None:
            tokens, effort = lease.prefill_tokens, lease.effort_held
            if tokens or effort:
                lease.prefill_tokens = lease.effort_held = 0.0
                if lease.hidden and not is_lost:
                    self._end_unseen(slot, lease)
        else:
            self._holders[prefill.slot] -= 1
            self.release_prefill(lease)
        output, context = lease.decode_tokens, lease.context
        if self.loads.give(slot, tokens, output, effort, context, now, not is_lost):
            self.recheck(slot)
        return lease

    def release_prefill_at(self, lease: Lease, due_s: float) -> None:
        """For an answer whose first token is not seen: it is believed there at `due_s`."""
        heapq.heappush(self._releases, (due_s, lease.id))
        self.next_release_s = self._releases[0][0]
        if len(self._releases) > 2 * len(self.leases) + _MAX_STALE_RELEASES:
            self._releases = [entry for entry in self._releases if entry[1] in self.leases]
            heapq.heapify(self._releases)

    def release_due(self, now: float, limit: int) -> None:
        """Gives back what is due, at most `limit` of it."""
        releases = self._releases
        while limit and releases and releases[0][0] <= now:
            lease = self.leases.get(heapq.heappop(releases)[1])
            if lease is not None:
                self.release_prefill(lease)
            limit -= 1
        self.next_release_s = releases[0][0] if releases else float("inf")

    def count_others(self, inflight: Values | None) -> None:
        """What other workers of this gateway have on the pods leaves so much less room there."""
        self.others = inflight
        for role in ROLES:
            for slot in iterate(self._table.role(role)):
                self.recheck(slot)

    def recheck(self, slot: int) -> None:
        """Whether the pod is full, after its load or its maxConns changed."""
        mark, bound = 1 << slot, float(self._table.max_conns[slot])
        if self.others is not None:
            bound -= self.others[slot]
        self.loads.bounds[slot] = bound
        if self.loads.inflight[slot] >= bound:
            self.full |= mark
        else:
            self.full &= ~mark
