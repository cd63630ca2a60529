"""For tests of prefill/decode pairs: what is asked where, and what was said."""

from __future__ import annotations

from typing import Any

from calinix.core.prompt import Endpoint

PATHS = {
    Endpoint.CHAT: "/v1/chat/completions",
    Endpoint.COMPLETIONS: "/v1/completions",
    Endpoint.RESPONSES: "/v1/responses",
    Endpoint.MESSAGES: "/v1/messages",
}
LONG = "Explain cache aware routing in simple words. " * 12
BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9},
    Endpoint.COMPLETIONS: {"prompt": LONG, "max_tokens": 9, "min_tokens": 5},
    Endpoint.RESPONSES: {"input": LONG, "max_output_tokens": 9},
    Endpoint.MESSAGES: {
        "model": "mock",
        "messages": [{"role": "user", "content": LONG}],
        "max_tokens": 9,
    },
}


def texts(value: Any) -> list[str]:
    """Every generated text in an answer, whatever its dialect."""
    if isinstance(value, dict):
        found = [item for key, item in value.items() if key in ("text", "content") and item]
        if found and isinstance(found[0], str):
            return [str(found[0])]
        return [text for item in value.values() for text in texts(item)]
    return [text for item in value for text in texts(item)] if isinstance(value, list) else []
