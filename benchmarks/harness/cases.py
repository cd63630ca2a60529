"""The kinds of load that proxies are compared under, and the bars that Calinix is held to."""

from __future__ import annotations

import msgspec

from harness import contenders as who
from harness.contenders import NIXL, SGLANG, UNIFIED


class Case(msgspec.Struct, frozen=True):
    """One kind of load; `per` names the field of Load that is compared."""

    name: str
    what: str
    arguments: tuple[str, ...]
    per: str = "cpu_us_req"
    unit: str = "CPU us/request"
    handoff: str = UNIFIED
    """How the pods hand KV on: unified pods, or pairs by nixl or sglang."""
    repeats: int = 5
    """How many slices of each contender it is worth."""
    direct: bool = False
    """Also measured straight to a pod, without any proxy."""
    of: str = ""
    """Takes no slices: another figure of the slices of the case named here."""


def _prompts(name: str, what: str, *arguments: str, repeats: int = 3) -> Case:
    return Case(name, f"{what}, 32 connections", ("-c", "32", *arguments), repeats=repeats)


def _streams(name: str, count: int, rate: str) -> Case:
    return Case(
        name,
        f"{count} streams of a chunk each 10 ms, {rate} chunks/s",
        ("-c", str(count), "-n", "200", "-s", "-t", "100", "-g", "10000"),
        "cpu_us_chunk",
        "CPU us/chunk",
    )


def _latencies(name: str, what: str, *arguments: str, repeats: int = 5) -> tuple[Case, Case]:
    """The median, and of the same slices the 99th percentile."""
    line = (*arguments, "-n", "200")
    return (
        Case(name, what, line, "p50", "p50 us", repeats=repeats, direct=True),
        Case(f"{name}-p99", what, line, "p99", "p99 us", repeats=repeats, of=name),
    )


def _pairs(handoff: str, name: str, size: str, size_bytes: int) -> Case:
    return Case(
        f"pd-{handoff}-{name}",
        f"{size} prompts, prefill and decode apart ({handoff}), 32 connections",
        ("-c", "32", "-n", str(size_bytes)),
        handoff=handoff,
    )


CASES = (
    _prompts("chat-200", "200 B prompts", "-n", "200", repeats=5),
    _prompts("chat-4k", "4 KB prompts", "-n", "4096"),
    _prompts("chat-32k", "32 KB prompts", "-n", "32768", repeats=5),
    _prompts("chat-128k", "128 KB prompts", "-n", "131072"),
    _prompts("chat-turns", "8 KB prompts of 60 messages", "-n", "8192", "-T", "60"),
    _prompts("chat-wide", "4 KB prompts of many scripts, in UTF-8", "-n", "4096", "-U"),
    _streams("stream", 128, "12.6k"),
    _streams("stream-25k", 256, "25k"),
    *_latencies("latency", "200 B prompts, one connection", "-c", "1"),
    *_latencies("rate-200", "200 B prompts, 200 a second", "-c", "16", "-r", "200", repeats=3),
    *_latencies("rate-1000", "200 B prompts, 1000 a second", "-c", "16", "-r", "1000", repeats=3),
    _pairs(NIXL, "200", "200 B", 200),
    _pairs(NIXL, "32k", "32 KB", 32768),
    _pairs(SGLANG, "200", "200 B", 200),
    _pairs(SGLANG, "32k", "32 KB", 32768),
)
SHORT_LIST = ("chat-200", "chat-32k", "stream", "stream-25k", "latency")
"""What is looked at while working on the request path."""


class Bar(msgspec.Struct, frozen=True):
    """Calinix may cost at most `limit` times what the peer costs in this case."""

    case: str
    peer: str
    limit: float


BARS = (
    Bar("chat-200", who.ROUND_ROBIN, 0.58),
    Bar("chat-200", who.CACHE_AWARE, 0.20),
    Bar("chat-200", who.SMG, 0.22),
    Bar("chat-200", who.NGINX, 2.4),
    Bar("chat-32k", who.ROUND_ROBIN, 0.80),
    Bar("chat-32k", who.CACHE_AWARE, 0.22),
    Bar("chat-32k", who.SMG, 0.28),
    Bar("chat-32k", who.NGINX, 3.5),
    *(
        Bar(case, peer, limit)
        for case in ("stream", "stream-25k")
        for peer, limit in ((who.ROUND_ROBIN, 0.80), (who.NGINX, 1.2))
    ),
    *(
        Bar(case, router, 1.0)
        for case in ("latency", "latency-p99")
        for router in (who.ROUND_ROBIN, who.CACHE_AWARE, who.SMG, who.SGLANG_ROUTER)
    ),
    *(
        Bar(f"pd-{handoff}-{size}", peer, 0.5)
        for size in ("200", "32k")
        for handoff, peer in (
            (NIXL, who.ROUND_ROBIN_PAIRS),
            (NIXL, who.CACHE_AWARE_PAIRS),
            (SGLANG, who.SMG_PAIRS),
        )
    ),
)
