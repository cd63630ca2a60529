"""The filters: each says which pods may stay candidates, and is named in explanations.

To add one: write the function, and its line in ALWAYS or FILTERS.
"""

# ruff: noqa: ARG001  one signature for all
from __future__ import annotations

from typing import Final

from calinix.core.bitmap import HostBitmap
from calinix.core.choice import Choice, Filter
from calinix.core.kv import balanced, least_of_highest, only_highest
from calinix.core.requests import RouteRequest
from calinix.core.state import State

COPY_SHARE: Final = 0.2
"""Pods that hold a hot prefix are too few where all have so much of their own over the mean, which
is a quarter of the mean."""


def alive(state: State, request: RouteRequest, choice: Choice) -> HostBitmap:
    """Pods whose probes are good."""
    return state.health.alive


def ejected(state: State, request: RouteRequest, choice: Choice) -> HostBitmap:
    """Pods that are not at rest after failures; a half-open one takes one request at a time."""
    return ~(state.health.ejected | state.health.trying)


def draining(state: State, request: RouteRequest, choice: Choice) -> HostBitmap:
    """Pods that take new work."""
    return ~state.table.draining


def model(state: State, request: RouteRequest, choice: Choice) -> HostBitmap:
    """Pods that serve the model."""
    return state.table.serving(request.model)


def avoided(state: State, request: RouteRequest, choice: Choice) -> HostBitmap:
    """Pods that this request has not failed on yet."""
    return ~request.avoid


def not_pinned(state: State, request: RouteRequest, choice: Choice) -> HostBitmap:
    """The one pod that can answer, where there is such a one."""
    pinned = request.pinned_pod
    if pinned is None or choice.role == "prefill":
        return choice.candidates
    pod = state.table.find(pinned)
    return 0 if pod is None else 1 << pod.slot


def full(state: State, request: RouteRequest, choice: Choice) -> HostBitmap:
    """Pods with inflight < maxConns."""
    return ~state.ledger.full


def cooling(state: State, request: RouteRequest, choice: Choice) -> HostBitmap:
    """Pods that did not answer 429 or 503 a moment ago, as long as there are others."""
    return choice.candidates & ~state.health.cooling or choice.candidates


def on_trial(state: State, request: RouteRequest, choice: Choice) -> HostBitmap:
    """A request that has failed once is not risked on a half-open pod if there are others."""
    if not request.avoid:
        return choice.candidates
    return choice.candidates & ~state.health.half_open or choice.candidates


def imbalance(state: State, request: RouteRequest, choice: Choice) -> HostBitmap:
    """Pods with inflight <= factor x mean + offset over the candidates."""
    rule = state.strategy.imbalance
    if choice.busiest <= rule.offset:
        return choice.candidates  # whatever the mean is
    assert choice.among is not None
    assert choice.inflight is not None
    kept = balanced(choice.inflight, choice.among.slots, rule.factor, rule.offset)
    return kept or choice.candidates


def without_busy_holders(state: State, choice: Choice, pick: int) -> HostBitmap:
    """Who does not hold a hot prefix, so that another pod comes to hold it; 0: nobody has to.

    Hot is what two pods or more hold most of, while all that hold it have more than the mean, by
    copyOffset requests and by a quarter. What one pod holds is somebody's own conversation.
    """
    inflight, depths, among = choice.inflight, choice.depths, choice.among
    assert inflight is not None
    assert depths is not None
    assert among is not None
    offset = state.strategy.imbalance.copy_offset
    if inflight[pick] <= offset or depths[pick] < choice.deepest or only_highest(depths) >= 0:
        return 0
    least = least_of_highest(depths, inflight, 0.0)
    load = inflight[least]
    if load <= offset:
        return 0
    slots, own = among.slots, COPY_SHARE * load
    kept = balanced(inflight, slots, 1.0, offset if own < offset else own)  # noqa: FURB136
    if not kept or kept >> slots[least] & 1:
        return 0
    others = 0
    for place in range(among.count):
        if depths[place] < choice.deepest:
            others |= 1 << slots[place]
    return others


ALWAYS: dict[str, Filter] = {
    "model": model,
    "alive": alive,
    "ejected": ejected,
    "draining": draining,
    "avoided": avoided,
    "notPinned": not_pinned,
    "full": full,
    "cooling": cooling,
    "onTrial": on_trial,
}
"""Apply to every strategy, in this order. `full` is the last that can leave nobody."""

FILTERS: dict[str, Filter] = {"imbalance": imbalance}
"""For strategies to choose from."""


def narrow(state: State, request: RouteRequest, choice: Choice) -> None:
    """Applies the filters that always apply, from the whole pool."""
    pool = choice.candidates = choice.pool
    table, health = state.table, state.health
    unfit = table.draining | state.ledger.full | health.cooling | request.avoid
    if (
        (not unfit or not pool & unfit)
        and pool & health.usable == pool
        and request.pinned_pod is None
        and (pool & table.any_model == pool or pool & table.serving(request.model) == pool)
    ):
        return  # the usual case: nobody would be dropped
    for name, keep in ALWAYS.items():
        kept = keep(state, request, choice)
        if choice.candidates & ~kept:
            choice.drop(name, kept)
