"""The router: what is believed cached after a route, a first token, an end, a failure, an event."""

from __future__ import annotations

import random

import pytest

from calinix.config import CacheRegistry
from calinix.core.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Failed,
    Failure,
    Finished,
    FirstToken,
    PrefillDone,
    ProbeSucceeded,
)
from calinix.core.kv import Chain
from calinix.core.requests import RouteRequest
from calinix.core.router import Router
from routing import ask, fail, finish, make_config, make_router, request, serve, text


def held(router: Router, pod_id: str, prompt: bytes) -> int:
    """Leading blocks of a prompt that a pod is believed to hold."""
    view = next(view for view in router.pods() if view.id == pod_id)
    chain = router._state.preparer.prepare(RouteRequest(request_id="", prompt=prompt)).chain
    groups = router._state.registry.match(chain, 1 << view.slot)
    return groups[0][0]


def speculative(router: Router, pod_id: str) -> int:
    """Blocks of a pod that nobody has confirmed."""
    view = next(view for view in router.pods() if view.id == pod_id)
    return sum(state[4] for state in router._state.registry.dump(view.slot))


def test_a_routed_prompt_is_believed_there_at_once() -> None:
    """The next request of a burst follows the first before it has answered."""
    router = make_router(make_config(4))
    first = ask(router, 10)
    assert first.cached_blocks == 0
    second = ask(router, 10)
    assert (second.pod.id, second.cached_blocks) == (first.pod.id, 10)
    assert speculative(router, first.pod.id) == 10


@pytest.mark.parametrize("last", [FirstToken, Finished])
def test_a_first_token_or_a_good_end_confirms(last: type) -> None:
    """Whichever is seen first says that the prompt was prefilled."""
    router = make_router(make_config(1))
    plan = ask(router, 10)
    router.observe(last(plan.lease_id) if last is FirstToken else last(plan.lease_id, 200), 1.1)
    assert speculative(router, "single-0") == 0
    fail(router, plan, Failure.BROKEN)
    assert held(router, "single-0", text(10)) == 10


@pytest.mark.parametrize("failure", list(Failure))
def test_a_failure_before_the_prefill_withdraws(failure: Failure) -> None:
    """What was only believed of the failed request goes; what others confirmed stays."""
    router = make_router(make_config(2))
    finish(router, ask(router, 4, avoid=0b10))
    plan = ask(router, 10, avoid=0b10)
    assert held(router, "single-0", text(10)) == 10
    fail(router, plan, failure)
    expected = 0 if failure is Failure.CONNECT else 4
    assert held(router, "single-0", text(10)) == expected


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_a_refusal_by_the_pod_withdraws(status: int) -> None:
    """An answer that is no 2xx was not prefilled."""
    router = make_router(make_config(1))
    finish(router, ask(router, 10), status=status)
    assert held(router, "single-0", text(10)) == 0


def test_a_later_request_takes_the_speculation_over() -> None:
    """A burst survives the failure of its first request: the newer one is still on its way."""
    router = make_router(make_config(1))
    first, second = ask(router, 10), ask(router, 10)
    fail(router, first)
    assert held(router, "single-0", text(10)) == 10
    fail(router, second)
    assert held(router, "single-0", text(10)) == 0


def test_dispatch_fills_both_pods() -> None:
    """The prompt is cached where it is prefilled, and where its KV cache is moved to."""
    router = make_router(make_config(0, 2, 2))
    plan = ask(router, 10)
    assert plan.prefill is not None
    router.observe(PrefillDone(plan.lease_id), 1.1)
    assert speculative(router, plan.prefill.id) == 0
    assert speculative(router, plan.pod.id) == 10
    router.observe(FirstToken(plan.lease_id), 1.2)
    assert speculative(router, plan.pod.id) == 0
    finish(router, plan)
    again = ask(router, 10)
    assert again.prefill == plan.prefill
    assert again.cached_blocks == 10


def test_a_decode_failure_after_the_prefill_keeps_the_prefill() -> None:
    """Only the decode pod's entries are taken back."""
    router = make_router(make_config(0, 1, 1))
    plan = ask(router, 10)
    router.observe(PrefillDone(plan.lease_id), 1.1)
    router.observe(Failed(plan.lease_id, "decode", Failure.BROKEN), 1.2)
    assert held(router, "prefill-0", text(10)) == 10
    assert held(router, "decode-0", text(10)) == 0


def test_a_failed_leg_blames_its_own_pod() -> None:
    """A prefill leg's failure counts against the prefill pod, not the decode pod."""
    router = make_router(make_config(0, 2, 2))
    plan = ask(router, 10)
    router.observe(Failed(plan.lease_id, "prefill", Failure.SERVER_ERROR), 1.0)
    failures = {view.id: view.failures_in_row for view in router.pods()}
    assert plan.prefill is not None
    assert failures.pop(plan.prefill.id) == 1
    assert not any(failures.values())


def test_the_depth_speaks_of_the_pod_that_prefills() -> None:
    """A decode pod that holds the prompt is no hit when the prefill pod does not."""
    router = make_router(make_config(0, 1, 1))
    finish(router, ask(router, 10))
    router.observe(BlocksCleared("prefill-0"), 2.0)
    plan = ask(router, 10)
    assert held(router, "decode-0", text(10)) == 10
    assert plan.cached_blocks == 0
    assert plan.predicted_cached_tokens == 0


@pytest.mark.parametrize("strategy", ["random", "roundRobin", "leastLoad", "powerOfTwo"])
def test_strategies_without_a_cache_term_still_know_the_cache(strategy: str) -> None:
    """The prediction and the load are right whoever picks."""
    router = make_router(make_config(1, strategy=strategy))
    finish(router, ask(router, 10))
    plan = ask(router, 10)
    assert plan.cached_blocks == 10
    assert router.pods()[0].prefill_tokens == 0


def test_events_of_the_engine_count() -> None:
    """Stored, removed, cleared: what the engine says goes into the same books."""
    router = make_router(make_config(2))
    prompt = text(6)
    chain = router._state.preparer.prepare(request(prompt)).chain
    hashes = tuple(chain)
    router.observe(BlocksStored("single-1", None, hashes[:4]), 1.0)
    router.observe(BlocksStored("single-1", hashes[3], hashes[4:]), 1.0)
    router.observe(BlocksStored("single-1", 12345, (6789,)), 1.0)
    assert held(router, "single-1", prompt) == 6
    assert serve(router, prompt) == "single-1"
    router.observe(BlocksRemoved("single-1", hashes[2:3]), 2.0)
    assert held(router, "single-1", prompt) == 2
    router.observe(BlocksCleared("single-1"), 2.0)
    assert held(router, "single-1", prompt) == 0


def test_events_are_ignored_when_nothing_is_remembered() -> None:
    """cacheRegistry.enabled false: events cost no memory either."""
    router = make_router(make_config(1, cache=CacheRegistry(enabled=False)))
    router.observe(BlocksStored("single-0", None, (1, 2, 3)), 1.0)
    router.observe(BlocksRemoved("single-0", (1,)), 1.0)
    router.observe(BlocksCleared("single-0"), 1.0)
    assert router.pods()[0].blocks == 0


def test_what_a_plan_says() -> None:
    """The plan carries what headers and logs are made of."""
    router = make_router(make_config(1))
    plan = ask(router, 4, request_id="me", model="m")
    assert (plan.request_id, plan.mode) == ("me", "single")
    assert (plan.pod.id, plan.prefill) == ("single-0", None)
    assert plan.strategy == "predictive"
    assert len(plan.namespace) == 16
    assert (plan.prompt_blocks, plan.cached_blocks) == (4, 0)
    assert plan.prompt_tokens == len(text(4)) / 4
    assert ask(router, 4).lease_id == plan.lease_id + 1


def test_views_show_what_was_just_routed() -> None:
    """Pods, decisions and the next route all know of the last plan."""
    router = make_router(make_config(1))
    plan = ask(router, 10)
    assert router.decisions.last(1) == [plan]
    assert router.pods()[0].blocks == 10
    assert router.pods()[0].inflight == router.open_leases() == 1


def test_ticking_alone_changes_no_load() -> None:
    """Time alone gives back nothing but what is due."""
    router = make_router(make_config(2))
    ask(router, 10, streamed=True)
    for second in range(100):
        router.tick(float(second))
        for view in router.pods():
            router.observe(ProbeSucceeded(view.id), float(second))
    assert sum(view.prefill_tokens for view in router.pods()) == round(len(text(10)) / 4)


def test_words_and_token_ids_are_routed_by_their_blocks() -> None:
    """Prefixes are found whatever the prompt is made of."""
    router = make_router(make_config(3, tokenizer="words"))
    words = b"w " * 320
    home = serve(router, words)
    assert ask(router, words + b"more").pod.id == home
    router = make_router(make_config(3))
    ids = bytes(4 * 160)
    home = serve(router, ids, prompt_is_tokens=True)
    plan = ask(router, ids + b"more", prompt_is_tokens=True)
    assert (plan.pod.id, plan.cached_blocks) == (home, 10)


def test_chains_fit_the_registry() -> None:
    """Whatever form of the registry is installed, an empty chain is one of its chains."""
    router = Router(make_config(1), random.Random(1))
    assert router._state.registry.match(Chain.of(()), 1) == [(0, 1)]
