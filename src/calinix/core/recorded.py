"""A Router that tells somebody of each call: what a journal is written from.

A class of its own, so that a Router of which nobody keeps a journal pays nothing for it.
"""

from __future__ import annotations

from typing import Protocol

from calinix.config import Config
from calinix.core.events import Event
from calinix.core.requests import Refusal, RoutePlan, RouteRequest
from calinix.core.router import Router
from calinix.core.state import Rng


class Record(Protocol):
    """Who is told; must not raise."""

    def routed(self, request: RouteRequest, outcome: RoutePlan | Refusal, now: float) -> None:
        """`route` was called, and this came of it."""
        ...

    def observed(self, event: Event, now: float) -> None:
        """`observe` is called."""
        ...

    def ticked(self, now: float) -> None:
        """`tick` is called."""
        ...


class RecordedRouter(Router):
    """A Router whose calls `record` hears of, in order."""

    def __init__(self, config: Config, rng: Rng, record: Record):
        super().__init__(config, rng)
        self._record = record

    def route(self, request: RouteRequest, now: float) -> RoutePlan | Refusal:
        """As Router's."""
        outcome = super().route(request, now)
        self._record.routed(request, outcome, now)
        return outcome

    def observe(self, event: Event, now: float) -> None:
        """As Router's."""
        # First: a fact that is refused has left its traces too.
        self._record.observed(event, now)
        super().observe(event, now)

    def tick(self, now: float) -> None:
        """As Router's."""
        self._record.ticked(now)
        super().tick(now)
