"""The ledger: what a lease takes, when parts of it go back, and that nothing is left over."""

from __future__ import annotations

import pytest

from calinix.core.events import Event, Failed, Failure, Finished, FirstToken, PrefillDone
from calinix.core.requests import RoutePlan, Work
from calinix.core.router import Router
from routing import ask, finish, load_is_zero, make_config, make_router, pods, refused, text

LOAD = tuple[int, int, int]


def load(router: Router, pod_id: str) -> LOAD:
    """(inflight, prefill tokens, decode tokens) of a pod."""
    view = next(view for view in router.pods() if view.id == pod_id)
    return view.inflight, view.prefill_tokens, view.decode_tokens


def test_a_single_lease_is_given_back_in_two_parts() -> None:
    """The prompt's part goes back with the first token, the rest at the end."""
    router = make_router(make_config(1))
    plan = ask(router, b"x" * 4000, max_output_tokens=50)
    assert load(router, "single-0") == (1, 1000, 50)
    router.observe(FirstToken(plan.lease_id), 1.1)
    assert load(router, "single-0") == (1, 0, 50)
    router.observe(FirstToken(plan.lease_id), 1.2)
    assert load(router, "single-0") == (1, 0, 50)
    router.observe(Finished(plan.lease_id, 200), 1.3)
    assert load_is_zero(router)


def test_dispatch_splits_the_lease_over_two_pods() -> None:
    """The prefill pod has the prompt until it is prefilled, the decode pod the output."""
    router = make_router(make_config(0, 1, 1))
    plan = ask(router, b"x" * 4000, max_output_tokens=50)
    assert load(router, "prefill-0") == (1, 1000, 0)
    assert load(router, "decode-0") == (1, 0, 50)
    router.observe(PrefillDone(plan.lease_id), 1.1)
    router.observe(PrefillDone(plan.lease_id), 1.1)
    assert load(router, "prefill-0") == (0, 0, 0)
    assert load(router, "decode-0") == (1, 0, 50)
    router.observe(Finished(plan.lease_id, 200), 1.2)
    assert load_is_zero(router)


@pytest.mark.parametrize("order", ["prefill first", "token first", "no prefill done", "failed"])
def test_every_order_gives_back_once(order: str) -> None:
    """In whatever order the events of a dispatch come, everything goes back exactly once."""
    router = make_router(make_config(0, 1, 1))
    lease_id = ask(router, 10).lease_id
    done, token = PrefillDone(lease_id), FirstToken(lease_id)
    orders: dict[str, list[Event]] = {
        "prefill first": [done, token],
        "token first": [token, done],
        "no prefill done": [token],
        "failed": [Failed(lease_id, "prefill", Failure.BROKEN), done, token],
    }
    steps = orders[order]
    for event in [*steps, Finished(lease_id, 200), *steps, Finished(lease_id, 200)]:
        router.observe(event, 1.0)
    assert load_is_zero(router)


def test_closing_twice_is_harmless() -> None:
    """A second end, of either kind, changes nothing; nor do ids that never were."""
    router = make_router(make_config(1))
    one, other = ask(router, 10), ask(router, 10)
    for event in (
        Finished(one.lease_id, 200), Failed(one.lease_id, "single", Failure.CONNECT),
        Finished(one.lease_id, 200), FirstToken(one.lease_id), Finished(10**9, 200),
    ):  # fmt: skip
        router.observe(event, 1.0)
    assert load(router, "single-0")[0] == 1
    assert next(iter(router.pods())).failures_in_row == 0
    finish(router, other)
    assert load_is_zero(router)


def test_max_conns_is_held() -> None:
    """A pod with maxConns inflight is full until one of them ends."""
    router = make_router(make_config(pods("single", 2, max_conns=2)))
    plans = [ask(router) for _ in range(4)]
    assert sorted(plan.pod.id for plan in plans) == ["single-0"] * 2 + ["single-1"] * 2
    assert "full" in refused(router).message
    finish(router, plans[0])
    assert ask(router).pod.id == plans[0].pod.id
    refused(router)


def test_pooling_work_is_prefill_without_decode() -> None:
    """All inputs count as prompt tokens, and are held until the end."""
    router = make_router(make_config(1))
    plan = ask(router, work=Work.POOLING, other_bytes=8000)
    assert load(router, "single-0") == (1, 2000, 0)
    assert plan.prompt_blocks == 0
    router.observe(Finished(plan.lease_id, 200), 1.0)
    assert load_is_zero(router)
    assert next(iter(router.pods())).blocks == 0


def test_other_work_counts_as_the_mean_and_gets_as_inflight() -> None:
    """A POST that is not understood is a mean request; a GET is only one inflight."""
    router = make_router(make_config(1))
    for number in range(100):
        finish(router, ask(router, b"%d" % number * 2000))
    post = ask(router, work=Work.MEAN)
    inflight, prefill, decode = load(router, "single-0")
    assert inflight == 1
    assert 500 < prefill < 2000
    assert decode > 0
    finish(router, post)
    get = ask(router, work=Work.NONE)
    assert load(router, "single-0") == (1, 0, 0)
    finish(router, get)


def test_only_uncached_tokens_are_backlog() -> None:
    """What the pod holds already is no work for it."""
    router = make_router(make_config(1))
    finish(router, ask(router, 100))
    ask(router, text(100) + b"y" * 400)
    assert load(router, "single-0")[1] == 100


def first_token_due_s(router: Router, plan: RoutePlan) -> float:
    """When an unseen first token is expected."""
    predicted = plan.explanation.predicted_ttft_s
    assert predicted is not None
    return 1.0 + predicted


def test_an_unseen_first_token_is_believed_at_its_time() -> None:
    """Not streamed: the backlog goes back at the predicted first token, inflight at the end."""
    router = make_router(make_config(1))
    plan = ask(router, b"x" * 80_000, streamed=False)
    due_s = first_token_due_s(router, plan)
    router.tick(due_s - 0.01)
    assert load(router, "single-0")[1] == 20_000
    router.tick(due_s)
    assert load(router, "single-0")[:2] == (1, 0)
    finish(router, plan)
    assert load_is_zero(router)


def test_the_end_before_the_predicted_first_token_gives_back_too() -> None:
    """Whichever comes first; and what is due later finds nothing left."""
    router = make_router(make_config(1))
    plans = [ask(router, b"x" * 80_000, streamed=False) for _ in range(3)]
    finish(router, plans[1])
    assert load(router, "single-0")[0] == 2
    router.tick(1e6)
    assert load(router, "single-0")[:2] == (2, 0)
    finish(router, plans[0])
    finish(router, plans[2])
    assert load_is_zero(router)


def test_predicted_first_tokens_queue_behind_each_other() -> None:
    """The later of two waits for the earlier: backlog over rate."""
    router = make_router(make_config(1))
    one = first_token_due_s(router, ask(router, b"x" * 80_000, streamed=False))
    other = first_token_due_s(router, ask(router, b"y" * 80_000, streamed=False))
    assert other - 1.0 == pytest.approx(2 * (one - 1.0), rel=0.01)


def test_expected_releases_are_bounded() -> None:
    """Releases of ended requests do not pile up."""
    router = make_router(make_config(1))
    ledger = router._state.ledger
    for number in range(5000):
        plan = ask(router, b"x" * 4_000_000, streamed=False, now=number * 1e-6)
        finish(router, plan, now=number * 1e-6)
    assert len(ledger._releases) <= 1100
    assert load_is_zero(router)


def test_a_retired_pod_keeps_its_slot_until_its_leases_end() -> None:
    """A slot is never given to another pod while a lease still speaks of it."""
    from calinix.core.events import PodAdded, PodRemoved
    from routing import pod_config

    router = make_router(make_config(2))
    plan = ask(router, avoid=0b10)
    router.observe(PodRemoved("single-0"), 1.0)
    router.tick(1.0)
    router.observe(PodAdded(pod_config("new"), "single"), 1.0)
    slots = {view.id: view.slot for view in router.pods()}
    assert slots["new"] == 2
    finish(router, plan)
    router.tick(2.0)
    router.observe(PodAdded(pod_config("newer"), "single"), 2.0)
    assert {view.id: view.slot for view in router.pods()}["newer"] == 0
    assert load_is_zero(router)
