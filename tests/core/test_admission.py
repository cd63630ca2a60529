"""Which mode serves a request, and how it is refused."""

from __future__ import annotations

import pytest

from calinix.config import Health
from calinix.core.events import PodDraining, PodRemoved, ProbeFailed, RulesChanged
from calinix.core.requests import RefusalReason, Work
from calinix.core.router import Router
from routing import ask, fail, make_config, make_router, pods, refused, serve


def reason(router: Router, **settings: object) -> RefusalReason:
    """Why it is refused."""
    return refused(router, **settings).reason  # type: ignore[arg-type]


def test_the_asked_mode_comes_first() -> None:
    """Where both groups are there, the client chooses."""
    router = make_router(make_config(2, 2, 2, default_mode="single"))
    assert ask(router, mode="dispatch").mode == "dispatch"
    assert ask(router, mode="single").mode == "single"


def test_without_a_wish_the_default_then_single() -> None:
    """gateway.defaultMode, else single where it exists, else dispatch."""
    assert ask(make_router(make_config(1, 1, 1))).mode == "single"
    assert ask(make_router(make_config(1, 1, 1, default_mode="dispatch"))).mode == "dispatch"
    assert ask(make_router(make_config(0, 1, 1))).mode == "dispatch"


def test_the_only_group_that_serves_the_model() -> None:
    """A model that one group alone serves goes there, whatever the default says."""
    router = make_router(
        make_config(
            pods("single", 1, models=("a", "both")),
            pods("prefill", 1, models=("b", "both")),
            pods("decode", 1, models=("b", "both")),
        )
    )
    assert ask(router, model="a").mode == "single"
    assert ask(router, model="b").mode == "dispatch"
    assert ask(router, model="both").mode == "single"
    router.observe(RulesChanged(Health(), "dispatch"), 1.0)
    assert ask(router, model="both").mode == "dispatch"
    assert ask(router, model="a").mode == "single"
    assert reason(router, model="a", mode="dispatch") is RefusalReason.MODEL_NOT_SERVED


def test_a_group_that_is_not_there() -> None:
    """Asking for a mode without pods is a mistake, and the answer says what there is."""
    refusal = refused(make_router(make_config(1)), mode="dispatch")
    assert refusal.reason is RefusalReason.MODE_NOT_SERVED
    assert "single" in refusal.message


def test_an_unknown_model() -> None:
    """A model that nobody serves is refused by name, with those that there are."""
    router = make_router(make_config(pods("single", 2, models=("llama", "qwen"))))
    refusal = refused(router, model="gpt")
    assert refusal.reason is RefusalReason.MODEL_NOT_SERVED
    assert "'gpt'" in refusal.message
    assert "'llama', 'qwen'" in refusal.message
    assert ask(router, model="qwen")
    assert ask(router, model="")


def test_a_mode_for_each_model_is_not_remembered_for_ever() -> None:
    """Models come from clients: what is remembered of them is bounded, and follows the pods."""
    router = make_router(make_config(1, 1, 1))
    for number in range(3000):
        serve(router, model=f"m{number}")
    assert len(router._state.modes) <= 1026
    assert ask(router, model="m").mode == "single"
    router.observe(PodRemoved("single-0"), 1.0)
    assert ask(router, model="m").mode == "dispatch"


def test_only_pods_of_the_model_get_it() -> None:
    """Within a group too, a model goes where it is served."""
    router = make_router(
        make_config((*pods("a", 2, models=("a",)), *pods("b", 2, models=("b",)), *pods("c", 1)))
    )
    assert {ask(router, model="a").pod.id for _ in range(30)} == {"a-0", "a-1", "c-0"}


def test_full_is_told_from_no_pod() -> None:
    """Full only where a pod would take it if it had room."""
    router = make_router(make_config(pods("single", 2, max_conns=1)))
    ask(router)
    ask(router)
    refusal = refused(router)
    assert refusal.reason is RefusalReason.FULL
    assert refusal.message == (
        "Every single pod that could take the request is full: of 2, 2 are full."
    )
    for pod_id in ("single-0", "single-1"):
        for _ in range(3):
            router.observe(ProbeFailed(pod_id), 1.0)
    assert reason(router) is RefusalReason.NO_POD


def test_a_mixed_verdict_counts_heads() -> None:
    """The message says how many pods were left out, and why."""
    router = make_router(make_config(pods("single", 4, max_conns=1)))
    for _ in range(3):
        router.observe(ProbeFailed("single-0"), 1.0)
    router.observe(PodDraining("single-1", True), 1.0)
    ask(router, avoid=0b1000)
    refusal = refused(router, avoid=0b1000)
    assert refusal.reason is RefusalReason.FULL
    for words in ("of 4", "1 are not healthy", "1 are draining", "1 have already failed"):
        assert words in refusal.message


def test_no_pods_at_all() -> None:
    """After the last pod is gone there is nobody, and nothing to be full."""
    router = make_router(make_config(1))
    router.observe(PodRemoved("single-0"), 1.0)
    assert reason(router) is RefusalReason.NO_POD
    assert reason(router, mode="single") is RefusalReason.MODE_NOT_SERVED
    assert not router.ready()


def test_a_pinned_request_goes_there_or_nowhere() -> None:
    """Only the pod that keeps the earlier response can answer; it decides the mode too."""
    router = make_router(make_config(2, 1, 2, default_mode="single"))
    assert {ask(router, pinned_pod="single-1").pod.id for _ in range(5)} == {"single-1"}
    plan = ask(router, pinned_pod="decode-1")
    assert (plan.mode, plan.pod.id) == ("dispatch", "decode-1")
    router.observe(PodDraining("single-1", True), 1.0)
    refusal = refused(router, pinned_pod="single-1")
    assert refusal.reason is RefusalReason.NO_POD
    assert "'single-1'" in refusal.message
    assert reason(router, pinned_pod="gone") is RefusalReason.NO_POD


def test_a_pinned_pod_that_is_full() -> None:
    """It may have room soon: full, not lost."""
    router = make_router(make_config(pods("single", 2, max_conns=1)))
    ask(router, pinned_pod="single-0")
    assert reason(router, pinned_pod="single-0") is RefusalReason.FULL


def test_dispatch_needs_both_roles() -> None:
    """Without a prefill pod, or without a decode pod, nothing is taken from the other."""
    for role in ("prefill", "decode"):
        router = make_router(make_config(0, 1, 1))
        router.observe(PodDraining(f"{role}-0", True), 1.0)
        assert role in refused(router).message
        assert router.open_leases() == 0
        assert not router.ready()
        assert all(view.inflight == 0 for view in router.pods())


def test_what_generates_nothing_is_one_leg_to_a_decode_pod() -> None:
    """In dispatch mode pooling, other POSTs and GETs are not split."""
    router = make_router(make_config(0, 1, 2))
    for work in (Work.POOLING, Work.MEAN, Work.NONE):
        plan = ask(router, work=work, other_bytes=400)
        assert plan.prefill is None
        assert plan.pod.role == "decode"


def test_a_decode_pod_can_be_picked_anew() -> None:
    """After the prefill, with that pod kept: near it, no prefill load, and it has to be there."""
    router = make_router(make_config(0, 2, 3))
    first = ask(router, 10)
    assert first.prefill is not None
    fail(router, first, leg="decode")
    again = ask(router, 10, prefill_pod=first.prefill.id, avoid=1 << first.pod.slot)
    assert again.prefill == first.prefill
    assert again.pod.id != first.pod.id
    assert again.cached_blocks == 10
    view = next(view for view in router.pods() if view.id == first.prefill.id)
    assert (view.inflight, view.prefill_tokens) == (0, 0)
    assert reason(router, prefill_pod="gone") is RefusalReason.NO_POD


@pytest.mark.parametrize("default_mode", ["single", "dispatch", None])
def test_a_default_mode_without_pods_is_passed_over(default_mode: str | None) -> None:
    """The default counts only where both groups could serve."""
    assert ask(make_router(make_config(1, default_mode=default_mode))).mode == "single"
