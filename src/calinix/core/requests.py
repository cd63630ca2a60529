"""What goes into `Router.route` and what comes out: RouteRequest, RoutePlan, Refusal."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Literal

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


class RouteRequest:
    """One request, as routing sees it."""

    __slots__ = (
        "avoid",
        "max_output_tokens",
        "mode",
        "model",
        "other_bytes",
        "pinned_pod",
        "prefill_pod",
        "prompt",
        "prompt_is_tokens",
        "request_id",
        "session_key",
        "spare",
        "split",
        "streamed",
        "tenant",
        "work",
    )  # fmt: skip

    def __init__(
        self,
        *,
        request_id: str,
        mode: Mode | None = None,
        work: Work = Work.GENERATE,
        model: str = "",
        prompt: bytes = b"",
        prompt_is_tokens: bool = False,
        other_bytes: int = 0,
        tenant: bytes = b"",
        session_key: str | None = None,
        max_output_tokens: int | None = None,
        streamed: bool = False,
        avoid: int = 0,
        prefill_pod: str | None = None,
        pinned_pod: str | None = None,
        split: bool | None = None,
        spare: bytes = b"",
    ):
        self.request_id = request_id
        self.mode = mode
        """The mode the client asked for; None lets the router choose."""
        self.work = work
        self.model = model
        self.prompt = prompt
        """Canonical prompt bytes, or little-endian u32 token ids when `prompt_is_tokens`."""
        self.prompt_is_tokens = prompt_is_tokens
        self.other_bytes = other_bytes
        """Bytes of inputs beside `prompt` (batches, pooling; 4 a token id): load, never a key."""
        self.tenant = tenant
        """Cache salt or tenant: part of the namespace, so that nothing leaks across tenants."""
        self.session_key = session_key
        self.max_output_tokens = max_output_tokens
        self.streamed = streamed
        self.avoid = avoid
        """Bitmap of slots not to use: pods that this request has already failed on."""
        self.prefill_pod = prefill_pod
        """Dispatch only: the prefill is done there; only the decode pod is to be picked."""
        self.pinned_pod = pinned_pod
        """The one pod that can answer (`previous_response_id`); anything else is a refusal."""
        self.split = split
        """Dispatch only. True: prefill and decode on two pods; False: all of it on the decode pod;
        None: the router decides (`prefillThreshold`)."""
        self.spare = spare
        """Beside token ids: the canonical bytes of the same prompt, where a later one that begins
        like it may have to go by its bytes. It is to be found by either then."""

    def once_more(
        self, avoid: int, prefill_pod: str | None, *, whole: bool = False
    ) -> RouteRequest:
        """The same request for other pods; `whole`: it is not to be split."""
        return RouteRequest(
            request_id=self.request_id,
            mode=self.mode,
            work=self.work,
            model=self.model,
            prompt=self.prompt,
            prompt_is_tokens=self.prompt_is_tokens,
            other_bytes=self.other_bytes,
            tenant=self.tenant,
            session_key=self.session_key,
            max_output_tokens=self.max_output_tokens,
            streamed=self.streamed,
            avoid=avoid,
            prefill_pod=prefill_pod,
            pinned_pod=self.pinned_pod,
            split=False if whole else self.split,
            spare=self.spare,
        )


class RefusalReason(enum.Enum):
    """Why no plan was made."""

    MODE_NOT_SERVED = "mode_not_served"
    MODEL_NOT_SERVED = "model_not_served"
    NO_POD = "no_pod"
    FULL = "full"


class Refusal:
    """No plan: the reason, in a form for machines and for people."""

    __slots__ = ("message", "reason")

    def __init__(
        self,
        reason: RefusalReason,
        message: str,
    ):
        self.reason = reason
        self.message = message


class RoutePlan:
    """Where one request goes. Its lease is open until a Finished or Failed event closes it."""

    __slots__ = (
        "cached_blocks",
        "explanation",
        "lease_id",
        "mode",
        "namespace",
        "pod",
        "predicted_cached_tokens",
        "prefill",
        "prompt_blocks",
        "prompt_tokens",
        "request_id",
        "strategy",
    )  # fmt: skip

    def __init__(
        self,
        *,
        request_id: str,
        lease_id: int,
        mode: Mode,
        pod: Pod,
        prefill: Pod | None,
        strategy: str,
        namespace: str,
        prompt_blocks: int,
        cached_blocks: int,
        prompt_tokens: float,
        predicted_cached_tokens: float,
        explanation: Explanation,
    ):
        self.request_id = request_id
        self.lease_id = lease_id
        self.mode = mode
        self.pod = pod
        """The pod that answers the client: the single pod, or the decode pod."""
        self.prefill = prefill
        self.strategy = strategy
        self.namespace = namespace
        """16 hex digits: the chain's first state."""
        self.prompt_blocks = prompt_blocks
        self.cached_blocks = cached_blocks
        """Blocks of the prompt believed cached on the pod that prefills."""
        self.prompt_tokens = prompt_tokens
        """Engine tokens of the prompt, estimated."""
        self.predicted_cached_tokens = predicted_cached_tokens
        """Engine tokens believed cached, capped as engines recompute the last token."""
        self.explanation = explanation

    def to_dict(self) -> dict[str, Any]:
        """The decision, why it was made and what came of it, as plain JSON-ready data."""
        return self.explanation.to_dict(self)
