"""What goes into `Router.route` and what comes out: RouteRequest, RoutePlan, Refusal."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from calinix.core.explain import Explanation
    from calinix.core.pods import Pod

Mode = Literal["single", "dispatch"]


class Work(enum.Enum):
    """How a request counts as load."""

    GENERATE = "generate"
    """Uncached prompt tokens until the first token, then decode tokens; leaves cache entries."""
    POOLING = "pooling"
    """Prefill tokens of all inputs; no decode, no cache term, no entries."""
    MEAN = "mean"
    """A POST that is not understood: the pool's mean request."""
    NONE = "none"
    """Inflight only (GET)."""


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request, as routing sees it."""

    request_id: str
    mode: Mode | None = None
    """The mode the client asked for; None lets the router choose."""
    work: Work = Work.GENERATE
    model: str = ""
    prompt: bytes = b""
    """Canonical prompt bytes, or little-endian u32 token ids when `prompt_is_tokens`."""
    prompt_is_tokens: bool = False
    other_bytes: int = 0
    """Bytes of inputs beside `prompt` (batches, pooling; 4 a token id): load, never a key."""
    tenant: bytes = b""
    """Cache salt or tenant: part of the namespace, so that nothing leaks across tenants."""
    session_key: str | None = None
    max_output_tokens: int | None = None
    streamed: bool = False
    avoid: int = 0
    """Bitmap of slots not to use: pods that this request has already failed on."""
    prefill_pod: str | None = None
    """Dispatch only: the prefill is done there; only the decode pod is to be picked."""
    pinned_pod: str | None = None
    """The one pod that can answer (`previous_response_id`); anything else is a refusal."""


class RefusalReason(enum.Enum):
    """Why no plan was made."""

    MODE_NOT_SERVED = "mode_not_served"
    MODEL_NOT_SERVED = "model_not_served"
    NO_POD = "no_pod"
    FULL = "full"


class Refusal(msgspec.Struct, frozen=True):
    """No plan: the reason, in a form for machines and for people."""

    reason: RefusalReason
    message: str


class RoutePlan(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Where one request goes. Its lease is open until a Finished or Failed event closes it."""

    request_id: str
    lease_id: int
    mode: Mode
    pod: Pod
    """The pod that answers the client: the single pod, or the decode pod."""
    prefill: Pod | None
    strategy: str
    namespace: str
    """16 hex digits: the chain's first state."""
    prompt_blocks: int
    cached_blocks: int
    """Blocks of the prompt believed cached on the pod that prefills."""
    prompt_tokens: float
    """Engine tokens of the prompt, estimated."""
    predicted_cached_tokens: float
    """Engine tokens believed cached, capped as engines recompute the last token."""
    explanation: Explanation

    def to_dict(self) -> dict[str, Any]:
        """The decision, why it was made and what came of it, as plain JSON-ready data."""
        return self.explanation.to_dict(self)
