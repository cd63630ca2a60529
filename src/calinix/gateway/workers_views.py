"""What several workers say of the same pods, as if one gateway said it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Said = Sequence[tuple[int, Any]]
"""(worker's index, its answer as plain data)"""

ADDED = ("inflight", "prefillTokens", "decodeTokens")
LARGEST = ("failuresInRow", "blocks", "capacityBlocks")
ANY = ("ejected", "draining", "cooling")
ALL = ("healthy", "silent")
WORST_FIRST = ("unhealthy", "starting", "ejected", "halfOpen", "healthy")


def pods_of(said: Said) -> dict[str, Any]:
    """/admin/pods: load added up, verdicts as careful as the most careful worker's."""
    by_id: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for index, answer in said:
        for pod in answer["pods"]:
            by_id.setdefault(pod["id"], []).append((index, pod))
    return {"pods": [_pod(views) for views in by_id.values()]}


def _pod(views: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    pods = [pod for _, pod in views]
    merged = dict(pods[0])
    for key in ADDED:
        merged[key] = sum(pod[key] for pod in pods)
    for key in LARGEST:
        merged[key] = max(pod[key] for pod in pods)
    ages = [pod["heardAgeS"] for pod in pods if pod["heardAgeS"] is not None]
    merged["heardAgeS"] = min(ages, default=None)
    for key in ANY:
        merged[key] = any(pod[key] for pod in pods)
    for key in ALL:
        merged[key] = all(pod[key] for pod in pods)
    rates = [pod["tokensPerS"] for pod in pods if pod["tokensPerS"] is not None]
    merged["tokensPerS"] = sum(rates) / len(rates) if rates else None
    worst = min(pods, key=lambda pod: WORST_FIRST.index(pod["state"]))
    merged["state"], merged["reason"] = worst["state"], worst["reason"]
    sure = max(pods, key=lambda pod: pod["calibration"]["cacheSamples"])
    merged["calibration"] = sure["calibration"]
    merged["workers"] = [
        {"worker": index, "state": pod["state"], "inflight": pod["inflight"]}
        for index, pod in views
    ]
    return merged


def decisions_of(said: Said, count: int) -> dict[str, Any]:
    """/admin/decisions: the last `count` of all, in order, each with the worker that took it."""
    decisions = [
        {"worker": index, **decision} for index, answer in said for decision in answer["decisions"]
    ]
    decisions.sort(key=_age, reverse=True)
    return {"decisions": decisions[-count:] if count > 0 else []}


def _age(decision: dict[str, Any]) -> float:
    return float(decision["ageSeconds"])


def state_of(said: Said) -> dict[str, Any]:
    """/admin/state: counts added up."""
    answers = [answer for _, answer in said]
    return {
        **{key: sum(a[key] for a in answers) for key in ("inflight", "waiting", "openLeases")},
        "draining": any(answer["draining"] for answer in answers),
        "maxTickLagSeconds": max(answer["maxTickLagSeconds"] for answer in answers),
    }
