"""The controller in the router, and the strategies that follow it or compare predicted seconds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from calinix.config import Config, Controller, Predictive, Strategy
from calinix.control.controller import ControllerReport
from calinix.core.events import Finished, FirstToken, PodFacts, ReplicaFacts, RoleFacts
from calinix.core.requests import RoutePlan
from calinix.core.router import Router
from routing import ask, finish, load_is_zero, make_config, make_router

SPEEDS = {"single-0": 4000.0, "single-1": 1000.0}
"""Tokens a second that the two pods prefill."""


def config_of(strategy: str = "weightedRoundRobin", **settings: Any) -> Config:
    """Two pods under this strategy; `settings` of the controller, or of `predictive`."""
    rule = settings.pop("predictive", Predictive())
    named: Any = strategy
    config = make_config(2, strategy=Strategy(name=named, predictive=rule))
    changed: Config = msgspec.structs.replace(config, controller=Controller(**settings))
    return changed


def driven(
    config: Config, requests: int = 200, gap_s: float = 0.4
) -> tuple[ControllerReport, Counter[str]]:
    """What the controller says, and who got the last half, of prompts at unequal pods.

    Each pod takes them one after the other. Prompts share nothing.
    """
    router = make_router(config)
    free_at = dict.fromkeys(SPEEDS, 0.0)
    pending: list[tuple[float, int]] = []
    now, got = 0.0, Counter[str]()
    for number in range(requests):
        now += gap_s
        for done_s, lease_id in sorted(pending):
            if done_s <= now:
                pending.remove((done_s, lease_id))
                router.observe(FirstToken(lease_id), done_s)
                router.observe(Finished(lease_id, 200, output_tokens=1), done_s)
        router.tick(now)
        plan = ask(router, b"%06d" % number + b"x" * 2000, now)
        if number >= requests // 2:
            got[plan.pod.id] += 1
        begin_s = max(now, free_at[plan.pod.id])
        free_at[plan.pod.id] = begin_s + plan.prompt_tokens / SPEEDS[plan.pod.id]
        pending.append((free_at[plan.pod.id], plan.lease_id))
    return router.controllers(now)["single"], got


def test_weights_follow_the_speeds() -> None:
    """The fast pod gets a larger weight and more of the requests; weights have mean 1."""
    report, got = driven(config_of())
    assert report.weights[0] > 1.3
    assert report.weights[1] < 0.7
    assert sum(report.weights) == pytest.approx(2.0)
    assert got["single-0"] > 1.5 * got["single-1"]


def test_controller_off() -> None:
    """`controller.enabled: false`: every weight is 1, and turns are equal."""
    router = make_router(config_of(enabled=False))
    got = Counter(finished(router, ask(router, b"", n / 10), n / 10) for n in range(20))
    assert set(got.values()) == {10}
    assert driven(config_of(enabled=False))[1]["single-0"] == 50


def finished(router: Router, plan: RoutePlan, now: float) -> str:
    """Ends a request; its pod."""
    finish(router, plan, now)
    return plan.pod.id


def test_time_between_steps() -> None:
    """`controller.stepMs` says how often it steps."""
    often, seldom = (driven(config_of(step_ms=ms))[0].steps for ms in (500, 5000))
    assert often > 3 * seldom > 0


def test_horizon() -> None:
    """`controller.horizon` says how many steps its trajectories hold."""
    for horizon in (3, 12):
        report, _ = driven(config_of(horizon=horizon), 60)
        assert len(report.weight_trajectory) == len(report.queue_trajectory) == horizon


def test_bounds_of_weights() -> None:
    """`controller.weightMin` and `weightMax` bound the weights."""
    narrow, _ = driven(config_of(weight_min=0.9, weight_max=1.05))
    assert narrow.weights == pytest.approx([1.05, 0.95])
    floor, _ = driven(config_of(weight_min=0.8, weight_max=3.0))
    assert floor.weights == pytest.approx([1.2, 0.8])


def test_price_of_unequal_weights() -> None:
    """A larger `controller.regularisation` keeps weights nearer to 1."""
    loose, _ = driven(config_of(regularisation=0.1))
    tight, _ = driven(config_of(regularisation=1000.0))
    assert tight.weights[0] < loose.weights[0]
    assert tight.weights == pytest.approx([1.0, 1.0], abs=0.1)


def test_mode() -> None:
    """`controller.mode: literal` goes by requests and by the form that is not convex."""
    convex, _ = driven(config_of(regularisation=1000.0))
    literal, _ = driven(config_of(mode="literal", regularisation=1000.0))
    assert literal.weights != pytest.approx(convex.weights, abs=1e-4)


def test_weighted_power_of_two() -> None:
    """The fast pod of two gets most requests, by weight and by load."""
    _, got = driven(config_of("weightedPowerOfTwo"))
    assert got["single-0"] > 1.5 * got["single-1"]


def rates_of(mode: str, idle_s: float) -> list[float | None]:
    """Service rates that the decode pool is steered by, in requests a second.

    Each request takes 0.5 s on pod 0 and then leaves it alone for `idle_s`; pod 1 has one all the
    time, which it never ends.
    """
    config = make_config(0, 1, 2, strategy="leastLoad")
    setting = Controller(mode=mode)  # type: ignore[arg-type]
    router = make_router(msgspec.structs.replace(config, controller=setting))
    ask(router, b"q", 0.0, avoid=0b010)
    now = 0.0
    for number in range(20):
        plan = ask(router, b"%d" % number, now, avoid=0b100)
        now += 0.5
        router.tick(now)
        finish(router, plan, now)
        now += idle_s
        router.tick(now)
    return list(router.controllers(now)["decode"].service_rate)


def test_service_rates_are_of_busy_time() -> None:
    """However seldom a pod is used, what it completes in its busy seconds is its speed."""
    for idle_s in (0.0, 1.5):
        assert rates_of("convex", idle_s)[0] == pytest.approx(2.0, rel=0.1)


def test_literal_service_rates_are_of_the_clock() -> None:
    """Literally, a service rate is the throughput: what the pod completes by the clock."""
    assert rates_of("literal", 0.0)[0] == pytest.approx(2.0, rel=0.1)
    assert rates_of("literal", 1.5)[0] == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("mode", ["convex", "literal"])
def test_a_pod_that_completed_nothing_yet_is_not_known(mode: str) -> None:
    """Busy with its first request it has the pool's mean rate, and is not one that stands still."""
    fast, first = rates_of(mode, 0.0)
    assert first == pytest.approx(fast)


def costs_of(rule: Predictive, busy: int, prompt: bytes = b"y" * 4000) -> dict[str, list[float]]:
    """The terms of a decision while pod 0 has so many requests, whose prompts it knows."""
    router = make_router(config_of("predictive", predictive=rule))
    for number in range(busy):
        ask(router, b"%06d" % number + b"z" * 2000, 1.0 + number / 1000)
    plan = ask(router, prompt, 2.0)
    choice = plan.explanation.choice
    return {
        name: [float(value) * term[1] for value in term[0]] if term is not None else []
        for name, term in zip(choice.names, choice.terms, strict=True)
    }


def test_attention() -> None:
    """With `predictive.attentionTokens` long prompts cost more than in proportion."""
    linear = costs_of(Predictive(), 0)["prefill"]
    curved = costs_of(Predictive(attention_tokens=500.0), 0)["prefill"]
    assert curved[0] > 1.5 * linear[0] > 0.0


def test_price_of_queues() -> None:
    """`predictive.queuePrice` makes a prefill dearer the more the pool has waiting."""
    cheap = costs_of(Predictive(queue_price=0.0), 40)["others"]
    dear = costs_of(Predictive(queue_price=10.0), 40)["others"]
    assert dear[0] > cheap[0] > 0.0


def test_price_of_a_crowd() -> None:
    """`predictive.crowding` says what each request of a pod costs."""
    assert max(costs_of(Predictive(crowding=0.0), 10)["crowd"]) < max(
        costs_of(Predictive(crowding=1.0), 10)["crowd"]
    )


def test_fallback_to_turns() -> None:
    """Where what others route is not known, `predictive.fallback` takes turns; false compares."""
    rules = {}
    for fallback in (True, False):
        router = make_router(config_of("predictive", predictive=Predictive(fallback=fallback)))
        for now in (1.0, 6.0, 11.0):
            for number in range(20):
                finish(router, ask(router, b"%d" % number + b"q" * 600, now), now + 0.1)
            facts = tuple(PodFacts(pod_id=pod.id, inflight=5.0) for pod in router.pods())
            roles = (RoleFacts("single", 400.0 * now, 1e5 * now),)
            router.observe(ReplicaFacts("b", facts, roles, sync_s=5.0, gateways=16), now)
        rules[fallback] = ask(router, b"new" * 300, 15.9).explanation.choice.rule
    assert rules == {True: "weightedTurn", False: ""}


def test_predictive_prefers_the_pod_that_holds_the_prompt() -> None:
    """A prompt goes where it was prefilled, until the queue there costs more than a prefill."""
    router = make_router(config_of("predictive"))
    first = ask(router, b"a" * 8000, 1.0)
    finish(router, first, 1.2)
    again = ask(router, b"a" * 8000, 2.0)
    assert again.pod.id == first.pod.id
    assert again.cached_blocks > 0
    got = {ask(router, b"a" * 8000, 2.0 + n / 1e6).pod.id for n in range(400)}
    assert len(got) == 2


def test_nothing_is_left_behind() -> None:
    """Every column of load is back at zero after requests under each strategy."""
    for strategy in ("weightedRoundRobin", "weightedPowerOfTwo", "predictive"):
        router = make_router(config_of(strategy))
        plans = [ask(router, b"%d" % n * 200, n / 10) for n in range(50)]
        for plan in plans:
            finish(router, plan, 6.0)
        assert load_is_zero(router)
