"""Predictions against what was found: errors, doubts, and what doubts do to routing."""

from __future__ import annotations

from typing import Any

import pytest

from calinix.config import CacheRegistry, Strategy
from calinix.core.calibration import (
    BELIEVE,
    DOUBT,
    FADE_S,
    LEAST_SAMPLES,
    LEAST_TRUST,
    Calibration,
)
from calinix.core.events import FirstToken, PodRestarted, PrefillDone
from calinix.core.requests import RoutePlan
from calinix.core.router import Router
from routing import BLOCK, ask, finish, make_config, make_router, text

TOKENS = 40 * BLOCK // 4


def cache_only(pods: int = 2, **cache: Any) -> Router:
    """Pods that are picked by what they hold alone."""
    config = make_config(
        pods, strategy=Strategy(name="cacheOnly"), cache=CacheRegistry(**cache), deterministic=True
    )
    return make_router(config)


def serve(router: Router, kind: int, found_share: float, now: float) -> RoutePlan:
    """A long prompt of this kind, of which the pod has this share of what it is believed to."""
    plan = ask(router, text(40, kind), now)
    believed = max(plan.explanation.believed_tokens, 0.0)
    finish(router, plan, now, prompt_tokens=TOKENS, cached_tokens=int(believed * found_share))
    return plan


def calibration_of(router: Router, pod_id: str) -> Any:
    """What is shown of a pod."""
    return next(pod.calibration for pod in router.pods() if pod.id == pod_id)


def test_a_pod_that_does_not_hold_what_it_should_loses_its_pull() -> None:
    """Once it is found out, the same prompt goes to another pod; the plan says what is trusted."""
    router = cache_only()
    first = serve(router, 0, 1.0, 1.0).pod.id
    for n in range(LEAST_SAMPLES):
        plan = serve(router, 0, 0.0, 2.0 + n)
        assert plan.pod.id == first
    shown = calibration_of(router, first)
    assert shown.trust < 0.2
    assert shown.cache_lack > 0.8
    assert shown.cache_samples == LEAST_SAMPLES + 1
    # Half of the prompt on an honest pod is now worth more than all of it here.
    other = next(pod.id for pod in router.pods() if pod.id != first)
    plan = ask(router, text(20, 0)[:-1], 30.0, avoid=1 << plan.pod.slot)
    finish(router, plan, 30.0)
    plan = ask(router, text(40, 0), 31.0)
    assert plan.pod.id == other
    candidates = plan.explanation.to_dict(plan)["choices"][0]["candidates"]
    assert {c["podId"]: c["trust"] for c in candidates} == {first: shown.trust, other: 1.0}


def test_a_plan_counts_on_what_is_trusted_and_remembers_what_was_believed() -> None:
    """Cached tokens, blocks and the load follow the trust; the comparison does not."""
    router = cache_only(1)
    serve(router, 0, 1.0, 1.0)
    honest = serve(router, 0, 0.5, 2.0)
    for n in range(40):
        serve(router, 0, 0.5, 3.0 + n)
    plan = ask(router, text(40, 0), 50.0)
    trust = calibration_of(router, plan.pod.id).trust
    assert 0.4 < trust < 0.7
    believed = honest.explanation.believed_tokens
    assert plan.explanation.believed_tokens == pytest.approx(believed, rel=1e-3)
    assert plan.predicted_cached_tokens == pytest.approx(
        plan.explanation.believed_tokens * trust, rel=1e-3
    )
    assert plan.cached_blocks == int(40 * router._state.calibration.trust(0))
    said = plan.explanation.to_dict(plan)["predicted"]
    assert said["cachedTokens"] < said["believedTokens"]


def test_trust_comes_back_with_the_truth() -> None:
    """Answers that bear the belief out end the doubt, all at once and below DOUBT."""
    router = cache_only(1)
    serve(router, 0, 1.0, 1.0)
    for n in range(40):
        serve(router, 0, 0.0, 2.0 + n)
    assert calibration_of(router, "single-0").trust == LEAST_TRUST
    seen = []
    for n in range(100):
        serve(router, 0, 1.0, 50.0 + n)
        seen.append(calibration_of(router, "single-0"))
    assert [one.trust for one in seen] == sorted(one.trust for one in seen)
    back = next(one for one in seen if one.trust == 1.0)
    assert back.cache_lack < BELIEVE < DOUBT


def test_doubt_fades_where_nobody_comes() -> None:
    """Without evidence the lack halves every FADE_S until the pod is believed again."""
    router = cache_only(1)
    serve(router, 0, 1.0, 1.0)
    for n in range(30):
        serve(router, 0, 0.0, 2.0 + n)
    router.tick(40.0)
    assert calibration_of(router, "single-0").trust < 0.2
    router.tick(40.0 + FADE_S)
    assert 0.4 < calibration_of(router, "single-0").trust < 0.8
    for n in range(2, 5):
        router.tick(40.0 + n * FADE_S)
    assert calibration_of(router, "single-0").trust == 1.0


def test_another_process_begins_with_a_clean_slate() -> None:
    """After a restart nothing is held against the pod, and nothing is known of its errors."""
    router = cache_only(1)
    serve(router, 0, 1.0, 1.0)
    for n in range(30):
        serve(router, 0, 0.0, 2.0 + n)
    router.observe(PodRestarted("single-0"), 40.0)
    shown = calibration_of(router, "single-0")
    assert (shown.trust, shown.cache_samples, shown.cache_lack) == (1.0, 0, 0.0)
    assert router._state.calibration.doubted == 0


def test_calibrate_false_shows_errors_and_doubts_nobody() -> None:
    """`cacheRegistry.calibrate: false`: the lack is there to be seen, the trust stays."""
    router = cache_only(1, calibrate=False)
    serve(router, 0, 1.0, 1.0)
    for n in range(30):
        serve(router, 0, 0.0, 2.0 + n)
    shown = calibration_of(router, "single-0")
    assert shown.cache_lack > 0.8
    assert shown.trust == 1.0


def test_what_pods_hold_beyond_belief_costs_no_trust() -> None:
    """Others fill caches too: more than believed is an error, but no lack; nor is a rounding."""
    calibration = Calibration(2)
    for n in range(100):
        calibration.cache_seen(0, 1000.0, 4000, 5000, float(n))
        calibration.cache_seen(1, 100.0, 50, 5000, float(n))
    assert calibration.doubted == 0
    assert calibration.of(0).cache_error == pytest.approx(0.6)
    assert calibration.of(0).lack == calibration.of(1).lack == 0.0


def test_answers_that_do_not_tell_change_nothing() -> None:
    """Engines that do not report cached tokens are neither praised nor blamed."""
    router = cache_only(1)
    for n in range(40):
        plan = ask(router, text(40), 1.0 + n)
        finish(router, plan, 1.0 + n, prompt_tokens=TOKENS)
    assert calibration_of(router, "single-0").cache_samples == 0


def test_times_to_the_first_token() -> None:
    """Mean error and bias of the predicted TTFT: above 0 for a pod quicker than predicted."""
    calibration = Calibration(1)
    for _ in range(50):
        calibration.first_token_seen(0, 1.0, 0.75)
    pod = calibration.of(0)
    assert [pod.error_s, pod.bias_s] == pytest.approx([0.25, 0.25])
    for _ in range(200):
        calibration.first_token_seen(0, 1.0, 1.5)
    assert pod.bias_s == pytest.approx(-0.5, abs=0.01)
    router = cache_only(1)
    plan = ask(router, text(40), 1.0)
    router.observe(FirstToken(plan.lease_id), 3.0)
    shown = calibration_of(router, "single-0")
    assert plan.explanation.predicted_ttft_s is not None
    assert shown.ttft_samples == 1
    assert shown.ttft_bias_s == pytest.approx(plan.explanation.predicted_ttft_s - 2.0, abs=1e-5)


def test_in_dispatch_mode_the_prefill_pod_is_judged() -> None:
    """Its answer ends the predicted time, and its cache is what was predicted."""
    router = make_router(make_config(prefill=1, decode=1))
    plan = ask(router, text(40), 1.0)
    router.observe(PrefillDone(plan.lease_id), 2.0)
    finish(router, plan, 3.0, prompt_tokens=TOKENS, cached_tokens=0)
    assert calibration_of(router, "prefill-0").ttft_samples == 1
    assert calibration_of(router, "prefill-0").cache_samples == 1
    shown = calibration_of(router, "decode-0")
    assert (shown.ttft_samples, shown.cache_samples) == (0, 0)


def test_a_decode_pod_that_is_picked_again_is_not_compared() -> None:
    """What the first plan's prefill pod had says nothing of the second plan's pod."""
    router = make_router(make_config(prefill=1, decode=2))
    plan = ask(router, text(40), 1.0, prefill_pod="prefill-0")
    finish(router, plan, 3.0, prompt_tokens=TOKENS, cached_tokens=0)
    assert sum(pod.calibration.cache_samples for pod in router.pods()) == 0
    assert plan.explanation.to_dict(plan)["predicted"]["believedTokens"] is None
