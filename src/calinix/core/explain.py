"""Why a pod was picked, and what came of it.

Nothing is computed for an explanation while a request is routed: it keeps the choices with the
arrays that they were made from, and becomes data for people only when it is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from calinix.core import bitmap
from calinix.core.choice import Choice
from calinix.core.columns import Floats, Term
from calinix.core.requests import RoutePlan


class Explanation:
    """What one decision rested on; the outcome is filled in later (None: not known)."""

    __slots__ = (
        "believed_tokens",
        "cached_tokens",
        "choice",
        "e2e_s",
        "failure",
        "first",
        "output_tokens",
        "predicted_ttft_s",
        "prompt_tokens",
        "routed_s",
        "status",
        "ttft_s",
    )

    def __init__(
        self,
        choice: Choice,
        first: Choice | None,
        routed_s: float,
        predicted_ttft_s: float | None,
        believed_tokens: float = -1.0,
    ):
        self.choice = choice
        """How the pod that answers was chosen."""
        self.first = first
        """In dispatch mode, how the prefill pod was."""
        self.routed_s = routed_s
        """When it was made, on the router's clock."""
        self.predicted_ttft_s = predicted_ttft_s
        """Backlog and own uncached tokens over the pod's measured rate."""
        self.believed_tokens = believed_tokens
        """Cached tokens of the prompt, before any doubt about the pod; below 0: another plan's."""
        self.ttft_s: float | None = None
        """Routed to first token."""
        self.e2e_s: float | None = None
        """Routed to end."""
        self.status: int | None = None
        self.failure: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        """As the engine reported it: the real hit."""
        self.output_tokens: int | None = None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """One per pod that was chosen: single, or prefill and decode."""
        return (self.choice,) if self.first is None else (self.first, self.choice)

    def to_dict(self, plan: RoutePlan) -> dict[str, Any]:
        """The whole decision as JSON-ready data, camelCase keys."""
        return {
            "requestId": plan.request_id,
            "leaseId": plan.lease_id,
            "mode": plan.mode,
            "strategy": plan.strategy,
            "podId": plan.pod.id,
            "prefillPodId": plan.prefill.id if plan.prefill is not None else None,
            "routedSeconds": self.routed_s,
            "prompt": {
                "namespace": plan.namespace,
                "blocks": plan.prompt_blocks,
                "tokens": round(plan.prompt_tokens, 1),
            },
            "predicted": {
                "cachedBlocks": plan.cached_blocks,
                "cachedTokens": round(plan.predicted_cached_tokens, 1),
                "believedTokens": round(self.believed_tokens, 1)
                if self.believed_tokens >= 0.0
                else None,
                "ttftSeconds": self.predicted_ttft_s,
            },
            "choices": [_choice(choice) for choice in self.choices],
            "outcome": {
                "status": self.status,
                "failure": self.failure,
                "ttftSeconds": self.ttft_s,
                "e2eSeconds": self.e2e_s,
                "promptTokens": self.prompt_tokens,
                "cachedTokens": self.cached_tokens,
                "outputTokens": self.output_tokens,
            },
        }


def _choice(choice: Choice) -> dict[str, Any]:
    scores = choice.weighed()
    candidates = list(_candidates(choice, scores))
    if scores is not None:
        candidates.sort(key=lambda candidate: (-candidate["score"], candidate["inflight"]))
    picked = choice.pod.id if choice.pod is not None else None
    others = [candidate["podId"] for candidate in candidates if candidate["podId"] != picked]
    return {
        "role": choice.role,
        "picked": picked,
        "rule": choice.rule or None,
        "otherWaySeconds": round(choice.other_way_s, 6) if choice.other_way_s >= 0.0 else None,
        "unit": "seconds" if choice.by_seconds else "score",
        "runnerUp": others[0] if others and scores is not None else None,
        "weights": {name: weight for name, weight, _ in _said(choice)},
        "candidates": candidates,
        "filtered": [
            {"podId": pod.id, "filter": name}
            for name, who in choice.dropped
            for slot in bitmap.iterate(who)
            if (pod := choice.who[slot]) is not None
        ],
    }


def _said(choice: Choice) -> Iterator[tuple[str, float, Term]]:
    """(name, weight, term) of the scorers that had something to say."""
    for name, weight, term in zip(choice.names, choice.weights, choice.terms, strict=True):
        if term is not None:
            yield name, weight, term


def _candidates(choice: Choice, scores: Floats | None) -> Iterator[dict[str, Any]]:
    among = choice.among
    if among is None or choice.inflight is None:
        return
    said = list(_said(choice))
    offset = sum(weight * base for _, weight, (_, _, base) in said)
    for place, slot in enumerate(among.slots):
        pod = choice.who[slot]
        if pod is not None:
            depths = choice.depths
            yield {
                "podId": pod.id,
                "score": None if scores is None else round(float(scores[place]) + offset, 6),
                "scores": {
                    name: round(float(values[place]) * scale + base, 6)
                    for name, _, (values, scale, base) in said
                },
                "inflight": int(choice.inflight[place]),
                "cachedBlocks": None if depths is None else int(depths[place]),
                "trust": 1.0 if choice.trusts is None else round(choice.trusts[place], 3),
                "silent": bool(choice.silent >> slot & 1),
            }


class DecisionRing:
    """The last plans, with their explanations and outcomes. `size` 0 keeps none."""

    def __init__(self, size: int):
        self._plans: deque[RoutePlan] = deque(maxlen=size)
        self.append = self._plans.append
        """Adds a plan; the oldest goes when the ring is full."""

    def __len__(self) -> int:
        """How many plans are kept."""
        return len(self._plans)

    def last(self, count: int) -> list[RoutePlan]:
        """The newest plans, newest first."""
        return list(islice(reversed(self._plans), max(0, count)))

    def find(self, request_id: str) -> RoutePlan | None:
        """The newest plan of this request; None when it is not kept (any more)."""
        return next((plan for plan in reversed(self._plans) if plan.request_id == request_id), None)
