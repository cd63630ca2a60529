"""What the controllers are fed: own load and others', speeds, answers; and when they step."""

from __future__ import annotations

import pytest

from calinix.core.events import (
    Finished,
    FirstToken,
    PodFacts,
    PodRestarted,
    ReplicaFacts,
    RoleFacts,
)
from calinix.core.router import Router
from calinix.core.steering import START_REQUEST_S
from routing import ask, finish, make_config, make_router


def decode_router(pods: int = 2) -> Router:
    """One prefill pod and so many decode pods."""
    return make_router(make_config(0, 1, pods, strategy="leastLoad"))


def told(router: Router, sync_s: float, times: tuple[float, ...]) -> None:
    """Another router has 6 requests on the first pod, and routes ten a second of 100 tokens."""
    for now in times:
        facts = (PodFacts("single-0", 6.0, work_tokens=600.0),)
        roles = (RoleFacts("single", 10.0 * now, 1000.0 * now),)
        router.observe(ReplicaFacts("b", facts, roles, sync_s=sync_s, gateways=2), now)


def test_without_a_tick_requests_step() -> None:
    """A host that only routes has its controllers stepped all the same, half a period late."""
    router = make_router(make_config(2))
    for number in range(50):
        finish(router, ask(router, now=number / 10), number / 10)
    assert 5 <= router.controllers(5.0)["single"].steps <= 8


def test_each_role_has_its_controller() -> None:
    """Pools are steered apart; a role without pods has none."""
    router = make_router(make_config(2, 1, 1))
    router.tick(1.0)
    assert set(router.controllers(1.0)) == {"single", "prefill", "decode"}
    alone = decode_router()
    alone.tick(1.0)
    assert set(alone.controllers(1.0)) == {"prefill", "decode"}


def test_others_load_and_flow_are_steered_against() -> None:
    """What other routers have on a pod is queue, and what they route is arrivals."""
    alone, beside = make_router(make_config(2)), make_router(make_config(2))
    told(beside, 1.0, (1.0, 2.0, 3.0))
    for router in (alone, beside):
        for number in range(30):
            now = 1.0 + number / 10
            finish(router, ask(router, b"%d" % number * 99, now), now)
            router.tick(now)
    own, both = alone.controllers(4.0)["single"], beside.controllers(4.0)["single"]
    assert own.queue[0] == 0.0
    assert both.queue[0] > 0.0 == both.queue[1]
    assert both.arrival_rate > own.arrival_rate
    assert both.weights[0] < both.weights[1]


@pytest.mark.parametrize(("sync_s", "share"), [(1.0, 0.0), (3.0, 0.5), (5.0, 1.0), (9.0, 1.0)])
def test_the_older_others_load_the_more_turns_go_by_speed(sync_s: float, share: float) -> None:
    """Weights for turns among blind routers go from the controller's to speeds alone."""
    router = make_router(make_config(2))
    told(router, sync_s, (1.0, 2.0, 3.0))
    router.tick(3.1)
    state = router._state
    # Nothing is known of the pods' speeds: by these alone they are equal.
    assert state.weights[0] < 1.0
    expected = (1.0 - share) * state.weights[0] + share
    assert state.blind_weights[0] == pytest.approx(expected)
    assert state.blind_weights[1] == pytest.approx(2.0 - expected)


def test_another_process_is_not_known() -> None:
    """After a restart a decode pod has no rate of its own: the pool's mean stands for it."""
    router = decode_router()
    for number in range(20):
        for slow, avoid in ((1.0, 0b100), (0.25, 0b010)):
            plan = ask(router, b"%d" % number, 10.0 * number, avoid=avoid)
            finish(router, plan, 10.0 * number + slow)
        router.tick(10.0 * number + 2.0)
    slow_rate, fast_rate = router.controllers(200.0)["decode"].service_rate
    assert slow_rate == pytest.approx(1.0, rel=0.05)
    assert fast_rate == pytest.approx(4.0, rel=0.05)
    router.observe(PodRestarted("decode-1"), 200.0)
    for now in (200.5, 201.5, 202.5):
        router.tick(now)
    first, anew = router.controllers(203.0)["decode"].service_rate
    assert first == anew == pytest.approx(slow_rate)


def test_time_per_token_is_learned_from_answers() -> None:
    """From 10 ms and 1 ms for each request of the pod; before that something is assumed."""
    router = decode_router(1)
    outlook = router._state.outlooks["decode"]
    assert outlook.request_s == START_REQUEST_S
    now = 0.0
    for number in range(300):
        count = 1 + number % 8
        plans = [ask(router, b"%d" % n, now) for n in range(count)]
        for plan in plans:
            router.observe(FirstToken(plan.lease_id), now)
        end_s = now + 100 * (0.010 + 0.001 * count)
        for plan in plans:
            router.observe(Finished(plan.lease_id, 200, output_tokens=101), end_s)
        now = end_s + 0.1
        router.tick(now)
    assert outlook.token_s == pytest.approx(0.010, rel=0.2)
    assert 0.0005 < outlook.request_s < 0.002
