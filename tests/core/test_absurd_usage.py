"""Usage that no request can hold: engines err, and nothing is learned from that."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from typing import Any

import pytest

from calinix.core.events import Finished, FirstToken
from calinix.core.observe import MOST_TOKENS_PER_S, SOME_TOKENS
from calinix.core.prepare import TEMPLATE_TOKENS
from calinix.core.requests import RoutePlan
from calinix.core.router import Router
from routing import make_config, make_router, request

PREFIX_BYTES, PROMPT_TOKENS, OUTPUT_TOKENS = 8000, 2100, 64
HUGE = 100_000_000


def shares(strategy: str, lie: dict[str, int], requests: int = 500) -> list[float]:
    """What of the traffic over eight shared prefixes each of four pods gets; the first one lies."""
    router = make_router(make_config(4, strategy=strategy))
    rng = random.Random(1)
    prefixes = [rng.randbytes(PREFIX_BYTES) for _ in range(8)]
    held: set[tuple[int, int]] = set()
    free_s, inflight, routed = [0.0] * 4, [0] * 4, Counter[int]()
    due: list[tuple[float, int, RoutePlan, dict[str, Any] | None]] = []
    now = 0.0
    for number in range(requests):
        now += rng.expovariate(6.0)
        while due and due[0][0] <= now:
            _pass(router, *heapq.heappop(due), inflight)
        which = rng.randrange(8)
        prompt = prefixes[which] + rng.randbytes(400)
        plan = router.route(request(prompt, request_id=str(number)), now)
        assert isinstance(plan, RoutePlan)
        slot = plan.pod.slot
        routed[slot] += number >= requests // 3
        cached = 2000 if (slot, which) in held else 0
        held.add((slot, which))
        free_s[slot] = first_s = max(now, free_s[slot]) + (PROMPT_TOKENS - cached) / 8000
        inflight[slot] += 1
        end_s = first_s + OUTPUT_TOKENS * 0.015 * (1 + inflight[slot] / 16)
        usage = {"prompt_tokens": PROMPT_TOKENS, "cached_tokens": cached,
                 "output_tokens": OUTPUT_TOKENS, **(lie if slot == 0 else {})}  # fmt: skip
        heapq.heappush(due, (first_s, 2 * number, plan, None))
        heapq.heappush(due, (end_s, 2 * number + 1, plan, usage))
    return [routed[slot] / routed.total() for slot in range(4)]


def _pass(
    router: Router,
    now: float,
    _: int,
    plan: RoutePlan,
    usage: dict[str, Any] | None,
    inflight: list[int],
) -> None:
    if usage is None:
        router.observe(FirstToken(plan.lease_id), now)
    else:
        inflight[plan.pod.slot] -= 1
        router.observe(Finished(plan.lease_id, 200, **usage), now)


@pytest.mark.parametrize("strategy", ["predictive", "cacheAware"])
@pytest.mark.parametrize(
    "lie",
    [
        {"prompt_tokens": HUGE, "cached_tokens": HUGE, "output_tokens": HUGE},
        {"prompt_tokens": HUGE, "cached_tokens": 0},
        {"prompt_tokens": 1, "cached_tokens": 0},
        {"cached_tokens": HUGE},
        {"output_tokens": HUGE},
    ],
)
def test_a_pod_that_lies_gets_its_share_and_no_more(strategy: str, lie: dict[str, int]) -> None:
    """Counts that cannot be neither draw traffic to a pod nor drive it away."""
    assert all(0.12 < share < 0.4 for share in shares(strategy, lie))


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_what_a_prompt_can_have(tokenizer: str) -> None:
    """At most a token a byte and what a template adds, at least one in 64 bytes or words."""
    prepare = make_router(make_config(1, tokenizer=tokenizer))._state.preparer.prepare
    text = prepare(request(b"a word " * 1000))
    assert text.may_have(7000 + TEMPLATE_TOKENS)
    assert not text.may_have(7001 + TEMPLATE_TOKENS)
    assert text.may_have(1000)
    assert not text.may_have(1)
    assert not text.may_have(0)
    ids = prepare(request(bytes(4000), prompt_is_tokens=True))
    assert ids.may_have(1000)
    assert not ids.may_have(1001 + TEMPLATE_TOKENS)
    # A batch: usage counts all of it.
    more = prepare(request(b"x" * 1000, other_bytes=9000))
    assert more.may_have(10_000 + TEMPLATE_TOKENS)
    assert not more.may_have(10_001 + TEMPLATE_TOKENS)


def test_what_an_answer_can_have() -> None:
    """Some tokens are always believed; more than that only as fast as any pod can be."""
    router = make_router(make_config(1))
    means = router._state.means
    most = int(SOME_TOKENS + MOST_TOKENS_PER_S * 2.0)
    for tokens, is_believed in ((most, True), (most + 1, False), (HUGE, False)):
        plan = router.route(request(b"x" * 500), 1.0)
        assert isinstance(plan, RoutePlan)
        before = means.output_tokens(None)
        router.observe(Finished(plan.lease_id, 200, output_tokens=tokens), 3.0)
        assert (means.output_tokens(None) > before) is is_believed
        # What it said is shown as it said it.
        assert plan.to_dict()["outcome"]["outputTokens"] == tokens
