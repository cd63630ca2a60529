"""The stages filter, score and pick: from a prepared request to one pod of one role."""

from __future__ import annotations

from calinix.core import bitmap
from calinix.core.bitmap import HostBitmap
from calinix.core.choice import Choice, Recipe
from calinix.core.filters import narrow, without_busy_holders
from calinix.core.kv import look, weigh
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
    only: HostBitmap = -1,
) -> Choice:
    """Chooses a pod; `pod` of the result is None when nobody is left. `now` in seconds.

    `only`: those that can do without a prefill pod, where the request is to be served whole.
    """
    table = state.table
    choice = Choice(role, prompt.blocks, table.roles[role], table.who, near, now=now)
    narrow(state, request, choice)
    candidates = choice.candidates
    if candidates & only != candidates:
        choice.drop("needsPrefill", only)
        candidates = choice.candidates
    if not candidates:
        return choice
    recipe = state.recipes[role]
    among = _look(state, choice)
    for name, keep in recipe.filters:
        kept = keep(state, request, choice)
        if candidates & kept != candidates:
            choice.drop(name, kept)
            candidates = choice.candidates
            among = _look(state, choice)
    index = _pick(state, request, prompt, choice, recipe, among)
    if choice.deepest and recipe.filters:
        kept = without_busy_holders(state, choice, index)
        if kept:
            choice.drop("busyHolders", kept)
            among = _look(state, choice)
            index = _pick(state, request, prompt, choice, recipe, among)
    choice.index = index
    choice.scores = None
    choice.pod = table.at[among.slots[index]]
    return choice


def _pick(
    state: State,
    request: RouteRequest,
    prompt: Prompt,
    choice: Choice,
    recipe: Recipe,
    among: SlotSet,
) -> int:
    """Looks up what they hold, scores and picks: the place of the pick."""
    candidates = choice.candidates
    if recipe.uses_cache and choice.blocks:
        depths, deepest = state.registry.held(prompt.chain, among.slots)
        choice.deepest = float(deepest)
        choice.depths = among.zeros if depths is None else depths
        choice.trusts = None
        if state.health.silent & candidates:
            choice.silent = state.health.silent & candidates
            if depths is not None:
                _mask(choice)
        if depths is not None and state.calibration.doubted & candidates:
            _discount(state, choice)
    if recipe.scorers:
        choice.tokens, choice.block_tokens = prompt.tokens, prompt.block_tokens
        choice.cap_blocks = prompt.cap_blocks
        if request.session_key is not None:
            session = state.sessions.find((request.tenant, request.session_key), choice.now)
            if session is not None:
                choice.last = state.sessions.pod_of(session, choice.role)
                choice.answer_tokens = session.answer_tokens
        terms = choice.terms = [scorer(state, request, choice) for _, _, scorer in recipe.scorers]
        choice.names, choice.weights = recipe.names, recipe.weights
        choice.scores = weigh(terms, recipe.weights, among.count)
    return recipe.picker(state, request, choice)


def _look(state: State, choice: Choice) -> SlotSet:
    """Takes the candidates' load."""
    candidates, table = choice.candidates, state.table
    among = choice.among = table.slot_sets.get(candidates) or table.slot_set(candidates)
    choice.inflight, choice.busiest = look(
        state.ledger.loads.inflight, among.slots, state.replicas.inflight
    )
    return among


def _mask(choice: Choice) -> None:
    """What silent pods were believed to hold is not counted on."""
    among, depths = choice.among, choice.depths
    assert among is not None
    assert depths is not None
    for slot in bitmap.iterate(choice.silent):
        depths[among.index(slot)] = 0.0
    choice.deepest = max(depths)


def _discount(state: State, choice: Choice) -> None:
    """What pods hold counts by how far they were found to hold what was believed."""
    among, depths = choice.among, choice.depths
    assert among is not None
    assert depths is not None
    trusts = choice.trusts = state.calibration.trusts(among.slots)
    for place, trust in enumerate(trusts):
        depths[place] *= trust
    choice.deepest = max(depths)
