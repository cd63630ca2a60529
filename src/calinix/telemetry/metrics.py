"""Metrics: the counters, and what is read from the host, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from calinix import __version__
from calinix.telemetry.counters import OTHER, Counters, Histogram
from calinix.telemetry.engine_families import (
    CalibrationState,
    calibration_families,
    engine_families,
)
from calinix.telemetry.kv_families import KvState, kv_families
from calinix.telemetry.steering_families import NoSteering, SteeringState, steering_families
from calinix.telemetry.token_families import TokenState, token_families

POD_LABELS = ("pod_id", "role")

HISTOGRAMS = {
    "ttft": (
        "calinix_request_ttft_seconds",
        "Request received to first token sent, streamed answers",
    ),
    "gap": (
        "calinix_inter_token_seconds",
        "Mean gap between tokens of one streamed answer; one observation per request",
    ),
    "e2e": (
        "calinix_request_e2e_seconds",
        "Request received to end of the answer, good answers of pods",
    ),
    "decision": ("calinix_decision_seconds", "To read a request and decide where it goes"),
}
TOTALS = {
    "prompt_tokens": ("calinix_prompt_tokens_total", "Prompt tokens, as engines report them"),
    "output_tokens": ("calinix_output_tokens_total", "Output tokens, as engines report them"),
    "predicted_cached_tokens": (
        "calinix_cached_tokens_predicted_total",
        "Prompt tokens believed cached when routed",
    ),
    "cached_tokens": (
        "calinix_cached_tokens_reported_total",
        "Prompt tokens that were cached, as engines report them",
    ),
    "prompt_blocks": ("calinix_prefix_lookups_total", "Prompt blocks looked up"),
    "cached_blocks": ("calinix_prefix_hits_total", "Prompt blocks believed cached when routed"),
    "client_disconnects": (
        "calinix_client_disconnects_total",
        "Clients that left, or stopped reading, before their answer was complete",
    ),
}


class Metrics:
    """The counters, with what only the host knows: set `inflight` and `waiting` to show them."""

    __slots__ = (
        "_registry", "build", "calibrations", "counters", "dropped_lines", "engine_figures",
        "inflight", "kv_views", "steering", "tokens", "waiting",
    )  # fmt: skip

    def __init__(self, counters: Counters, build: dict[str, str] | None = None):
        self.counters = counters
        self.build = {"version": __version__, **(build or {})}
        self.inflight: Callable[[], int] | None = None
        self.waiting: Callable[[], int] | None = None
        self.dropped_lines: Callable[[], int] | None = None
        self.tokens: TokenState | None = None
        self.kv_views: Callable[[], Mapping[str, KvState]] = dict
        self.calibrations: Callable[[], Mapping[str, CalibrationState]] = dict
        self.steering: Callable[[], SteeringState] = NoSteering
        self.engine_figures: Callable[[], Mapping[str, Mapping[str, float]]] = dict
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_View(self))
        ProcessCollector(registry=self._registry)

    def exposition(self) -> bytes:
        """Every metric in Prometheus' text format 0.0.4, those of the process included."""
        return generate_latest(self._registry)


class _View(Collector):
    """Builds the families from the plain numbers, at every scrape anew."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Every family of Calinix."""
        metrics = self._metrics
        yield _gauge("calinix_build_info", "What runs here; always 1", metrics.build, 1)
        yield self._requests()
        for field, (name, text) in HISTOGRAMS.items():
            yield _histogram(name, text, getattr(metrics.counters, field))
        for field, (name, text) in TOTALS.items():
            yield CounterMetricFamily(name, text, value=getattr(metrics.counters, field))
        yield _counter_by(
            "calinix_retries_total", "Requests sent again", "reason", metrics.counters.retries
        )
        if metrics.inflight is not None:
            text = "Requests under way, waiting ones included"
            yield _gauge("calinix_inflight_requests", text, {}, metrics.inflight())
        if metrics.waiting is not None:
            text = "Requests that wait for a pod with room"
            yield _gauge("calinix_waiting_requests", text, {}, metrics.waiting())
        if metrics.dropped_lines is not None:
            yield CounterMetricFamily(
                "calinix_request_log_dropped_lines_total",
                "Request log lines dropped because their reader was behind",
                value=metrics.dropped_lines(),
            )
        yield from self._pods()

    def _requests(self) -> Metric:
        family = CounterMetricFamily(
            "calinix_requests_total",
            "Finished requests",
            labels=("mode", "strategy", "status", "endpoint"),
        )
        for labels, cell in sorted(self._metrics.counters.requests.items()):
            family.add_metric(labels, cell[0])
        return family

    def _pods(self) -> Iterator[Metric]:
        """What the router knows of its pods, and what was counted of them."""
        pods = self._metrics.counters.source.pods()
        roles = {pod.id: pod.role for pod in pods}
        gauges = {
            "inflight": "Requests that the pod has",
            "healthy": "1: its probes are good",
            "draining": "1: it gets no new work",
            "ejected": "1: its answers were bad and it rests",
            "blocks": "Blocks believed in its cache",
        }
        for field, text in gauges.items():
            suffix = "blocks_known" if field == "blocks" else field
            family = GaugeMetricFamily(f"calinix_pod_{suffix}", text, labels=POD_LABELS)
            for pod in pods:
                family.add_metric((pod.id, pod.role), float(getattr(pod, field)))
            yield family
        requests = CounterMetricFamily(
            "calinix_pod_requests_total", "Requests that ended on the pod", labels=POD_LABELS
        )
        failures = CounterMetricFamily(
            "calinix_pod_failures_total", "Legs that failed", labels=(*POD_LABELS, "kind")
        )
        for pod_id, counters in self._metrics.counters.pods.items():
            labels = (pod_id, roles.get(pod_id, OTHER))
            requests.add_metric(labels, counters.requests)
            for kind, count in sorted(counters.failures.items()):
                failures.add_metric((*labels, kind), count)
        yield requests
        yield failures
        yield from calibration_families(self._metrics.calibrations(), roles, POD_LABELS)
        yield from engine_families(self._metrics.engine_figures(), roles, POD_LABELS)
        yield from kv_families(roles, self._metrics.kv_views(), POD_LABELS)
        yield from steering_families(self._metrics.steering(), POD_LABELS)
        if self._metrics.tokens is not None:
            yield from token_families(self._metrics.tokens, roles, POD_LABELS)


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def _counter_by(name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for key, count in sorted(counts.items()):
        family.add_metric((key,), count)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    found = 0
    buckets = []
    for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
        found += count
        buckets.append(("+Inf" if bound is None else repr(bound), found))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total_s)
