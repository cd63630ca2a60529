"""Several workers' metrics as one exposition, and their admin's answers as one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from calinix.gateway.workers_views import decisions_of, pods_of, state_of
from calinix.telemetry import merge
from calinix.telemetry.merge import ADDED, LEAST, MEANS, MergedMetrics

TELEMETRY = Path(merge.__file__).parent

ONE = """\
# HELP calinix_requests_total Finished requests
# TYPE calinix_requests_total counter
calinix_requests_total{mode="single",status="200"} 3.0
# HELP calinix_request_e2e_seconds To the end
# TYPE calinix_request_e2e_seconds histogram
calinix_request_e2e_seconds_bucket{le="0.5"} 1.0
calinix_request_e2e_seconds_bucket{le="+Inf"} 3.0
calinix_request_e2e_seconds_count 3.0
calinix_request_e2e_seconds_sum 4.5
# HELP calinix_pod_inflight Requests
# TYPE calinix_pod_inflight gauge
calinix_pod_inflight{pod_id="a",role="single"} 2.0
# HELP calinix_pod_healthy Probes
# TYPE calinix_pod_healthy gauge
calinix_pod_healthy{pod_id="a",role="single"} 1.0
# HELP calinix_pod_weight Share
# TYPE calinix_pod_weight gauge
calinix_pod_weight{pod_id="a",role="single"} 1.0
# HELP calinix_pod_blocks_known Blocks
# TYPE calinix_pod_blocks_known gauge
calinix_pod_blocks_known{pod_id="a",role="single"} 40.0
# HELP calinix_pod_engine_stats_age_seconds Since
# TYPE calinix_pod_engine_stats_age_seconds gauge
calinix_pod_engine_stats_age_seconds{pod_id="a",role="single"} +Inf
"""
OTHER = ONE
for _old, _new in (
    ('"200"} 3.0', '"503"} 5.0'),
    ('healthy{pod_id="a",role="single"} 1.0', 'healthy{pod_id="a",role="single"} 0.0'),
    ('weight{pod_id="a",role="single"} 1.0', 'weight{pod_id="a",role="single"} 2.0'),
    ('known{pod_id="a",role="single"} 40.0', 'known{pod_id="a",role="single"} 41.0'),
    ("+Inf\n", "7.0\n"),
):
    assert _old in OTHER
    OTHER = OTHER.replace(_old, _new)


def samples(merged: MergedMetrics, **more: Any) -> dict[str, float]:
    """name{labels} -> value, as Prometheus reads it."""
    return {
        s.name + "".join(f",{k}={v}" for k, v in sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(merged.exposition(**more).decode())
        for s in family.samples
    }


def test_counters_and_histograms_add_up_and_gauges_have_rules() -> None:
    """Sums for what each worker has a part of, the least of verdicts, means of estimates."""
    merged = MergedMetrics()
    merged.take("0", ONE)
    merged.take("1", OTHER)
    pod = ",pod_id=a,role=single"
    seen = samples(merged, more=[GaugeMetricFamily("calinix_extra", "More", value=9.0)])
    assert seen == {
        "calinix_requests_total,mode=single,status=200": 3.0,
        "calinix_requests_total,mode=single,status=503": 5.0,
        "calinix_request_e2e_seconds_bucket,le=0.5": 2.0,
        "calinix_request_e2e_seconds_bucket,le=+Inf": 6.0,
        "calinix_request_e2e_seconds_count": 6.0,
        "calinix_request_e2e_seconds_sum": 9.0,
        f"calinix_pod_inflight{pod}": 4.0,
        f"calinix_pod_healthy{pod}": 0.0,
        f"calinix_pod_weight{pod}": 1.5,
        f"calinix_pod_blocks_known{pod}": 41.0,
        f"calinix_pod_engine_stats_age_seconds{pod}": 7.0,
        "calinix_extra": 9.0,
    }


def test_every_gauge_with_a_rule_exists() -> None:
    """A gauge that was given another name would silently lose its rule."""
    source = "".join(path.read_text() for path in TELEMETRY.glob("*.py") if path.name != "merge.py")
    for name in ADDED | LEAST | MEANS:
        family = name.removeprefix("calinix_").removeprefix("pod_").removeprefix("engine_")
        assert name.startswith("process_") or f'{family}"' in source, name
    assert len(ADDED | LEAST | MEANS) == len(ADDED) + len(LEAST) + len(MEANS)


def test_what_an_ended_worker_counted_stays() -> None:
    """Its counters stay in the sums, so that none ever falls; its gauges go."""
    merged = MergedMetrics()
    merged.take("0", ONE)
    merged.take("1.a", ONE)
    for life in ("1.a", "1.b", "never seen"):
        merged.forget(life)
        merged.take("1.b", ONE)
    seen = samples(merged)
    assert seen["calinix_requests_total,mode=single,status=200"] == 12.0
    assert seen["calinix_request_e2e_seconds_bucket,le=+Inf"] == 12.0
    assert seen["calinix_pod_inflight,pod_id=a,role=single"] == 4.0
    assert math.isinf(seen["calinix_pod_engine_stats_age_seconds,pod_id=a,role=single"])


def view(**changed: Any) -> dict[str, Any]:
    """One pod as a worker's admin tells it."""
    calibration = {"cacheSamples": changed.pop("samples", 0)}
    return {
        "id": "a", "url": "http://a", "state": "healthy", "reason": "", "healthy": True,
        "ejected": False, "draining": False, "cooling": False, "silent": False,
        "failuresInRow": 0, "inflight": 1, "prefillTokens": 10, "decodeTokens": 20,
        "tokensPerS": None, "blocks": 5, "capacityBlocks": 9, "heardAgeS": None,
        "calibration": calibration, **changed,
    }  # fmt: skip


def test_pods_of_all_workers() -> None:
    """Loads add up, the most careful verdict counts, and each worker's part is named."""
    one = view(tokensPerS=100.0, samples=3)
    other = view(
        inflight=2, state="ejected", ejected=True, reason="why", tokensPerS=300.0, heardAgeS=4.0
    )
    (pod,) = pods_of([(0, {"pods": [one]}), (2, {"pods": [other]})])["pods"]
    assert (pod["inflight"], pod["prefillTokens"], pod["decodeTokens"]) == (3, 20, 40)
    assert (pod["state"], pod["reason"], pod["ejected"]) == ("ejected", "why", True)
    assert (pod["tokensPerS"], pod["heardAgeS"], pod["healthy"]) == (200.0, 4.0, True)
    assert pod["calibration"]["cacheSamples"] == 3
    assert pod["workers"] == [
        {"worker": 0, "state": "healthy", "inflight": 1},
        {"worker": 2, "state": "ejected", "inflight": 2},
    ]


def test_decisions_and_state_of_all_workers() -> None:
    """Decisions in order of time, the last of all; counts added up."""
    said = [
        (0, {"decisions": [{"ageSeconds": 4.0}, {"ageSeconds": 1.0}]}),
        (1, {"decisions": [{"ageSeconds": 3.0}, {"ageSeconds": 2.0}]}),
    ]
    found = decisions_of(said, 3)["decisions"]
    assert [(one["worker"], one["ageSeconds"]) for one in found] == [(1, 3.0), (1, 2.0), (0, 1.0)]
    assert decisions_of(said, 0) == {"decisions": []}
    state = {
        "inflight": 1, "waiting": 2, "openLeases": 3, "draining": False, "maxTickLagSeconds": 0.5
    }  # fmt: skip
    other = {**state, "draining": True, "maxTickLagSeconds": 0.25}
    assert state_of([(0, state), (1, other)]) == {
        "inflight": 2, "waiting": 4, "openLeases": 6, "draining": True, "maxTickLagSeconds": 0.5
    }  # fmt: skip
