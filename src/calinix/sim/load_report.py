"""What a load run found: outcomes, their summary, and the summary as JSON and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request, from its first byte out to its last byte in."""

    started_s: float
    first_token_s: float | None
    """When the first data event was there; None when not streamed, or when none came."""
    ended_s: float
    status: int
    error: str | None = None
    """What went wrong, in a few words that many requests share."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    pod: str | None = None
    cache_hit: bool | None = None


class Times(msgspec.Struct, frozen=True, rename="camel"):
    """Of one kind of duration, in milliseconds."""

    count: int
    mean_ms: float
    p50_ms: float
    p99_ms: float


class Summary(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A whole run."""

    requests: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft: Times | None
    itl: Times | None
    e2e: Times | None
    errors: dict[str, int]
    """Failed requests by kind; empty is good."""
    not_sent: int
    """Arrivals of an open loop that found too many requests under way."""
    cache_hit_ratio: float | None
    """Share of answers whose `x-calinix-cache-hit` is true; None without that header."""
    cached_token_ratio: float | None
    """Cached prompt tokens over all prompt tokens, as the engines counted them."""
    pods: dict[str, int]
    """Answers by `x-calinix-target-pod-id`."""
    jain_index: float | None
    """1: every pod answered as many; 1/n: one pod answered all."""


def jain_index(counts: Iterable[int]) -> float | None:
    """Jain's fairness of the counts; None when there are none."""
    values = np.fromiter(counts, dtype=float)
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares else None


def times_of(seconds: Sequence[float]) -> Times | None:
    """Mean and percentiles; None when there is nothing to take them of."""
    if not seconds:
        return None
    ms = np.asarray(seconds) * 1000
    p50, p99 = np.percentile(ms, (50, 99))
    return Times(len(ms), float(ms.mean()), float(p50), float(p99))


def summarise(
    outcomes: Sequence[Outcome], gaps_s: Sequence[float], seconds: float, not_sent: int = 0
) -> Summary:
    """The summary of a run that took `seconds`; `gaps_s` are all gaps between tokens."""
    good = [one for one in outcomes if one.error is None]
    span_s = max(seconds, 1e-9)
    hits = [one.cache_hit for one in good if one.cache_hit is not None]
    counted = [one for one in good if one.cached_tokens is not None]
    prompt_tokens = sum(one.prompt_tokens for one in counted)
    cached_tokens = sum(one.cached_tokens or 0 for one in counted)
    pods = Counter(one.pod for one in good if one.pod is not None)
    return Summary(
        requests=len(outcomes),
        seconds=seconds,
        requests_per_s=len(good) / span_s,
        output_tokens_per_s=sum(one.output_tokens for one in good) / span_s,
        prompt_tokens_per_s=sum(one.prompt_tokens for one in good) / span_s,
        ttft=times_of(
            [one.first_token_s - one.started_s for one in good if one.first_token_s is not None]
        ),
        itl=times_of(gaps_s),
        e2e=times_of([one.ended_s - one.started_s for one in good]),
        errors=dict(Counter(one.error for one in outcomes if one.error is not None)),
        not_sent=not_sent,
        cache_hit_ratio=sum(hits) / len(hits) if hits else None,
        cached_token_ratio=cached_tokens / prompt_tokens if prompt_tokens else None,
        pods=dict(sorted(pods.items())),
        jain_index=jain_index(pods.values()),
    )


def tables(summary: Summary) -> RenderableType:
    """The summary for people."""
    latency = Table("", "count", "mean ms", "p50 ms", "p99 ms", title="Latency")
    for name, times in (("TTFT", summary.ttft), ("ITL", summary.itl), ("E2E", summary.e2e)):
        if times is not None:
            figures = (times.mean_ms, times.p50_ms, times.p99_ms)
            latency.add_row(name, str(times.count), *(f"{value:.1f}" for value in figures))
    facts = Table("", "", title="Run", show_header=False)
    facts.add_row("requests", f"{summary.requests} in {summary.seconds:.2f} s")
    facts.add_row("throughput", f"{summary.requests_per_s:.1f} requests/s")
    facts.add_row("output", f"{summary.output_tokens_per_s:.0f} tokens/s")
    facts.add_row("prompt", f"{summary.prompt_tokens_per_s:.0f} tokens/s")
    if summary.cache_hit_ratio is not None:
        facts.add_row("routed to a prefix", f"{summary.cache_hit_ratio:.1%} of requests")
    if summary.cached_token_ratio is not None:
        facts.add_row("prefix hits", f"{summary.cached_token_ratio:.1%} of prompt tokens")
    for kind, count in sorted(summary.errors.items()):
        facts.add_row(f"[red]{kind}[/red]", str(count))
    if summary.not_sent:
        facts.add_row("[red]not sent[/red]", str(summary.not_sent))
    parts: list[RenderableType] = [latency, facts] if latency.row_count else [facts]
    if summary.pods:
        pods = Table("pod", "answers", title="Pods")
        for pod, count in summary.pods.items():
            pods.add_row(pod, str(count))
        if summary.jain_index is not None:
            pods.caption = f"Jain index {summary.jain_index:.3f}"
        parts.append(pods)
    return Group(*parts)
