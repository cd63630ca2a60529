"""The one object that matters: `route`, `observe`, `tick`.

Pure: no I/O, no clock, no rng of its own. The same calls give the same plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from calinix.config import Config
from calinix.control.controller import ControllerReport
from calinix.core.admission import ready, refuse, resolve, usable_ids
from calinix.core.bitmap import iterate
from calinix.core.choice import Choice, Recipe
from calinix.core.events import Event, ReplicaFacts
from calinix.core.explain import DecisionRing
from calinix.core.ledger import Lease
from calinix.core.observe import Observer
from calinix.core.pipeline import choose
from calinix.core.plans import Planner
from calinix.core.pods import ROLES, Pod, Role
from calinix.core.pool_views import SteeringView
from calinix.core.requests import Refusal, RefusalReason, RoutePlan, RouteRequest, Work
from calinix.core.roster import Roster
from calinix.core.splitting import is_whole_better, seconds, whole_on
from calinix.core.state import Rng, State
from calinix.core.steering import Steering
from calinix.core.strategies import recipes as recipes_of
from calinix.core.views import PodView, facts_of, pod_view

__all__ = ["Rng", "Router"]

LOOK_INTERVAL_S: Final = 0.5
"""How often `tick` looks for silent and slow pods."""
SLOW_SAMPLES: Final = 8.0
"""First tokens that a pod is judged slow by; after a rest for slowness, one is enough."""
SLOW_FLOOR_S: Final = 0.5
"""Nobody is slow whose first tokens come faster than this."""
_RELEASES_PER_CALL: Final = 256
_GENERATE = Work.GENERATE


class Router:
    """Decides where requests go. `now` is in seconds, monotonic, on the host's clock."""

    def __init__(self, config: Config, rng: Rng, recipes: Mapping[Role, Recipe] | None = None):
        """Starts with the pods of `config`, none of them known to be alive.

        `recipes` take the place of the strategy's, for the roles that they name. Raises ConfigError
        when there are more than `cacheRegistry.maxPods`.
        """
        self._state = state = State(config, rng)
        state.own_recipes = dict(recipes or {})
        state.recipes = recipes_of(state.strategy) | state.own_recipes
        self._roster = Roster(state)
        self._decisions = DecisionRing(config.gateway.decisions_kept)
        self._planner = Planner(state, state.means, self._decisions)
        self._handlers = Observer(state, self._roster, state.means).handlers
        self._names: tuple[str, ...] = ()
        self._names_version = -1
        self._next_look_s = float("-inf")
        self._steering = Steering(state, config.controller)
        upstreams = config.upstreams
        if upstreams.single is not None:
            for pod in upstreams.single.pods:
                self._roster.add(pod, "single")
        if upstreams.dispatch is not None:
            for pod in upstreams.dispatch.prefill.pods:
                self._roster.add(pod, "prefill")
            for pod in upstreams.dispatch.decode.pods:
                self._roster.add(pod, "decode")

    # --- the three verbs ---------------------------------------------------------------------

    def route(self, request: RouteRequest, now: float) -> RoutePlan | Refusal:
        """Prepare, filter, score, pick. A plan's lease is open until Finished or Failed."""
        state = self._state
        if (
            now >= state.health.due_s
            or now >= state.ledger.next_release_s
            or now >= state.replicas.lapse_s
        ):
            self._catch_up(now)
        if now >= state.late_s:
            # Nobody ticks: then whoever comes first pays for the step.
            self._steering.step(now)
        mode = resolve(state, request)
        if mode == "single":
            prompt = state.preparer.prepare(request)
            choice = choose(state, request, prompt, "single", now)
            if choice.pod is None:
                return refuse(request, choice)
            return self._planner.open(request, prompt, choice, None, now)
        if isinstance(mode, Refusal):
            return mode
        return self._dispatch(request, now)

    def _dispatch(self, request: RouteRequest, now: float) -> RoutePlan | Refusal:
        """A prefill pod, then a decode pod near it."""
        state = self._state
        prompt = state.preparer.prepare(request)
        first: Choice | None = None
        alone: Choice | None = None
        near: Pod | None = None
        # What generates nothing is not split: it is one leg to a decode pod.
        if request.prefill_pod is not None:
            near = state.table.find(request.prefill_pod)
            if near is None:
                return Refusal(
                    RefusalReason.NO_POD,
                    f"The prefill pod '{request.prefill_pod}' is not configured any more.",
                )
        elif request.work is _GENERATE and request.split is not False:
            if state.prefill_threshold and request.split is None:
                whole = whole_on(state, prompt)
                choice = choose(state, request, prompt, "decode", now, only=whole)
                if choice.pod is not None:
                    if seconds(choice) is None:
                        return self._planner.open(request, prompt, choice, None, now)
                    alone = choice
            first = choose(state, request, prompt, "prefill", now)
            near = first.pod
            if near is None:
                if alone is not None:
                    return self._planner.open(request, prompt, alone, None, now)
                return refuse(request, first)
        choice = choose(state, request, prompt, "decode", now, near)
        # Where both ways are open: the one that takes less.
        if alone and first and is_whole_better(state, alone, first, choice, now):
            return self._planner.open(request, prompt, alone, None, now)
        if choice.pod is None:
            return refuse(request, choice)
        return self._planner.open(request, prompt, choice, first, now)

    def observe(self, event: Event, now: float) -> None:
        """Takes in a fact. What it speaks of may be unknown or over: then it is ignored.

        Raises ConfigError for a PodAdded that finds no free slot.
        """
        self._handlers[type(event)](event, now)

    def tick(self, now: float) -> None:
        """One bounded share of what time brings. To be called some times a second."""
        state = self._state
        self._catch_up(now)
        if now >= self._steering.due_s:
            self._steering.step(now)
        state.sessions.sweep(now)
        state.pins.sweep(now)
        state.registry.sweep()
        self._roster.resize_next()
        if state.table.retired:
            self._roster.free_retired()
        if now >= self._next_look_s:
            self._next_look_s = now + LOOK_INTERVAL_S
            state.health.look_for_silence(now)
            if state.calibration.doubted:
                state.calibration.fade(now)
            if state.health.rules.passive.enabled:
                self._eject_slow(now)

    # --- views -------------------------------------------------------------------------------

    @property
    def decisions(self) -> DecisionRing:
        """The last plans, with what came of them."""
        return self._decisions

    def pods(self) -> list[PodView]:
        """The configured pods as they are now, by role and slot."""
        state = self._state
        found = [state.table.at[s] for role in ROLES for s in iterate(state.table.role(role))]
        return [
            pod_view(state, pod, self._roster.capacity_blocks(pod.slot))
            for pod in found
            if pod is not None
        ]

    def usable_pods(self) -> list[str]:
        """Ids of the pods that would be given work."""
        return usable_ids(self._state)

    def ready(self) -> bool:
        """Whether at least one mode could serve a request."""
        return ready(self._state)

    def lease(self, lease_id: int) -> Lease | None:
        """What an open lease holds, for hosts that tell other workers of it; not to be changed."""
        return self._state.ledger.leases.get(lease_id)

    def pod_names(self) -> tuple[str, ...]:
        """Ids of the pods by slot, empty where nobody is, up to the last one."""
        table = self._state.table
        if self._names_version != table.version:
            names = ["" if pod is None else pod.id for pod in table.at]
            while names and not names[-1]:
                names.pop()
            self._names, self._names_version = tuple(names), table.version
        return self._names

    def open_leases(self) -> int:
        """Requests routed and not ended."""
        return len(self._state.ledger)

    def controllers(self, now: float) -> dict[Role, ControllerReport]:
        """What the controller of each role knows and does; roles without pods are left out."""
        return self._steering.reports(now)

    def steering(self, now: float) -> SteeringView:
        """The controllers' weights, trajectories and estimates, for people."""
        return self._steering.view(now)

    def facts(self, now: float, replica: str = "") -> ReplicaFacts:  # noqa: ARG002
        """What this router has on its pods and has measured, for others of the same pods."""
        return facts_of(self._state, replica)

    def response_owner(self, response_id: str, now: float) -> str | None:
        """Id of the pod that keeps a stored answer; None when that is not known or it is lost."""
        pod = self._state.pins.find(response_id, now)
        return None if pod is None else pod.id

    def epoch(self, pod_id: str) -> int:
        """Of a configured pod, another one whenever its cache is believed lost; 0: unknown pod."""
        pod = self._state.table.find(pod_id)
        return 0 if pod is None else pod.epoch

    # --- inside ------------------------------------------------------------------------------

    def _catch_up(self, now: float) -> None:
        """What was due by now."""
        state = self._state
        if now >= state.health.due_s:
            state.health.advance(now, state.rates.forget)
        if now >= state.ledger.next_release_s:
            state.ledger.release_due(now, _RELEASES_PER_CALL)
        if now >= state.replicas.lapse_s:
            state.replicas.lapse(now)
            for slot in state.replicas.moved:
                state.ledger.recheck(slot)

    def _eject_slow(self, now: float) -> None:
        """Grey failures: alive, but far slower per token than the median of their peers."""
        state = self._state
        factor = state.health.rules.passive.slow_factor
        for role in ROLES:
            peers = state.table.role(role)
            slots = list(iterate(peers & state.health.usable))
            needed = [1.0 if state.health.of(s).was_slow else SLOW_SAMPLES for s in slots]
            for slot in state.rates.slow(slots, factor, SLOW_FLOOR_S, needed):
                if state.health.may_eject(slot, peers):
                    state.health.eject_slow(slot, now)
