"""The costs that the predictive strategy compares: each in seconds, one for every candidate.

To add one: write the function, and its line in COSTS. Those of a recipe are called in its order:
`queue` sets `choice.request_s`, which `crowd` reads, and `prefill` `choice.own_s`, which `others`
does. A credit is a cost below zero. As scorers they weigh -1: the cheapest candidate has the
highest score.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from calinix.core.choice import Choice, Scorer
from calinix.core.columns import Term
from calinix.core.kv import backlog_s, prefill_s, token_s
from calinix.core.rates import REQUEST_TOKENS
from calinix.core.requests import RouteRequest, Work
from calinix.core.state import State

LEAST_OTHERS: Final = 0.5
MOST_OTHERS: Final = 8.0
"""Bounds of what a second of prefill costs those behind it, in seconds."""
MOST_REQUEST_S: Final = 0.002
"""Most that one more request is taken to add to an output token; a bad fit may say anything."""

_GENERATE, _POOLING, _NONE = Work.GENERATE, Work.POOLING, Work.NONE


def queue(state: State, request: RouteRequest, choice: Choice) -> Term | None:
    """What the pod has before its first token has to be prefilled first."""
    role, work = choice.role, request.work
    if work is _NONE or is_second(request, choice):
        return None
    assert choice.among is not None
    pace = state.rates.pool_pace(role)
    found, mean_s = backlog_s(
        state.ledger.loads.work, state.rates.paces, choice.among.slots, pace, state.replicas.work
    )
    choice.request_s = (state.means.prompt_tokens(role) + REQUEST_TOKENS) * pace
    if work is _GENERATE:
        state.outlooks[role].met(mean_s / choice.request_s)
    return found, 1.0, 0.0


def prefill(state: State, request: RouteRequest, choice: Choice) -> Term | None:
    """What the pod does not hold of the prompt has to be computed."""
    role, work = choice.role, request.work
    if work is _NONE or is_second(request, choice):
        return None
    assert choice.among is not None
    rule = state.strategy.predictive
    attention = 1.0 / rule.attention_tokens if rule.attention_tokens > 0.0 else 0.0
    if work is _GENERATE:
        own = prefill_s(
            choice.depths if choice.deepest else None,
            state.rates.paces,
            choice.among.slots,
            state.rates.pool_pace(role),
            choice.tokens,
            choice.block_tokens,
            choice.cap_blocks,
            attention,
            REQUEST_TOKENS,
        )
    else:
        tokens = choice.tokens if work is _POOLING else state.means.prompt_tokens(role)
        pace = state.rates.pool_pace(role)
        own = prefill_s(
            None, state.rates.paces, choice.among.slots, pace, tokens, 0.0, 0.0, attention,
            REQUEST_TOKENS,
        )  # fmt: skip
    choice.own_s = own
    return own, 1.0, 0.0


def is_second(request: RouteRequest, choice: Choice) -> bool:
    """Whether the prompt comes from a prefill pod."""
    return choice.role == "decode" and choice.near is not None and request.work is _GENERATE


def others(state: State, request: RouteRequest, choice: Choice) -> Term | None:
    """Whoever comes to the pod next waits for this prefill, too: the more, the longer queues are.

    It is what keeps a pool from computing the same prefixes everywhere when it is nearly full. On
    decode pods all answers stand still meanwhile.
    """
    own = choice.own_s
    if own is None:
        return None
    price = LEAST_OTHERS + state.strategy.predictive.queue_price * state.outlooks[choice.role].queue
    price = min(price, MOST_OTHERS)
    if choice.role == "decode" and request.work is _GENERATE:
        seconds = np.asarray(own)
        # What a request costs beside its tokens is waiting, not computing.
        still = np.maximum(seconds - REQUEST_TOKENS * state.rates.pool_pace("decode"), 0.0)
        return price * seconds + still * np.asarray(choice.inflight), 1.0, 0.0
    return own, price, 0.0


def crowd(state: State, request: RouteRequest, choice: Choice) -> Term | None:
    """Each request that the pod has slows the answer down, and is slowed down by it."""
    role = choice.role
    assert choice.inflight is not None
    outlook = state.outlooks[role]
    seconds = state.strategy.predictive.crowding * choice.request_s
    if role == "single" and request.work is _GENERATE:
        tokens = state.means.output_tokens(request.max_output_tokens)
        step_s = outlook.request_s
        seconds += tokens * (min(step_s, MOST_REQUEST_S))
    return choice.inflight, seconds, 0.0


def decode(state: State, request: RouteRequest, choice: Choice) -> Term | None:
    """Token after token of the answer, on a pod with so many requests and so much in its cache."""
    if request.work is not _GENERATE:
        return None
    assert choice.among is not None
    assert choice.inflight is not None
    outlook = state.outlooks[choice.role]
    found = token_s(
        choice.inflight,
        state.ledger.loads.context,
        state.slowness,
        choice.among.slots,
        outlook.token_s,
        outlook.request_s,
        outlook.context_s,
        state.replicas.context,
    )
    return found, state.means.output_tokens(request.max_output_tokens), 0.0


def transfer(state: State, request: RouteRequest, choice: Choice) -> Term | None:
    """The prompt's KV has to come from the prefill pod, as far as it is not there already."""
    near, among = choice.near, choice.among
    if near is None or among is None or request.work is not _GENERATE:
        return None
    paces = state.transfers.paces(state.transfers.ways(state.table, near.slot, among))
    if choice.depths is None or not choice.deepest:
        missing = np.full(among.count, choice.tokens)
    else:
        held = np.minimum(np.asarray(choice.depths), choice.cap_blocks) * choice.block_tokens
        missing = np.maximum(choice.tokens - held, 0.0)
    return missing * paces, 1.0, 0.0


def session(state: State, request: RouteRequest, choice: Choice) -> Term | None:
    """The session's last answer is in its pod's cache, though no prompt has said so yet."""
    last, among = choice.last, choice.among
    if last is None or among is None or not choice.candidates >> last.slot & 1:
        return None
    tokens = choice.answer_tokens
    if tokens <= 0.0 or request.work is not _GENERATE:
        return None
    place = among.index(last.slot)
    depth = 0.0 if choice.depths is None else float(choice.depths[place])
    uncached = choice.tokens - min(depth, choice.cap_blocks) * choice.block_tokens
    saved = min(tokens, max(uncached, 0.0))
    if choice.role == "single":
        price = 1.0 + LEAST_OTHERS
        seconds = saved * state.rates.pace(last) * price
    elif choice.role == "decode" and choice.near is not None:
        seconds = saved * state.transfers.pace(state.table, choice.near.slot, last.slot)
    else:
        return None
    values = array("d", among.zeros)
    values[place] = -seconds
    return values, 1.0, 0.0


COSTS: dict[str, Scorer] = {
    "queue": queue,
    "prefill": prefill,
    "others": others,
    "crowd": crowd,
    "decode": decode,
    "transfer": transfer,
    "session": session,
}
