"""Every fact that may enter `Router.observe`. Plain data: an event can be written to a journal."""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from calinix.config import Health, Mode, PodConfig, Strategy

Role = Literal["single", "prefill", "decode"]


class Failure(enum.Enum):
    """How a leg failed; core/health.py says what each means for the pod."""

    CONNECT = "connect"
    """No connection: refused, unreachable or not within `connectMs`."""
    REFUSED = "refused"
    """429 or 503: back-pressure, not illness."""
    SERVER_ERROR = "server_error"
    """Any other 5xx."""
    CLOSED = "closed"
    """Closed without an answer, or with one that is not HTTP."""
    BROKEN = "broken"
    """Broke off in the middle of its answer."""
    TIMEOUT = "timeout"
    """No first token, or no next event, in time."""
    TOTAL_TIMEOUT = "total_timeout"
    """Not streamed and not answered within `totalMs`: by itself no sign of illness."""
    CANCELLED = "cancelled"
    """The client left, or the other leg failed: says nothing of the pod."""


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of all events."""


class PodAdded(Event, frozen=True):
    """A pod is configured. Known id and role: its settings are updated, its state is kept."""

    config: PodConfig
    role: Role


class PodRemoved(Event, frozen=True):
    """A pod is no longer configured: no new work; its slot is freed when its leases are closed."""

    pod_id: str


class PodDraining(Event, frozen=True):
    """A pod is to get no new work (or is to get some again)."""

    pod_id: str
    draining: bool


class StrategyChanged(Event, frozen=True):
    """From now on, route by this."""

    strategy: Strategy


class RulesChanged(Event, frozen=True):
    """From now on, other rules of health, modes and dispatch; what is known of pods stays."""

    health: Health
    default_mode: Mode | None = None
    prefill_threshold: int = 0


class ProbeSucceeded(Event, frozen=True):
    """The health endpoint answered 2xx in time."""

    pod_id: str


class ProbeFailed(Event, frozen=True):
    """The health endpoint did not answer 2xx in time. `refused`: nobody listens there."""

    pod_id: str
    refused: bool = False
    reason: str = ""
    """In words, for people."""


class PodHeard(Event, frozen=True):
    """Some other sign of life (a scrape, a KV event)."""

    pod_id: str


class PodRestarted(Event, frozen=True):
    """Evidence of a new process: what was cached is gone."""

    pod_id: str


class PodCapacity(Event, frozen=True):
    """The engine says how many tokens its KV cache holds; `kvCapacityTokens` goes before it."""

    pod_id: str
    tokens: int


class BlocksStored(Event, frozen=True):
    """The pod's cache gained these blocks, in chain order, behind `parent` (None: at the root)."""

    pod_id: str
    parent: int | None
    blocks: tuple[int, ...]


class BlocksRemoved(Event, frozen=True):
    """The pod's cache lost one copy of each of these blocks."""

    pod_id: str
    blocks: tuple[int, ...]


class BlocksCleared(Event, frozen=True):
    """The pod's cache is empty."""

    pod_id: str


class ResponseStored(Event, frozen=True):
    """The pod keeps this answer: whatever names it can be served there only."""

    response_id: str
    pod_id: str


class PromptTokens(Event, frozen=True):
    """The token ids of a prompt that was routed by its bytes: they took too long."""

    lease_id: int
    model: str
    tenant: bytes
    tokens: bytes
    """Little-endian u32."""


class PrefillDone(Event, frozen=True):
    """Dispatch: the prefill leg was answered; its part of the lease is given back.

    `transferred`: the answer came only when the KV was with the decode pod, so that what follows
    is no transfer to be timed.
    """

    lease_id: int
    transferred: bool = False


class FirstToken(Event, frozen=True):
    """The first token was seen: the prompt is prefilled, decoding goes on."""

    lease_id: int


class Finished(Event, frozen=True):
    """The answer is complete (any status that the pod itself gave, 4xx too). Closes the lease."""

    lease_id: int
    status: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class Failed(Event, frozen=True):
    """The request is lost on this plan. Closes the lease."""

    lease_id: int
    leg: Role
    failure: Failure
    status: int = 0


class PodFacts(msgspec.Struct, frozen=True, array_like=True):
    """What one replica has on one pod, and has measured of it."""

    pod_id: str
    inflight: float = 0.0
    """Requests."""
    work_tokens: float = 0.0
    """Prefill work that waits for its first token."""
    context_tokens: float = 0.0
    """Tokens of its requests in the pod's KV cache."""
    rate_tokens: float = 0.0
    """Prefill work that its measured rate rests on, and"""
    rate_s: float = 0.0
    """the seconds that this work took."""


class RoleFacts(msgspec.Struct, frozen=True, array_like=True):
    """What one replica has routed to a role since it started; a difference of two is a flow."""

    role: Role
    requests: float
    work_tokens: float


class ReplicaFacts(Event, frozen=True):
    """Another router of the same pods says what it has there: for scoring, never for leases.

    Each one replaces what the same replica said before.
    """

    replica: str
    """Its name."""
    pods: tuple[PodFacts, ...]
    roles: tuple[RoleFacts, ...] = ()
    sync_s: float = 0.0
    """How often it says so; 0: it is seen from when it does."""
    age_s: float = 0.0
    """How old this is on arrival."""
    gateways: int = 0
    """Replicas in all, this one included; 0: as many as are heard of."""


class ReplicaGone(Event, frozen=True):
    """The other router has ended: its load and what it had under way are gone with it."""

    replica: str


class PeerFacts(Event, frozen=True):
    """What another worker of this gateway has done since it last said so, in order."""

    replica: str
    """Its name, as in ReplicaFacts."""
    pods: tuple[str, ...]
    """Ids of its pods by its own slots; empty: nobody is in that slot."""
    records: bytes
    """As core/peer_records.py packs them."""
