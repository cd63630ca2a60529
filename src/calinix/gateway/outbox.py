"""What this worker has to tell the others: gathered call by call, sent some tens of times a second.

Hears of every call of the Router (core.recorded.Record). Only gateways of several workers have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

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
FULL_BYTES: Final = 256 * 1024
"""With so much gathered, a report does not wait."""
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
        self._repeat: asyncio.TimerHandle | None = None
        self._tell: dict[type[Event], Callable[[Any], None]] = {
            FirstToken: self._first_token,
            Finished: self._finished,
            Failed: self._failed,
            PrefillDone: self._prefill_done,
            PromptTokens: self._prompt_tokens,
            ResponseStored: self._response_stored,
        }

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
        if not isinstance(outcome, RoutePlan) or self._router is None:
            return
        lease = self._router.lease(outcome.lease_id)
        if lease is None:
            return
        slot, prefill = lease.pod.slot, _prefill_slot(lease)
        prompt = lease.prompt
        if prompt.blocks:
            self._records += records.routed(lease.id, slot, prefill, prompt.chain)
            if prompt.spare is not None:
                self._records += records.routed(lease.id, slot, prefill, prompt.spare)
            if not self._sample and prompt.units > 0.0 and prompt.ratio is not None:
                self._sample, self._sample_model = lease.id, request.model
        if request.session_key is not None:
            self._sessions[lease.id] = (request.tenant, request.session_key)
            self._records += records.session(
                request.tenant, request.session_key, slot, prefill, 0.0
            )
        self._soon()

    def observed(self, event: Event, now: float) -> None:
        """A fact; those of leases and answers are for the others, too."""
        if self._journal is not None:
            self._journal.observed(event, now)
        tell = self._tell.get(type(event))
        if tell is not None and self._router is not None:
            tell(event)
            self._soon()

    def ticked(self, now: float) -> None:
        """Nothing to tell."""
        if self._journal is not None:
            self._journal.ticked(now)

    # --- facts; each is looked at before the Router takes it in -------------------------------

    def _lease(self, lease_id: int) -> Lease | None:
        return None if self._router is None else self._router.lease(lease_id)

    def _first_token(self, event: FirstToken) -> None:
        lease = self._lease(event.lease_id)
        if lease is not None and not lease.confirmed and lease.prompt.blocks:
            self._records += records.settled(lease.id)

    def _prefill_done(self, event: PrefillDone) -> None:
        lease = self._lease(event.lease_id)
        if lease is not None and not lease.prefilled and lease.prompt.blocks:
            self._records += records.prefilled(lease.id)

    def _finished(self, event: Finished) -> None:
        lease = self._lease(event.lease_id)
        if lease is None:
            return
        key = self._sessions.pop(lease.id, None)
        slot, prompt = lease.pod.slot, lease.prompt
        if self._sample == lease.id:
            self._sample = 0
            if event.prompt_tokens and 200 <= event.status < 300:
                self._records += records.learned(
                    self._sample_model, prompt.units, float(event.prompt_tokens), prompt.blocks
                )
        if not 200 <= event.status < 300:
            self._ended_badly(lease)
            if event.status in (429, 503):
                self._records += records.bad(slot, Failure.REFUSED)
            elif event.status >= 500:
                self._records += records.bad(slot, Failure.SERVER_ERROR)
            return
        if not lease.confirmed and prompt.blocks:
            self._records += records.settled(lease.id)
        self._good |= 1 << slot
        if key is not None and lease.work is _GENERATE and event.output_tokens:
            self._records += records.session(
                key[0], key[1], slot, _prefill_slot(lease), float(event.output_tokens)
            )

    def _failed(self, event: Failed) -> None:
        lease = self._lease(event.lease_id)
        if lease is None:
            return
        self._sessions.pop(lease.id, None)
        if self._sample == lease.id:
            self._sample = 0
        self._ended_badly(lease)
        pod = lease.prefill if event.leg == "prefill" else lease.pod
        if pod is not None and event.failure not in _NEUTRAL:
            self._records += records.bad(pod.slot, event.failure)

    def _ended_badly(self, lease: Lease) -> None:
        if lease.prompt.blocks and not lease.confirmed:
            self._records += records.lost(lease.id)

    def _prompt_tokens(self, event: PromptTokens) -> None:
        self._late.append(event.lease_id)

    def _response_stored(self, event: ResponseStored) -> None:
        if self._router is not None:
            names = self._router.pod_names()
            if event.pod_id in names:
                self._records += records.kept(event.response_id, names.index(event.pod_id))
                # The client may ask for it as soon as it has read it.
                self._loop.call_soon(self.flush)

    # --- reports -----------------------------------------------------------------------------

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(FLUSH_S, self.flush)
        elif len(self._records) > FULL_BYTES:
            self.flush()

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
        for lease_id in self._late:
            lease = router.lease(lease_id)
            if lease is not None and lease.prompt.spare is not None:
                self._records += records.routed(
                    lease_id, lease.pod.slot, _prefill_slot(lease), lease.prompt.spare
                )
        self._late.clear()
        good, slot = self._good, 0
        while good:
            if good & 1:
                self._records += records.good(slot)
            good >>= 1
            slot += 1
        self._good = 0
        facts = router.facts(self._loop.time(), self.name)
        report = Report(
            self.name, router.pod_names(), facts.pods, facts.roles, bytes(self._records)
        )
        self._records.clear()
        self.reports += 1
        self._send(packed(report))


def _prefill_slot(lease: Lease) -> int:
    return records.NO_SLOT if lease.prefill is None else lease.prefill.slot
