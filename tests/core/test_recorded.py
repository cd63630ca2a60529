"""A RecordedRouter decides as a Router does, and tells of each call."""

from __future__ import annotations

import random
from typing import Any

from calinix.core.events import Event, Finished, ProbeSucceeded
from calinix.core.recorded import RecordedRouter
from calinix.core.requests import Refusal, RoutePlan, RouteRequest
from routing import make_config, make_router, request


class Calls:
    """A record that is a list."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def routed(self, request: RouteRequest, outcome: RoutePlan | Refusal, now: float) -> None:
        """Kept."""
        self.heard.append(("route", request.request_id, outcome, now))

    def observed(self, event: Event, now: float) -> None:
        """Kept."""
        self.heard.append(("observe", event, now))

    def ticked(self, now: float) -> None:
        """Kept."""
        self.heard.append(("tick", now))


def test_each_call_is_told_in_order() -> None:
    """Routes with what came of them, events and ticks, each with its time."""
    calls = Calls()
    router = RecordedRouter(make_config(1), random.Random(1), calls)
    refusal = router.route(request(), 0.5)
    router.observe(ProbeSucceeded("single-0"), 1.0)
    plan = router.route(request(3), 2.0)
    assert isinstance(plan, RoutePlan)
    router.tick(3.0)
    router.observe(Finished(plan.lease_id, 200), 4.0)
    assert calls.heard == [
        ("route", "r", refusal, 0.5),
        ("observe", ProbeSucceeded("single-0"), 1.0),
        ("route", "r", plan, 2.0),
        ("tick", 3.0),
        ("observe", Finished(plan.lease_id, 200), 4.0),
    ]
    assert router.open_leases() == 0


def test_it_picks_as_a_router_does() -> None:
    """The same seed and calls give the same pods, recorded or not."""
    config = make_config(5)
    recorded = RecordedRouter(config, random.Random(3), Calls())
    for pod in recorded.pods():
        recorded.observe(ProbeSucceeded(pod.id), 0.0)
    plain = make_router(config, seed=3)
    for number in range(50):
        one, other = (router.route(request(number % 7), 1.0) for router in (recorded, plain))
        assert isinstance(one, RoutePlan)
        assert isinstance(other, RoutePlan)
        assert one.to_dict() == other.to_dict()
