"""What people see of a pod: plain data, made when it is asked for."""

from __future__ import annotations

import msgspec

from calinix.core.events import PodFacts, ReplicaFacts, RoleFacts
from calinix.core.pods import Pod, Role
from calinix.core.state import State


class CalibrationView(msgspec.Struct, frozen=True, rename="camel"):
    """Predictions of one pod against what was found; means follow the last tens of requests."""

    trust: float
    """In [0, 1]: what of the prefixes that it is believed to hold is counted on."""
    cache_samples: int
    """Answers that told their cached tokens."""
    cache_error: float
    """Mean of |believed - found| cached tokens, as a share of the prompt."""
    cache_lack: float
    """Share of the tokens believed cached that were not."""
    ttft_samples: int
    """First tokens that were seen; of prefill pods, whole prefill answers."""
    ttft_error_s: float
    """Mean of |predicted - found|."""
    ttft_bias_s: float
    """Mean of predicted - found."""


class PodView(msgspec.Struct, frozen=True, rename="camel"):
    """One configured pod as it is now."""

    id: str
    url: str
    role: Role
    slot: int
    epoch: int
    """Changes when another engine process is believed behind the url: its cache is cold."""
    state: str
    """starting, unhealthy, ejected, halfOpen or healthy."""
    reason: str
    """Why it is starting or unhealthy; else why it was ejected last, empty when never."""
    healthy: bool
    """The probes' verdict."""
    ejected: bool
    draining: bool
    cooling: bool
    """It answered 429 or 503 a moment ago."""
    silent: bool
    """Nothing heard of for too long: what it caches is not counted on."""
    failures_in_row: int
    inflight: int
    max_conns: int
    prefill_tokens: int
    """Uncached prompt tokens before their first token."""
    decode_tokens: int
    """Output tokens expected of the requests inflight."""
    tokens_per_s: float | None
    """Measured prefill rate."""
    blocks: int
    """Blocks believed in its cache."""
    capacity_blocks: int
    last_heard_s: float | None
    """On the router's clock; null: never."""
    calibration: CalibrationView


def pod_view(state: State, pod: Pod, capacity_blocks: int) -> PodView:
    """The view of a configured pod."""
    slot = pod.slot
    health = state.health.of(slot)
    ledger = state.ledger
    rate = state.rates.measured(slot)
    return PodView(
        id=pod.id,
        url=pod.url,
        role=pod.role,
        slot=slot,
        epoch=pod.epoch,
        state=state.health.state(slot),
        reason=state.health.reason(slot),
        healthy=health.healthy,
        ejected=bool(state.health.ejected >> slot & 1),
        draining=bool(state.table.draining >> slot & 1),
        cooling=bool(state.health.cooling >> slot & 1),
        silent=bool(state.health.silent >> slot & 1),
        failures_in_row=health.streak,
        inflight=int(ledger.inflight.item(slot)),
        max_conns=pod.config.max_conns,
        prefill_tokens=int(ledger.prefill_tokens.item(slot)),
        decode_tokens=int(ledger.decode_tokens.item(slot)),
        tokens_per_s=None if rate is None else round(rate, 1),
        blocks=state.registry.blocks(slot),
        capacity_blocks=capacity_blocks,
        last_heard_s=health.heard_s if health.heard_s != float("inf") else None,
        calibration=_calibration(state, slot),
    )


def _calibration(state: State, slot: int) -> CalibrationView:
    errors = state.calibration.of(slot)
    return CalibrationView(
        trust=round(errors.trust, 3),
        cache_samples=errors.cache_samples,
        cache_error=round(errors.cache_error, 4),
        cache_lack=round(errors.lack, 4),
        ttft_samples=errors.ttft_samples,
        ttft_error_s=round(errors.error_s, 6),
        ttft_bias_s=round(errors.bias_s, 6),
    )


def facts_of(state: State, replica: str) -> ReplicaFacts:
    """What this router has on its pods and has measured, by this name."""
    loads = state.ledger.loads
    pods = []
    for pod in state.table.at:
        if pod is not None:
            slot = pod.slot
            tokens, seconds = state.rates.sums(slot)
            pods.append(
                PodFacts(
                    pod.id,
                    loads.inflight[slot],
                    loads.work[slot],
                    loads.context[slot],
                    tokens,
                    seconds,
                )
            )
    roles = tuple(
        RoleFacts(role, outlook.requests, outlook.work) for role, outlook in state.outlooks.items()
    )
    return ReplicaFacts(replica, tuple(pods), roles)
