"""What this worker has to tell the others: gathered call by call, sent some tens of times a second.

Hears of every call of the Router (core.recorded.Record). Only gateways of several workers have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from calinix.core import peer_records as records
from calinix.core.events import (
    Event,
    Failed,
    Failure,
    Finished,
    FirstToken,
    PrefillDone,
    PromptTokens,
    ResponseStored,
)
from calinix.core.ledger import Lease
from calinix.core.recorded import Record
from calinix.core.requests import Refusal, RoutePlan, RouteRequest, Work
from calinix.core.router import Router
from calinix.edge.bus import SYNC_S, Report, packed

FLUSH_S: Final = 0.75 * SYNC_S
"""From the first fact to its report; the rest is for the way."""
IDLE_S: Final = 0.25 * SYNC_S
"""Who has nothing left under way says so sooner, but so long after its last report: a burst that
comes right then would shun the pods that it is still taken to fill."""
FULL_LEASES: Final = 1024
"""With so many requests gathered, a report does not wait."""
FULL_BYTES: Final = 256 * 1024
"""Longer reports are cut into several."""
REPEAT_S: Final = 1.0
"""Without anything to tell, load is told again this often."""

_GENERATE: Final = Work.GENERATE
_NEUTRAL: Final = (Failure.CANCELLED, Failure.TOTAL_TIMEOUT)


class Outbox:
    """Gathers records; `send` gets a report's payload and must not raise."""

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[bytes], None],
        journal: Record | None = None,
    ):
        self.name = name
        self.reports = 0
        """How many were sent."""
        self._loop = loop
        self._send = send
        self._journal = journal
        self._router: Router | None = None
        self._records = bytearray()
        self._routed: list[Lease] = []
        """Not told yet."""
        self._told: set[int] = set()
        """Open leases that were told, and not yet that their prompts are there."""
        self._ended: list[Lease] = []
        """Of those: what became of them has to be told."""
        self._good = 0
        """Slots that gave good answers since the last report."""
        self._sample = 0
        """The open lease whose prompt's size will be told, and its model:"""
        self._sample_model = ""
        self._sessions: dict[int, tuple[bytes, str]] = {}
        """Open lease -> its session."""
        self._late: list[int] = []
        """Leases whose prompt has got a second chain."""
        self._timer: asyncio.TimerHandle | None = None
        self._reported_s = float("-inf")
        self._repeat: asyncio.TimerHandle | None = None

    def start(self, router: Router) -> None:
        """From now on, `router` is what is told of."""
        self._router = router
        self._repeat = self._loop.call_later(REPEAT_S, self._say_again)

    def stop(self) -> None:
        """Tells what is left, and no more after that."""
        self.flush()
        self._router = None
        if self._repeat is not None:
            self._repeat.cancel()

    # --- core.recorded.Record ----------------------------------------------------------------

    def routed(self, request: RouteRequest, outcome: RoutePlan | Refusal, now: float) -> None:
        """A request has its plan: its prompt is on its way to a pod."""
        if self._journal is not None:
            self._journal.routed(request, outcome, now)
        router = self._router
        if router is None or not isinstance(outcome, RoutePlan):
            return
        lease = router.lease(outcome.lease_id)
        if lease is None:
            return
        prompt = lease.prompt
        if prompt.blocks:
            self._routed.append(lease)
            if not self._sample and prompt.units > 0.0 and prompt.ratio is not None:
                self._sample, self._sample_model = lease.id, request.model
        if request.session_key is not None:
            key = (request.tenant, request.session_key)
            self._sessions[lease.id] = key
            self._records += records.session(
                key[0], key[1], lease.pod.slot, _prefill_slot(lease), 0.0
            )
        if self._timer is None:
            self._soon()
        elif len(self._routed) >= FULL_LEASES:
            self.flush()

    def observed(self, event: Event, now: float) -> None:
        """A fact; those of leases and answers are for the others, too."""
        if self._journal is not None:
            self._journal.observed(event, now)
        router = self._router
        if router is None:
            return
        # Looked at before the Router takes it in: the lease is still there.
        if isinstance(event, Finished):
            lease = router.lease(event.lease_id)
            if lease is not None:
                self._finished(event, lease)
                if router.open_leases() == 1:
                    self._soon_idle()
        elif isinstance(event, FirstToken):
            lease = router.lease(event.lease_id)
            if lease is not None and not lease.confirmed and lease.id in self._told:
                self._ended.append(lease)
        elif isinstance(event, Failed):
            lease = router.lease(event.lease_id)
            if lease is not None:
                self._failed(event, lease)
                if router.open_leases() == 1:
                    self._soon_idle()
        elif not self._told_rarely(event, router):
            return
        if self._timer is None:
            self._soon()

    def ticked(self, now: float) -> None:
        """Nothing to tell."""
        if self._journal is not None:
            self._journal.ticked(now)

    # --- facts -------------------------------------------------------------------------------

    def _finished(self, event: Finished, lease: Lease) -> None:
        slot, status = lease.pod.slot, event.status
        is_good = 200 <= status < 300
        if not lease.confirmed and lease.id in self._told:
            self._ended.append(lease)
        if self._sample == lease.id:
            self._sample = 0
            if is_good and event.prompt_tokens:
                prompt = lease.prompt
                self._records += records.learned(
                    self._sample_model, prompt.units, float(event.prompt_tokens), prompt.blocks
                )
        if is_good:
            self._good |= 1 << slot
        elif status in (429, 503):
            self._records += records.bad(slot, Failure.REFUSED)
        elif status >= 500:
            self._records += records.bad(slot, Failure.SERVER_ERROR)
        if self._sessions:
            key = self._sessions.pop(lease.id, None)
            if key is not None and is_good and lease.work is _GENERATE and event.output_tokens:
                self._records += records.session(
                    key[0], key[1], slot, _prefill_slot(lease), float(event.output_tokens)
                )

    def _failed(self, event: Failed, lease: Lease) -> None:
        self._sessions.pop(lease.id, None)
        if self._sample == lease.id:
            self._sample = 0
        if not lease.confirmed and lease.id in self._told:
            self._ended.append(lease)
        pod = lease.prefill if event.leg == "prefill" else lease.pod
        if pod is not None and event.failure not in _NEUTRAL:
            self._records += records.bad(pod.slot, event.failure)

    def _told_rarely(self, event: Event, router: Router) -> bool:
        """Whether there is something to tell."""
        if isinstance(event, PrefillDone):
            lease = router.lease(event.lease_id)
            if lease is not None and not lease.prefilled and lease.id in self._told:
                self._records += records.prefilled(lease.id)
        elif isinstance(event, PromptTokens):
            self._late.append(event.lease_id)
        elif isinstance(event, ResponseStored):
            names = router.pod_names()
            if event.pod_id in names:
                self._records += records.kept(event.response_id, names.index(event.pod_id))
                # The client may ask for it as soon as it has read it.
                self._loop.call_soon(self.flush)
        else:
            return False
        return True

    # --- reports -----------------------------------------------------------------------------

    def _soon(self) -> None:
        self._timer = self._loop.call_later(FLUSH_S, self.flush)

    def _soon_idle(self) -> None:
        """The last open lease is about to end."""
        if self._timer is not None:
            self._timer.cancel()
        due_s = max(self._reported_s + IDLE_S, self._loop.time())
        self._timer = self._loop.call_at(due_s, self.flush)

    def _say_again(self) -> None:
        self._repeat = self._loop.call_later(REPEAT_S, self._say_again)
        self.flush()

    def flush(self) -> None:
        """Tells what has gathered, and the load as it is now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        router = self._router
        if router is None:
            return
        self._tell_late(router)
        self._tell_routed(router)
        self._tell_ended()
        good, slot = self._good, 0
        while good:
            if good & 1:
                self._records += records.good(slot)
            good >>= 1
            slot += 1
        self._good = 0
        self._report(router)

    def _tell_late(self, router: Router) -> None:
        """Second chains of requests that were told before they had them."""
        for lease_id in self._late:
            lease = router.lease(lease_id)
            spare = None if lease is None else lease.prompt.spare
            if lease is None or spare is None:
                continue
            if lease.id in self._told:
                self._records += records.routed(
                    lease.id, lease.pod.slot, _prefill_slot(lease), spare
                )
            elif lease.confirmed:
                self._records += records.held(lease.pod.slot, _prefill_slot(lease), spare)
        self._late.clear()

    def _tell_routed(self, router: Router) -> None:
        """By now some are prefilled, and some have failed and left nothing to tell."""
        for lease in self._routed:
            prompt, slot = lease.prompt, lease.pod.slot
            prefill = records.NO_SLOT if lease.prefill is None else lease.prefill.slot
            if lease.confirmed:
                self._records += records.held(slot, prefill, prompt.chain)
                if prompt.spare is not None:
                    self._records += records.held(slot, prefill, prompt.spare)
            elif router.lease(lease.id) is not None:
                self._told.add(lease.id)
                self._records += records.routed(lease.id, slot, prefill, prompt.chain)
                if prompt.spare is not None:
                    self._records += records.routed(lease.id, slot, prefill, prompt.spare)
                if lease.prefilled:
                    self._records += records.prefilled(lease.id)
            if len(self._records) > FULL_BYTES:
                self._report(router)
        self._routed.clear()

    def _tell_ended(self) -> None:
        for lease in self._ended:
            if lease.id in self._told:
                self._told.discard(lease.id)
                self._records += (
                    records.settled(lease.id) if lease.confirmed else records.lost(lease.id)
                )
        self._ended.clear()

    def _report(self, router: Router) -> None:
        self._reported_s = self._loop.time()
        facts = router.facts(self._reported_s, self.name)
        report = Report(
            self.name, router.pod_names(), facts.pods, facts.roles, bytes(self._records)
        )
        self._records.clear()
        self.reports += 1
        self._send(packed(report))


def _prefill_slot(lease: Lease) -> int:
    return records.NO_SLOT if lease.prefill is None else lease.prefill.slot
