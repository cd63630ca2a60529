"""What a pod can do: its speeds and sizes, and the work that a prompt is."""

from __future__ import annotations

import msgspec


class PodFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod can do. Times are seconds, rates tokens per second.

    By default every answer has its own pace. With any of `sequence_s`, `kv_token_s` and
    `chunk_tokens`, the pod works in steps that all of its answers share, as engines do:

        step = token_delay_s + sequence_s * sequences + kv_token_s * their KV tokens
               + chunk_tokens / prefill_tokens_per_s while a prompt is being computed
    """

    delay_s: float = 0.0
    """Fixed part of every prefill that is computed here."""
    prefill_tokens_per_s: float | None = None
    """Tokens of prefill work per second; None: only the fixed part counts."""
    token_delay_s: float = 0.0
    """Between two tokens of one answer; the fixed part of a step."""
    parallel: int = 1
    """Prompts prefilled at once; further ones wait, first in, first out. 1 with `chunk_tokens`."""
    block_size: int = 16
    kv_capacity_tokens: int = 524_288
    """KV tokens that jobs can hold."""
    offload_tokens: int = 0
    """Further KV tokens that are kept as cache (host memory), beside what jobs hold."""
    sequence_s: float = 0.0
    """What each answer under way adds to a step."""
    kv_token_s: float = 0.0
    """What each token of their contexts adds to a step."""
    chunk_tokens: float = 0.0
    """Tokens of prefill work in a step; 0: prompts are computed beside the steps."""
    attention_tokens: float = 0.0
    """Context length at which attention doubles a token's prefill work; 0: it costs nothing."""
    request_tokens: float = 0.0
    """Work of a prefill beside its tokens, in tokens."""
    transfer_tokens_per_s: float | None = None
    """KV tokens per second that come from another pod; None: no time."""
    transfer_delay_s: float = 0.0
    """Fixed part of such a transfer."""

    @property
    def capacity_blocks(self) -> int:
        """Blocks that jobs can hold."""
        return self.kv_capacity_tokens // self.block_size

    @property
    def cache_blocks(self) -> int:
        """Blocks of both tiers."""
        return (self.kv_capacity_tokens + self.offload_tokens) // self.block_size

    @property
    def in_steps(self) -> bool:
        """Whether answers share the pod's steps."""
        return self.sequence_s > 0.0 or self.kv_token_s > 0.0 or self.chunk_tokens > 0.0

    def work_tokens(self, computed_tokens: int, cached_tokens: int = 0) -> float:
        """Work of computing so many tokens behind a cached prefix, in tokens of an empty context.

        The mean context of the computed tokens is the cached ones and half of their own.
        """
        work = float(computed_tokens)
        if self.attention_tokens > 0.0:
            work *= 1.0 + (cached_tokens + 0.5 * computed_tokens) / self.attention_tokens
        return work + self.request_tokens

    def prefill_s(self, computed_tokens: int, cached_tokens: int = 0) -> float:
        """How long the prefill of this many uncached tokens takes, alone on the pod."""
        rate = self.prefill_tokens_per_s
        if not rate:
            return self.delay_s
        work = self.work_tokens(computed_tokens, cached_tokens)
        return self.delay_s + work * self.work_token_s

    def compute_s(self, computed_tokens: int) -> float:
        """The part of a prefill that grows with its tokens."""
        rate = self.prefill_tokens_per_s
        return computed_tokens / rate if rate else 0.0

    @property
    def work_token_s(self) -> float:
        """Seconds per token of prefill work on an otherwise idle pod."""
        rate = self.prefill_tokens_per_s
        if not rate:
            return 0.0
        fixed_s = self.token_delay_s / self.chunk_tokens if self.chunk_tokens else 0.0
        return 1.0 / rate + fixed_s

    def transfer_s(self, tokens: int) -> float:
        """How long so many KV tokens take from another pod to this one."""
        rate = self.transfer_tokens_per_s
        return self.transfer_delay_s + (tokens / rate if rate else 0.0)

    def scaled(self, speed: float) -> PodFigures:
        """The same pod `speed` times as fast in everything that it computes."""
        rate = self.prefill_tokens_per_s
        return msgspec.structs.replace(
            self,
            delay_s=self.delay_s / speed,
            prefill_tokens_per_s=rate * speed if rate else None,
            token_delay_s=self.token_delay_s / speed,
            sequence_s=self.sequence_s / speed,
            kv_token_s=self.kv_token_s / speed,
        )
