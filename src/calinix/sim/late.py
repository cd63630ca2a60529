"""A router that knows its pods' load only as it was some seconds ago.

As with engine metrics that are polled: what it has sent in the meantime does not show either.
Each route's load is taken out of the columns again and put back when its time has come; the facts
about the request are delivered as late by the gateway.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from calinix.core.requests import RoutePlan
from calinix.core.router import Router
from calinix.sim.clock import VirtualClock

_COLUMNS = ("inflight", "prefill_tokens", "decode_tokens", "work", "context")
"""Of core.columns.Loads: what a lease takes and gives back."""

_Taken = list[tuple[int, int, float]]
"""(column, slot, amount)."""


class LateLoad:
    """Delays what routing takes from the load columns."""

    def __init__(self, router: Router, clock: VirtualClock):
        # The router has no door for this: no real host wants to know less than it does.
        self._ledger = ledger = router._state.ledger  # noqa: SLF001
        loads: Any = ledger.loads
        self._columns = [np.asarray(getattr(loads, name)) for name in _COLUMNS]
        self._busy_from = np.asarray(loads.busy_from)
        self._before = [column.copy() for column in self._columns]
        self._busy_before = self._busy_from.copy()
        self._clock = clock

    def remember(self) -> None:
        """Before a route."""
        for column, before in zip(self._columns, self._before, strict=True):
            before[:] = column
        self._busy_before[:] = self._busy_from

    def hide(self, plan: RoutePlan, now: float, late_s: float) -> None:
        """After the route: the plan's load shows `late_s` from now."""
        slots = [plan.pod.slot] if plan.prefill is None else [plan.pod.slot, plan.prefill.slot]
        taken: _Taken = []
        for number, (column, before) in enumerate(zip(self._columns, self._before, strict=True)):
            for slot in slots:
                amount = float(column[slot] - before[slot])
                column[slot] = before[slot]
                if amount:
                    taken.append((number, slot, amount))
        self._busy_from[slots] = self._busy_before[slots]
        # First tokens will be told as late: the rates must not count that as waiting.
        lease = self._ledger.leases[plan.lease_id]
        lease.opened_s = now + late_s
        self._clock.at(lease.opened_s, self._show, taken)

    def _show(self, taken: _Taken) -> None:
        for number, slot, amount in taken:
            if number == 0 and self._columns[0][slot] <= 0.0:
                self._busy_from[slot] = self._clock.now
            self._columns[number][slot] += amount
