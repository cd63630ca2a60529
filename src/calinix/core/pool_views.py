"""What people see of a pool's controller and of the estimates it steers by: plain data."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from calinix.control.controller import ControllerReport
from calinix.control.estimators import trust
from calinix.core.pods import Role
from calinix.core.state import State


class SteeredPod(msgspec.Struct, frozen=True, rename="camel"):
    """One pod, as its pool's controller sees it. Queues and rates are in the pool's unit."""

    pod_id: str
    weight: float
    """1 is the mean pod's share of the load; a pod that is not usable has 1, and gets nothing."""
    usable: bool
    queue: float | None
    """What waits for its first token, or (decode pods) is inflight; null: not usable."""
    service_rate: float | None
    """Units a second, as used."""
    weights_ahead: list[float]
    """w_0..w_{H-1}."""
    queues_ahead: list[float]
    """q_1..q_H."""
    prefill_tokens_per_s: float | None
    """As costs are reckoned with; null: the pool's is taken."""
    samples: float
    """What the pod's own rate rests on, old ones counting less."""
    sample_age_s: float | None
    """Seconds since the last one; null: never."""
    confidence: float
    """Of it, in [0, 1]."""
    slowness: float
    """Time per output token over what the pool's model says."""


class SteeredPool(msgspec.Struct, frozen=True, rename="camel"):
    """One role's pods and their controller."""

    role: Role
    unit: Literal["seconds", "requests"]
    """Of queues and rates: seconds of prefill on a mean pod, or requests."""
    steering: str
    """starting, fresh, held or decaying: where the weights in use come from."""
    status: str | None
    """Of the last solution."""
    steps: int
    fallbacks: int
    """Steps that brought no fresh weights."""
    step_age_s: float
    snapshot_age_s: float
    arrival_rate: float
    """Units a second."""
    prefill_tokens_per_s: float
    """Of the mean pod."""
    mean_queue: float
    """Mean requests that wait on a pod, as requests find it."""
    token_s: float
    """Seconds per output token on a pod with nothing else to do."""
    token_s_per_request: float
    """What each request that the pod has adds to that."""
    pods: list[SteeredPod]


class SteeringView(msgspec.Struct, frozen=True, rename="camel"):
    """All pools, and the other routers of the same pods."""

    pools: list[SteeredPool]
    replicas: int
    """Other routers that are heard of."""
    replicas_sync_s: float | None
    """How often they say what they have."""


def pool_view(
    state: State, role: Role, report: ControllerReport, in_requests: bool, now: float
) -> SteeredPool:
    """The view of one role's pods."""
    outlook = state.outlooks[role]
    places = {slot: place for place, slot in enumerate(report.slots)}
    pods = []
    for slot, pod in enumerate(state.table.at):
        if pod is None or pod.role != role or state.table.retired >> slot & 1:
            continue
        place = places.get(slot)
        samples, last_s = state.rates.samples(slot), state.rates.last_s(slot)
        pace, age_s = state.rates.paces[slot], now - last_s
        pods.append(
            SteeredPod(
                pod_id=pod.id,
                weight=state.weights[slot],
                usable=place is not None,
                queue=None if place is None else report.queue[place],
                service_rate=None if place is None else report.service_rate[place],
                weights_ahead=_column(report.weight_trajectory, place),
                queues_ahead=_column(report.queue_trajectory, place),
                prefill_tokens_per_s=round(1.0 / pace, 1) if pace > 0.0 else None,
                samples=round(samples, 2),
                sample_age_s=age_s if math.isfinite(age_s) else None,
                confidence=trust(samples, age_s) if math.isfinite(age_s) else 0.0,
                slowness=state.slowness[slot],
            )
        )
    return SteeredPool(
        role=role,
        unit="requests" if in_requests else "seconds",
        steering=report.steering.value,
        status=None if report.status is None else report.status.value,
        steps=report.steps,
        fallbacks=report.fallbacks,
        step_age_s=report.step_age_s,
        snapshot_age_s=report.snapshot_age_s,
        arrival_rate=report.arrival_rate,
        prefill_tokens_per_s=round(1.0 / state.rates.pool_pace(role), 1),
        mean_queue=outlook.queue,
        token_s=outlook.token_s,
        token_s_per_request=outlook.request_s,
        pods=pods,
    )


def _column(rows: list[list[float]], place: int | None) -> list[float]:
    return [] if place is None else [row[place] for row in rows]
