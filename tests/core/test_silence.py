"""Pods that fall silent, come back warm or cold, or are slow: what is believed of them."""

from __future__ import annotations

from calinix.config import CacheRegistry
from calinix.core.events import (
    BlocksCleared,
    Failure,
    FirstToken,
    PodHeard,
    PodRestarted,
    ProbeFailed,
    ProbeSucceeded,
)
from calinix.core.router import Router
from calinix.core.views import PodView
from routing import ask, fail, finish, make_config, make_router

EJECT_S = 10.0


def pod(router: Router, pod_id: str = "single-0") -> PodView:
    """The view of one pod."""
    return next(view for view in router.pods() if view.id == pod_id)


def warm(router: Router, now: float) -> None:
    """single-0 gets ten blocks."""
    finish(router, ask(router, 10, now=now, avoid=0b10), now=now)
    assert pod(router).blocks == 10


def test_a_silent_pods_cache_is_masked_and_comes_back_warm() -> None:
    """Nothing heard: not counted on. Heard of in time: everything is there as before."""
    router = make_router(make_config(2))
    warm(router, 0.0)
    router.tick(8.1)
    assert pod(router).silent
    assert ask(router, 10, now=8.2, avoid=0b10).cached_blocks == 0
    shown = router.decisions.last(1)[0].to_dict()["choices"][0]["candidates"][0]
    assert shown["silent"]
    assert shown["cachedBlocks"] == 0
    router.observe(PodHeard("single-0"), 20.0)
    assert not pod(router).silent
    assert pod(router).blocks == 10
    assert ask(router, 10, now=20.1, avoid=0b10).cached_blocks == 10


def test_a_pod_silent_for_longer_than_stale_ttl_is_cold() -> None:
    """Heard of again too late: a new epoch, nothing cached."""
    router = make_router(make_config(2))
    warm(router, 0.0)
    epoch = pod(router).epoch
    router.observe(ProbeSucceeded("single-0"), 30.1)
    assert pod(router).epoch != epoch
    assert pod(router).blocks == 0


def test_stale_ttl_is_no_expiry_of_blocks() -> None:
    """A pod that is heard of keeps its blocks however long ago they were stored."""
    router = make_router(make_config(2, cache=CacheRegistry(stale_ttl_ms=1000)))
    warm(router, 0.0)
    for tenth in range(1, 600):
        router.observe(ProbeSucceeded("single-0"), tenth / 2)
    assert pod(router).blocks == 10


def test_a_refused_connection_makes_cold_once() -> None:
    """Nobody listens: the process is gone, and whoever answers next starts cold."""
    for event in (ProbeFailed("single-0", refused=True), None):
        router = make_router(make_config(2))
        warm(router, 0.0)
        epochs = [pod(router).epoch]
        for _ in range(2):
            if event is None:
                fail(router, ask(router, avoid=0b10), Failure.CONNECT)
            else:
                router.observe(event, 1.0)
            epochs.append(pod(router).epoch)
        assert epochs[0] != epochs[1] == epochs[2]
        assert pod(router).blocks == 0
        router.observe(ProbeSucceeded("single-0"), 2.0)
        assert pod(router).blocks == 0


def test_a_failed_probe_that_was_not_refused_keeps_the_cache() -> None:
    """A probe that timed out says nothing of the process."""
    router = make_router(make_config(2))
    warm(router, 0.0)
    for second in (1.0, 2.0, 3.0):
        router.observe(ProbeFailed("single-0"), second)
    router.observe(ProbeSucceeded("single-0"), 4.0)
    assert pod(router).blocks == 10


def test_evidence_of_a_restart_makes_cold() -> None:
    """PodRestarted: a new epoch; BlocksCleared: only the cache goes."""
    router = make_router(make_config(2))
    warm(router, 0.0)
    epoch = pod(router).epoch
    router.observe(BlocksCleared("single-0"), 1.0)
    assert (pod(router).epoch, pod(router).blocks) == (epoch, 0)
    warm(router, 1.0)
    router.observe(PodRestarted("single-0"), 2.0)
    assert pod(router).epoch != epoch
    assert pod(router).blocks == 0


def test_what_an_old_process_began_says_nothing_of_the_new_one() -> None:
    """Leases from before a restart neither fill the new cache nor count as its failures."""
    router = make_router(make_config(2))
    old = [ask(router, 10, avoid=0b10) for _ in range(6)]
    router.observe(PodRestarted("single-0"), 1.0)
    router.observe(FirstToken(old[0].lease_id), 1.1)
    for plan in old[1:]:
        fail(router, plan, Failure.BROKEN)
    assert pod(router).blocks == 0
    assert pod(router).failures_in_row == 0
    assert pod(router).inflight == 1


def slow_down(router: Router, seconds: dict[str, float], rounds: int, start: float) -> float:
    """`rounds` requests on every pod, each with its own time to first token."""
    now = start
    views = router.pods()
    for _ in range(rounds):
        for view in views:
            if view.id in router.usable_pods():
                others = sum(1 << other.slot for other in views if other.id != view.id)
                plan = ask(router, b"x" * 4000, now=now, avoid=others)
                finish(router, plan, now + seconds[view.id])
        now += 30.0
        for view in views:
            router.observe(PodHeard(view.id), now)
        router.tick(now)
    return now


def test_grey_slowness_ejects() -> None:
    """A pod whose first tokens take far longer than its peers' rests, and is tried again."""
    router = make_router(make_config(3, cache=CacheRegistry(enabled=False)))
    pace = {"single-0": 20.0, "single-1": 1.0, "single-2": 1.2}
    now = slow_down(router, pace, 10, 0.0)
    assert [view.ejected for view in router.pods()] == [True, False, False]
    assert "slower" in pod(router).reason
    router.tick(now + EJECT_S)
    assert pod(router).state == "halfOpen"
    # One slow trial is enough to rest again, one at its peers' pace to stay.
    now = slow_down(router, pace, 1, now + EJECT_S)
    assert pod(router).ejected
    router.tick(now + 2 * EJECT_S)
    slow_down(router, dict.fromkeys(pace, 1.0), 3, now + 2 * EJECT_S)
    assert pod(router).state == "healthy"


def test_no_pod_is_slow_without_reason() -> None:
    """Noise in fast answers, an even pool, and a pod without peers eject nobody."""
    for pace in (
        {"single-0": 0.04, "single-1": 0.002},
        {"single-0": 3.0, "single-1": 1.0},
        {"single-0": 25.0},
    ):
        router = make_router(make_config(len(pace), cache=CacheRegistry(enabled=False)))
        slow_down(router, pace, 12, 0.0)
        assert not any(view.ejected for view in router.pods())
