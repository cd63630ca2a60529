"""Which mode serves a request, and in what words it is refused when none does."""

from __future__ import annotations

from typing import Final

from calinix.config import Mode
from calinix.core import bitmap
from calinix.core.choice import Choice
from calinix.core.pods import PodTable, Role
from calinix.core.requests import Refusal, RefusalReason, RouteRequest
from calinix.core.state import State

MODE_ROLES: dict[Mode, tuple[Role, ...]] = {
    "single": ("single",),
    "dispatch": ("prefill", "decode"),
}
_MAX_NAMED: Final = 8
_MAX_MODES: Final = 1024


def resolve(state: State, request: RouteRequest) -> Mode | Refusal:
    """The mode of a request.

    The asked one; else that of the pod that alone can answer; else that of the only group that
    serves the model; else `gateway.defaultMode`; else single.
    """
    table = state.table
    if request.mode is not None:
        return _asked(table, request, request.mode)
    only = request.prefill_pod or request.pinned_pod
    if only is not None and (pod := table.find(only)) is not None:
        return "single" if pod.role == "single" else "dispatch"
    if state.modes_version != table.version or len(state.modes) > _MAX_MODES:
        state.modes_version = table.version
        state.modes.clear()
    known = state.modes.get(request.model)
    if known is not None:
        return known
    mode = _open_mode(state, request)
    if not isinstance(mode, Refusal):
        state.modes[request.model] = mode
    return mode


def _open_mode(state: State, request: RouteRequest) -> Mode | Refusal:
    table = state.table
    serving = table.serving(request.model)
    single = bool(table.role("single") & serving)
    dispatch = bool(table.role("prefill") & serving) and bool(table.role("decode") & serving)
    if single and dispatch:
        return state.default_mode or "single"
    if single:
        return "single"
    if dispatch:
        return "dispatch"
    if not len(table):
        return Refusal(RefusalReason.NO_POD, "No pod is configured.")
    return _unknown_model(table, request.model, None)


def _asked(table: PodTable, request: RouteRequest, mode: Mode) -> Mode | Refusal:
    roles = MODE_ROLES[mode]
    if not all(table.role(role) for role in roles):
        there = [other for other, of in MODE_ROLES.items() if all(map(table.role, of))]
        hint = f"; this gateway serves {' and '.join(there)}" if there else ""
        return Refusal(
            RefusalReason.MODE_NOT_SERVED, f"There are no pods for the mode '{mode}'{hint}."
        )
    serving = table.serving(request.model)
    if not all(table.role(role) & serving for role in roles):
        return _unknown_model(table, request.model, mode)
    return mode


def _unknown_model(table: PodTable, model: str, mode: Mode | None) -> Refusal:
    known = sorted({name for pod in table.at if pod is not None for name in pod.config.models})
    named = ", ".join(f"'{name}'" for name in known[:_MAX_NAMED])
    more = ", ..." if len(known) > _MAX_NAMED else ""
    where = f" in the mode '{mode}'" if mode is not None else ""
    return Refusal(
        RefusalReason.MODEL_NOT_SERVED,
        f"The model '{model[:200]}' is not served{where}; configured are {named}{more}.",
    )


_WORDS = {
    "model": "do not serve the model",
    "alive": "are not healthy",
    "ejected": "rest after failures",
    "draining": "are draining",
    "avoided": "have already failed this request",
    "notPinned": "do not keep the earlier response",
    "full": "are full",
}


def refuse(request: RouteRequest, choice: Choice) -> Refusal:
    """Why nobody was left: full when there would be pods but for their maxConns, else no pod."""
    total = choice.pool.bit_count()
    verdict = ", ".join(
        f"{who.bit_count()} {_WORDS.get(name, name)}" for name, who in choice.dropped if who
    )
    is_full = bool(choice.dropped) and choice.dropped[-1][0] == "full"
    pinned = request.pinned_pod
    if pinned is not None and choice.role != "prefill":
        lead = f"Only the pod '{pinned}' can answer this, and it cannot at present"
    elif is_full:
        lead = f"Every {choice.role} pod that could take the request is full"
    else:
        lead = f"No {choice.role} pod can take the request"
    return Refusal(
        RefusalReason.FULL if is_full else RefusalReason.NO_POD,
        f"{lead}: of {total}, {verdict}." if verdict else f"{lead}: there are {total}.",
    )


def usable(state: State, role: Role) -> int:
    """The pods of a role that would be given work, full ones included."""
    return state.table.role(role) & state.health.usable & ~state.table.draining


def ready(state: State) -> bool:
    """Whether at least one mode could serve a request."""
    return any(all(usable(state, role) for role in roles) for roles in MODE_ROLES.values())


def usable_ids(state: State) -> list[str]:
    """Ids of the pods that would be given work."""
    at = state.table.at
    found = [
        at[slot]
        for role in MODE_ROLES["single"] + MODE_ROLES["dispatch"]
        for slot in bitmap.iterate(usable(state, role))
    ]
    return [pod.id for pod in found if pod is not None]
