"""The shapes of token counts: as engines state them, and as they are read."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_TOKENS = 100_000_000
"""Of one answer. A count over it, or below zero, is an engine's error: sums, means and rates that
took it in would be wrong for long, or could not be worked out at all."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one answer; None where the engine did not say."""

    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens that were a prefix hit on the pod."""


class Details(msgspec.Struct, frozen=True):
    """OpenAI's `prompt_tokens_details` and `input_tokens_details`."""

    cached_tokens: Count | None = None


class WireUsage(msgspec.Struct, frozen=True):
    """The usage objects of OpenAI's chat, completions and responses, and of Anthropic's messages.

    Anthropic's `input_tokens` leaves out what was read from or written to the cache.
    """

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: Details | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    input_tokens_details: Details | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None

    def prompt(self) -> int | None:
        """All prompt tokens, cached ones too."""
        if self.prompt_tokens is not None or self.input_tokens is None:
            return self.prompt_tokens
        read, created = self.cache_read_input_tokens, self.cache_creation_input_tokens
        return self.input_tokens + (read or 0) + (created or 0)


decode_usage = msgspec.json.Decoder(WireUsage).decode


Counts = tuple[int | None, int | None, int | None]
"""Prompt tokens, output tokens, cached tokens."""


def usual_counts(tail: bytes) -> Counts | None:  # noqa: ARG001  the signature of the compiled form
    """What the last usage object in `tail` says, all None where there is no such object.

    None: it is of no usual form (flat but for details, whole numbers and nulls, names in plain
    ASCII, at most a blank between), or says nothing. This form knows none.
    """
    return None
