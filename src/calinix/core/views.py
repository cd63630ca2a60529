"""What people see of a pod: plain data, made when it is asked for."""

from __future__ import annotations

import msgspec

from calinix.core.events import PodFacts, ReplicaFacts, RoleFacts
from calinix.core.pods import Pod, Role
from calinix.core.state import State


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
    """Why it was ejected last; empty when never."""
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
        reason=health.eject_reason,
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
