"""What users of other routers complain of, each as a behaviour that this one has right."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from typing import get_args

import pytest

from calinix.config import StrategyName
from calinix.core.events import (
    Event,
    Failure,
    Finished,
    FirstToken,
    PodRestarted,
    ProbeFailed,
    ProbeSucceeded,
)
from calinix.core.requests import Work
from routing import ask, fail, finish, load_is_zero, make_config, make_router, pods, serve, text

STRATEGIES = get_args(StrategyName)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ties_are_not_broken_by_id(strategy: str) -> None:
    """Idle equal pods share new work; the first id is nobody's favourite."""
    router = make_router(make_config(8, strategy=strategy))
    found = Counter(serve(router, b"%d" % number * 300) for number in range(800))
    assert len(found) == 8
    assert max(found.values()) < 170


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sequential_agents_spread(strategy: str) -> None:
    """Requests one after the other, inflight always 0: still every pod gets its share."""
    router = make_router(make_config(4, strategy=strategy))
    found: Counter[str] = Counter()
    for agent in range(60):
        conversation = b"agent %d " % agent * 100
        for _ in range(3):
            found[serve(router, conversation, now=float(agent))] += 1
            conversation += b"and more " * 40
    assert len(found) == 4
    assert max(found.values()) < 90


def test_an_agents_turns_stay_together() -> None:
    """Spreading agents does not tear one agent's conversation apart."""
    router = make_router(make_config(4))
    for agent in range(30):
        conversation = b"agent %d " % agent * 100
        homes = set()
        for _ in range(4):
            homes.add(serve(router, conversation))
            conversation += b"and more " * 40
        assert len(homes) == 1


def test_a_burst_does_not_herd() -> None:
    """A hundred requests within one moment are spread by what was just routed."""
    router = make_router(make_config(4))
    found = Counter(ask(router, b"%d" % number * 300).pod.id for number in range(100))
    assert all(15 < count < 35 for count in found.values())


@pytest.mark.parametrize("tokens", [64, None])
@pytest.mark.parametrize("strategy", ["cacheAware", "predictive"])
def test_a_hot_prefix_does_not_send_everything_to_one_pod(
    strategy: str, tokens: int | None
) -> None:
    """90 % of the load share a prefix: it spreads over the pods, and is still mostly a hit.

    Also where engines do not say how many tokens their answers had.
    """
    router = make_router(make_config(8, strategy=strategy))
    shared = text(40)
    coming: list[tuple[float, int, Event]] = []
    hits = 0
    found: Counter[str] = Counter()
    for number in range(800):
        now = number / 100
        while coming and coming[0][0] <= now:
            at_s, _, event = heappop(coming)
            router.observe(event, at_s)
        hot = number % 10 != 0
        plan = ask(router, (shared if hot else b"") + b"%d" % number * 100, now=now)
        hits += hot and plan.cached_blocks >= 40
        found[plan.pod.id] += 1
        # Each request of the pod makes the tokens of all others 0.2 ms slower.
        inflight = next(view.inflight for view in router.pods() if view.id == plan.pod.id)
        end_s = now + 0.01 + 64 * (0.01 + 0.0002 * inflight)
        heappush(coming, (now + 0.01, 2 * number, FirstToken(plan.lease_id)))
        answered = Finished(plan.lease_id, 200, output_tokens=tokens)
        heappush(coming, (end_s, 2 * number + 1, answered))
    assert len(found) == 8
    assert max(found.values()) < 800 / 4
    assert sum(count > 800 / 16 for count in found.values()) >= 4
    assert hits > 0.97 * 720


def test_a_dead_pods_load_does_not_flip_the_policy() -> None:
    """A dead pod with load 0 neither attracts nor makes the others look imbalanced."""
    router = make_router(make_config(4))
    home = serve(router, 10)
    dead = next(view.id for view in router.pods() if view.id != home)
    for _ in range(3):
        router.observe(ProbeFailed(dead), 1.0)
    found = Counter(ask(router, b"%d" % number * 300).pod.id for number in range(90))
    assert dead not in found
    assert ask(router, 10).pod.id == home


def test_a_4xx_storm_ejects_nobody() -> None:
    """One client's oversize prompts leave the fleet as it was."""
    router = make_router(make_config(3))
    for _ in range(300):
        finish(router, ask(router, 10), status=400)
    assert len(router.usable_pods()) == 3
    assert load_is_zero(router)


def test_health_checks_do_not_reset_counters() -> None:
    """Probes, good and bad, leave the count of requests inflight alone."""
    router = make_router(make_config(2))
    for _ in range(6):
        ask(router)
    for _ in range(5):
        for event in (ProbeFailed, ProbeSucceeded):
            for view in router.pods():
                router.observe(event(view.id), 1.0)
    assert sum(view.inflight for view in router.pods()) == 6


def test_unknown_paths_count_as_load() -> None:
    """Other POSTs and GETs are inflight requests like any other."""
    router = make_router(make_config(2, strategy="leastLoad"))
    for work in (Work.MEAN, Work.NONE, Work.POOLING, Work.MEAN):
        ask(router, work=work)
    assert sorted(view.inflight for view in router.pods()) == [2, 2]


@pytest.mark.parametrize("failure", list(Failure))
def test_counters_do_not_leak_on_errors_and_cancels(failure: Failure) -> None:
    """However a request ends, nothing of it is left in the books."""
    router = make_router(make_config(2, 2, 2))
    for number in range(40):
        mode = ("single", "dispatch")[number % 2]
        plan = ask(router, number % 7, mode=mode, streamed=bool(number % 3), now=float(number))
        if number % 5 == 0:
            router.observe(FirstToken(plan.lease_id), float(number))
        fail(router, plan, failure, now=float(number), leg=plan.pod.role)
        for view in router.pods():
            router.observe(ProbeSucceeded(view.id), float(number))
    assert load_is_zero(router)


def test_a_returning_pod_is_cold() -> None:
    """After a restart nothing is believed cached there, and old sessions are over."""
    router = make_router(make_config(2))
    home = serve(router, 10, session_key="s")
    router.observe(PodRestarted(home), 2.0)
    plan = ask(router, 10, now=2.0, session_key="s")
    assert plan.cached_blocks == 0
    assert all(view.blocks == (10 if view.id == plan.pod.id else 0) for view in router.pods())


def test_back_pressure_is_not_death() -> None:
    """A fleet that answers 429 is asked last, pod by pod, but never given up."""
    router = make_router(make_config(3))
    for number in range(60):
        fail(router, ask(router, now=number / 10), Failure.REFUSED, now=number / 10)
    assert router.ready()
    assert len(router.usable_pods()) == 3


def test_memory_is_bounded_under_prompts_that_never_repeat() -> None:
    """A mirror never holds more than the pod's cache could."""
    router = make_router(make_config(pods("single", 2, kv_capacity_tokens=6400)))
    for number in range(400):
        serve(router, text(20, kind=number))
    assert all(view.blocks <= view.capacity_blocks == 200 for view in router.pods())


def test_a_middle_block_is_no_prefix() -> None:
    """A prompt that contains another's text, but not at its beginning, is no hit."""
    router = make_router(make_config(1))
    serve(router, 10)
    assert ask(router, b"x" * 128 + text(10)).cached_blocks == 0


def test_one_hung_pod_does_not_hold_the_others_up() -> None:
    """A pod that never answers fills up to its bound; everything else is served elsewhere."""
    router = make_router(make_config(pods("single", 3, max_conns=50)))
    served = 0
    for number in range(600):
        plan = ask(router, b"%d" % number * 300, now=number / 10)
        if plan.pod.id != "single-0":
            finish(router, plan, now=number / 10)
            served += 1
    assert served > 550
