"""Metrics of exact tokens: what prompts were routed by, and whose pods make the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

KINDS = ("completions", "chat")


class Agreements(Protocol):
    """What comparing with a pod has shown: `same`, `different` or `unknown`, by these names."""

    @property
    def completions(self) -> str:
        """Of texts."""
        ...

    @property
    def chat(self) -> str:
        """Of chats."""
        ...


class TokenState(Protocol):
    """What the host knows of exact tokens."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Prompts by what became of their tokens."""
        ...

    @property
    def verdicts(self) -> Mapping[str, Agreements]:
        """By pod id, of those that have answered."""
        ...

    @property
    def cache_bytes(self) -> int:
        """What the remembered pieces take."""
        ...


def token_families(
    state: TokenState, roles: Mapping[str, str], labels: Sequence[str]
) -> Iterator[Metric]:
    """The families of exact tokens; `roles` are the pods' by id."""
    prompts = CounterMetricFamily(
        "calinix_prompt_tokens_made_total",
        "Prompts by what became of their exact tokens",
        labels=("outcome",),
    )
    for outcome, count in sorted(state.counts.items()):
        prompts.add_metric((outcome,), count)
    yield prompts
    agree = GaugeMetricFamily(
        "calinix_pod_tokens_agree",
        "1: the pod's /tokenize has the same ids, 0: it has others; absent: it does not tell",
        labels=(*labels, "kind"),
    )
    for pod_id, verdict in state.verdicts.items():
        for kind in KINDS:
            found = getattr(verdict, kind)
            if found != "unknown" and pod_id in roles:
                agree.add_metric((pod_id, roles[pod_id], kind), float(found == "same"))
    yield agree
    yield GaugeMetricFamily(
        "calinix_token_cache_bytes",
        "Memory of pieces of conversations whose tokens are known",
        value=float(state.cache_bytes),
    )
