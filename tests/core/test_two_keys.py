"""Prompts that are to be found by their tokens and by their bytes: both chains, kept in step."""

from __future__ import annotations

from typing import Any

import pytest

from calinix.core.events import FirstToken, PrefillDone, PromptTokens
from calinix.core.router import Router
from calinix.edge.journal import Asked
from routing import ask, fail, finish, make_config, make_router, request, text

TEXT = text(8)
IDS = bytes(range(256))
"""64 token ids: four blocks of 16."""


def router_of(**groups: Any) -> Router:
    """A router for exact tokens."""
    return make_router(make_config(tokenizer="hf:anywhere", **(groups or {"single": 1})))


def by_tokens(router: Router, **settings: Any) -> float:
    """Cached tokens predicted for the prompt by its ids. Takes nothing and leaves nothing."""
    plan = ask(router, IDS, prompt_is_tokens=True, **settings)
    fail(router, plan)
    return plan.predicted_cached_tokens


def by_text(router: Router, **settings: Any) -> int:
    """Blocks of its text believed cached."""
    plan = ask(router, TEXT, **settings)
    fail(router, plan)
    return plan.cached_blocks


def test_a_prompt_in_time_is_found_by_either_key() -> None:
    """Routed by its ids with its text beside them, a later one finds it by ids and by text."""
    router = router_of()
    finish(router, ask(router, IDS, prompt_is_tokens=True, spare=TEXT))
    assert by_tokens(router) == 48  # the last token is always computed anew
    assert by_text(router) == 8


def test_without_a_text_beside_it_there_is_one_key() -> None:
    """Ids alone leave no entry of the text."""
    router = router_of()
    finish(router, ask(router, IDS, prompt_is_tokens=True))
    assert by_tokens(router) == 48
    assert by_text(router) == 0


@pytest.mark.parametrize("first_token_first", [False, True])
def test_ids_that_come_late(first_token_first: bool) -> None:
    """Routed by its bytes, a prompt is found by its ids as soon as they are known."""
    router = router_of()
    plan = ask(router, TEXT, model="m", tenant=b"t")
    same = {"model": "m", "tenant": b"t"}
    assert by_tokens(router, **same) == 0
    if first_token_first:
        router.observe(FirstToken(plan.lease_id), 1.0)
    router.observe(PromptTokens(plan.lease_id, "m", b"t", IDS), 1.0)
    assert by_tokens(router, **same) == 48
    assert by_tokens(router, model="m") == 0
    finish(router, plan)
    assert by_tokens(router, **same) == 48
    assert by_text(router, **same) == 8


def test_what_fails_leaves_neither_key() -> None:
    """Before its first token a lost request takes both chains with it; afterwards none."""
    router = router_of()
    fail(router, ask(router, IDS, prompt_is_tokens=True, spare=TEXT))
    late = ask(router, TEXT)
    router.observe(PromptTokens(late.lease_id, "", b"", IDS), 1.0)
    fail(router, late)
    assert by_tokens(router) == 0
    assert by_text(router) == 0
    plan = ask(router, TEXT)
    router.observe(FirstToken(plan.lease_id), 1.0)
    router.observe(PromptTokens(plan.lease_id, "", b"", IDS), 1.0)
    fail(router, plan)
    assert by_tokens(router) == 48


def test_late_ids_of_what_is_over_are_ignored() -> None:
    """Ids for a closed lease, a second time, or for a prompt without blocks change nothing."""
    router = router_of()
    plan = ask(router, TEXT)
    finish(router, plan)
    router.observe(PromptTokens(plan.lease_id, "", b"", IDS), 1.0)
    assert by_tokens(router) == 0
    short = ask(router, b"short")
    router.observe(PromptTokens(short.lease_id, "", b"", IDS), 1.0)
    assert by_tokens(router) == 0
    again = ask(router, TEXT)
    for ids in (IDS, b"other " * 100):
        router.observe(PromptTokens(again.lease_id, "", b"", ids), 1.0)
    assert by_tokens(router) == 48
    finish(router, again)


def test_both_legs_of_a_dispatch_have_both_keys() -> None:
    """Prefill and decode pods are entered by ids and text, ids that come late included."""
    router = router_of(prefill=1, decode=1)
    plan = ask(router, TEXT)
    router.observe(PrefillDone(plan.lease_id), 1.0)
    router.observe(PromptTokens(plan.lease_id, "", b"", IDS), 1.0)
    finish(router, plan)
    both = ask(router, IDS, prompt_is_tokens=True, spare=TEXT)
    assert both.predicted_cached_tokens == 48
    finish(router, both)
    assert by_text(router) == 8


def test_tokens_per_block_count_both_chains() -> None:
    """With exact tokens a mirror holds capacity / tokenBlockSize blocks, fewer with two keys."""
    router = router_of()
    (pod,) = router.pods()
    assert pod.capacity_blocks == 524_288 // 16
    for _ in range(200):
        plan = ask(router, IDS, prompt_is_tokens=True, spare=TEXT)
        finish(router, plan, prompt_tokens=64)
    for tick in range(300):
        router.tick(2.0 + tick)
    (pod,) = router.pods()
    # Four blocks of tokens and eight of text for 64 tokens.
    assert pod.capacity_blocks == pytest.approx(524_288 / (64 / 12), rel=0.15)


def test_a_retry_and_a_journal_keep_the_spare_key() -> None:
    """The same request for another pod, and as it is written down, has its text beside the ids."""
    asked = request(IDS, prompt_is_tokens=True, spare=TEXT)
    assert asked.once_more(1, None).spare == TEXT
    assert "spare" in Asked.__struct_fields__
