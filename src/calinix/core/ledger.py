"""Load: what is taken from the pods when a request is routed, and given back exactly once.

A lease holds, on the pod that answers, one inflight request and the decode tokens expected; and
on the pod that prefills, the uncached prompt tokens (in dispatch mode one inflight request of
that pod too). The prefill part goes back with the first token or the prefill's answer, the rest
at the end. All amounts are whole numbers, so that the columns come back to exactly zero.
Nothing but leases changes these columns: no probe, no event of a pod.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from calinix.core.bitmap import HostBitmap
from calinix.core.kv import Loads
from calinix.core.pods import Pod, PodTable
from calinix.core.requests import Work

if TYPE_CHECKING:
    from calinix.core.explain import Explanation
    from calinix.core.prepare import Prompt

_MAX_STALE_RELEASES = 1024


class Lease:
    """What one request holds. Changed only by the Ledger and the Router."""

    __slots__ = (
        "confirmed",
        "decode_tokens",
        "explanation",
        "id",
        "opened_s",
        "pod",
        "prefill",
        "prefill_held",
        "prefill_tokens",
        "prefilled",
        "prompt",
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
        """The uncached prompt tokens taken at first; what rates are learned from."""
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

    def __len__(self) -> int:
        """How many leases are open."""
        return len(self.leases)

    def backlog_tokens(self, slot: int) -> float:
        """The pod's uncached prompt tokens before their first token."""
        return self.loads.prefill_tokens[slot]

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
    ) -> Lease:
        """Takes the load; token counts are rounded to whole tokens."""
        tokens = (prefill_tokens + 0.5) // 1.0
        output = (decode_tokens + 0.5) // 1.0
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
        )
        slot = pod.slot
        self._holders[slot] += 1
        if prefill is None:
            if self.loads.take(slot, -1, tokens, output):
                self.recheck(slot)
        else:
            self._holders[prefill.slot] += 1
            if self.loads.take(slot, prefill.slot, tokens, output):
                self.recheck(slot)
                self.recheck(prefill.slot)
        return lease

    def release_prefill(self, lease: Lease) -> None:
        """The prompt is prefilled: that part goes back. Harmless the second time."""
        tokens, prefill = lease.prefill_tokens, lease.prefill
        if prefill is None:
            if tokens:
                lease.prefill_tokens = 0.0
                self.loads.give_prefill(lease.pod.slot, tokens, False)
        elif tokens or lease.prefill_held:
            slot, held = prefill.slot, lease.prefill_held
            lease.prefill_tokens = 0.0
            lease.prefill_held = False
            if self.loads.give_prefill(slot, tokens, held):
                self.recheck(slot)

    def close(self, lease_id: int) -> Lease | None:
        """Gives back all that is still held; None for an unknown or closed lease."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return None
        slot, prefill = lease.pod.slot, lease.prefill
        self._holders[slot] -= 1
        tokens = 0.0
        if prefill is None:
            tokens = lease.prefill_tokens
            if tokens:
                lease.prefill_tokens = 0.0
        else:
            self._holders[prefill.slot] -= 1
            self.release_prefill(lease)
        if self.loads.give(slot, tokens, lease.decode_tokens):
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

    def recheck(self, slot: int) -> None:
        """Whether the pod is full, after its load or its maxConns changed."""
        mark, bound = 1 << slot, float(self._table.max_conns[slot])
        self.loads.bounds[slot] = bound
        if self.loads.inflight[slot] >= bound:
            self.full |= mark
        else:
            self.full &= ~mark
