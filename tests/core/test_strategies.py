"""Filters, scorers, pickers and the recipes made of them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from calinix.config import Imbalance, Labels, Strategy, StrategyName, Weights
from calinix.core import filters, pickers, scorers, strategies
from calinix.core.choice import Choice, Recipe
from calinix.core.columns import Term
from calinix.core.events import StrategyChanged
from calinix.core.requests import RouteRequest
from calinix.core.router import Router
from calinix.core.state import State
from routing import ask, finish, make_config, make_router, pod_config, request, serve

REQUEST = request()


def choice_of(
    state: State, inflight: list[float], depths: list[float] | None = None, blocks: int = 10
) -> Choice:
    """A choice among the first pods with this load, which hold so many blocks."""
    members = (1 << len(inflight)) - 1
    among = state.table.slot_set(members)
    choice = Choice("single", blocks, members, state.table.who)
    choice.candidates, choice.among = members, among
    choice.inflight, choice.busiest = np.array(inflight, dtype=np.float64), max(inflight)
    if depths is not None:
        choice.depths, choice.deepest = np.array(depths, dtype=np.float64), max(depths)
    return choice


def scores(term: Term | None) -> list[float]:
    """What a term stands for."""
    assert term is not None
    values, scale, offset = term
    return [round(float(value), 6) for value in np.asarray(values) * scale + offset]


def state_of(pods: int, **gateway: object) -> State:
    """The state of a fresh router."""
    return make_router(make_config(pods, **gateway))._state  # type: ignore[arg-type]


def counts(router: Router, requests: int, **settings: Any) -> Counter[str]:
    """How many of so many requests each pod got, all of them inflight."""
    return Counter(ask(router, **settings).pod.id for _ in range(requests))


# --- scorers ---------------------------------------------------------------------------------


def test_cache_score_is_the_share_of_blocks() -> None:
    """0 where nothing is held, 1 where everything is; nothing to say where nobody holds any."""
    state = state_of(3)
    choice = choice_of(state, [0, 0, 0], [0, 5, 10])
    assert scores(scorers.cache(state, REQUEST, choice)) == [0.0, 0.5, 1.0]
    assert scorers.cache(state, REQUEST, choice_of(state, [0, 0, 0], [0, 0, 0])) is None
    assert scorers.cache(state, REQUEST, choice_of(state, [0, 0, 0])) is None


def test_load_score() -> None:
    """1 - n / max(n_max, 8): the busiest has 0, but a little load is no great difference."""
    state = state_of(3)
    assert scores(scorers.load(state, REQUEST, choice_of(state, [0, 10, 20]))) == [1.0, 0.5, 0.0]
    assert scores(scorers.load(state, REQUEST, choice_of(state, [0, 2, 4]))) == [1.0, 0.75, 0.5]


def test_sticky_score() -> None:
    """1 for the session's last pod as long as it is a candidate."""
    state = state_of(3)
    choice = choice_of(state, [0, 0, 0])
    assert scorers.sticky(state, REQUEST, choice) is None
    choice.last = state.table.at[1]
    assert scores(scorers.sticky(state, REQUEST, choice)) == [0.0, 1.0, 0.0]
    choice.candidates = 0b101
    assert scorers.sticky(state, REQUEST, choice) is None


def test_locality_score() -> None:
    """1 for the prefill pod's own engine, its host, its zone."""
    single = (
        pod_config("a", labels=Labels(zone="z1", host="h1")),
        pod_config("b", labels=Labels(zone="z1", host="h2")),
        pod_config("c", labels=Labels(zone="z2", host="h3")),
        pod_config("d", labels=Labels(host="h1")),
        pod_config("e", url="http://a:8000"),
        pod_config("f"),
    )
    state = make_router(make_config(single))._state
    choice = choice_of(state, [0] * 6)
    assert scorers.locality(state, REQUEST, choice) is None
    choice.near = state.table.at[0]
    assert scores(scorers.locality(state, REQUEST, choice)) == [1, 1, 0, 1, 1, 0]
    choice.near = state.table.at[5]
    assert scores(scorers.locality(state, REQUEST, choice)) == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("name", scorers.SCORERS)
def test_scores_are_in_0_to_1(name: str) -> None:
    """Every scorer keeps to [0, 1], whatever the load and the hits."""
    rng = random.Random(3)
    state = state_of(8)
    for _ in range(50):
        choice = choice_of(
            state,
            [rng.randrange(100) for _ in range(8)],
            [rng.randrange(11) for _ in range(8)],
        )
        choice.last = state.table.at[rng.randrange(8)]
        choice.near = state.table.at[rng.randrange(8)]
        term = scorers.SCORERS[name](state, REQUEST, choice)
        if term is not None:
            assert all(0.0 <= score <= 1.0 for score in scores(term))


# --- filters ---------------------------------------------------------------------------------


def test_imbalance_drops_the_too_busy() -> None:
    """Inflight > 1.5 x mean + 4 is dropped; never everybody."""
    state = state_of(3)
    assert filters.imbalance(state, REQUEST, choice_of(state, [0, 0, 9])) == 0b011
    assert filters.imbalance(state, REQUEST, choice_of(state, [3, 3, 9])) == 0b111
    assert filters.imbalance(state, REQUEST, choice_of(state, [100, 100, 100])) == 0b111
    state.strategy = Strategy(imbalance=Imbalance(factor=0.0, offset=0.0))
    assert filters.imbalance(state, REQUEST, choice_of(state, [5, 5, 5])) == 0b111


def test_a_hot_prefix_is_copied_while_all_its_holders_are_busy() -> None:
    """Two or more hold it, and each has more than the mean and copyOffset: then nobody of them."""
    state = state_of(4)

    def kept(inflight: list[float], depths: list[float], pick: int) -> int:
        return filters.without_busy_holders(state, choice_of(state, inflight, depths), pick)

    assert kept([5, 5, 0, 0], [9, 9, 0, 3], 0) == 0b1100
    assert kept([5, 3, 0, 0], [9, 9, 0, 3], 0) == 0, "one of them has room"
    assert kept([5, 5, 0, 0], [9, 8, 0, 3], 0) == 0, "only one pod holds most"
    assert kept([5, 5, 0, 0], [9, 9, 0, 3], 2) == 0, "it goes elsewhere anyhow"
    assert kept([5, 5, 5, 5], [9, 9, 9, 9], 0) == 0, "there is nobody else"
    state.strategy = Strategy(imbalance=Imbalance(copy_offset=3.0))
    assert kept([5, 5, 0, 0], [9, 9, 0, 3], 0) == 0


def test_a_full_match_cannot_outbid_any_load() -> None:
    """Under cacheAware a hot prefix spreads once its pod is too busy; not if switched off."""
    for enabled, spread in ((True, True), (False, False)):
        strategy = Strategy(
            "cacheAware",
            single=Weights(cache=1.0, load=0.1),
            imbalance=Imbalance(enabled=enabled),
        )
        router = make_router(make_config(4, strategy=strategy))
        finish(router, ask(router, 10))
        found = counts(router, 40, prompt=10)
        assert (len(found) > 1) is spread


def test_filters_are_named_in_order() -> None:
    """The bitmaps of each filter are named, and what one drops no later one drops again."""
    router = make_router(make_config(5))
    state = router._state
    state.health.alive &= ~0b00001
    state.health.ejected |= 0b00010
    state.table.draining |= 0b00100
    state.ledger.full |= 0b01000
    state.health._refresh()
    choice = Choice("single", 0, 0b11111, state.table.who)
    filters.narrow(state, RouteRequest(request_id="r", avoid=0b00011), choice)
    assert choice.candidates == 0b10000
    assert choice.dropped == (
        ("alive", 0b00001), ("ejected", 0b00010), ("draining", 0b00100), ("full", 0b01000),
    )  # fmt: skip


# --- pickers ---------------------------------------------------------------------------------


def pick_many(
    count: int, values: list[float], inflight: list[float], **gateway: object
) -> Counter[int]:
    """Places that `best` picks for these scores and loads."""
    state = state_of(len(values), **gateway)
    choice = choice_of(state, inflight)
    choice.scores = np.array(values)
    return Counter(pickers.best(state, REQUEST, choice) for _ in range(count))


@pytest.mark.parametrize("pods", [5, 40])
def test_best_takes_the_highest(pods: int) -> None:
    """The highest score wins, wherever it stands; few candidates or many."""
    for place in (0, 3, pods - 1):
        values = [0.5] * pods
        values[place] = 0.7
        assert pick_many(5, values, [9.0] * pods) == {place: 5}


@pytest.mark.parametrize("pods", [6, 40])
def test_ties_go_to_the_least_loaded_then_to_anyone(pods: int) -> None:
    """Among equal scores least inflight, and among these all alike."""
    values, inflight = [0.5] * pods, [3.0] * pods
    values[0] = 0.4
    inflight[0] = 0.0
    inflight[2] = inflight[5] = 1.0
    found = pick_many(400, values, inflight)
    assert set(found) == {2, 5}
    assert 120 < found[2] < 280
    everyone = pick_many(pods * 60, [0.5] * pods, [1.0] * pods)
    assert len(everyone) == pods
    assert max(everyone.values()) < 3 * min(everyone.values()) + 60


@pytest.mark.parametrize("pods", [6, 40])
def test_ties_go_by_pod_id_when_deterministic(pods: int) -> None:
    """In deterministic mode the first id of the tied wins, not the first slot."""
    named = tuple(pod_config(f"p{(number * 7) % pods:03}") for number in range(pods))
    state = make_router(make_config(named, deterministic=True))._state
    choice = choice_of(state, [float(n % 3) for n in range(pods)])
    choice.scores = np.array([0.1] + [0.5] * (pods - 1))
    expected = min(range(1, pods), key=lambda place: named[place].id)
    assert pickers.best(state, REQUEST, choice) == expected


def test_round_robin_is_fair_whoever_comes_and_goes() -> None:
    """Each in turn; without one the others go on in turn, and it is taken in again."""
    router = make_router(make_config(3, strategy="roundRobin"))
    names = ["single-0", "single-1", "single-2"]
    assert [serve(router) for _ in range(6)] == names * 2
    assert [serve(router, avoid=0b010) for _ in range(4)] == ["single-0", "single-2"] * 2
    assert [serve(router) for _ in range(3)] == names


def test_power_of_two_prefers_the_less_loaded() -> None:
    """The busiest pod is never picked, all others are."""
    router = make_router(make_config(4, strategy="powerOfTwo"))
    for _ in range(5):
        ask(router, avoid=0b0111)
    found = Counter(serve(router) for _ in range(200))
    assert set(found) == {"single-0", "single-1", "single-2"}
    assert serve(make_router(make_config(1, strategy="powerOfTwo"))) == "single-0"


def test_power_of_two_draws_every_pair_alike() -> None:
    """With equal loads every pod is picked equally often."""
    router = make_router(make_config(4, strategy="powerOfTwo"))
    found = Counter(serve(router) for _ in range(2000))
    assert all(400 < count < 600 for count in found.values())


def test_least_load_keeps_pods_level() -> None:
    """Requests inflight never differ by more than one."""
    router = make_router(make_config(4, strategy="leastLoad"))
    for _ in range(30):
        ask(router)
        inflight = [view.inflight for view in router.pods()]
        assert max(inflight) - min(inflight) <= 1


def test_random_takes_anyone() -> None:
    """All pods alike, whatever their load."""
    router = make_router(make_config(4, strategy="random"))
    assert all(400 < count < 600 for count in counts(router, 2000).values())


def test_cache_only_follows_the_cache() -> None:
    """Whoever holds most of the prompt, whatever its load."""
    router = make_router(make_config(4, strategy="cacheOnly"))
    home = serve(router, 10)
    assert counts(router, 50, prompt=10) == {home: 50}


# --- recipes ---------------------------------------------------------------------------------


def test_default_weights_are_the_seeds() -> None:
    """Of cacheAware, per role; scorers of weight 0 are left out."""
    found = {
        role: {name: weight for name, weight, _ in recipe.scorers}
        for role, recipe in strategies.recipes(Strategy("cacheAware")).items()
    }
    assert found == {
        "single": {"cache": 0.6, "load": 0.3, "sticky": 0.1},
        "prefill": {"cache": 0.65, "load": 0.25, "sticky": 0.1},
        "decode": {"cache": 0.1, "load": 0.55, "sticky": 0.1, "locality": 0.25},
    }


def test_every_strategy_of_the_config_has_its_line() -> None:
    """No name can be configured that is not there, nor the other way round."""
    from typing import get_args

    assert set(strategies.STRATEGIES) == set(get_args(StrategyName))


@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_every_strategy_serves_both_modes(name: StrategyName) -> None:
    """A policy works for a single pod and for a prefill and decode pair, at any pool size."""
    for count in (1, 3, 40):
        router = make_router(make_config(count, count, count, strategy=name))
        for mode in ("single", "dispatch"):
            plan = ask(router, 5, mode=mode)
            assert plan.strategy == name
            finish(router, plan)


def test_weights_have_an_effect() -> None:
    """Of cacheAware: each weight of each role changes who is picked."""
    labels = Labels(zone="z")
    near = tuple(pod_config(f"decode-{n}", labels=labels if n == 2 else Labels()) for n in range(3))
    prefill = (pod_config("prefill-0", labels=labels),)

    def router_of(weights: Weights) -> Router:
        strategy = Strategy("cacheAware", decode=weights)
        return make_router(make_config(0, prefill, near, strategy=strategy))

    for weights in (Weights(locality=1.0), Weights(load=0.1, locality=1.0)):
        router = router_of(weights)
        assert Counter(serve(router) for _ in range(10)) == {"decode-2": 10}
    router = router_of(Weights(load=1.0))
    assert len({serve(router) for _ in range(30)}) == 3


def test_a_strategy_can_be_changed_while_running() -> None:
    """From the next request on, with everything that is known."""
    router = make_router(make_config(4, strategy="roundRobin"))
    home = serve(router, 10)
    assert len({serve(router, 0) for _ in range(4)}) == 4
    router.observe(StrategyChanged(Strategy(name="cacheOnly")), 2.0)
    plan = ask(router, 10)
    assert (plan.pod.id, plan.strategy, plan.cached_blocks) == (home, "cacheOnly", 10)


def last_place(state: Any, request: RouteRequest, choice: Choice) -> int:
    """A picker of a host's own: whoever stands last."""
    assert choice.among is not None
    return choice.among.count - 1


def test_a_host_can_bring_its_own_recipe() -> None:
    """It takes the place of the strategy's for the roles it names, also after a change of these."""
    own = Recipe(last_place)
    router = make_router(make_config(3, 3, 3, strategy="roundRobin"), recipes={"decode": own})
    plans = [ask(router, mode="dispatch") for _ in range(3)]
    assert {plan.pod.id for plan in plans} == {"decode-2"}
    assert len({plan.prefill.id for plan in plans if plan.prefill is not None}) == 3
    router.observe(StrategyChanged(Strategy(name="leastLoad")), 2.0)
    assert ask(router, mode="dispatch").pod.id == "decode-2"
