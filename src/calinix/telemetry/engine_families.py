"""Metrics of what pods say of themselves, and of how well they are predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

ENGINE = {
    "running": ("running", "Requests in the engine's batches, as it says"),
    "waiting": ("waiting", "Requests that wait in the engine, as it says"),
    "kv_usage": ("kv_usage_ratio", "Used share of the engine's KV cache, as it says"),
    "capacity_tokens": ("kv_capacity_tokens", "Tokens that the engine's KV cache holds"),
    "block_size": ("block_size_tokens", "Tokens of an engine's KV block"),
    "age_s": ("stats_age_seconds", "Since the engine's own figures were heard; +Inf: never"),
}
CALIBRATION = {
    "trust": ("cache_trust", "What of the prefixes believed on the pod is counted on"),
    "cache_error": (
        "cache_error_ratio",
        "Mean difference of believed and reported cached tokens, over the prompt",
    ),
    "cache_lack": ("cache_lack_ratio", "Share of the tokens believed cached that were not"),
    "ttft_error_s": ("ttft_error_seconds", "Mean difference of predicted and seen first token"),
    "ttft_bias_s": ("ttft_bias_seconds", "Mean of predicted less seen time to first token"),
}


class CalibrationState(Protocol):
    """How well a pod is predicted; also the figures by the names above."""

    @property
    def cache_samples(self) -> int:
        """Answers that told their cached tokens."""
        ...

    @property
    def ttft_samples(self) -> int:
        """First tokens that were seen."""
        ...


def engine_families(
    figures: Mapping[str, Mapping[str, float]], roles: Mapping[str, str], labels: Sequence[str]
) -> Iterator[Metric]:
    """The engines' own figures by pod id; what a pod has not said has no sample."""
    for name, (suffix, text) in ENGINE.items():
        family = GaugeMetricFamily(f"calinix_pod_engine_{suffix}", text, labels=labels)
        for pod_id, said in figures.items():
            if pod_id in roles and name in said:
                family.add_metric((pod_id, roles[pod_id]), said[name])
        yield family
    failures = CounterMetricFamily(
        "calinix_pod_engine_stats_failures_total", "Looks at /metrics in vain", labels=labels
    )
    for pod_id, said in figures.items():
        if pod_id in roles:
            failures.add_metric((pod_id, roles[pod_id]), said["failures"])
    yield failures


def calibration_families(
    states: Mapping[str, CalibrationState], roles: Mapping[str, str], labels: Sequence[str]
) -> Iterator[Metric]:
    """Predictions against what was found, by pod id; errors only where something was compared."""
    samples = CounterMetricFamily(
        "calinix_pod_compared_total",
        "Predictions that were compared with what was found",
        labels=(*labels, "kind"),
    )
    for pod_id, state in states.items():
        if pod_id in roles:
            samples.add_metric((pod_id, roles[pod_id], "cache"), state.cache_samples)
            samples.add_metric((pod_id, roles[pod_id], "ttft"), state.ttft_samples)
    yield samples
    for name, (suffix, text) in CALIBRATION.items():
        family = GaugeMetricFamily(f"calinix_pod_{suffix}", text, labels=labels)
        for pod_id, state in states.items():
            count = state.ttft_samples if name.startswith("ttft") else state.cache_samples
            if pod_id in roles and (count or name == "trust"):
                family.add_metric((pod_id, roles[pod_id]), getattr(state, name))
        yield family
