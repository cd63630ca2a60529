"""What is kept of a finished request: one record for the request log and for the metrics."""

from __future__ import annotations

import msgspec

MAX_FIELD_CHARS = 128


class RequestRecord(msgspec.Struct, kw_only=True, gc=False, rename="camel", omit_defaults=True):
    """One finished request. Not frozen: the host may fill it as the request goes on.

    Fields that a client chooses (`request_id`, `model`) may hold anything; they are cut before
    they are written and never become labels.
    """

    request_id: str
    endpoint: str = ""
    """A path of the route table, never the client's own."""
    mode: str = ""
    strategy: str = ""
    model: str = ""
    status: int = 0
    """As the client saw it; 499 where it left before there was one."""
    pod_id: str = ""
    """The pod that answered, or was last asked to; empty: no pod was asked."""
    prefill_pod_id: str = ""
    received_at: float = 0.0
    """Unix time in seconds; filled in at the end where it is 0."""
    ttft_us: int | None = None
    itl_us: int | None = None
    """Mean gap between tokens (or chunks, where tokens cannot be told) of a streamed answer."""
    e2e_us: int = 0
    decision_us: int | None = None
    prompt_blocks: int = 0
    cached_blocks: int = 0
    """Blocks of the prompt believed cached when it was routed."""
    predicted_cached_tokens: float | None = None
    prompt_tokens: int | None = None
    """As the engine reported it, like the two that follow."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    chunks: int = 0
    retries: int = 0
    retry_reason: str = ""
    """The failure that the retry was for."""
    error: str = ""
    bytes_out: int = 0

    def trim(self) -> None:
        """Cuts texts to MAX_FIELD_CHARS: what a client chose may be of any length."""
        if len(self.model) > MAX_FIELD_CHARS:
            self.model = self.model[:MAX_FIELD_CHARS]
        if len(self.request_id) > MAX_FIELD_CHARS:
            self.request_id = self.request_id[:MAX_FIELD_CHARS]
        if len(self.error) > MAX_FIELD_CHARS:
            self.error = self.error[:MAX_FIELD_CHARS]
