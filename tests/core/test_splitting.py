"""Which prompts skip the prefill pod: short ones, and those that a decode pod holds already."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.config import CacheRegistry, DispatchUpstream, Health, PodGroup, Upstreams
from calinix.core.events import PodDraining, ProbeFailed, RulesChanged
from calinix.core.requests import RoutePlan
from calinix.core.router import Router
from routing import ask, finish, make_config, make_router, pods, refused, text

BLOCK_TOKENS = 32.0
"""128 bytes, at first taken for four a token."""


def router_of(
    threshold: int, decode: int = 2, cache: CacheRegistry | None = None, **gateway: Any
) -> Router:
    """Two prefill pods, so many decode pods, and this threshold."""
    config = make_config(prefill=2, decode=decode, **({"strategy": "cacheAware"} | gateway))
    group = DispatchUpstream(
        PodGroup(pods("prefill", 2)),
        PodGroup(pods("decode", decode)),
        prefill_threshold=threshold,
    )
    return make_router(
        type(config)(
            Upstreams(dispatch=group),
            gateway=config.gateway,
            cache_registry=cache or CacheRegistry(),
        )
    )


def is_whole(plan: RoutePlan) -> bool:
    """One decode leg, whose pod has the prefill's load too."""
    assert plan.mode == "dispatch"
    return plan.prefill is None


def test_without_a_threshold_every_prompt_is_split() -> None:
    """0 is the default: even an empty prompt, or one that is cached, goes to a prefill pod."""
    router = router_of(0)
    for _ in range(3):
        plan = ask(router, 0)
        assert not is_whole(plan)
        finish(router, plan)


def test_short_prompts_skip_the_prefill_pod() -> None:
    """Up to the threshold in tokens, and not one beyond; the load is the decode pod's."""
    router = router_of(int(4 * BLOCK_TOKENS))
    plan = ask(router, text(4)[:-1], request_id="short")
    assert is_whole(plan)
    (busy,) = [pod for pod in router.pods() if pod.inflight]
    assert (busy.id, busy.prefill_tokens) == (plan.pod.id, 4 * BLOCK_TOKENS)
    assert not is_whole(ask(router, text(4, kind=1) + b"four"))
    finish(router, plan)
    assert [pod.prefill_tokens for pod in router.pods() if pod.id == plan.pod.id] == [0]


@pytest.mark.parametrize("strategy", ["cacheAware", "predictive"])
def test_sizes_alone_decide_where_no_cache_is_remembered(strategy: str) -> None:
    """With the registry off, longer prompts are split and shorter ones are not."""
    router = router_of(40, cache=CacheRegistry(enabled=False), strategy=strategy)
    assert is_whole(ask(router, text(1)))
    assert not is_whole(ask(router, text(20)))


def test_a_cached_prompt_goes_whole_to_the_pod_that_holds_it() -> None:
    """Once split, its decode pod has it all: the next one goes there, others are still split."""
    router = router_of(40)
    first = ask(router, text(20))
    assert not is_whole(first)
    finish(router, first)
    for _ in range(5):
        again = ask(router, text(20))
        assert is_whole(again)
        assert again.pod.id == first.pod.id
        assert again.predicted_cached_tokens == 20 * BLOCK_TOKENS
        finish(router, again)
    longer = ask(router, text(20) + b"x" * 200)
    assert not is_whole(longer)  # 200 bytes more than what is cached
    finish(router, longer)
    assert not is_whole(ask(router, text(20, kind=1)))


def test_who_holds_it_and_cannot_take_it_is_not_waited_for() -> None:
    """Draining, dead or tried already: the prompt is split, over the others."""
    router = router_of(40)
    first = ask(router, text(20))
    finish(router, first)
    holder = first.pod
    router.observe(PodDraining(holder.id, draining=True), 1.0)
    plan = ask(router, text(20))
    assert not is_whole(plan)
    assert plan.pod.id != holder.id
    finish(router, plan)  # now the other one holds it too
    router.observe(PodDraining(holder.id, draining=False), 1.0)
    assert is_whole(ask(router, text(20), avoid=1 << holder.slot))
    for pod in router.pods():
        if pod.role == "decode":
            for _ in range(3):
                router.observe(ProbeFailed(pod.id), 1.0)
    refused(router, text(20))


def test_what_a_host_asks_for_goes_before_the_threshold() -> None:
    """`split` True always has a prefill pod, False never, whatever the prompt."""
    router = router_of(10_000)
    assert is_whole(ask(router, 2))
    assert not is_whole(ask(router, 2, split=True))
    router = router_of(0)
    assert is_whole(ask(router, 200, split=False))


def test_the_threshold_can_change() -> None:
    """From a new configuration on, the new one holds."""
    router = router_of(0)
    assert not is_whole(ask(router, 2))
    router.observe(RulesChanged(Health(), None, 1000), 1.0)
    assert is_whole(ask(router, 2))


def test_split_prompts_still_go_round() -> None:
    """To ask whether a prompt is short moves no turn: split ones use every decode pod alike."""
    router = router_of(10, strategy="roundRobin")
    plans = [ask(router, text(9, kind=kind)) for kind in range(8)]
    assert not any(is_whole(plan) for plan in plans)
    for attribute in ("pod", "prefill"):
        used = [getattr(plan, attribute).id for plan in plans]
        assert sorted(used.count(name) for name in set(used)) == [4, 4]


def test_why_is_in_the_explanation() -> None:
    """Pods that would need a prefill are listed as filtered, by that name."""
    router = router_of(40)
    first = ask(router, text(20))
    finish(router, first)
    (choice,) = ask(router, text(20)).to_dict()["choices"]
    other = next(p.id for p in router.pods() if p.role == "decode" and p.id != first.pod.id)
    assert choice["filtered"] == [{"podId": other, "filter": "needsPrefill"}]


@given(st.integers(0, 30), st.integers(0, 600), st.integers(0, 30))
def test_a_whole_prompt_never_needs_more_than_the_threshold(
    cached: int, threshold: int, asked: int
) -> None:
    """Whatever is cached, what a decode pod has to compute of an unsplit prompt is within it."""
    router = router_of(threshold, decode=1)
    if cached:
        finish(router, ask(router, text(cached), split=True))
    plan = ask(router, text(asked))
    needed = plan.prompt_tokens - plan.predicted_cached_tokens
    if is_whole(plan):
        assert needed <= threshold
    elif threshold:
        assert plan.prompt_tokens - min(cached, asked) * BLOCK_TOKENS > threshold
