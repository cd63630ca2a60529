"""Bodies that are hard on whoever tokenises them, one of each kind."""

from __future__ import annotations

import json
import random
from typing import Any

_PART = {"type": "text", "text": "y"}
_MARK = "<|im_end|>"


def hard_bodies(text: str, scale: float = 1.0) -> dict[str, bytes]:
    """Name -> a body of POST /v1/chat/completions.

    `text`: what long messages are made of, over and over. `scale` 1.0: as large as is tokenised at
    all, and larger; with less they have fewer parts, messages and letters.
    """

    def so_many(count: int) -> int:
        return max(1, round(count * scale))

    def long_text(chars: int) -> str:
        return (text * (so_many(chars) // len(text) + 1))[: so_many(chars)]

    rng = random.Random(5)
    wide = "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(so_many(80_000)))
    arguments = json.dumps({f"k{n}": [n, str(n)] for n in range(so_many(60_000))})
    emoji = "\U0001f600" * so_many(300_000)
    return {
        "a few lines": _chat(_user(text[:400])),
        "just below a batch": _chat(_user(long_text(65_000))),
        "a thousand parts": _chat(_user([_PART] * so_many(1_000))),
        "130,000 parts": _chat(_user([_PART] * so_many(130_000))),
        "8,192 tiny messages": _chat(*(_user("y") for _ in range(so_many(8_192)))),
        "thousands of tools": _chat(
            _user("x"), tools=[_tool(f"f{n}", 3) for n in range(so_many(9_000))]
        ),
        "deep tools": _chat(_user("x"), tools=[_tool("f", 150)] * so_many(250)),
        "arguments of a call": _chat(_user("x"), _call(arguments)),
        "special tokens only": _chat(_user(_MARK * so_many(40_000))),
        "one long message": _chat(_user(long_text(390_000))),
        "one long word": _chat(_user("a" * so_many(390_000))),
        "other scripts": _chat(_user(wide)),
        "escaped emoji": json.dumps({"messages": [_user(emoji)]}).encode(),
        "4 MiB of chat": _chat(*(_user(f"{n} " + long_text(100_000)) for n in range(so_many(38)))),
        "64 MiB": _chat(_user("a" * so_many(64 << 20))),
    }


def _user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _chat(*messages: dict[str, Any], **more: Any) -> bytes:
    body = {"model": "m", "messages": messages, **more}
    return json.dumps(body, ensure_ascii=False).encode()


def _tool(name: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": {"type": "string"}}}
    function = {"name": name, "description": "d" * 50, "parameters": schema}
    return {"type": "function", "function": function}


def _call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}
