"""The predictive strategy: costs in seconds, near ties, sessions, and what it says of itself."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from calinix.config import CacheRegistry, Labels, Predictive, Strategy
from calinix.core import costs, pickers
from calinix.core.choice import Choice
from calinix.core.events import PodFacts, PodHeard, ReplicaFacts, RoleFacts
from calinix.core.rates import REQUEST_TOKENS
from calinix.core.requests import RouteRequest, Work
from calinix.core.router import Router
from calinix.core.state import State
from routing import BLOCK, ask, finish, make_config, make_router, pod_config, request, serve

POOL_PACE = 1.0 / 8000.0
"""Seconds per token before anything is measured."""


def router_of(count: int = 3, **settings: Any) -> Router:
    """Single pods under the predictive strategy."""
    settings.setdefault("strategy", "predictive")
    return make_router(make_config(count, **settings))


def terms(router: Router, prompt: bytes | int = b"", now: float = 1.0, **more: Any) -> Any:
    """Seconds by term, one for each candidate, of a decision that is then forgotten."""
    plan = ask(router, prompt, now, **more)
    choice = plan.explanation.choice
    found = {
        name: [float(value) * term[1] for value in term[0]]
        for name, term in zip(choice.names, choice.terms, strict=True)
        if term is not None
    }
    finish(router, plan, now)
    return found


# --- terms -----------------------------------------------------------------------------------


def test_queue_and_prefill_are_seconds() -> None:
    """Work before its first token, and the own uncached prompt, by the pool's pace at first."""
    router = router_of(2)
    ask(router, b"x" * 4000, avoid=0b10)
    found = terms(router, b"y" * 8000)
    waiting = (1000 + REQUEST_TOKENS) * POOL_PACE
    assert found["queue"] == pytest.approx([waiting, 0.0])
    assert found["prefill"] == pytest.approx([(2000 + REQUEST_TOKENS) * POOL_PACE] * 2)


def test_a_cached_prefix_saves_seconds() -> None:
    """The pod that holds the prompt computes the last block and the fixed part only."""
    router = router_of(2)
    home = serve(router, b"x" * 100 * BLOCK, avoid=0b10)
    found = terms(router, b"x" * 100 * BLOCK)
    assert home == "single-0"
    per_block = BLOCK / 4
    assert found["prefill"][0] == pytest.approx((per_block + REQUEST_TOKENS) * POOL_PACE, rel=0.05)
    assert found["prefill"][1] == pytest.approx(
        (100 * per_block + REQUEST_TOKENS) * POOL_PACE, rel=0.05
    )


@pytest.mark.parametrize(
    ("work", "tokens"), [(Work.POOLING, 500.0), (Work.MEAN, 256.0), (Work.NONE, None)]
)
def test_what_generates_nothing(work: Work, tokens: float | None) -> None:
    """Pooling computes its inputs, an unknown POST the mean request, a GET nothing at all."""
    found = terms(router_of(2), b"x" * 2000, work=work)
    if tokens is None:
        assert not found.get("queue")
        assert not found.get("prefill")
    else:
        assert found["prefill"] == pytest.approx([(tokens + REQUEST_TOKENS) * POOL_PACE] * 2)
        assert found["queue"] == [0.0, 0.0]
    assert "decode" not in found


def test_others_wait_for_a_prefill_too() -> None:
    """Half a second for each at least, more the longer queues are, eight at most."""
    router = router_of(2)
    shares = []
    for queue in (0.0, 3.0, 1e6):
        router._state.outlooks["single"].queue = queue
        found = terms(router, b"x" * 4000)
        shares.append(found["others"][0] / found["prefill"][0])
    assert shares == pytest.approx([0.5, 2.0, 8.0], rel=0.1)


def test_the_mean_queue_is_what_requests_find() -> None:
    """It rises while requests wait, in mean requests per pod, and falls when none do."""
    router = router_of(2)
    outlook = router._state.outlooks["single"]
    plans = [ask(router, b"%d" % n + b"x" * 2000) for n in range(200)]
    full = outlook.queue
    assert 10.0 < full < 100.0
    for plan in plans:
        finish(router, plan)
    for n in range(200):
        finish(router, ask(router, b"%d" % n + b"y" * 2000))
    assert outlook.queue < 0.1 * full


def test_a_crowd_slows_answers_down() -> None:
    """Each request of a pod costs what it adds to every token; a wild fit is bounded."""
    router = router_of(2)
    outlook = router._state.outlooks["single"]
    for _ in range(3):
        ask(router, avoid=0b10)
    outlook.request_s = 0.001
    mild = terms(router, max_output_tokens=100)["crowd"]
    assert mild[0] - mild[1] == pytest.approx(3 * 0.1, rel=0.1)
    outlook.request_s = 1e6
    wild = terms(router, max_output_tokens=100)["crowd"]
    assert wild[0] - wild[1] == pytest.approx(3 * 100 * costs.MOST_REQUEST_S, rel=0.1)


def dispatch(**labels: Labels) -> Router:
    """One prefill pod and three decode pods under the predictive strategy."""
    decode = tuple(
        pod_config(f"decode-{n}", labels=labels.get(f"d{n}", Labels())) for n in (0, 1, 2)
    )
    prefill = (pod_config("prefill-0", labels=labels.get("p", Labels())),)
    return make_router(make_config(0, prefill, decode, strategy="predictive"))


def decode_terms(router: Router, prompt: bytes = b"", **more: Any) -> Any:
    """Seconds by term of the choice of the decode pod."""
    return terms(router, prompt, mode="dispatch", **more)


def test_decoding_takes_longer_on_slow_and_crowded_pods() -> None:
    """Output tokens times what one takes there: base, requests, slowness."""
    router = dispatch()
    state = router._state
    outlook = state.outlooks["decode"]
    outlook.token_s, outlook.request_s = 0.01, 0.001
    slot = {pod.id: pod.slot for pod in router.pods()}
    for _ in range(4):
        ask(router, mode="dispatch", avoid=1 << slot["decode-1"] | 1 << slot["decode-2"])
    state.slowness[slot["decode-2"]] = 3.0
    found = decode_terms(router, max_output_tokens=100)["decode"]
    assert found == pytest.approx([1.5, 1.1, 3.3])
    outlook.context_s = 1e-6
    held = state.ledger.loads.context[slot["decode-0"]]
    assert decode_terms(router, max_output_tokens=100)["decode"][0] == pytest.approx(
        1.5 + 100 * 1e-6 * held
    )


def test_kv_that_has_to_travel_costs_seconds() -> None:
    """None to the own engine's host, more the farther; what the decode pod holds stays there."""
    here, there = Labels(host="h1", zone="z"), Labels(host="h2", zone="z")
    router = dispatch(p=here, d0=here, d1=there)
    prompt = b"x" * 100 * BLOCK
    found = decode_terms(router, prompt)["transfer"]
    assert 0.0 < found[0] < found[1] < found[2]
    again = decode_terms(router, prompt)["transfer"]
    assert sum(after < 0.1 * before for before, after in zip(found, again, strict=True)) == 1


def test_work_that_is_not_split_is_prefilled_by_the_decode_pod() -> None:
    """Embeddings in dispatch mode are compared by queue and prefill."""
    found = decode_terms(dispatch(), b"x" * 2000, work=Work.POOLING)
    assert found["prefill"] == pytest.approx([(500 + REQUEST_TOKENS) * POOL_PACE] * 3)
    assert "decode" not in found
    assert "transfer" not in found


# --- sessions --------------------------------------------------------------------------------


def test_a_session_credits_its_last_answer() -> None:
    """Its pod holds the answer's tokens, until another answer or another process comes."""
    router = router_of(2)
    plan = ask(router, b"x" * 2000, session_key="s")
    finish(router, plan, output_tokens=300, prompt_tokens=500)
    found = terms(router, b"x" * 4000, session_key="s")
    place = int(plan.pod.id[-1])
    saved = 300 * POOL_PACE * (1.0 + costs.LEAST_OTHERS)
    assert found["session"][place] == pytest.approx(-saved)
    assert found["session"][1 - place] == 0.0
    assert "session" not in terms(router, b"x" * 4000, session_key="other")


def test_a_credit_is_no_pin() -> None:
    """It never exceeds what the pod would have to compute, and a queue outbids it."""
    router = router_of(2)
    plan = ask(router, b"short", session_key="s", avoid=0b10)
    finish(router, plan, output_tokens=4_000)
    state, again = router._state, request(b"short", session_key="s")
    for n in range(50):
        ask(router, b"%d" % n + b"y" * 4000, avoid=0b10)
    choice = choose_by(state, again)
    credit = dict(zip(choice.names, choice.terms, strict=True))["session"]
    assert credit is not None
    assert min(credit[0]) >= -10.0 * POOL_PACE
    assert ask(router, b"short", session_key="s").pod.id == "single-1"


def choose_by(state: State, asked: RouteRequest) -> Choice:
    """A choice, with nothing taken for it."""
    from calinix.core.pipeline import choose

    return choose(state, asked, state.preparer.prepare(asked), "single", 1.0)


def test_later_turns_stay_and_agents_spread() -> None:
    """Agents one after the other: each stays where it is, and no pod gets twice its share."""
    router = router_of(8)
    first, stayed, turns, now = Counter[str](), 0, 0, 1.0
    rng = random.Random(5)
    for agent in range(120):
        history = b"%06d" % agent + rng.randbytes(rng.randrange(2000, 16000))
        home = ""
        for turn in range(5):
            now += 3.0
            for pod in router.pods():
                router.observe(PodHeard(pod.id), now)
            router.tick(now)
            plan = ask(router, history, now, session_key=str(agent))
            took_s = (plan.prompt_tokens - plan.predicted_cached_tokens + 64) / 9000
            finish(router, plan, now + took_s * rng.gauss(1.0, 0.2), output_tokens=100)
            if turn:
                stayed += plan.pod.id == home
                turns += 1
            else:
                first[plan.pod.id] += 1
            home = plan.pod.id
            history += rng.randbytes(800)
    assert stayed >= 0.95 * turns
    assert len(first) == 8
    assert max(first.values()) <= 2 * 120 / 8


# --- ties ------------------------------------------------------------------------------------


def test_near_ties_go_to_the_least_inflight() -> None:
    """A difference that no measurement is exact enough for decides nothing."""
    state = router_of(3)._state
    among = state.table.slot_set(0b111)
    found = Counter[int]()
    for _ in range(200):
        choice = Choice("single", 0, 0b111, state.table.who)
        choice.candidates, choice.among = 0b111, among
        choice.inflight = np.array([1.0, 0.0, 0.0])
        choice.scores = np.array([-1.0, -1.01, -1.015])
        found[pickers.cheapest(state, request(), choice)] += 1
    assert set(found) == {1, 2}
    assert min(found.values()) > 50


def test_deterministic_ties_go_by_id() -> None:
    """With `deterministic` the first id of those near the least cost, the session's pod before."""
    router = router_of(3, deterministic=True)
    assert {serve(router) for _ in range(5)} == {"single-0"}
    plan = ask(router, b"x" * 4000, session_key="s", avoid=0b011)
    finish(router, plan, output_tokens=1)
    assert serve(router, b"z", session_key="s") == "single-2"


# --- answers that are not streamed -----------------------------------------------------------


def test_a_later_first_token_ends_hidden_prefills() -> None:
    """Pods prefill in order: what came before a first token that is seen is prefilled as well."""
    router = router_of(1)
    ask(router, b"a" * 8000, 1.0, streamed=False)
    hidden = ask(router, b"b" * 8000, 1.0, streamed=False)
    seen = ask(router, b"c" * 8000, 1.0)
    later = ask(router, b"d" * 8000, 1.0, streamed=False)
    assert router.pods()[0].prefill_tokens == 8000
    finish(router, seen, 2.0)
    assert router.pods()[0].prefill_tokens == 2000
    per_request = 2000 + REQUEST_TOKENS
    assert router._state.rates.measured(0) == pytest.approx(3 * per_request)
    for plan in (hidden, later):
        finish(router, plan, 3.0)
    assert router.pods()[0].prefill_tokens == 0


def test_a_lost_request_is_no_prefill() -> None:
    """What failed unseen makes no pod look fast, nor does time in which nothing waited."""
    from routing import fail

    router = router_of(1)
    for _ in range(50):
        fail(router, ask(router, b"a" * 8000, 1.0, streamed=False), now=1.0)
    finish(router, ask(router, b"b" * 8000, 2.0), 3.0)
    assert router._state.rates.measured(0) == pytest.approx(2000 + REQUEST_TOKENS)
    plan = ask(router, b"c" * 8000, 10.0, streamed=False)
    finish(router, plan, 11.0, status=500)
    finish(router, ask(router, b"e" * 8000, 500.0), 501.0)
    assert router._state.rates.measured(0) == pytest.approx(2000 + REQUEST_TOKENS, rel=0.01)


# --- many routers ----------------------------------------------------------------------------


def facts(router: Router, *inflight: float, **more: Any) -> ReplicaFacts:
    """Another router's report: so many requests and a thousand times as much work on each pod."""
    pods = tuple(
        PodFacts(pod.id, held, 1000.0 * held, 100.0 * held)
        for pod, held in zip(router.pods(), inflight, strict=True)
    )
    return ReplicaFacts("other", pods, **more)


def test_others_load_counts_but_is_not_held() -> None:
    """What another router has on a pod is seen by costs and never by leases or maxConns."""
    router = router_of(2)
    router.observe(facts(router, 50.0, 0.0), 1.0)
    found = terms(router, b"x" * 4000)
    assert found["queue"] == pytest.approx([50_000 * POOL_PACE, 0.0])
    assert {serve(router) for _ in range(10)} == {"single-1"}
    assert [pod.inflight for pod in router.pods()] == [0, 0]
    router.observe(facts(router, 0.0, 50.0), 2.0)
    assert serve(router) == "single-0"


def test_turns_where_too_much_is_unseen() -> None:
    """Unseen arrivals make it take turns; a prompt that some pod holds is compared all the same."""
    router = router_of(2)
    for now in (0.0, 5.0, 10.0):
        flow = RoleFacts("single", requests=100.0 * now, work_tokens=1e5 * now)
        router.observe(facts(router, 0.0, 0.0, roles=(flow,)), now)
    fresh = ask(router, b"x" * 4000, 10.0)
    assert fresh.explanation.to_dict(fresh)["choices"][0]["rule"] is None
    finish(router, fresh, 10.0)
    old = ask(router, b"y" * 4000, 12.0)
    assert old.explanation.to_dict(old)["choices"][0]["rule"] == "weightedTurn"
    finish(router, old, 12.0)
    known = ask(router, b"x" * 4000, 14.0)
    assert known.explanation.choice.rule == ""
    assert known.pod.id == fresh.pod.id


def test_reports_are_what_the_router_has() -> None:
    """`facts` says load, flow and measured rates; another router's columns are their sum."""
    one, two = router_of(2), router_of(2)
    finish(one, ask(one, b"x" * 4000, 1.0, avoid=0b10), 2.0)
    ask(one, b"y" * 4000, 3.0, avoid=0b10)
    said = one.facts(3.0, "one")
    two.observe(said, 3.0)
    state = two._state
    assert state.replicas.inflight is not None
    assert list(state.replicas.inflight)[:2] == [1.0, 0.0]
    assert terms(two)["queue"][0] == pytest.approx((1000 + REQUEST_TOKENS) ** 2 / 1064.0 / 1064.0)
    assert {role.role: role.requests for role in said.roles}["single"] == 2.0


# --- what it says of itself ------------------------------------------------------------------


def test_explanations_are_in_seconds() -> None:
    """Candidates are told cheapest first, with the seconds of each term; weights are -1."""
    router = router_of(3)
    plan = ask(router, b"x" * 4000, session_key="s")
    finish(router, plan, output_tokens=50)
    (choice,) = ask(router, b"x" * 8000, session_key="s").to_dict()["choices"]
    assert set(choice["weights"].values()) == {-1.0}
    assert set(choice["weights"]) == {"queue", "prefill", "others", "crowd", "session"}
    assert choice["picked"] == choice["candidates"][0]["podId"] == plan.pod.id
    best = choice["candidates"][0]
    assert best["score"] == pytest.approx(-sum(best["scores"].values()), abs=1e-5)


def test_without_a_registry_nothing_is_believed_cached() -> None:
    """With `cacheRegistry.enabled: false` the costs are those of a cold pool."""
    router = router_of(2, cache=CacheRegistry(enabled=False))
    serve(router, b"x" * 8000)
    found = terms(router, b"x" * 8000)["prefill"]
    assert found == pytest.approx([(2000 + REQUEST_TOKENS) * POOL_PACE] * 2, rel=0.1)


def test_the_rule_is_the_strategys_own() -> None:
    """`queuePrice: 0` leaves the least price of a prefill, whatever waits."""
    router = router_of(
        2, strategy=Strategy(name="predictive", predictive=Predictive(queue_price=0))
    )
    router._state.outlooks["single"].queue = 5.0
    found = terms(router, b"x" * 4000)
    assert found["others"][0] == pytest.approx(0.5 * found["prefill"][0])
