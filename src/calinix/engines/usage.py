"""The token counts that an engine states at the end of an answer, read from its last bytes."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

TAIL_BYTES = 2048
"""Enough of an answer's end for `read_usage`: the widest real tail is under half of it."""

_TRIES = 8
MAX_TOKENS = 100_000_000
"""Of one answer. A count over it, or below zero, is an engine's error: sums, means and rates that
took it in would be wrong for long, or could not be worked out at all."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_KEY = b'"usage"'
# Usage objects hold numbers, nulls and objects of the same kind, so braces are structure.
_object_after = re.compile(rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*){0,7}\})").match


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one answer; None where the engine did not say."""

    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens that were a prefix hit on the pod."""


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: Count | None = None


class _Wire(msgspec.Struct, frozen=True):
    """The usage objects of OpenAI's chat, completions and responses, and of Anthropic's messages.

    Anthropic's `input_tokens` leaves out what was read from or written to the cache.
    """

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None

    def prompt(self) -> int | None:
        if self.prompt_tokens is not None or self.input_tokens is None:
            return self.prompt_tokens
        read, created = self.cache_read_input_tokens, self.cache_creation_input_tokens
        return self.input_tokens + (read or 0) + (created or 0)


_decoder = msgspec.json.Decoder(_Wire)


def read_usage(tail: bytes) -> Usage | None:
    """The last usage object in `tail`: the end of a JSON body or of an SSE stream.

    None when there is none, or only a part of one. Generated text cannot forge one: inside a
    JSON string the quotes of `"usage"` are escaped.
    """
    end = len(tail)
    for _ in range(_TRIES):
        end = tail.rfind(_KEY, 0, end)
        if end < 0:
            return None
        start = end + len(_KEY)
        if tail[start : start + 2] == b":{" and (plain := tail.find(b"}", start)) > 0:
            text = tail[start + 1 : plain + 1]
            if text.count(b"{") == 1:  # the usual case: nothing nested
                usage = _decode(text)
                if usage is not None:
                    return usage
                continue
        found = _object_after(tail, start)
        usage = _decode(found[1]) if found is not None else None
        if usage is not None:
            return usage
    return None


def _decode(text: bytes) -> Usage | None:
    try:
        wire = _decoder.decode(text)
    except msgspec.MsgspecError:
        return None
    prompt = wire.prompt()
    output = wire.completion_tokens if wire.completion_tokens is not None else wire.output_tokens
    if prompt is None and output is None:
        return None
    details = wire.prompt_tokens_details or wire.input_tokens_details
    cached = wire.cache_read_input_tokens if details is None else details.cached_tokens
    return Usage(prompt, output, cached)
