"""The load of several workers of one gateway: added up, echoed, bounded together."""

from __future__ import annotations

from calinix.core.events import (
    Failure,
    PodFacts,
    ReplicaFacts,
    RoleFacts,
)
from calinix.core.replicas import ECHO_S
from calinix.core.requests import RefusalReason, RoutePlan
from calinix.core.router import Router
from routing import ask, fail, finish, make_config, make_router, pods, refused, request


def say(
    router: Router, who: str = "b", now: float = 1.0, sync_s: float = 0.02, **load: float
) -> None:
    """Another worker's load on the first pod."""
    pod = router.pods()[0].id
    roles = (RoleFacts("single", 10.0, 100.0),)
    router.observe(ReplicaFacts(who, (PodFacts(pod, **load),), roles, sync_s=sync_s), now)


def others(router: Router) -> float:
    """Requests of others on the first pod."""
    inflight = router._state.replicas.inflight
    assert inflight is not None
    return inflight[0]


def test_max_conns_is_for_all_workers_together() -> None:
    """The others' requests leave less room, and none of them is ever given back here."""
    router = make_router(make_config(single=pods("single", 1, max_conns=4)))
    say(router, inflight=2.0)
    plans = [ask(router)]
    assert router._state.ledger.full == 1  # the other one may have taken a place as well
    say(router, inflight=2.0)
    assert router._state.ledger.full == 0
    plans.append(ask(router))
    assert router._state.ledger.full == 1
    say(router, inflight=1.0)
    plans.append(ask(router))
    assert router._state.ledger.full == 1
    for plan in plans:
        finish(router, plan)
    say(router, inflight=0.0)
    assert router._state.ledger.full == 0
    # Gateways that report once a second are too late for that.
    say(router, who="far", inflight=9.0, sync_s=1.0)
    assert router._state.ledger.full == 0


def test_until_the_next_report_the_others_do_the_same() -> None:
    """Each own request counts for each other worker, from two on its next too, until it reports."""
    router = make_router(make_config(single=1))
    say(router, who="b")
    say(router, who="c")
    ask(router)
    assert others(router) == 2.0
    ask(router)
    assert others(router) == 6.0
    say(router, who="b", inflight=1.0)
    assert others(router) == 5.0
    say(router, who="c")
    assert others(router) == 3.0
    say(router, who="b", inflight=1.0)
    say(router, who="c")
    assert others(router) == 1.0


def test_workers_that_say_nothing_did_not_do_the_same() -> None:
    """After ECHO_S without a word, what was supposed of the others holds up no request."""
    router = make_router(make_config(single=1))
    say(router)
    ask(router, 64)
    assert others(router) == 1.0
    ask(router, now=1.0 + ECHO_S / 2)
    assert others(router) == 3.0
    ask(router, now=1.0 + 2 * ECHO_S)
    assert others(router) == 1.0  # by this one alone
    replicas = router._state.replicas
    assert replicas.work is not None
    assert replicas.work[0] < 200.0


def test_room_is_shared_between_reports() -> None:
    """Four workers that fill a pod at the same moment keep to maxConns; later each may take more.

    Silent workers leave all of it to who asks, some at a time.
    """
    router = make_router(make_config(single=pods("single", 1, max_conns=8)))
    for who in "bcd":
        say(router, who=who)
    taken = 0
    for window in range(8):
        now = 1.0 + window * ECHO_S
        while isinstance(router.route(request(), now), RoutePlan):
            taken += 1
        if not window:
            assert taken == 2
    assert taken == 8
    router.tick(2.0)
    assert router._state.ledger.full == 1  # by its own


def test_what_is_supposed_ends_with_the_request() -> None:
    """Short requests, one after the other, do not add up to a crowd that is not there."""
    router = make_router(make_config(single=1))
    say(router)
    for _ in range(20):
        finish(router, ask(router))
    assert others(router) == 0.0
    plans = [ask(router), ask(router)]
    assert others(router) == 3.0
    say(router, now=1.01)
    fail(router, plans.pop(), Failure.CANCELLED)
    assert others(router) == 1.0  # what a report has settled already is not given back again


def test_a_worker_that_stands_still_leaves_room() -> None:
    """One that is silent for ten seconds takes no part of maxConns any more, dead or not."""
    router = make_router(make_config(single=pods("single", 1, max_conns=4)))
    say(router, inflight=4.0)
    assert refused(router).reason is RefusalReason.FULL
    router.tick(20.0)
    assert router._state.ledger.full == 0
