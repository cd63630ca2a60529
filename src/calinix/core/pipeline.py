"""The stages filter, score and pick: from a prepared request to one pod of one role."""

from __future__ import annotations

import numpy as np

from calinix.core import bitmap
from calinix.core.choice import Choice
from calinix.core.filters import narrow
from calinix.core.pods import Pod, Role
from calinix.core.prepare import Prompt
from calinix.core.requests import RouteRequest
from calinix.core.state import State


def choose(
    state: State,
    request: RouteRequest,
    prompt: Prompt,
    role: Role,
    now: float,
    near: Pod | None = None,
) -> Choice:
    """Chooses a pod; `pod` of the result is None when nobody is left. `now` in seconds."""
    table = state.table
    choice = Choice(role, request, prompt, table.role(role), table.snapshot(), near)
    narrow(state, choice)
    if not choice.candidates:
        return choice
    recipe = state.recipes[role]
    _look(state, choice)
    for name, keep in recipe.filters:
        kept = keep(state, choice)
        if choice.candidates & ~kept:
            choice.drop(name, kept)
            _look(state, choice)
    among = choice.among
    assert among is not None
    if recipe.uses_cache and prompt.blocks:
        depths = choice.depths = np.empty(among.count)
        state.registry.depths(prompt.chain, among.slots32, depths)
        silent = state.health.silent & choice.candidates
        if silent:
            for slot in bitmap.iterate(silent):
                depths[among.index(slot)] = 0.0
    if recipe.scorers:
        key = request.session_key
        if key is not None:
            choice.last = state.sessions.last((request.tenant, key), role, now)
        _score(state, choice)
    choice.index = index = recipe.picker(state, choice)
    choice.pod = table.at[among.slots.item(index)]
    return choice


def _look(state: State, choice: Choice) -> None:
    """Takes the candidates' load."""
    among = choice.among = state.table.slot_set(choice.candidates)
    inflight = choice.inflight = state.ledger.inflight[among.slots]
    choice.busiest = inflight.item(int(inflight.argmax()))


def _score(state: State, choice: Choice) -> None:
    """The weighted sum of the recipe's scorers."""
    total = None
    terms = []
    for name, weight, scale, scorer in state.recipes[choice.role].scorers:
        scores = scorer(state, choice)
        if scores is not None:
            terms.append((name, weight, scores))
            total = scores * scale if total is None else total + scores * scale
    choice.terms = tuple(terms)
    if total is None:
        assert choice.among is not None
        total = np.zeros(choice.among.count)
    choice.scores = total
