"""The strategies: which filters, scorers and picker choose a pod, per role.

To add one: write the function, its line in STRATEGIES, and its name in config/policy.py
(docs/policies.md has an example).
"""

from __future__ import annotations

from collections.abc import Callable

from calinix.config import Strategy, Weights
from calinix.core.choice import Recipe
from calinix.core.costs import COSTS
from calinix.core.filters import FILTERS
from calinix.core.pickers import PICKERS
from calinix.core.pods import ROLES, Role
from calinix.core.scorers import SCORERS


def _recipe(
    picker: str, weights: dict[str, float] | None = None, filters: tuple[str, ...] = ()
) -> Recipe:
    """From names. A scorer of weight 0 is left out: it would cost time and change nothing."""
    used = {name: weight for name, weight in (weights or {}).items() if weight > 0.0}
    if weights and not used:
        used = {"load": 0.0}  # all are equal, and the picker still has scores to compare
    return Recipe(
        PICKERS[picker],
        tuple((name, weight, SCORERS[name]) for name, weight in used.items()),
        tuple((name, FILTERS[name]) for name in filters),
        uses_cache="cache" in used,
    )


def _random(strategy: Strategy, role: Role) -> Recipe:  # noqa: ARG001
    return _recipe("random")


def _round_robin(strategy: Strategy, role: Role) -> Recipe:  # noqa: ARG001
    return _recipe("nextInTurn")


def _least_load(strategy: Strategy, role: Role) -> Recipe:  # noqa: ARG001
    return _recipe("best", {"load": 1.0})


def _power_of_two(strategy: Strategy, role: Role) -> Recipe:  # noqa: ARG001
    return _recipe("lessLoadedOfTwo")


def _cache_only(strategy: Strategy, role: Role) -> Recipe:  # noqa: ARG001
    return _recipe("best", {"cache": 1.0})


def _cache_aware(strategy: Strategy, role: Role) -> Recipe:
    weights: Weights = getattr(strategy, role)
    return _recipe(
        "best",
        {
            "cache": weights.cache,
            "load": weights.load,
            "sticky": weights.sticky,
            "locality": weights.locality if role == "decode" else 0.0,
        },
        ("imbalance",) if strategy.imbalance.enabled else (),
    )


def _weighted_round_robin(strategy: Strategy, role: Role) -> Recipe:  # noqa: ARG001
    return _recipe("weightedTurn")


def _weighted_power_of_two(strategy: Strategy, role: Role) -> Recipe:  # noqa: ARG001
    return _recipe("lessLoadedOfTwoWeighted")


def _predictive(strategy: Strategy, role: Role) -> Recipe:  # noqa: ARG001
    names = ["queue", "prefill", "others"]
    names += ["decode", "transfer"] if role == "decode" else ["crowd"]
    names += [] if role == "prefill" else ["session"]
    costs = tuple((name, -1.0, COSTS[name]) for name in names)
    return Recipe(PICKERS["cheapest"], costs, uses_cache=True)


STRATEGIES: dict[str, Callable[[Strategy, Role], Recipe]] = {
    "random": _random,
    "roundRobin": _round_robin,
    "leastLoad": _least_load,
    "powerOfTwo": _power_of_two,
    "cacheOnly": _cache_only,
    "cacheAware": _cache_aware,
    "weightedRoundRobin": _weighted_round_robin,
    "weightedPowerOfTwo": _weighted_power_of_two,
    "predictive": _predictive,
}


def recipes(strategy: Strategy) -> dict[Role, Recipe]:
    """The recipe of each role."""
    return {role: STRATEGIES[strategy.name](strategy, role) for role in ROLES}
