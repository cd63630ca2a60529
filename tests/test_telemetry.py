"""Metrics: what is counted, under which labels, and that labels and tables are bounded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix import __version__
from calinix.config import StrategyName
from calinix.core.events import Failure
from calinix.core.pool_views import SteeredPod, SteeredPool, SteeringView
from calinix.gateway.routes import RouteTable
from calinix.telemetry import Metrics, RequestRecord
from calinix.telemetry.counters import (
    FAILURES,
    MAX_CACHED_KEYS,
    MAX_ENDPOINTS,
    STRATEGIES,
    Counters,
    Histogram,
    status_label,
)
from telemetrykit import Pod, Pods, record, samples, value

OPERATIONS = Path(__file__).resolve().parent.parent / "docs" / "operations.md"


def metrics(*pods: Pod) -> Metrics:
    """Metrics of a gateway with these pods."""
    return Metrics(Counters(Pods(*(pods or (Pod("a"), Pod("b")))), max_pods=256))


def test_requests_are_counted_by_their_labels() -> None:
    """Mode, strategy, status and endpoint tell requests apart."""
    shown = metrics()
    for status in (200, 200, 503):
        shown.counters.observe(record(status=status))
    shown.counters.observe(record(endpoint="/v1/embeddings", mode="dispatch", strategy="random"))
    labels = {"mode": "single", "strategy": "cacheAware", "endpoint": "/v1/chat/completions"}
    assert value(shown, "calinix_requests_total", status="200", **labels) == 2
    assert value(shown, "calinix_requests_total", status="503", **labels) == 1
    other = {"mode": "dispatch", "strategy": "random", "endpoint": "/v1/embeddings"}
    assert value(shown, "calinix_requests_total", status="200", **other) == 1


def test_what_a_routed_request_adds_up_to() -> None:
    """Tokens, blocks, retries, disconnects and the four histograms take what the record says."""
    shown = metrics()
    shown.counters.observe(
        record(
            ttft_us=300_000,
            itl_us=12_000,
            e2e_us=2_000_000,
            decision_us=30,
            prompt_blocks=10,
            cached_blocks=4,
            predicted_cached_tokens=64.5,
            prompt_tokens=160,
            cached_tokens=48,
            output_tokens=70,
            retries=1,
            retry_reason="refused",
        )
    )
    shown.counters.observe(record(status=499, error="client_left", e2e_us=9_000_000))
    expected = {
        "calinix_request_ttft_seconds_sum": 0.3,
        "calinix_inter_token_seconds_sum": 0.012,
        "calinix_request_e2e_seconds_sum": 2.0,
        "calinix_request_e2e_seconds_count": 1,
        "calinix_decision_seconds_sum": 3e-5,
        "calinix_prefix_lookups_total": 10,
        "calinix_prefix_hits_total": 4,
        "calinix_cached_tokens_predicted_total": 64.5,
        "calinix_cached_tokens_reported_total": 48,
        "calinix_prompt_tokens_total": 160,
        "calinix_output_tokens_total": 70,
        "calinix_client_disconnects_total": 1,
    }
    assert {name: value(shown, name) for name in expected} == expected
    assert value(shown, "calinix_retries_total", reason="refused") == 1
    assert value(shown, "calinix_pod_requests_total", pod_id="a", role="single") == 2


def test_refused_and_broken_requests_are_no_latencies() -> None:
    """A request that no pod took, or whose answer broke off, says nothing of answer times."""
    shown = metrics()
    shown.counters.observe(record(pod_id="", status=503, decision_us=10, prompt_blocks=9))
    shown.counters.observe(record(error="broken"))
    shown.counters.observe(record(status=404))
    assert value(shown, "calinix_request_e2e_seconds_count") == 0
    assert value(shown, "calinix_decision_seconds_count") == 0
    assert value(shown, "calinix_prefix_lookups_total") == 0


def test_both_pods_of_a_dispatch_are_counted() -> None:
    """A dispatched request counts for its prefill pod and its decode pod."""
    shown = metrics(Pod("a", "decode"), Pod("b", "prefill"))
    shown.counters.observe(record(mode="dispatch", prefill_pod_id="b"))
    assert value(shown, "calinix_pod_requests_total", pod_id="a", role="decode") == 1
    assert value(shown, "calinix_pod_requests_total", pod_id="b", role="prefill") == 1


def test_pods_are_shown_as_the_router_knows_them() -> None:
    """Every scrape asks the router: a pod that is added appears, one that is removed does not."""
    source = Pods(Pod("a", "single", 3, False, True, True, 77))
    shown = Metrics(Counters(source, max_pods=4))
    labels = {"pod_id": "a", "role": "single"}
    kinds = {"inflight": 3, "healthy": 0, "draining": 1, "ejected": 1, "blocks_known": 77}
    assert {k: value(shown, f"calinix_pod_{k}", **labels) for k in kinds} == kinds
    source.list = [Pod("new", "prefill")]
    assert value(shown, "calinix_pod_healthy", pod_id="new", role="prefill") == 1
    assert value(shown, "calinix_pod_healthy", **labels) is None


def test_failures_are_counted_by_pod_and_kind() -> None:
    """Every Failure of the core has its own label; what is none is `other`."""
    assert {failure.value for failure in Failure} == FAILURES
    shown = metrics()
    for kind in ("connect", "connect", "made up"):
        shown.counters.pod_failed("a", kind)
    labels = {"pod_id": "a", "role": "single"}
    assert value(shown, "calinix_pod_failures_total", kind="connect", **labels) == 2
    assert value(shown, "calinix_pod_failures_total", kind="other", **labels) == 1


def test_what_only_the_host_knows() -> None:
    """Inflight and waiting are shown once the host says how to ask; dropped lines likewise."""
    shown = metrics()
    assert value(shown, "calinix_inflight_requests") is None
    shown.inflight, shown.waiting = (lambda: 3), (lambda: 2)
    assert value(shown, "calinix_inflight_requests") == 3
    assert value(shown, "calinix_waiting_requests") == 2


def test_build_info_and_the_process() -> None:
    """The version is there, and what Prometheus expects of any process."""
    shown = Metrics(Counters(Pods(), 1), {"compiled": "true"})
    assert value(shown, "calinix_build_info", version=__version__, compiled="true") == 1
    assert b"# TYPE process_cpu_seconds_total counter" in shown.exposition()


NASTY = st.sampled_from(["", "single", "cacheAware", 'a"b\n', "\ud800", "x" * 500]) | st.text()


@given(st.lists(st.tuples(NASTY, NASTY, st.integers(), NASTY, NASTY, NASTY), max_size=30))
def test_labels_are_bounded(made: list[tuple[str, str, int, str, str, str]]) -> None:
    """Whatever a record holds, labels come from fixed lists; endpoints by number."""
    shown = metrics()
    for mode, strategy, status, pod_id, reason, error in made:
        shown.counters.observe(
            RequestRecord(
                request_id="r",
                mode=mode,
                strategy=strategy,
                status=status,
                pod_id=pod_id,
                prefill_pod_id=pod_id,
                retries=1,
                retry_reason=reason,
                error=error,
            )
        )
        shown.counters.pod_failed(pod_id, error)
    for name, labels in samples(shown):
        for label, text in labels:
            if label == "mode":
                assert text in {"single", "dispatch", "other"}
            elif label == "strategy":
                assert text in STRATEGIES | {"other"}
            elif label == "status":
                assert re.fullmatch(r"[1-5]\d\d|[1-5]xx|other", text)
            elif label == "pod_id":
                assert text in {"a", "b", "other"}
            elif label in {"kind", "reason"}:
                assert text in FAILURES | {"other"}
            elif label == "source":
                assert text in {"history", "events", "gapped"}
            else:
                assert label in {"le", "role", "endpoint", "version"}, (name, label)


def test_tables_are_bounded() -> None:
    """Endless new endpoints and statuses end in a bounded number of series and cached keys."""
    shown = metrics()
    count = 2 * MAX_CACHED_KEYS
    for i in range(count):
        shown.counters.observe(record(endpoint=f"/made/up/{i}", status=100 + i % 500))
    assert len({labels[3] for labels in shown.counters.requests}) == MAX_ENDPOINTS + 1
    assert len(shown.counters._cells) <= MAX_CACHED_KEYS
    assert sum(cell[0] for cell in shown.counters.requests.values()) == count
    few = Counters(Pods(*(Pod(f"p{i}") for i in range(100))), max_pods=2)
    for i in range(100):
        few.observe(record(pod_id=f"p{i}"))
    assert len(few.pods) <= 4 * 2 + 1


def test_strategies_and_endpoints_fit() -> None:
    """Every strategy has its label, and the gateway's own route table fits among the endpoints."""
    assert set(get_args(StrategyName)) == STRATEGIES
    labels = {route.label for route in RouteTable(())._routes.values()}
    assert 10 < len(labels) < MAX_ENDPOINTS - 10


@pytest.mark.parametrize(
    ("status", "label"),
    [(200, "200"), (499, "499"), (418, "4xx"), (599, "5xx"), (0, "other"), (-5, "other")],
)
def test_statuses(status: int, label: str) -> None:
    """Known statuses have labels of their own, others their class."""
    assert status_label(status) == label


@given(st.lists(st.floats()))
def test_histograms_count_what_they_should(values: list[float]) -> None:
    """Every duration is in the first bucket that is not below it; what is none is left out."""
    histogram = Histogram((0.1, 1.0, 10.0))
    for one in values:
        histogram.observe(one)
    good = [one for one in values if 0 <= one < 1e9]
    assert histogram.counts == [
        sum(low < one <= high for one in good)
        for low, high in ((-1, 0.1), (0.1, 1.0), (1.0, 10.0), (10.0, 1e9))
    ]
    assert histogram.total_s == pytest.approx(sum(good))


def test_controllers_are_shown_by_pod_and_role() -> None:
    """Weights, queues now and ahead, rates; a pod that gets no work has a weight alone."""
    pods = [
        SteeredPod("a", 1.4, True, 3.0, 2.0, [1.4, 1.3], [2.5, 2.0], 9000.0, 8.0, 0.5, 0.6, 1.1),
        SteeredPod("b", 1.0, False, None, None, [], [], None, 0.0, None, 0.0, 1.0),
    ]
    pool = SteeredPool(
        "prefill", "seconds", "held", "solved", 9, 2, 0.1, 0.2, 1.5, 8000.0, 0.3, 0.02, 0.001, pods
    )
    shown = metrics()
    shown.steering = lambda: SteeringView([pool], 3, 1.0)
    labels = {"pod_id": "a", "role": "prefill"}
    for name, figure in (("weight", 1.4), ("queue", 3.0), ("queue_ahead", 2.0), ("slowness", 1.1)):
        assert value(shown, f"calinix_pod_{name}", **labels) == figure
    assert value(shown, "calinix_pod_weight", pod_id="b", role="prefill") == 1.0
    found = samples(shown)
    assert ("calinix_pod_queue", (("pod_id", "b"), ("role", "prefill"))) not in found
    states = {
        name: value(shown, "calinix_controller_state", role="prefill", state=name)
        for name in ("starting", "fresh", "held", "decaying")
    }
    assert states == {"starting": 0.0, "fresh": 0.0, "held": 1.0, "decaying": 0.0}
    assert value(shown, "calinix_controller_steps_total", role="prefill") == 9
    assert value(shown, "calinix_controller_fallbacks_total", role="prefill") == 2
    assert value(shown, "calinix_controller_arrival_rate", role="prefill", unit="seconds") == 1.5
    assert value(shown, "calinix_replicas") == 3


def test_the_documents_list_what_is_shown() -> None:
    """The metrics table of docs/operations.md and the exposition name the same metrics."""
    listed = set(re.findall(r"^\| `(calinix_\w+)`", OPERATIONS.read_text("utf-8"), re.MULTILINE))
    shown = metrics()
    shown.inflight = shown.waiting = shown.dropped_lines = lambda: 0
    types = re.findall(r"^# TYPE (calinix_\w+) ", shown.exposition().decode(), re.MULTILINE)
    assert listed == set(types)
