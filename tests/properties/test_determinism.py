"""The same calls into a fresh router give the same plans."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calinix.config import StrategyName
from calinix.core.events import (
    Failed,
    Failure,
    Finished,
    FirstToken,
    PodHeard,
    PodRestarted,
    ProbeFailed,
    ProbeSucceeded,
)
from calinix.core.requests import RoutePlan, Work
from calinix.core.router import Router
from routing import make_config, make_router, request, text

STRATEGIES = get_args(StrategyName)


def journal(seed: int, calls: int) -> list[Any]:
    """Requests and events in an arbitrary but fixed order."""
    rng = random.Random(seed)
    entries: list[Any] = []
    for number in range(calls):
        kind = rng.randrange(10)
        lease_id = rng.randrange(1, number + 2)
        pod_id = f"{rng.choice(['single', 'prefill', 'decode'])}-{rng.randrange(3)}"
        if kind < 5:
            entries.append(
                request(
                    text(rng.randrange(8), rng.randrange(3)),
                    mode=rng.choice(["single", "dispatch", None]),
                    streamed=rng.random() < 0.5,
                    session_key=rng.choice([None, "a", "b"]),
                    work=rng.choice(list(Work)),
                )
            )
        elif kind < 8:
            entries.append(
                rng.choice(
                    [
                        FirstToken(lease_id),
                        Finished(lease_id, rng.choice([200, 400, 500, 503]), 100, 10, 20),
                        Failed(lease_id, "single", rng.choice(list(Failure))),
                    ]
                )
            )
        else:
            event = rng.choice([ProbeSucceeded, ProbeFailed, PodHeard, PodRestarted, None])
            entries.append(event(pod_id) if event is not None else None)
    return entries


def replay(router: Router, entries: list[Any]) -> list[Any]:
    """What the router answers to these calls."""
    answers: list[Any] = []
    now = 1.0
    for entry in entries:
        now += 0.3
        if entry is None:
            router.tick(now)
        elif hasattr(entry, "request_id"):
            outcome = router.route(entry, now)
            answers.append(outcome.to_dict() if isinstance(outcome, RoutePlan) else outcome)
        else:
            router.observe(entry, now)
    answers.append(router.pods())
    return answers


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_same_calls_give_the_same_plans(strategy: str, deterministic: bool) -> None:
    """Same seed and calls: every plan, explanation and view is equal."""
    config = make_config(3, 3, 3, strategy=strategy, deterministic=deterministic)
    entries = journal(7, 300)
    one = replay(make_router(config, seed=5), entries)
    assert one == replay(make_router(config, seed=5), entries)


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from(STRATEGIES))
def test_whatever_the_calls(seed: int, strategy: str) -> None:
    """So it is for any journal."""
    config = make_config(3, 3, 3, strategy=strategy)
    entries = journal(seed, 60)
    assert replay(make_router(config), entries) == replay(make_router(config), entries)


def test_another_seed_gives_other_plans() -> None:
    """The rng is used: the property above could fail."""
    config = make_config(3, 3, 3)
    entries = journal(7, 300)
    one, other = (replay(make_router(config, seed=seed), entries) for seed in (1, 2))
    assert one != other


@pytest.mark.parametrize("strategy", ["cacheAware", "predictive", "weightedRoundRobin"])
def test_deterministic_mode_needs_no_seed(strategy: str) -> None:
    """Ties by pod id, and turns from the first slot on: no random number is drawn."""
    config = make_config(3, 3, 3, deterministic=True, strategy=strategy)
    entries = journal(7, 300)
    one, other = (replay(make_router(config, seed=seed), entries) for seed in (1, 2))
    assert one == other


class Recorder:
    """An Rng that is only what the Router may ask for."""

    def random(self) -> float:
        """Always the middle."""
        return 0.5

    def randrange(self, stop: int, /) -> int:
        """Always the middle."""
        return stop // 2


def test_any_rng_will_do() -> None:
    """The Router asks for nothing beyond the Rng protocol."""
    router = Router(make_config(3), Recorder())
    router.observe(ProbeSucceeded("single-1"), 0.0)
    assert isinstance(router.route(request(), 1.0), RoutePlan)
