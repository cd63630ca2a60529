"""What a run comes to: one row of figures, and the series that its pictures are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from calinix.sim.recorder import Requests

if TYPE_CHECKING:
    from calinix.sim.simulate import Run

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

GOODPUT_TTFT_S, GOODPUT_TPOT_S = 2.0, 0.060
"""A request is good whose first token comes within this and one prefill of its whole prompt, and
whose tokens come no further apart than that."""

BINS = 60
"""Over the length of a run."""
MAX_MOMENTS = 160
"""Samples of queues and weights that are kept; fewer where there are many pods."""
MAX_CELLS = 4096
MAX_FORECASTS = 16
SHARES = 1.0 - np.logspace(0.0, -3.0, 61)
"""The percentiles of a latency's curve, as shares: dense towards p99.9."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run in figures. Latencies are of the requests that were answered; null: there is none."""

    strategy: str
    seed: int
    load: float
    requests: int
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    e2e_mean_s: float | None
    e2e_p99_s: float | None
    tpot_mean_s: float | None
    goodput_ratio: float
    """Good requests over all; see GOODPUT_TTFT_S."""
    prefix_hit_ratio: float
    """Prompt tokens found in caches over all prompt tokens."""
    jain: float
    """Jain's index of the pods' work; with several roles the lowest of them."""


class PodShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod did."""

    id: str
    role: str
    requests: int
    """That it answered or prefilled."""
    work: float
    """Tokens of prefill work and of answers."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller expected at `t_s`."""

    t_s: float
    queue: list[list[float | None]]
    """Of the steps that follow, shape (H, pods)."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The pictures of one run, as numbers; null where there is nothing to measure."""

    shares: list[float]
    """Percentiles of the latency curves, as shares; likewise:"""
    ttft_s: list[float | None]
    tpot_s: list[float | None]
    e2e_s: list[float | None]
    t_s: list[float]
    """Middles of the bins; likewise:"""
    requests_per_s: list[float | None]
    output_tokens_per_s: list[float | None]
    prefix_hit_ratio: list[float | None]
    jain: list[float | None]
    sample_t_s: list[float]
    """Moments of the samples, shape (k,); likewise (k, pods):"""
    queue: list[list[float]]
    weights: list[list[float | None]]
    expected_t_s: list[float]
    """Moments of the controller's steps, shape (j,)."""
    expected: list[list[float | None]]
    """The queue that it expected one step later, in its own unit, shape (j, pods): seconds of work
    where prompts are computed, requests where answers are."""
    forecast_step_s: float
    forecasts: list[Forecast]
    """Some of its whole trajectories."""
    pods: list[PodShare]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A run, boiled down."""

    row: Row
    series: Series
    config: dict[str, Any]


def outcome_of(run: Run) -> Outcome:
    """A run's row and series."""
    return Outcome(row=row_of(run), series=series_of(run), config=run.config)


def row_of(run: Run) -> Row:
    """A run's figures."""
    asked = run.requests
    good = answered(asked)
    ttft_s, e2e_s, tpot_s = asked.ttft_s[good], asked.e2e_s[good], asked.tpot_s[good]
    prompts = int(asked.prompt_tokens.sum(dtype=np.int64))
    return Row(
        strategy=run.strategy,
        seed=run.seed,
        load=run.load,
        requests=len(asked.arrival_s),
        ttft_mean_s=_mean(ttft_s),
        ttft_p50_s=_quantile(ttft_s, 0.5),
        ttft_p99_s=_quantile(ttft_s, 0.99),
        e2e_mean_s=_mean(e2e_s),
        e2e_p99_s=_quantile(e2e_s, 0.99),
        tpot_mean_s=_mean(tpot_s),
        goodput_ratio=_short(_goodput(asked, good)),
        prefix_hit_ratio=_short(int(asked.cached_tokens.sum(dtype=np.int64)) / max(1, prompts)),
        jain=_short(_jain_of(np.asarray(run.work_done, float), [pod.role for pod in run.pods])),
    )


def series_of(run: Run) -> Series:
    """A run's pictures, as numbers: bounded, however long the run was."""
    asked, samples = run.requests, run.samples
    good = answered(asked)
    end_s = float(np.nanmax(asked.arrival_s + np.nan_to_num(asked.e2e_s), initial=0.0)) or 1.0
    edges = np.linspace(0.0, end_s, BINS + 1)
    ended_s = (asked.arrival_s + asked.e2e_s)[good]
    per_bin_s = end_s / BINS
    prompts, _ = np.histogram(asked.arrival_s, edges, weights=asked.prompt_tokens)
    cached, _ = np.histogram(asked.arrival_s, edges, weights=asked.cached_tokens)
    kept = _moments(len(samples.times_s), len(run.pods))
    heard = run.predicted_queue
    steps = [heard[n] for n in _moments(len(heard), len(run.pods)).tolist()]
    return Series(
        shares=_floats(SHARES),
        ttft_s=_curve(asked.ttft_s[good]),
        tpot_s=_curve(asked.tpot_s[good]),
        e2e_s=_curve(asked.e2e_s[good]),
        t_s=_floats((edges[:-1] + edges[1:]) / 2.0),
        requests_per_s=_nullable(np.histogram(ended_s, edges)[0] / per_bin_s),
        output_tokens_per_s=_nullable(
            np.histogram(ended_s, edges, weights=asked.output_tokens[good])[0] / per_bin_s
        ),
        prefix_hit_ratio=_nullable(_ratio(cached, prompts)),
        jain=_nullable(_jain_over_time(run, edges)),
        sample_t_s=_floats(samples.times_s[kept]),
        queue=[_floats(row) for row in samples.queue[kept]],
        weights=[_nullable(row) for row in samples.weights[kept]],
        expected_t_s=[_short(t_s) for t_s, _ in steps],
        expected=[_nullable(queues[0]) for _, queues in steps],
        forecast_step_s=_step_s(run.config),
        forecasts=_forecasts(run),
        pods=_shares(run),
    )


def answered(asked: Requests) -> npt.NDArray[np.bool_]:
    """Which requests got their whole answer."""
    good: npt.NDArray[np.bool_] = (asked.status == 200) & np.isfinite(asked.e2e_s)
    return good


def jain_index(loads: Floats) -> float:
    """(sum x)^2 / (n sum x^2): 1 where all are equal, 1/n where one has all; 1 for no load."""
    most = float(loads.max(initial=0.0))
    if not most:
        return 1.0
    # By a power of two, which rounds nothing: squares of tiny loads would lose their digits.
    scaled = np.ldexp(loads, -int(np.frexp(most)[1]))
    return float(scaled.sum()) ** 2 / (len(loads) * float((scaled * scaled).sum()))


def _goodput(asked: Requests, good: npt.NDArray[np.bool_]) -> float:
    in_time = asked.ttft_s <= GOODPUT_TTFT_S + asked.ideal_prefill_s
    paced = ~(asked.tpot_s > GOODPUT_TPOT_S)
    return float((good & in_time & paced).mean()) if len(good) else 0.0


def _jain_of(work: Floats, roles: Sequence[str]) -> float:
    """Pods of different roles do different work: the lowest of their indices."""
    groups = [np.array([role == one for role in roles]) for one in sorted(set(roles))]
    return min((jain_index(work[group]) for group in groups), default=1.0)


def _jain_over_time(run: Run, edges: Floats) -> Floats:
    """Jain's index of the tokens that came to each pod in each bin; NaN in empty ones."""
    asked, roles = run.requests, [pod.role for pod in run.pods]
    pods, bins = len(roles), len(edges) - 1
    when = np.clip(np.searchsorted(edges, asked.arrival_s, side="right") - 1, 0, bins - 1)
    work = np.zeros((bins, pods))
    prefiller = np.where(asked.prefill_pod >= 0, asked.prefill_pod, asked.pod)
    computed = asked.prompt_tokens - asked.cached_tokens
    for pod, tokens in ((prefiller, computed), (asked.pod, asked.output_tokens)):
        known = pod >= 0
        np.add.at(work, (when[known], pod[known]), tokens[known].astype(float))
    return np.array([_jain_of(row, roles) if row.any() else np.nan for row in work])


def _moments(there: int, pods: int) -> Ints:
    """Which of so many are kept: evenly, as many as fit."""
    most = max(24, min(MAX_MOMENTS, MAX_CELLS // max(1, pods)))
    return np.unique(np.linspace(0, there - 1, min(there, most)).astype(np.int32))


def _forecasts(run: Run) -> list[Forecast]:
    """Some of what the controller predicted, evenly over the run."""
    there = run.predicted_queue
    kept = np.unique(np.linspace(0, len(there) - 1, min(len(there), MAX_FORECASTS)).astype(int))
    return [
        Forecast(t_s=_short(there[n][0]), queue=[_nullable(row) for row in there[n][1]])
        for n in kept.tolist()
    ]


def _step_s(config: dict[str, Any]) -> float:
    return float(config.get("controller", {}).get("stepMs", 500)) / 1e3


def _shares(run: Run) -> list[PodShare]:
    asked = run.requests
    counts = np.zeros(len(run.pods), dtype=np.int64)
    for column in (asked.pod, asked.prefill_pod):
        known = column[column >= 0]
        counts += np.bincount(known, minlength=len(counts))[: len(counts)]
    return [
        PodShare(id=pod.id, role=pod.role, requests=count, work=_short(float(work)))
        for pod, count, work in zip(run.pods, counts.tolist(), run.work_done, strict=True)
    ]


def _curve(values: Floats) -> list[float | None]:
    known = values[np.isfinite(values)]
    if not len(known):
        return [None] * len(SHARES)
    return _nullable(np.quantile(known, SHARES))


def _ratio(part: Floats, whole: Floats) -> Floats:
    ratios: Floats = np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
    return ratios


def _mean(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return _short(float(known.mean())) if len(known) else None


def _quantile(values: Floats, share: float) -> float | None:
    known = values[np.isfinite(values)]
    return _short(float(np.quantile(known, share))) if len(known) else None


def _short(value: float) -> float:
    """Six digits: more would be noise, and longer files."""
    return float(f"{value:.6g}")


def _floats(values: Floats) -> list[float]:
    return [_short(value) for value in values.tolist()]


def _nullable(values: Floats) -> list[float | None]:
    return [_short(value) if np.isfinite(value) else None for value in values.tolist()]
