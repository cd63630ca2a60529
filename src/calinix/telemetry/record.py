"""What is kept of a finished request: one record for the request log and for the metrics."""

from __future__ import annotations


class RequestRecord:
    """One finished request. The host may fill it as the request goes on.

    Fields that a client chooses (`request_id`, `model`) may hold anything; they are cut before
    they are written and never become labels.
    """

    __slots__ = (
        "bytes_out", "cached_blocks", "cached_tokens", "chunks", "decision_us", "e2e_us",
        "endpoint", "error", "itl_us", "mode", "model", "output_tokens", "pod_id",
        "predicted_cached_tokens", "prefill_pod_id", "prompt_blocks", "prompt_tokens",
        "received_at", "request_id", "retries", "retry_reason", "status", "strategy", "ttft_us",
    )  # fmt: skip

    def __init__(
        self,
        *,
        request_id: str,
        endpoint: str = "",
        mode: str = "",
        strategy: str = "",
        model: str = "",
        status: int = 0,
        pod_id: str = "",
        prefill_pod_id: str = "",
        received_at: float = 0.0,
        ttft_us: int | None = None,
        itl_us: int | None = None,
        e2e_us: int = 0,
        decision_us: int | None = None,
        prompt_blocks: int = 0,
        cached_blocks: int = 0,
        predicted_cached_tokens: float | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        chunks: int = 0,
        retries: int = 0,
        retry_reason: str = "",
        error: str = "",
        bytes_out: int = 0,
    ):
        self.request_id = request_id
        self.endpoint = endpoint
        """A path of the route table, never the client's own."""
        self.mode = mode
        self.strategy = strategy
        self.model = model
        self.status = status
        """As the client saw it; 499 where it left before there was one."""
        self.pod_id = pod_id
        """The pod that answered, or was last asked to; empty: no pod was asked."""
        self.prefill_pod_id = prefill_pod_id
        self.received_at = received_at
        """Unix time in seconds; filled in at the end where it is 0."""
        self.ttft_us = ttft_us
        self.itl_us = itl_us
        """Mean gap between tokens of a streamed answer; events, where the pod counted no tokens."""
        self.e2e_us = e2e_us
        self.decision_us = decision_us
        self.prompt_blocks = prompt_blocks
        self.cached_blocks = cached_blocks
        """Blocks of the prompt believed cached when it was routed."""
        self.predicted_cached_tokens = predicted_cached_tokens
        self.prompt_tokens = prompt_tokens
        """As the engine reported it, like the two that follow."""
        self.cached_tokens = cached_tokens
        self.output_tokens = output_tokens
        self.chunks = chunks
        self.retries = retries
        self.retry_reason = retry_reason
        """The failure that the retry was for."""
        self.error = error
        self.bytes_out = bytes_out
