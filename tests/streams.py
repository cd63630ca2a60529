"""Streamed chat requests, and how to tell a whole answer from one that broke openly."""

from __future__ import annotations

from typing import Any

import kit
from calinix.sim.pod_model import PodFigures
from fleets import merged

SLOW_TOKENS = PodFigures(token_delay_s=0.02)
RARE_PROBES = {"health": {"intervalMs": 60_000, "passive": {"enabled": False}}}
ROUND_ROBIN = {"gateway": {"strategy": "roundRobin"}, **RARE_PROBES}


def chat(text: str = "Say something.", *, max_tokens: int = 4, stream: bool = True) -> bytes:
    """A chat request, connection close."""
    body = {
        "model": "mock",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "stream": stream,
    }
    return kit.request_bytes("POST", "/v1/chat/completions", body)


async def ask(port: int, data: bytes) -> kit.Reply:
    """Sends it and reads the whole answer."""
    return await (await kit.Exchange.send(port, data)).reply()


def is_whole(reply: kit.Reply) -> bool:
    """A stream that ended as it should."""
    return reply.status == 200 and reply.complete and reply.events()[-1:] == ["[DONE]"]


def is_broken_openly(reply: kit.Reply) -> bool:
    """A stream that says that it broke: an error event last, no [DONE]."""
    events = reply.events()
    return "[DONE]" not in events and '"error"' in events[-1]


def timeouts(**ms: int) -> dict[str, Any]:
    """Round robin, rare probes, these time-outs."""
    return merged(ROUND_ROBIN, {"gateway": {"timeouts": ms}})
