"""What an engine says of itself at /metrics: load, and the size of its KV cache. Text to numbers.

Only the lines wanted are looked at: an engine's page has hundreds, most of them histograms. An
engine behind one port may be several (data parallel ranks): their requests and caches are summed,
their use is averaged over their caches. What several say of the same rank (tensor parallel ranks,
processes) is one fact told more than once: the largest counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

MAX_LINE_BYTES: Final = 65_536
"""A longer line is passed over."""
MAX_LINES: Final = 1024
"""Wanted lines of one page; more are passed over."""

Figure = Literal["running", "waiting", "kv_usage", "capacity", "block_size", "started"]

_GAUGES: Final[dict[bytes, Figure]] = {
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:kv_cache_usage_perc": "kv_usage",
    b"vllm:gpu_cache_usage_perc": "kv_usage",
    b"sglang:num_running_reqs": "running",
    b"sglang:num_queue_reqs": "waiting",
    b"sglang:token_usage": "kv_usage",
    b"sglang:max_total_num_tokens": "capacity",
    b"sglang:page_size": "block_size",
    b"process_start_time_seconds": "started",
}
_CONFIG: Final = b"vllm:cache_config_info"
"""vLLM's cache has its sizes in the labels of this one."""
_NAMES: Final = b"|".join([*_GAUGES, _CONFIG])
# One search of a page costs a tenth of splitting it into its lines.
_wanted = re.compile(rb"\n((?:%b)[{ ][^\n]*)" % _NAMES).findall
# From the beginning of a name only, and never back: garbage would cost the square of its length.
_labels = re.compile(rb'\b([A-Za-z_][A-Za-z0-9_]*+)="((?:[^"\\]|\\.)*+)"').findall
_RANKS: Final = (b"engine", b"dp_rank")
"""Labels that tell data parallel ranks apart."""
_MAX_TOKENS: Final = 1e12


class EngineStats(msgspec.Struct, frozen=True, rename="camel"):
    """One look at an engine; None where its page does not say."""

    engine: Literal["vllm", "sglang"] | None = None
    """By the names on the page; None: it is neither's."""
    running: int | None = None
    """Requests in its batches."""
    waiting: int | None = None
    """Requests that wait for a place in them."""
    kv_usage: float | None = None
    """Used share of the KV cache, in [0, 1]."""
    block_size: int | None = None
    """Tokens of a KV block."""
    capacity_tokens: int | None = None
    """Tokens that the KV cache holds."""
    started_s: float | None = None
    """When the process started, unix time; engines of several processes do not say."""


class StatsReader:
    """Reads one page, whatever the split of its bytes, and keeps only the lines wanted."""

    __slots__ = ("_lines", "_rest")

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._rest = b"\n"
        """The last line so far with the line end before it; without: the end of one too long."""

    def feed(self, piece: bytes) -> None:
        """Takes the next bytes."""
        text = self._rest + piece
        end = text.rfind(b"\n")
        if end > 0 and (found := _wanted(text, 0, end)):
            self._lines += found[: MAX_LINES - len(self._lines)]
        rest = text[end:] if end >= 0 else b""
        self._rest = rest if len(rest) <= MAX_LINE_BYTES else b""

    def stats(self) -> EngineStats:
        """What the page said, at its end."""
        self.feed(b"\n")
        return _stats(self._lines)


def read_stats(page: bytes) -> EngineStats:
    """What a whole page says."""
    reader = StatsReader()
    reader.feed(page)
    return reader.stats()


Found = dict[Figure, dict[bytes, float]]
"""Figure -> rank -> value."""


def _stats(lines: list[bytes]) -> EngineStats:
    found: Found = {}
    vllm = sglang = False
    for line in lines:
        vllm = vllm or line.startswith(b"vllm:")
        sglang = sglang or line.startswith(b"sglang:")
        for figure, rank, value in _said(line):
            ranks = found.setdefault(figure, {})
            ranks[rank] = max(value, ranks.get(rank, value))
    capacities = found.get("capacity", {})
    return EngineStats(
        engine="vllm" if vllm else "sglang" if sglang else None,
        running=_total(found, "running"),
        waiting=_total(found, "waiting"),
        kv_usage=_mean_use(found.get("kv_usage", {}), capacities),
        block_size=int(max(found["block_size"].values())) if "block_size" in found else None,
        capacity_tokens=int(sum(capacities.values())) or None,
        started_s=max(found["started"].values()) if "started" in found else None,
    )


def _said(line: bytes) -> Iterator[tuple[Figure, bytes, float]]:
    """(figure, rank, value) of one line; nothing of one that makes no sense."""
    brace, end = line.find(b"{"), line.rfind(b"}")
    space = line.find(b" ")
    has_labels = 0 <= brace < end and (space < 0 or brace < space)
    name = line[: brace if has_labels else max(space, 0)]
    labels = dict(_labels(line[brace + 1 : end])) if has_labels else {}
    rank = next((labels[key] for key in _RANKS if key in labels), b"")
    if name == _CONFIG:
        yield from _cache_config(labels, rank)
        return
    figure = _GAUGES.get(name)
    value = _number(line[end + 1 if has_labels else max(space, 0) :].split()[:1])
    if figure is not None and value is not None:
        yield figure, rank, value


def _cache_config(labels: dict[bytes, bytes], rank: bytes) -> Iterator[tuple[Figure, bytes, float]]:
    """Newer versions state the tokens themselves: not every block of theirs holds block_size."""
    block = _number([labels.get(b"block_size", b"")])
    blocks = _number([labels.get(b"num_gpu_blocks", b"")])
    tokens = _number([labels.get(b"kv_cache_size_tokens", b"")])
    if block:
        yield "block_size", rank, block
    if tokens or (block and blocks and block * blocks < _MAX_TOKENS):
        yield "capacity", rank, tokens or (block or 0.0) * (blocks or 0.0)


def _number(words: list[bytes]) -> float | None:
    """A count, a share or a time; None: it is none."""
    try:
        value = float(words[0])
    except (ValueError, IndexError):
        return None
    return value if 0.0 <= value < _MAX_TOKENS else None


def _total(found: Found, figure: Figure) -> int | None:
    return int(sum(found[figure].values())) if figure in found else None


def _mean_use(uses: dict[bytes, float], capacities: dict[bytes, float]) -> float | None:
    """Over the ranks, by the size of their caches where all of them are known."""
    if not uses:
        return None
    weights = {rank: capacities.get(rank, 0.0) for rank in uses}
    if not all(weights.values()):
        weights = dict.fromkeys(uses, 1.0)
    total = sum(uses[rank] * weight for rank, weight in weights.items())
    return min(total / sum(weights.values()), 1.0)
