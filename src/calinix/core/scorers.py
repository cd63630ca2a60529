"""The scorers: each gives every candidate a score in [0, 1].

To add one: write the function, and its line in SCORERS.
"""

# ruff: noqa: ARG001  one signature for all
from __future__ import annotations

from typing import Final

import numpy as np

from calinix.core.choice import Choice, Scorer
from calinix.core.columns import Term
from calinix.core.requests import RouteRequest
from calinix.core.state import State

LEAST_BUSIEST: Final = 8.0
"""Below so many requests on the busiest candidate, load differences count less."""


def cache(state: State, request: RouteRequest, choice: Choice) -> Term | None:
    """The share of the prompt's full blocks that the pod holds."""
    if choice.depths is None or not choice.deepest:
        return None
    return choice.depths, 1.0 / choice.blocks, 0.0


def load(state: State, request: RouteRequest, choice: Choice) -> Term | None:
    """1 - n / max(n_max, 8): n requests inflight, n_max on the busiest candidate."""
    assert choice.inflight is not None
    busiest = choice.busiest
    most = busiest if busiest > LEAST_BUSIEST else LEAST_BUSIEST  # noqa: FURB136  max() is slow
    return choice.inflight, -1.0 / most, 1.0


def sticky(state: State, request: RouteRequest, choice: Choice) -> Term | None:
    """1 for the pod that served the session last."""
    last, among = choice.last, choice.among
    if last is None or among is None or not choice.candidates >> last.slot & 1:
        return None
    scores = np.zeros(among.count)
    scores[among.index(last.slot)] = 1.0
    return scores, 1.0, 0.0


def locality(state: State, request: RouteRequest, choice: Choice) -> Term | None:
    """1 for pods near the prefill pod: the same engine, or the same host or zone label.

    Once the ways are measured, by how long KV takes on them.
    """
    near, among = choice.near, choice.among
    if near is None or among is None:
        return None
    ways = state.transfers.ways(state.table, near.slot, among)
    measured = state.transfers.nearness(ways)
    return ways.near if measured is None else measured, 1.0, 0.0


SCORERS: dict[str, Scorer] = {
    "cache": cache,
    "load": load,
    "sticky": sticky,
    "locality": locality,
}
