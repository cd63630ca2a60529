"""Health as a state machine: probes, passive rules, back-pressure, half-open return."""

from __future__ import annotations

import pytest

from calinix.config import Health, Passive
from calinix.core.events import (
    BlocksCleared,
    Failed,
    Failure,
    Finished,
    FirstToken,
    PodHeard,
    PodRestarted,
    ProbeFailed,
    ProbeSucceeded,
)
from calinix.core.router import Router
from calinix.core.views import PodView
from routing import ask, fail, finish, make_config, make_router, refused, serve

EJECT_S = 10.0


def pod(router: Router, pod_id: str = "single-0") -> PodView:
    """The view of one pod."""
    return next(view for view in router.pods() if view.id == pod_id)


def break_down(router: Router, pod_id: str, now: float, failures: int = 5) -> None:
    """So many requests in a row fail on one pod."""
    for _ in range(failures):
        others = sum(1 << view.slot for view in router.pods() if view.id != pod_id)
        fail(router, ask(router, now=now, avoid=others), now=now)


def fresh(single: int = 2, **settings: object) -> Router:
    """A router whose pods have not been probed yet."""
    import random

    return Router(make_config(single, **settings), random.Random(1))  # type: ignore[arg-type]


def test_a_pod_is_not_alive_before_it_was_heard_of() -> None:
    """At start nobody gets work; one good probe suffices for the first verdict."""
    router = fresh()
    assert pod(router).state == "starting"
    assert not router.ready()
    assert "healthy" in refused(router).message
    router.observe(ProbeSucceeded("single-0"), 0.0)
    assert pod(router).state == "healthy"
    assert router.ready()
    assert router.usable_pods() == ["single-0"]
    assert serve(router) == "single-0"


def test_one_good_probe_suffices_after_bad_ones_at_start() -> None:
    """A pod that took long to start is used with its first good probe."""
    router = fresh()
    for second in range(10):
        router.observe(ProbeFailed("single-0", refused=True), float(second))
    router.observe(ProbeSucceeded("single-0"), 11.0)
    assert pod(router).healthy


def test_a_pod_that_is_out_says_why() -> None:
    """Before the first probe, after bad ones in bounded words, and while good ones are counted."""
    router = fresh()
    assert pod(router).reason == "no probe has ended yet"
    router.observe(ProbeFailed("single-0", reason="answered 404"), 1.0)
    assert (pod(router).state, pod(router).reason) == ("starting", "its probe failed: answered 404")
    router.observe(ProbeSucceeded("single-0"), 2.0)
    assert (pod(router).state, pod(router).reason) == ("healthy", "")
    for _ in range(3):
        router.observe(ProbeFailed("single-0", reason="x" * 10_000), 3.0)
    assert (pod(router).state, len(pod(router).reason)) == ("unhealthy", 218)
    router.observe(ProbeSucceeded("single-0"), 4.0)
    assert pod(router).reason == "1 of 2 good probes in a row"


def test_thresholds_count_probes_in_a_row() -> None:
    """Three bad probes in a row take a pod out, two good ones in a row bring it back."""
    router = make_router(make_config(2))
    bad, good = ProbeFailed("single-0"), ProbeSucceeded("single-0")
    for event in (bad, bad, good, bad, bad):
        router.observe(event, 1.0)
    assert pod(router).healthy
    router.observe(bad, 1.0)
    assert pod(router).state == "unhealthy"
    for event in (good, bad, good):
        router.observe(event, 2.0)
    assert not pod(router).healthy
    router.observe(good, 2.0)
    assert pod(router).healthy


@pytest.mark.parametrize(
    "failure",
    [Failure.CONNECT, Failure.SERVER_ERROR, Failure.CLOSED, Failure.BROKEN, Failure.TIMEOUT],
)
def test_failures_in_a_row_eject(failure: Failure) -> None:
    """Five failures in a row by the pod's fault, of any kind, make it rest."""
    router = make_router(make_config(2))
    for number in range(5):
        assert not pod(router).ejected, number
        # Routed anew each time: a refused connection starts a new epoch.
        fail(router, ask(router, avoid=0b10), failure)
    assert pod(router).ejected
    assert pod(router).healthy
    assert {serve(router) for _ in range(8)} == {"single-1"}


@pytest.mark.parametrize("failure", [Failure.TOTAL_TIMEOUT, Failure.CANCELLED, Failure.REFUSED])
def test_what_is_not_the_pods_fault_ejects_nobody(failure: Failure) -> None:
    """Clients that leave, long answers and back-pressure are no failures."""
    router = make_router(make_config(2))
    for _ in range(50):
        fail(router, ask(router, avoid=0b10), failure)
    assert not pod(router).ejected
    assert pod(router).failures_in_row == 0


def test_a_good_answer_ends_the_row() -> None:
    """Only failures in a row eject."""
    router = make_router(make_config(2))
    for _ in range(10):
        break_down(router, "single-0", 1.0, failures=4)
        finish(router, ask(router, avoid=0b10))
    assert not pod(router).ejected


def test_a_first_token_alone_does_not_end_the_row() -> None:
    """A pod whose streams all break after the first token is ejected all the same."""
    router = make_router(make_config(2))
    for _ in range(5):
        plan = ask(router, avoid=0b10)
        router.observe(FirstToken(plan.lease_id), 1.0)
        fail(router, plan, Failure.BROKEN)
    assert pod(router).ejected


def test_a_storm_of_4xx_ejects_nobody_and_heals_nobody() -> None:
    """An oversize prompt cannot take the fleet down; nor does a 4xx hide failures."""
    router = make_router(make_config(2))
    for _ in range(100):
        finish(router, ask(router), status=400)
    assert not any(view.ejected or view.failures_in_row for view in router.pods())
    for _ in range(4):
        break_down(router, "single-0", 1.0, failures=1)
        finish(router, ask(router, avoid=0b10), status=422)
    break_down(router, "single-0", 1.0, failures=1)
    assert pod(router).ejected


def test_half_open_takes_one_request_at_a_time() -> None:
    """After its rest one request tries the pod; until it shows a result, nobody else does."""
    router = make_router(make_config(2))
    break_down(router, "single-0", 1.0)
    later = 1.0 + EJECT_S
    assert refused(router, now=later - 0.1, pinned_pod="single-0")
    trial = ask(router, now=later, pinned_pod="single-0")
    assert pod(router).state == "halfOpen"
    refused(router, now=later, pinned_pod="single-0")
    router.observe(FirstToken(trial.lease_id), later + 0.1)
    assert pod(router).state == "healthy"
    ask(router, now=later + 0.2, pinned_pod="single-0")


def test_a_failed_trial_makes_the_rest_longer() -> None:
    """The rest doubles with every ejection in a row, up to maxEjectMs."""
    router = make_router(make_config(2))
    break_down(router, "single-0", 0.0)
    now = 0.0
    for rest_s in (10.0, 20.0, 40.0, 60.0, 60.0):
        refused(router, now=now + rest_s - 0.1, pinned_pod="single-0")
        now += rest_s
        fail(router, ask(router, now=now, pinned_pod="single-0"), now=now)
        assert pod(router).ejected
    now += 60.0
    finish(router, ask(router, now=now, pinned_pod="single-0"), now=now)
    assert pod(router).state == "healthy"


def test_after_a_good_time_the_rest_is_short_again() -> None:
    """A pod that behaved as long as it last rested starts with the first rest anew."""
    router = make_router(make_config(2))
    break_down(router, "single-0", 0.0)
    fail(router, ask(router, now=10.0, pinned_pod="single-0"), now=10.0)
    finish(router, ask(router, now=30.0, pinned_pod="single-0"), now=30.0)
    finish(router, ask(router, now=51.0, pinned_pod="single-0"), now=51.0)
    break_down(router, "single-0", 52.0)
    ask(router, now=52.0 + EJECT_S, pinned_pod="single-0")


def test_one_failure_after_a_passed_trial_ejects_again() -> None:
    """A first token opens the pod again, but on probation until a whole good answer."""
    router = make_router(make_config(2))
    break_down(router, "single-0", 0.0)
    trial = ask(router, now=10.0, pinned_pod="single-0")
    router.observe(FirstToken(trial.lease_id), 10.1)
    break_down(router, "single-0", 10.2, failures=1)
    assert pod(router).ejected


@pytest.mark.parametrize("status", [400, None])
def test_a_trial_without_a_verdict_is_tried_again(status: int | None) -> None:
    """A trial that ended in a 4xx or was cancelled says nothing: the next request tries."""
    router = make_router(make_config(2))
    break_down(router, "single-0", 0.0)
    trial = ask(router, now=10.0, pinned_pod="single-0")
    if status is None:
        fail(router, trial, Failure.CANCELLED, now=10.0)
    else:
        router.observe(Finished(trial.lease_id, status), 10.0)
    assert pod(router).state == "halfOpen"
    ask(router, now=10.0, pinned_pod="single-0")


def test_failures_from_before_the_rest_do_not_lengthen_it() -> None:
    """Requests that were under way when the pod was ejected fail without further effect."""
    router = make_router(make_config(2))
    old = [ask(router, now=0.0, avoid=0b10) for _ in range(9)]
    for plan in old[:5]:
        fail(router, plan, now=0.0)
    for plan in old[5:7]:
        fail(router, plan, now=5.0)
    router.tick(EJECT_S)
    for plan in old[7:]:
        fail(router, plan, now=EJECT_S)
    assert pod(router).state == "halfOpen"


def test_passive_rules_never_take_out_more_than_half() -> None:
    """A poison prompt that fails everywhere leaves half of the pods; one pod alone stays."""
    for count, most in ((1, 0), (2, 1), (3, 1), (4, 2)):
        router = make_router(make_config(count))
        for view in router.pods() * 3:
            if view.id in router.usable_pods():
                break_down(router, view.id, 1.0)
        assert sum(view.ejected for view in router.pods()) == most
        assert router.ready()


def test_passive_rules_can_be_switched_off() -> None:
    """With passive.enabled false only probes decide."""
    health = Health(passive=Passive(enabled=False))
    router = make_router(make_config(2, health=health))
    break_down(router, "single-0", 1.0, failures=20)
    assert not pod(router).ejected


def test_back_pressure_cools_and_decays() -> None:
    """A pod that refused is asked last for a moment, longer if it goes on, and never dies of it."""
    router = make_router(make_config(2))
    fail(router, ask(router, now=0.0, avoid=0b10), Failure.REFUSED, now=0.0)
    assert pod(router).cooling
    assert {serve(router, now=0.1) for _ in range(6)} == {"single-1"}
    router.tick(0.6)
    assert not pod(router).cooling
    for _ in range(3):
        fail(router, ask(router, now=1.0, avoid=0b10), Failure.REFUSED, now=1.0)
    router.tick(2.0)
    assert pod(router).cooling
    router.tick(10.0)
    assert not pod(router).cooling
    assert pod(router).healthy
    assert not pod(router).ejected


def test_where_every_pod_cools_all_are_used() -> None:
    """Back-pressure everywhere is no reason to refuse what is not refused by the pods."""
    router = make_router(make_config(2))
    for avoid in (0b10, 0b01):
        fail(router, ask(router, avoid=avoid), Failure.REFUSED)
    assert {serve(router, now=1.01) for _ in range(20)} == {"single-0", "single-1"}


def test_an_answer_of_503_or_429_cools_too() -> None:
    """It does not matter whether the refusal reached the client or was retried."""
    for status in (429, 503):
        router = make_router(make_config(2))
        finish(router, ask(router, avoid=0b10), status=status)
        assert pod(router).cooling
        assert pod(router).failures_in_row == 0


def test_health_never_touches_load() -> None:
    """Whatever is heard of a pod, what it has inflight stays what was given to it."""
    router = make_router(make_config(2))
    plan = ask(router, 10, avoid=0b10)
    before = [(v.inflight, v.prefill_tokens, v.decode_tokens) for v in router.pods()]
    for event in (
        ProbeFailed("single-0"), ProbeFailed("single-0", refused=True), ProbeSucceeded("single-0"),
        PodRestarted("single-0"), PodHeard("single-0"), BlocksCleared("single-0"),
    ):  # fmt: skip
        router.observe(event, 40.0)
        router.tick(80.0)
        assert [(v.inflight, v.prefill_tokens, v.decode_tokens) for v in router.pods()] == before
    router.observe(Finished(plan.lease_id, 200), 90.0)
    assert pod(router).inflight == 0


def test_a_dead_pod_without_load_does_not_attract() -> None:
    """Zero inflight makes a dead or ejected pod no candidate, nor part of the mean."""
    router = make_router(make_config(3))
    for _ in range(3):
        router.observe(ProbeFailed("single-0"), 1.0)
    plans = [ask(router) for _ in range(12)]
    assert {plan.pod.id for plan in plans} == {"single-1", "single-2"}
    choice = plans[-1].to_dict()["choices"][0]
    assert {candidate["podId"] for candidate in choice["candidates"]} == {"single-1", "single-2"}
    assert choice["filtered"] == [{"podId": "single-0", "filter": "alive"}]


def test_a_retry_is_not_risked_on_a_half_open_pod() -> None:
    """A request that failed once goes to a sure pod where there is one."""
    router = make_router(make_config(3, strategy="roundRobin"))
    break_down(router, "single-0", 0.0)
    router.tick(EJECT_S)
    for _ in range(6):
        plan = ask(router, now=EJECT_S, avoid=0b10)
        assert plan.pod.id == "single-2"
    assert ask(router, now=EJECT_S, avoid=0b110).pod.id == "single-0"


def test_events_about_strangers_are_harmless() -> None:
    """Unknown pods and leases change nothing."""
    router = make_router(make_config(1))
    before = router.pods()
    for event in (
        ProbeSucceeded("x"), ProbeFailed("x"), PodHeard("x"), PodRestarted("x"),
        BlocksCleared("x"), FirstToken(77), Finished(77, 200),
        Failed(77, "single", Failure.CONNECT),
    ):  # fmt: skip
        router.observe(event, 1.0)
    assert router.pods() == before
