"""What a run comes to: rows and series, from made-up runs whose figures are known."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from calinix.core.pods import Role
from calinix.sim.measures import BINS, MAX_MOMENTS, jain_index, outcome_of, row_of, series_of
from calinix.sim.recorder import Requests, Samples
from calinix.sim.simulate import PodSummary, Run

NAN = float("nan")


def a_run(count: int = 100, **changes: Any) -> Run:
    """`count` requests, one a second, each 1 s to the first token and 3 s in all; 2 pods."""
    ones = np.ones(count)
    fields: dict[str, Any] = {
        "arrival_s": np.arange(count, dtype=float),
        "ttft_s": ones.copy(),
        "tpot_s": 0.02 * ones,
        "e2e_s": 3.0 * ones,
        "pod": np.arange(count, dtype=np.int32) % 2,
        "prefill_pod": np.full(count, -1, dtype=np.int32),
        "prompt_tokens": np.full(count, 1000, dtype=np.int32),
        "cached_tokens": np.full(count, 250, dtype=np.int32),
        "output_tokens": np.full(count, 100, dtype=np.int32),
        "status": np.full(count, 200, dtype=np.int32),
        "retries": np.zeros(count, dtype=np.int32),
        "streamed": np.ones(count, dtype=bool),
        "ideal_prefill_s": 0.5 * ones,
    }
    run_fields: dict[str, Any] = {
        "scenario": "made-up",
        "strategy": "roundRobin",
        "seed": 3,
        "load": 1.5,
        "config": {"controller": {"stepMs": 250}},
        "requests": Requests(**{k: changes.pop(k, v) for k, v in fields.items()}),
        "pods": pods(("single", 10.0), ("single", 10.0)),
        "samples": Samples(
            times_s=np.arange(3.0),
            queue=np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]),
            weights=np.full((3, 2), NAN),
        ),
        "predicted_queue": ((1.0, np.array([[1.0, 2.0], [0.5, 1.0]])),),
        "duration_s": 102.0,
    }
    return Run(**{k: changes.pop(k, v) for k, v in run_fields.items()})


def pods(*done: tuple[Role, float]) -> tuple[PodSummary, ...]:
    """Pods of these roles that did so much work."""
    return tuple(
        PodSummary(id=f"{role}-{number}", role=role, speed=1.0, work_done=work)
        for number, (role, work) in enumerate(done)
    )


def test_a_row_has_the_figures() -> None:
    """Means, percentiles, goodput, hits and balance of a run that is known."""
    ttft_s = np.arange(1.0, 101.0) / 100.0
    row = row_of(a_run(ttft_s=ttft_s))
    assert (row.strategy, row.seed, row.load, row.requests) == ("roundRobin", 3, 1.5, 100)
    assert row.ttft_mean_s == pytest.approx(0.505)
    assert row.ttft_p50_s == pytest.approx(0.505)
    assert row.ttft_p99_s == pytest.approx(np.quantile(ttft_s, 0.99))
    assert (row.e2e_mean_s, row.e2e_p99_s, row.tpot_mean_s) == (3.0, 3.0, 0.02)
    assert (row.goodput_ratio, row.prefix_hit_ratio, row.jain) == (1.0, 0.25, 1.0)


def test_the_row_has_the_agreed_names() -> None:
    """Exactly these keys, in this order."""
    assert list(msgspec.to_builtins(row_of(a_run()))) == [
        "strategy", "seed", "load", "requests", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s",
        "e2e_mean_s", "e2e_p99_s", "tpot_mean_s", "goodput_ratio", "prefix_hit_ratio", "jain",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({"ttft_s": np.full(10, 2.4)}, 1.0),
        ({"ttft_s": np.full(10, 2.6)}, 0.0),
        ({"tpot_s": np.full(10, 0.061)}, 0.0),
        ({"tpot_s": np.full(10, NAN)}, 1.0),
        ({"status": np.array([200] * 5 + [502] * 5, dtype=np.int32)}, 0.5),
        ({"e2e_s": np.array([3.0] * 9 + [NAN])}, 0.9),
    ],
)
def test_goodput(changes: dict[str, Any], good: float) -> None:
    """Answered, its first token within 2 s and one prefill, tokens at most 60 ms apart."""
    assert row_of(a_run(10, **changes)).goodput_ratio == good


def test_what_failed_is_in_no_latency() -> None:
    """The means are of the requests that were answered."""
    status = np.array([200, 503], dtype=np.int32)
    row = row_of(a_run(2, status=status, ttft_s=np.array([1.0, 50.0]), e2e_s=np.array([2.0, NAN])))
    assert (row.ttft_mean_s, row.e2e_mean_s, row.requests) == (1.0, 2.0, 2)


def test_a_run_without_answers_has_no_latencies() -> None:
    """Null, not a number that means something else; and it can be written as JSON."""
    outcome = outcome_of(a_run(3, status=np.zeros(3, dtype=np.int32)))
    assert outcome.row.ttft_mean_s is None
    assert outcome.row.goodput_ratio == 0.0
    assert set(outcome.series.ttft_s) == {None}
    assert b"NaN" not in msgspec.json.encode(outcome)


def test_balance_is_that_of_the_worst_role() -> None:
    """Decode pods share their work badly, prefill pods well: the index is the decode pods'."""
    roles = pods(("prefill", 5.0), ("prefill", 5.0), ("decode", 0.0), ("decode", 8.0))
    both = {"pod": np.full(4, 3, dtype=np.int32), "prefill_pod": np.array([0, 1, 0, 1], np.int32)}
    samples = Samples(times_s=np.zeros(1), queue=np.zeros((1, 4)), weights=np.zeros((1, 4)))
    run = a_run(4, pods=roles, samples=samples, predicted_queue=(), **both)
    assert row_of(run).jain == 0.5
    assert [pod.requests for pod in series_of(run).pods] == [2, 2, 0, 4]


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=30))
@example([2.4e-159, 2.4e-159])
def test_jains_index_is_between_one_over_n_and_one(work: list[float]) -> None:
    """Whatever the work; and 1 for none at all."""
    index = jain_index(np.array(work))
    assert 1.0 / len(work) - 1e-9 <= index <= 1.0 + 1e-9


def test_series_add_up() -> None:
    """Throughput over time holds every request and every token; hits are those of the row."""
    series = series_of(a_run())
    width = series.t_s[1] - series.t_s[0]
    assert sum(x or 0.0 for x in series.requests_per_s) * width == pytest.approx(100, rel=1e-3)
    assert sum(x or 0.0 for x in series.output_tokens_per_s) * width == pytest.approx(1e4, rel=1e-3)
    assert {x for x in series.prefix_hit_ratio if x is not None} == {0.25}
    assert series.queue == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert series.weights[0] == [None, None]
    assert series.forecast_step_s == 0.25
    assert series.forecasts[0].queue == [[1.0, 2.0], [0.5, 1.0]]
    assert (series.expected_t_s, series.expected) == ([1.0], [[1.0, 2.0]])


def test_series_are_bounded() -> None:
    """A long run on many pods takes no more room than a short one."""
    samples = Samples(
        times_s=np.arange(1000.0), queue=np.ones((1000, 256)), weights=np.ones((1000, 256))
    )
    many: list[tuple[Role, float]] = [("single", 1.0)] * 256
    run = a_run(
        5000,
        samples=samples,
        pods=pods(*many),
        predicted_queue=tuple((float(n), np.ones((10, 256))) for n in range(1000)),
    )
    series = series_of(run)
    assert len(series.t_s) == BINS
    assert len(series.queue) <= MAX_MOMENTS
    assert len(msgspec.json.encode(series)) < 500_000
    assert series.sample_t_s[0] == 0.0
    assert series.sample_t_s[-1] == 999.0
