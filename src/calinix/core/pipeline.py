"""The stages filter, score and pick: from a prepared request to one pod of one role."""

from __future__ import annotations

import numpy as np

from calinix.core import bitmap
from calinix.core.choice import Choice, Recipe
from calinix.core.columns import Floats
from calinix.core.filters import narrow
from calinix.core.pods import Pod, Role, SlotSet
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
    choice = Choice(role, prompt.blocks, table.role(role), table.who, near)
    narrow(state, request, choice)
    candidates = choice.candidates
    if not candidates:
        return choice
    recipe = state.recipes[role]
    among = _look(state, choice)
    for name, keep in recipe.filters:
        kept = keep(state, request, choice)
        if candidates & ~kept:
            choice.drop(name, kept)
            candidates = choice.candidates
            among = _look(state, choice)
    if recipe.uses_cache and prompt.blocks:
        depths = choice.depths = np.empty(among.count)
        choice.deepest = state.registry.depths(prompt.chain, among.slots32, depths)
        if state.health.silent & candidates:
            choice.silent = state.health.silent & candidates
            _mask(choice)
    if recipe.scorers:
        if request.session_key is not None:
            key = (request.tenant, request.session_key)
            choice.last = state.sessions.last(key, role, now)
        _score(state, request, choice, recipe)
    choice.index = index = recipe.picker(state, request, choice)
    choice.pod = table.at[among.slots.item(index)]
    return choice


def _look(state: State, choice: Choice) -> SlotSet:
    """Takes the candidates' load."""
    candidates, table = choice.candidates, state.table
    among = choice.among = table.slot_sets.get(candidates) or table.slot_set(candidates)
    inflight = choice.inflight = state.ledger.inflight[among.slots]
    choice.busiest = inflight.item(inflight.argmax())
    return among


def _mask(choice: Choice) -> None:
    """What silent pods were believed to hold is not counted on."""
    among, depths = choice.among, choice.depths
    assert among is not None
    assert depths is not None
    for slot in bitmap.iterate(choice.silent):
        depths[among.index(slot)] = 0.0
    choice.deepest = depths.max().item()


def _score(state: State, request: RouteRequest, choice: Choice, recipe: Recipe) -> None:
    """The weighted sum of the recipe's scorers."""
    total: Floats | None = None
    terms = []
    for name, weight, scorer in recipe.scorers:
        term = scorer(state, request, choice)
        if term is not None:
            terms.append((name, weight, term))
            part = term[0] * (weight * term[1])
            if total is None:
                total = part
            else:
                total += part
    choice.terms = tuple(terms)
    if total is None:
        assert choice.among is not None
        total = np.zeros(choice.among.count)
    choice.scores = total
