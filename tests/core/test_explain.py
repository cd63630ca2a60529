"""Explanations: everything that made a decision, and later what came of it."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from calinix.config import StrategyName
from calinix.core.choice import Choice
from calinix.core.events import (
    Failed,
    Failure,
    Finished,
    FirstToken,
    PodDraining,
    PodRemoved,
)
from calinix.core.explain import DecisionRing
from calinix.core.requests import RoutePlan
from routing import ask, fail, finish, make_config, make_router, serve


def test_a_decision_explains_itself() -> None:
    """Candidates with their scores, who was filtered and why, the runner-up, the prediction."""
    router = make_router(make_config(4, strategy="cacheAware"))
    finish(router, ask(router, 8, avoid=0b1110))
    router.observe(PodDraining("single-3", True), 1.0)
    plan = ask(router, 8, request_id="me", session_key="s")
    told = plan.to_dict()
    assert plan.pod.id == told["podId"] == "single-0"
    assert told["requestId"] == "me"
    assert told["strategy"] == "cacheAware"
    assert told["prompt"]["blocks"] == 8
    assert told["predicted"]["cachedBlocks"] == 8
    assert told["predicted"]["cachedTokens"] == 8 * 32
    assert told["predicted"]["ttftSeconds"] > 0
    (choice,) = told["choices"]
    assert choice["picked"] == "single-0"
    assert choice["runnerUp"] in ("single-1", "single-2")
    assert choice["filtered"] == [{"podId": "single-3", "filter": "draining"}]
    assert choice["unit"] == "score"
    assert choice["weights"] == {"cache": 0.6, "load": 0.3}
    first, second, _ = choice["candidates"]
    assert first["podId"] == "single-0"
    assert first["scores"] == {"cache": 1.0, "load": 1.0}
    assert first["score"] == pytest.approx(0.9)
    assert first["cachedBlocks"] == 8
    assert second["score"] == pytest.approx(0.3)
    assert told["outcome"]["status"] is None


def test_predicted_seconds_explain_themselves() -> None:
    """Under predictive the terms are seconds that add up to the score, below 0; cheapest first."""
    router = make_router(make_config(3))
    finish(router, ask(router, 8, avoid=0b110), now=1.2)
    (choice,) = ask(router, 8, now=2.0).to_dict()["choices"]
    assert choice["unit"] == "seconds"
    assert set(choice["weights"].values()) == {-1.0}
    first, *others = choice["candidates"]
    assert first["podId"] == choice["picked"] == "single-0"
    assert [one["cachedBlocks"] for one in (first, *others)] == [8, 0, 0]
    for one in (first, *others):
        assert one["score"] == pytest.approx(-sum(one["scores"].values()), abs=1e-5)
        assert one["scores"]["prefill"] > 0.0
    assert first["score"] > others[0]["score"]


def test_the_outcome_is_filled_in() -> None:
    """First token, end, usage: what really happened stands beside what was predicted."""
    router = make_router(make_config(1))
    plan = ask(router, 8, now=1.0)
    router.observe(FirstToken(plan.lease_id), 1.25)
    router.observe(Finished(plan.lease_id, 200, 260, 128, 40), 2.0)
    assert plan.to_dict()["outcome"] == {
        "status": 200,
        "failure": None,
        "ttftSeconds": 0.25,
        "e2eSeconds": 1.0,
        "promptTokens": 260,
        "cachedTokens": 128,
        "outputTokens": 40,
    }
    lost = ask(router, 8, now=3.0)
    router.observe(Failed(lost.lease_id, "single", Failure.SERVER_ERROR, 500), 4.0)
    outcome = lost.to_dict()["outcome"]
    assert (outcome["status"], outcome["failure"]) == (500, "server_error")


def test_dispatch_explains_both_choices() -> None:
    """Prefill first, then decode, each with its own candidates."""
    router = make_router(make_config(0, 2, 3))
    told = ask(router, 4).to_dict()
    assert [choice["role"] for choice in told["choices"]] == ["prefill", "decode"]
    assert [len(choice["candidates"]) for choice in told["choices"]] == [2, 3]
    assert told["prefillPodId"] == told["choices"][0]["picked"]
    assert told["podId"] == told["choices"][1]["picked"]


def test_it_is_json() -> None:
    """Whatever the strategy, an explanation can be written as JSON."""
    for strategy in get_args(StrategyName):
        router = make_router(make_config(3, 2, 2, strategy=strategy))
        for mode in ("single", "dispatch"):
            plan = ask(router, 4, mode=mode)
            assert msgspec.json.decode(msgspec.json.encode(plan.to_dict()))["strategy"] == strategy


def test_it_speaks_of_the_pods_of_its_time() -> None:
    """A decision names the pods that there were, however the pods have changed since."""
    router = make_router(make_config(2))
    plan = ask(router)
    before = plan.to_dict()
    finish(router, plan)
    router.observe(PodRemoved("single-0"), 1.0)
    router.tick(2.0)
    after = plan.to_dict()
    assert after["choices"] == before["choices"]


def test_the_ring_is_bounded_and_searchable() -> None:
    """The last N plans, newest first; found by request id; of a retried request the newest."""
    router = make_router(make_config(2, decisions_kept=3))
    for number in range(5):
        serve(router, request_id=f"r{number}")
    assert [plan.request_id for plan in router.decisions.last(10)] == ["r4", "r3", "r2"]
    assert [plan.request_id for plan in router.decisions.last(1)] == ["r4"]
    assert router.decisions.last(0) == router.decisions.last(-1) == []
    assert router.decisions.find("r1") is None
    first = ask(router, request_id="again")
    fail(router, first)
    second = ask(router, request_id="again")
    found = router.decisions.find("again")
    assert isinstance(found, RoutePlan)
    assert found.lease_id == second.lease_id
    assert len(router.decisions) == 3


def test_none_are_kept_where_none_are_wanted() -> None:
    """DecisionsKept 0 keeps nothing."""
    router = make_router(make_config(1, decisions_kept=0))
    plan = ask(router)
    assert len(router.decisions) == 0
    assert router.decisions.find("r") is None
    assert plan.to_dict()["podId"] == "single-0"
    assert len(DecisionRing(0)) == 0


def test_prompts_are_not_kept() -> None:
    """A kept decision holds nothing of the prompt's text."""
    import gc

    router = make_router(make_config(1))
    prompt = b"secret " * 1000
    finish(router, ask(router, prompt))
    router.tick(2.0)
    kept: list[object] = [router.decisions.last(1)[0]]
    seen: set[int] = set()
    while kept:
        thing = kept.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        assert not (isinstance(thing, bytes) and b"secret" in thing)
        kept += gc.get_referents(thing)
        if isinstance(thing, msgspec.Struct):
            kept += [getattr(thing, name) for name in thing.__struct_fields__]


@pytest.mark.parametrize(
    ("weights", "answer"), [((), False), ((-1.0, -1.0), True), ((-1.0, 0.5), False)]
)
def test_what_is_compared_by_seconds(weights: tuple[float, ...], answer: bool) -> None:
    """Candidates are compared by seconds where every term is a cost."""
    choice = Choice("single", 0, 1, (None,))
    choice.weights = weights
    assert choice.by_seconds is answer
