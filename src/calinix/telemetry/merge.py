"""One exposition out of those of several workers: counters and histograms add up, gauges by rule.

What a worker had counted stays in the sums when it ends, as far as it was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

ADDED: Final = frozenset(
    {
        "calinix_inflight_requests", "calinix_waiting_requests", "calinix_pod_inflight",
        "process_resident_memory_bytes", "process_virtual_memory_bytes",
    }
)  # fmt: skip
"""Gauges of which each worker has a part."""
LEAST: Final = frozenset(
    {
        "calinix_pod_engine_stats_age_seconds", "calinix_pod_healthy", "process_max_fds",
        "process_start_time_seconds",
    }
)  # fmt: skip
"""Gauges of which the least is told: what everybody has."""
MEANS: Final = frozenset(
    {
        "calinix_controller_arrival_rate", "calinix_controller_token_seconds",
        "calinix_pod_cache_error_ratio", "calinix_pod_cache_lack_ratio", "calinix_pod_cache_trust",
        "calinix_pod_queue", "calinix_pod_queue_ahead", "calinix_pod_service_rate",
        "calinix_pod_slowness", "calinix_pod_ttft_bias_seconds", "calinix_pod_ttft_error_seconds",
        "calinix_pod_weight",
    }
)  # fmt: skip
"""Gauges that each worker estimates for itself. Of all others the largest is told."""
SUMMED: Final = frozenset({"counter", "histogram"})

Key = tuple[str, tuple[tuple[str, str], ...]]
"""(name, labels)"""


class MergedMetrics:
    """The workers' last expositions, and what ended workers had counted."""

    def __init__(self) -> None:
        self._last: dict[str, list[Metric]] = {}
        self._gone: dict[str, Metric] = {}

    def take(self, worker: str, exposition: str) -> None:
        """What a worker says now. Raises ValueError: it is no exposition."""
        self._last[worker] = list(text_string_to_metric_families(exposition))

    def forget(self, worker: str) -> None:
        """It has ended: what it had counted is kept."""
        counted = [f for f in self._last.pop(worker, []) if f.type in SUMMED]
        self._gone = {f.name: f for f in _merged([[*self._gone.values()], counted])}

    def exposition(self, more: Iterable[Metric] = ()) -> bytes:
        """All of it in Prometheus' text format, with `more` behind."""
        families = [*_merged([*self._last.values(), [*self._gone.values()]]), *more]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(families))
        return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]):
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        yield from self._families


def _merged(sources: Sequence[Sequence[Metric]]) -> list[Metric]:
    """Every family once, in the order in which they are met first."""
    found: dict[str, tuple[Metric, dict[Key, list[float]]]] = {}
    for families in sources:
        for family in families:
            if family.name not in found:
                empty = Metric(family.name, family.documentation, family.type)
                found[family.name] = (empty, {})
            values = found[family.name][1]
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                values.setdefault(key, []).append(sample.value)
    for family, values in found.values():
        combine = _rule(family)
        for (name, labels), each in values.items():
            family.add_sample(name, dict(labels), combine(each))
    return [family for family, _ in found.values()]


def _rule(family: Metric) -> Callable[[Sequence[float]], float]:
    if family.type in SUMMED or family.name in ADDED:
        return sum
    if family.name in LEAST:
        return min
    return _mean if family.name in MEANS else max


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
