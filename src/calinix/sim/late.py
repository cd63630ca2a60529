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

_COLUMNS = ("inflight", "prefill_tokens", "decode_tokens", "work", "head", "context")
"""Of core.columns.Loads: what a route may add to."""
_TIMES = {"inflight": "busy_from", "head": "since"}
"""Since when a column is not 0."""

_Taken = list[tuple[str, int, float]]
"""(column, slot, amount)."""


class LateLoad:
    """Delays what routing takes from the load columns."""

    def __init__(self, router: Router, clock: VirtualClock):
        # The router has no door for this: no real host wants to know less than it does.
        self._ledger = ledger = router._state.ledger  # noqa: SLF001
        loads: Any = ledger.loads
        names = [name for name in _COLUMNS if hasattr(loads, name)]
        self._columns = {name: np.asarray(getattr(loads, name)) for name in names}
        self._since = {
            name: np.asarray(getattr(loads, since))
            for name, since in _TIMES.items()
            if name in names
        }
        self._watched = [*self._columns.values(), *self._since.values()]
        self._before = [column.copy() for column in self._watched]
        self._clock = clock

    def remember(self) -> None:
        """Before a route."""
        for column, before in zip(self._watched, self._before, strict=True):
            before[:] = column

    def hide(self, plan: RoutePlan, now: float, late_s: float) -> None:
        """After the route: the plan's load shows `late_s` from now."""
        slots = [plan.pod.slot] if plan.prefill is None else [plan.pod.slot, plan.prefill.slot]
        taken: _Taken = []
        for (name, column), before in zip(self._columns.items(), self._before, strict=False):
            for slot in slots:
                amount = float(column[slot] - before[slot])
                if amount:
                    taken.append((name, slot, amount))
        for column, before in zip(self._watched, self._before, strict=True):
            column[slots] = before[slots]
        # First tokens will be told as late: the rates must not count that as waiting.
        lease = self._ledger.leases[plan.lease_id]
        lease.opened_s = now + late_s
        self._clock.at(lease.opened_s, self._show, taken)

    def _show(self, taken: _Taken) -> None:
        for name, slot, amount in taken:
            column = self._columns[name]
            if column[slot] <= 0.0:
                if name in self._since:
                    self._since[name][slot] = self._clock.now
            elif name == "head":
                continue  # the router has found it in the meantime
            column[slot] += amount
