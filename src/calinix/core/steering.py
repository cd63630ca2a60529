"""Steers each pool: a few times a second, from what was counted to estimates and weights.

A step reads the columns of load, learns what requests have left behind (core/outlook.py), lets the
pool's controller find weights, and writes them where pickers read them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from calinix.config import Controller
from calinix.control.controller import ControllerReport, PoolController
from calinix.control.estimators import ArrivalRate, TpotModel
from calinix.control.model import MpcSettings, equal_delay_target
from calinix.control.shares import bounded_weights
from calinix.core import bitmap
from calinix.core.admission import usable
from calinix.core.columns import Values
from calinix.core.peers import without_some
from calinix.core.pods import ROLES, Role
from calinix.core.pool_views import SteeringView, pool_view
from calinix.core.state import State

Floats = npt.NDArray[np.float64]

LATE = 1.5
"""Periods after which a step is taken by a request if no tick takes it."""
BUSY_TAU_S = 10.0
"""Busy seconds after which what a pod completed counts a third; seconds of the clock, where it is
the throughput that is asked for."""
START_REQUEST_S = 0.00005
"""What one more request adds to an output token of a pool that nothing has been measured of. With
nothing at all, a hot prefix would stay on one pod where engines never say what their answers hold.
"""
OLD_SYNC_S, STEP_SYNC_S = 1.0, 4.0
"""With reports from other replicas every second their queues are fresh enough to steer by; with
four seconds more only measured speeds are."""


class _Pool:
    """One role's controller, and what it has counted."""

    def __init__(self, role: Role, settings: MpcSettings, slots: int):
        self.role = role
        self.controller = PoolController(settings, slots)
        self.arrivals = ArrivalRate()
        self.requests = 0.0
        self.work = 0.0
        self.times = TpotModel(slots)


class Steering:
    """The controllers of all roles. `due_s` is when the next step is due."""

    def __init__(self, state: State, settings: Controller):
        self._state = state
        self._is_on = settings.enabled
        self._literal = settings.mode == "literal"
        self._period_s = settings.step_ms / 1e3
        self._pools: dict[Role, _Pool] = {}
        self._settings = MpcSettings(
            horizon=settings.horizon,
            dt_s=self._period_s,
            weight_min=settings.weight_min,
            weight_max=settings.weight_max,
            regularisation=settings.regularisation,
            mode=settings.mode,
        )
        slots = state.table.max_pods
        self._done: Floats = np.zeros(slots)
        self._busy_s: Floats = np.zeros(slots)
        self._rate_done: Floats = np.zeros(slots)
        """Completions, forgotten as the seconds beside them are."""
        self._rate_busy_s: Floats = np.zeros(slots)
        self._counted_s = float("nan")
        self._epochs = [0] * slots
        for outlook in state.outlooks.values():
            outlook.request_s = START_REQUEST_S
        self.due_s = float("-inf")

    def step(self, now: float) -> None:
        """One step of every pool that has pods."""
        state = self._state
        self.due_s = now + self._period_s
        state.late_s = now + LATE * self._period_s
        if state.replicas.refresh(now):
            without_some(state)
        state.ledger.others = state.replicas.in_workers  # summed up anew
        self._count_completions(now)
        for role in ROLES:
            members = state.table.role(role)
            if not members:
                continue
            pool = self._pools.get(role)
            if pool is None:
                pool = self._pools[role] = _Pool(role, self._settings, state.table.max_pods)
            slots = list(bitmap.iterate(members))
            self._learn_answers(pool, slots, now)
            self._look_for_overdue(slots, now)
            self._steer(pool, now)

    def reports(self, now: float) -> dict[Role, ControllerReport]:
        """What each pool's controller knows and does."""
        return {role: pool.controller.report(now) for role, pool in self._pools.items()}

    def view(self, now: float) -> SteeringView:
        """All that people see of it."""
        state = self._state
        return SteeringView(
            pools=[
                pool_view(state, role, report, self._in_requests(role), now)
                for role, report in self.reports(now).items()
            ],
            replicas=len(state.replicas),
            replicas_sync_s=state.replicas.sync_s or None,
        )

    def _in_requests(self, role: Role) -> bool:
        return role == "decode" or self._literal

    # --- what is learned ---------------------------------------------------------------------

    def _count_completions(self, now: float) -> None:
        """Completions per busy second, by slot; in literal mode per second of the clock.

        Another process begins with nothing.
        """
        state = self._state
        loads = state.ledger.loads
        done = np.array(loads.done)
        running = np.asarray(loads.inflight) > 0.0
        busy_s = np.array(loads.busy_s)
        busy_s[running] += now - np.asarray(loads.busy_from)[running]
        new_s = np.maximum(busy_s - self._busy_s, 0.0)
        if self._literal:
            new_s = np.full(len(busy_s), np.nan_to_num(now - self._counted_s))
        self._counted_s = now
        keep = np.exp(-new_s / BUSY_TAU_S)
        self._rate_done = keep * self._rate_done + (done - self._done)
        self._rate_busy_s = keep * self._rate_busy_s + new_s
        self._done, self._busy_s = done, busy_s
        for slot, pod in enumerate(state.table.at):
            epoch = 0 if pod is None else pod.epoch
            if epoch != self._epochs[slot]:
                self._epochs[slot] = epoch
                self._rate_done[slot] = self._rate_busy_s[slot] = 0.0
                state.answers[slot] = None
                for pool in self._pools.values():
                    pool.times.forget(slot)

    def _learn_answers(self, pool: _Pool, slots: list[int], now: float) -> None:
        state = self._state
        for slot in slots:
            found = state.answers[slot]
            if found is None or found.tokens <= 0.0:
                continue
            state.answers[slot] = None
            pool.times.add(now, slot, found.load / found.tokens, found.seconds / found.tokens)
        outlook, times = state.outlooks[pool.role], pool.times
        if times.b0_s > 0.0:
            outlook.token_s, outlook.request_s = times.b0_s, times.b1_s
        for slot in slots:
            state.slowness[slot] = times.slowness(slot)

    def _look_for_overdue(self, slots: list[int], now: float) -> None:
        """Pods whose oldest request should long have had its first token are slow by now."""
        ledger, rates = self._state.ledger, self._state.rates
        rates.refresh(slots)
        for slot in slots:
            lease = ledger.oldest(slot)
            if lease is not None and not lease.hidden:
                rates.wait(slot, lease.effort, lease.opened_s, now)

    # --- weights -----------------------------------------------------------------------------

    def _steer(self, pool: _Pool, now: float) -> None:
        state, role = self._state, pool.role
        alive = list(bitmap.iterate(usable(state, role)))
        queue, speed, arrivals, target = self._seen(pool, now)
        if self._is_on and alive:
            pool.controller.step(now, now, alive, queue, speed, arrivals, target)
            weights = pool.controller.weights
        else:
            weights = np.ones(state.table.max_pods)
        blind = self._blind(weights, speed, alive)
        for slot in bitmap.iterate(state.table.role(role)):
            state.weights[slot] = weights[slot]
            state.blind_weights[slot] = blind[slot]

    def _seen(self, pool: _Pool, now: float) -> tuple[Floats, Floats, float, Floats | None]:
        """(queue, service rate, arrival rate, target), the arrays by slot."""
        state, role = self._state, pool.role
        outlook, loads, replicas = state.outlooks[role], state.ledger.loads, state.replicas
        requests, work = outlook.requests - pool.requests, outlook.work - pool.work
        pool.requests, pool.work = outlook.requests, outlook.work
        other_requests, other_work = replicas.flow(role)
        in_requests = self._in_requests(role)
        pool.arrivals.add(now, requests if in_requests else work)
        arrivals = pool.arrivals.rate(now) + (other_requests if in_requests else other_work)
        if in_requests:
            queue = _with(loads.inflight, replicas.inflight)
            busy = np.full(len(queue), np.nan)
            # A pod that has completed nothing yet is not one that completes nothing.
            known = (self._rate_busy_s > 0.0) & (self._rate_done > 0.0)
            busy[known] = self._rate_done[known] / self._rate_busy_s[known]
            if self._literal:
                return queue, busy, arrivals, None
            target = np.zeros(len(queue))
            slots = list(bitmap.iterate(usable(state, role)))
            target[slots] = equal_delay_target(queue[slots], busy[slots])
            return queue, busy, arrivals, target
        pace = state.rates.pool_pace(role)
        paces = np.array(state.rates.paces)
        speed = np.full(len(paces), np.nan)
        measured = paces > 0.0
        speed[measured] = pace / paces[measured]
        # All in seconds of a pod of mean speed.
        return _with(loads.work, replicas.work) * pace, speed, arrivals * pace, None

    def _blind(self, weights: Floats, speed: Floats, alive: list[int]) -> Floats:
        """Weights for turns where others' load is old: the older, the more by speed alone."""
        sync_s = self._state.replicas.sync_s
        share = min(max((sync_s - OLD_SYNC_S) / STEP_SYNC_S, 0.0), 1.0)
        if share == 0.0 or len(alive) < 2:
            return weights
        own = speed[alive]
        own = np.where(np.isfinite(own), own, np.nanmean(own) if np.isfinite(own).any() else 1.0)
        mean = float(own.mean())
        pure = np.ones(len(weights))
        if mean > 0.0:
            settings = self._settings
            pure[alive] = bounded_weights(own / mean, settings.weight_min, settings.weight_max)
        blended: Floats = (1.0 - share) * weights + share * pure
        return blended


def _with(column: Values, more: Values | None) -> Floats:
    found: Floats = np.array(column)
    return found if more is None else found + np.asarray(more)
