"""With the predictive strategy: whether a prompt within the threshold goes whole, by seconds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kit
from calinix.config import DispatchUpstream, PodGroup, Upstreams
from calinix.core import splitting
from calinix.core.events import PodDraining, PrefillDone
from calinix.core.requests import RoutePlan
from calinix.core.router import Router
from routing import ask, finish, load_is_zero, make_config, make_router, pods, text

PROMPT = b"x" * 4000
"""1000 tokens."""


def router_of(threshold: int = 2000, **gateway: Any) -> Router:
    """Two prefill and two decode pods under the predictive strategy."""
    config = make_config(prefill=2, decode=2, **gateway)
    group = DispatchUpstream(
        PodGroup(pods("prefill", 2)), PodGroup(pods("decode", 2)), prefill_threshold=threshold
    )
    return make_router(type(config)(Upstreams(dispatch=group), gateway=config.gateway))


def tried(**gateway: Any) -> Router:
    """The same after both ways were gone once, with empty pods."""
    router = router_of(**gateway)
    for kind in (0, 1):
        plan = ask(router, text(9, kind=kind))
        assert (plan.prefill is None) is (kind == 0)
        if plan.prefill is not None:
            router.observe(PrefillDone(plan.lease_id), 1.0)
        finish(router, plan)
    return router


def new_prompt(number: int) -> bytes:
    """One that shares nothing with others."""
    return b"%06d" % number + PROMPT


def other_way_s(plan: RoutePlan) -> float | None:
    """What the decision says of the other way."""
    found: float | None = plan.to_dict()["choices"][-1]["otherWaySeconds"]
    return found


def test_idle_pods_need_no_transfer() -> None:
    """Nobody waits anywhere: the prompt is computed where it is needed, and says why."""
    router = tried()
    for number in range(5):
        plan = ask(router, new_prompt(number))
        assert plan.prefill is None
        cost = -max(one["score"] for one in plan.to_dict()["choices"][0]["candidates"])
        other = other_way_s(plan)
        assert other is not None
        assert cost <= other
        finish(router, plan)
    assert load_is_zero(router)


def test_answers_under_way_are_not_held_up() -> None:
    """While decode pods write many answers, the same prompt goes by a prefill pod."""
    router = tried()
    busy = [ask(router, new_prompt(n), split=True) for n in range(20)]
    for plan in busy:
        router.observe(PrefillDone(plan.lease_id), 1.0)
    plan = ask(router, new_prompt(99))
    assert plan.prefill is not None
    assert other_way_s(plan) is not None
    for other in (*busy, plan):
        finish(router, other)
    assert load_is_zero(router)


def test_a_queue_before_prefill_pods_is_gone_around() -> None:
    """With much waiting for every prefill pod, even busy decode pods do it themselves."""
    router = tried()
    busy = [ask(router, new_prompt(n), split=True) for n in range(3)]
    for plan in busy:
        router.observe(PrefillDone(plan.lease_id), 1.0)
    waiting = [ask(router, b"%06d" % n + 20 * PROMPT, split=True) for n in range(20)]
    assert all(plan.prefill is not None for plan in waiting)
    assert ask(router, new_prompt(99)).prefill is None


def test_the_threshold_is_the_most() -> None:
    """Whatever the seconds say, a prompt with more uncached tokens is split, uncompared."""
    router = tried(threshold=500)
    plan = ask(router, new_prompt(1))
    assert plan.prefill is not None
    assert other_way_s(plan) is None


def test_without_prefill_pods_short_prompts_are_served() -> None:
    """Where no prefill pod can be used, what may go whole does."""
    router = tried()
    for pod in router.pods():
        if pod.role == "prefill":
            router.observe(PodDraining(pod.id, draining=True), 1.0)
    assert ask(router, new_prompt(1)).prefill is None


def test_each_way_is_tried_again() -> None:
    """One bad measurement ends no way for good: after a while one request goes it again."""
    router = tried()
    slow = ask(router, new_prompt(0), 1.0)
    assert slow.prefill is None
    finish(router, slow, 41.0)  # and now decode pods seem to take 40 s for this
    assert ask(router, new_prompt(1), 41.0).prefill is not None
    late_s = 1.0 + splitting.TRY_S + 0.1
    retried = ask(router, new_prompt(2), late_s)
    assert retried.prefill is None
    assert ask(router, new_prompt(3), late_s).prefill is not None


def test_no_long_prompt_is_a_trial() -> None:
    """What would hold up a busy decode pod for long does not go there only to be measured."""
    router = router_of(threshold=100_000)
    for n in range(20):
        router.observe(PrefillDone(ask(router, new_prompt(n), split=True).lease_id), 1.0)
    assert ask(router, b"long" + 10 * PROMPT).prefill is not None
    assert ask(router, new_prompt(99)).prefill is None


def test_decode_pods_are_first_taken_for_prefill_pods() -> None:
    """Before a decode pod has prefilled anything, it is as fast as the prefill pods are."""
    router = router_of(0)
    plan = ask(router, new_prompt(1), 1.0)
    router.observe(PrefillDone(plan.lease_id), 2.0)
    rates = router._state.rates
    assert rates.pool_pace("decode") == rates.pool_pace("prefill") != 0.0
    assert rates.pool_pace("prefill") == pytest.approx(1.0 / 1066, rel=0.01)


def test_other_strategies_go_by_the_threshold_alone() -> None:
    """Where nothing is predicted in seconds, nothing is compared, however busy the pods are."""
    router = router_of(strategy="cacheAware")
    for number in range(30):
        plan = ask(router, new_prompt(number))
        assert plan.prefill is None
        assert other_way_s(plan) is None


def test_explain_says_what_the_other_way_would_take(tmp_path: Path) -> None:
    """`calinix explain` ends a decision that was made by seconds with those of the other way."""
    groups = {
        role: {"pods": [{"id": role, "url": f"http://{role}:1"}]} for role in ("prefill", "decode")
    }
    config = {"upstreams": {"dispatch": {**groups, "prefillThreshold": 2000}}}
    (tmp_path / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    (tmp_path / "body.json").write_bytes(msgspec.json.encode({"messages": [{"content": "hi"}]}))
    command = [str(kit.CALINIX), "explain", "body.json"]
    after: list[str]
    for after, said in (([], "by a prefill pod: "), (["--after", "body.json"], "whole: ")):
        done = subprocess.run(
            [*command, *after], cwd=tmp_path, capture_output=True, check=True, timeout=60
        )
        assert re.search(rf"(?m)^{said}\d+\.\d+ s$", done.stdout.decode())


def test_explain_with_another_strategy(tmp_path: Path) -> None:
    """`calinix explain --strategy` decides as the file would with that one, its settings kept."""
    pods = [{"id": f"p{number}", "url": f"http://p{number}:1"} for number in range(2)]
    weights = {"cache": 1.0, "load": 0.0, "sticky": 0.0}
    body = {"messages": [{"content": "hi"}]}
    (tmp_path / "body.json").write_bytes(msgspec.json.encode(body))
    for strategy in ("leastLoad", {"name": "predictive", "single": weights}):
        config = {"upstreams": {"single": {"pods": pods}}, "gateway": {"strategy": strategy}}
        (tmp_path / "config.yaml").write_bytes(msgspec.yaml.encode(config))
        done = subprocess.run(
            [kit.CALINIX, "explain", "body.json", "--strategy", "cacheAware", "--json"],
            cwd=tmp_path, capture_output=True, check=True, timeout=60,
        )  # fmt: skip
        decision = msgspec.json.decode(done.stdout)
        assert decision["strategy"] == "cacheAware"
        (choice,) = decision["choices"]
        is_set = isinstance(strategy, dict)
        assert choice["weights"].get("cache", 1.0 if is_set else 0.6) == (1.0 if is_set else 0.6)
        assert choice["weights"].get("load", 0.0) == (0.0 if is_set else 0.3)
