"""The token counts that an engine states at the end of an answer, read from its last bytes."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from calinix.engines.fast import usual_counts
from calinix.engines.usage_shapes import Usage, decode_usage

__all__ = ["TAIL_BYTES", "Usage", "read_usage"]

TAIL_BYTES: Final = 2048
"""Enough of an answer's end for `read_usage`: the widest real tail is under half of it."""

_TRIES: Final = 8
_KEY: Final = b'"usage"'
# Usage objects hold numbers, nulls and objects of the same kind, so braces are structure.
_object_after = re.compile(rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*){0,7}\})").match


def read_usage(tail: bytes) -> Usage | None:
    """The last usage object in `tail`: the end of a JSON body or of an SSE stream.

    None when there is none, or only a part of one. Generated text cannot forge one: inside a
    JSON string the quotes of `"usage"` are escaped.
    """
    counts = usual_counts(tail)
    if counts is None:
        return _read_any(tail)
    prompt, output, cached = counts
    return None if prompt is None and output is None else Usage(prompt, output, cached)


def _read_any(tail: bytes) -> Usage | None:
    """The same of any form."""
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
        wire = decode_usage(text)
    except msgspec.MsgspecError:
        return None
    prompt = wire.prompt_tokens
    if prompt is None:
        prompt = wire.prompt()
    output = wire.completion_tokens
    if output is None:
        output = wire.output_tokens
    if prompt is None and output is None:
        return None
    details = wire.prompt_tokens_details or wire.input_tokens_details
    cached = wire.cache_read_input_tokens if details is None else details.cached_tokens
    return Usage(prompt, output, cached)
