"""A router that knows its pods' load only as it was some seconds ago.

As with engine metrics that are polled: what it has sent in the meantime does not show either.
Each route's load is taken out of the columns again and put back when its time has come; facts are
delivered as late by the gateway.
"""

from __future__ import annotations

from calinix.core.requests import RoutePlan
from calinix.core.router import Router
from calinix.sim.clock import VirtualClock

_Taken = tuple[int, float, float, float]
"""Slot; inflight requests, prefill tokens and decode tokens."""


class LateLoad:
    """Delays what routing takes from the load columns."""

    def __init__(self, router: Router, clock: VirtualClock, late_s: float):
        # The router has no door for this: no real host wants to know less than it does.
        self._ledger = router._state.ledger  # noqa: SLF001
        self._clock = clock
        self._late_s = late_s

    def hide(self, plan: RoutePlan, now: float) -> None:
        """The plan's load shows `late_s` from now."""
        lease = self._ledger.leases[plan.lease_id]
        taken: list[_Taken]
        if lease.prefill is None:
            taken = [(plan.pod.slot, 1.0, lease.prefill_tokens, lease.decode_tokens)]
        else:
            taken = [
                (lease.prefill.slot, 1.0, lease.prefill_tokens, 0.0),
                (plan.pod.slot, 1.0, 0.0, lease.decode_tokens),
            ]
        for one in taken:
            self._add(one, -1.0)
        # First tokens will be told as late: the rates must not count that as waiting.
        lease.opened_s = now + self._late_s
        self._clock.at(lease.opened_s, self._show, taken)

    def _show(self, taken: list[_Taken]) -> None:
        for one in taken:
            self._add(one, 1.0)

    def _add(self, one: _Taken, sign: float) -> None:
        slot, inflight, prefill_tokens, decode_tokens = one
        ledger = self._ledger
        ledger.inflight[slot] += sign * inflight
        ledger.prefill_tokens[slot] += sign * prefill_tokens
        ledger.decode_tokens[slot] += sign * decode_tokens
