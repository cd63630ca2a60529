"""What others route by, from their published formulas and defaults, as recipes for the simulator.

Each is given what its original has, and never less: ties are broken at random where the original
takes the first, cache indexes know what the pods hold, engine metrics are fresh. They read the
simulated cluster, so a gateway cannot run them.
"""

# ruff: noqa: ARG001, ARG002  one signature for all
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from calinix.core.choice import Choice, Recipe, Scorer
from calinix.core.columns import Term
from calinix.core.kv import Chain, PrefixRegistry
from calinix.core.pickers import PICKERS
from calinix.core.pods import Role
from calinix.core.requests import RouteRequest
from calinix.core.scorers import SCORERS
from calinix.core.state import Rng, State
from calinix.sim.cluster import Baseline, Cluster
from calinix.sim.workload import SimRequest

Floats = npt.NDArray[np.float64]
Recipes = Mapping[Role, Recipe]

SMG_THRESHOLD, SMG_ABSOLUTE, SMG_RELATIVE = 0.3, 64.0, 1.5
"""The command line's defaults (the library's are 0.5, 32 and 1.1)."""
SMG_TREE_TOKENS = (1 << 26) // 4
"""Its tree keeps 2**26 characters a pod."""
LLMD_QUEUE, LLMD_KV, LLMD_PREFIX = 2.0, 2.0, 3.0
AIBRIX_GAP = 8.0
CLAIRVOYANT_ALPHA = 1.0
"""What a second of work here costs those who come later."""


def _any_least(costs: Floats, rng: Rng) -> int:
    """A place of the least cost, all such alike."""
    tied = np.flatnonzero(costs == costs.min())
    return int(tied[int(rng.random() * len(tied))])


def _current(cluster: Cluster) -> SimRequest:
    assert cluster.current is not None
    return cluster.current


def _block_tokens(cluster: Cluster) -> int:
    return cluster.pods[0].figures.block_size


def _slots(choice: Choice) -> list[int]:
    assert choice.among is not None
    return list(choice.among.slots)


def _inflight(choice: Choice) -> Floats:
    assert choice.inflight is not None
    return np.asarray(choice.inflight)


def _depths(choice: Choice) -> Floats:
    """Leading blocks of the prompt on each candidate."""
    if choice.depths is None:
        return np.zeros(len(_slots(choice)))
    return np.asarray(choice.depths)


class _SmgCacheAware:
    """SMG's and vllm-router's cache_aware, with the prefix tree of its own history."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._block_tokens = _block_tokens(cluster)
        self._history = PrefixRegistry(len(cluster.pods), 64)
        for slot in range(len(cluster.pods)):
            self._history.open_slot(slot, SMG_TREE_TOKENS // self._block_tokens)

    def pick(self, state: State, request: RouteRequest, choice: Choice) -> int:
        """Imbalanced: the least loaded. Else the best match over the threshold, else as before."""
        assert choice.among is not None
        loads, slots = _inflight(choice), choice.among.slots
        asked = _current(self._cluster)
        # Only the prompt's full blocks; 0 is no hash.
        full = asked.prompt_tokens // self._block_tokens
        chain = Chain.of(block + 1 for block in asked.chain[:full])
        place = -1
        least, most = float(loads.min()), float(loads.max())
        if not (most - least > SMG_ABSOLUTE and most > SMG_RELATIVE * least):
            depths, deepest = self._history.held(chain, slots)
            if depths is not None and deepest * self._block_tokens > (
                SMG_THRESHOLD * asked.prompt_tokens
            ):
                place = _any_least(-np.asarray(depths), state.rng)
        if place < 0:
            place = _any_least(loads, state.rng)
        if len(chain):
            self._history.route(slots[place], chain, 1)
            self._history.sweep()
        return place


def _smg_cache_aware(cluster: Cluster) -> Recipes:
    """Prefill as single; decode by power of two, as its documentation pairs them."""
    return {
        "single": Recipe(_SmgCacheAware(cluster).pick),
        "prefill": Recipe(_SmgCacheAware(cluster).pick),
        "decode": Recipe(PICKERS["lessLoadedOfTwo"]),
    }


class _Active:
    """The blocks that the requests under way hold on each pod, shared ones once, as Dynamo counts.

    The ledger does not keep chains, so what was picked is remembered until its lease is there.
    """

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._counts: dict[int, Counter[int]] = {}
        self._open: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._pending: tuple[int, tuple[int, ...]] | None = None
        self._last_lease = 0

    def potential(self, state: State, slots: list[int]) -> Floats:
        """Blocks on each pod, if the current request came there as well."""
        self._catch_up(state)
        chain = self._chain()
        found = np.zeros(len(slots))
        for place, slot in enumerate(slots):
            held = self._counts.get(slot)
            shared = 0
            if held:
                shared = next((n for n, block in enumerate(chain) if block not in held), len(chain))
            found[place] = len(held or ()) + len(chain) - shared
        return found

    def picked(self, slot: int) -> None:
        """The current request goes there."""
        self._pending = slot, self._chain()

    def _chain(self) -> tuple[int, ...]:
        asked = _current(self._cluster)
        return tuple(asked.chain[: -(-asked.prompt_tokens // _block_tokens(self._cluster))])

    def _catch_up(self, state: State) -> None:
        leases = state.ledger.leases
        for lease_id in self._open.keys() - leases.keys():
            slot, chain = self._open.pop(lease_id)
            held = self._counts[slot]
            held.subtract(chain)
            for block in chain:
                if held[block] <= 0:
                    del held[block]
        newest = next(reversed(leases), 0)
        if self._pending is not None and newest > self._last_lease:
            slot, chain = self._open[newest] = self._pending
            self._counts.setdefault(slot, Counter()).update(chain)
        self._last_lease = max(self._last_lease, newest)
        self._pending = None


class _DynamoCost:
    """Dynamo's KV router at temperature 0: prefill blocks to compute, and blocks in use."""

    def __init__(self, cluster: Cluster, role: Role):
        self._block_tokens = _block_tokens(cluster)
        self._cluster = cluster
        self._role = role
        self._active = _Active(cluster)

    def pick(self, state: State, request: RouteRequest, choice: Choice) -> int:
        """The least of max(active prefill blocks + prompt blocks - overlap, 0) + decode blocks.

        Prefill pods are compared by the first part alone, decode pods by the second.
        """
        slots = _slots(choice)
        costs = np.zeros(len(slots))
        if self._role != "decode":
            tokens = state.ledger.prefill_tokens[slots] + _current(self._cluster).prompt_tokens
            costs += np.maximum(tokens / self._block_tokens - _depths(choice), 0.0)
        if self._role != "prefill":
            costs += self._active.potential(state, slots)
        place = _any_least(costs, state.rng)
        self._active.picked(slots[place])
        return place


def _dynamo_cost(cluster: Cluster) -> Recipes:
    return {
        "single": Recipe(_DynamoCost(cluster, "single").pick, uses_cache=True),
        "prefill": Recipe(_DynamoCost(cluster, "prefill").pick, uses_cache=True),
        "decode": Recipe(_DynamoCost(cluster, "decode").pick),
    }


def _llmd_default(cluster: Cluster) -> Recipes:
    """llm-d's default profile: queue 2, kv-cache-utilization 2, prefix 3, the highest sum."""

    def queue(state: State, request: RouteRequest, choice: Choice) -> Term | None:
        """(max - q) / (max - min); nothing to say where all are equal."""
        waiting = np.array([float(cluster.pods[slot].waiting) for slot in _slots(choice)])
        span = float(np.ptp(waiting))
        return (float(waiting.max()) - waiting, 1.0 / span, 0.0) if span else None

    def kv_free(state: State, request: RouteRequest, choice: Choice) -> Term | None:
        """1 - the share of KV blocks in use."""
        return np.array([cluster.pods[slot].kv_usage for slot in _slots(choice)]), -1.0, 1.0

    scorers: tuple[tuple[str, float, Scorer], ...] = (
        ("queue", LLMD_QUEUE, queue),
        ("kvFree", LLMD_KV, kv_free),
        ("cache", LLMD_PREFIX, SCORERS["cache"]),
    )
    recipe = Recipe(PICKERS["best"], scorers, uses_cache=True)
    return {"single": recipe, "prefill": recipe, "decode": recipe}


def _aibrix_prefix_pick(state: State, request: RouteRequest, choice: Choice) -> int:
    """The best match that is not one standard deviation above the mean; else the least requests."""
    loads, depths = _inflight(choice), _depths(choice)
    if float(np.ptp(loads)) <= AIBRIX_GAP:
        fit = (depths > 0.0) & (loads <= loads.mean() + loads.std())
        if fit.any():
            best = fit & (depths == depths[fit].max())
            return _any_least(np.where(best, loads, np.inf), state.rng)
    return _any_least(loads, state.rng)


def _aibrix_prefix(cluster: Cluster) -> Recipes:
    recipe = Recipe(_aibrix_prefix_pick, uses_cache=True)
    return {"single": recipe, "prefill": recipe, "decode": Recipe(_least_requests)}


def _least_requests(state: State, request: RouteRequest, choice: Choice) -> int:
    return _any_least(_inflight(choice), state.rng)


def _clairvoyant(cluster: Cluster) -> Recipes:
    """Greedy with the truth: real queues, batches and caches, real lengths, real speeds."""

    def first_token(state: State, request: RouteRequest, choice: Choice) -> int:
        """The earliest first token, with a price on the work that it makes."""
        asked, now = _current(cluster), cluster.clock.now
        costs = np.zeros(len(_slots(choice)))
        for place, slot in enumerate(_slots(choice)):
            pod = cluster.pods[slot]
            size = pod.figures.block_size
            usable = (asked.prompt_tokens - 1) // size
            cached = min(pod.blocks.match(asked.chain), usable) * size
            own_s = pod.figures.prefill_s(asked.prompt_tokens - cached, cached) * pod.slow_factor
            ready_s = pod.predicted_first_token_s(asked.chain, asked.prompt_tokens, now)
            costs[place] = ready_s + CLAIRVOYANT_ALPHA * own_s
        return _any_least(costs, state.rng)

    def last_token(state: State, request: RouteRequest, choice: Choice) -> int:
        """The shortest way from the prefill pod to the last token."""
        asked, now = _current(cluster), cluster.clock.now
        costs = np.zeros(len(_slots(choice)))
        for place, slot in enumerate(_slots(choice)):
            pod = cluster.pods[slot]
            sizes = (asked.chain, asked.prompt_tokens)
            first_s = pod.predicted_first_token_s(*sizes, now)
            decode_s = pod.predicted_finish_s(*sizes, asked.output_tokens, now) - first_s
            is_near = choice.near is not None and cluster.share_host(choice.near.slot, slot)
            transfer_s = 0.0 if is_near else pod.figures.transfer_s(asked.prompt_tokens)
            costs[place] = decode_s + transfer_s
        return _any_least(costs, state.rng)

    first, last = Recipe(first_token), Recipe(last_token)
    return {"single": first, "prefill": first, "decode": last}


BASELINES: dict[str, Baseline] = {
    "smgCacheAware": _smg_cache_aware,
    "dynamoCost": _dynamo_cost,
    "llmdDefault": _llmd_default,
    "aibrixPrefix": _aibrix_prefix,
    "clairvoyant": _clairvoyant,
}
"""By the name that `simulate` takes."""
