"""The pictures of runs: which series are drawn, against what, with which words."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from calinix.sim.measures import Outcome, PodShare, Series
from calinix.sim.svg import Bar, Line, bar_chart, heat_map, line_chart
from calinix.sim.svg_axes import Axis

Floats = npt.NDArray[np.float64]

MOST_LINES = 12
"""Pods that are drawn as lines; more become a heat map."""
MOST_BARS = 16
STEERED = frozenset({"weightedRoundRobin", "weightedPowerOfTwo", "predictive"})
"""Strategies that look at the controller's weights; it runs under all of them."""
_SECONDS = Axis(name="seconds of the run")
_PERCENTILES = Axis(name="percentile of the requests", kind="percentile", least=0.05, most=0.999)
_LATENCIES = (
    ("ttft_s", "Time to first token"),
    ("tpot_s", "Time per output token"),
    ("e2e_s", "End to end"),
)
_COURSES = (
    ("requests_per_s", "Throughput", Axis(name="requests / s", least=0.0)),
    ("output_tokens_per_s", "Output", Axis(name="tokens / s", least=0.0)),
    ("prefix_hit_ratio", "Prefix hit ratio", Axis(name="of prompt tokens", least=0.0)),
    ("jain", "Balance (Jain's index)", Axis(name="1 is equal work", least=0.0, most=1.0)),
)


class Picture(msgspec.Struct, frozen=True):
    """One picture; `name` is fit for a file, and no two of one scenario share it."""

    name: str
    svg: str


def latencies(outcomes: Sequence[Outcome]) -> list[Picture]:
    """Percentiles of each latency, one line per strategy: the mean of its seeds."""
    return [
        Picture(
            field.removesuffix("_s"),
            line_chart(title, _curves(outcomes, field), _PERCENTILES, Axis(name="s", kind="log")),
        )
        for field, title in _LATENCIES
    ]


def courses(outcomes: Sequence[Outcome]) -> list[Picture]:
    """Throughput, prefix hits and balance over time, one line per strategy: its first seed."""
    return [
        Picture(
            field.replace("_", "-"),
            line_chart(title, _over_time(outcomes, field), _SECONDS, y, height=260),
        )
        for field, title, y in _COURSES
    ]


def control(outcome: Outcome) -> list[Picture]:
    """Queues of one run by role; where weights are used, they and what the controller expected."""
    series, strategy = outcome.series, outcome.row.strategy
    steered = strategy.partition(":")[0] in STEERED
    found = []
    for role in sorted({pod.role for pod in series.pods}, key=_ROLES.index):
        places = [place for place, pod in enumerate(series.pods) if pod.role == role]
        of_role = "" if role == "single" else f" of {role} pods"
        title = f"Queue{of_role}, {strategy}"
        found.append(Picture(_named("queue", role, strategy), _queues(series, places, title)))
        if not steered:
            continue
        if np.isfinite(_table(series.weights, len(series.pods))[:, places]).any():
            title = f"Weights{of_role}, {strategy}"
            found.append(
                Picture(_named("weights", role, strategy), _weights(series, places, title))
            )
        if np.isfinite(_table(series.expected, len(series.pods))[:, places]).any():
            unit = "requests" if role == "decode" else "seconds of work"
            title = f"Expected queue{of_role}, {strategy}"
            found.append(
                Picture(_named("expected", role, strategy), _expected(series, places, title, unit))
            )
    return found


def loads(outcomes: Sequence[Outcome]) -> list[Picture]:
    """How the work was shared: every strategy's pods by rank; and by name where they are few."""
    lines = []
    for colour, outcome in enumerate(_firsts(outcomes)):
        shares = _shares_by_rank(outcome.series.pods)
        ranks: Floats = np.arange(len(shares)) / max(1, len(shares) - 1)
        lines.append(Line(name=outcome.row.strategy, x=ranks, y=shares, colour=colour))
    title = "Work per pod, from the busiest to the idlest"
    y = Axis(name="times the mean of its role", least=0.0)
    found = [Picture("work-by-rank", line_chart(title, lines, Axis(name="share of the pods"), y))]
    for outcome in _firsts(outcomes):
        pods = outcome.series.pods
        if len(pods) <= MOST_BARS:
            bars = [
                Bar(name=pod.id, value=pod.work, colour=_ROLE_COLOURS.get(pod.role, 0))
                for pod in pods
            ]
            title = f"Work per pod, {outcome.row.strategy}"
            found.append(
                Picture(_named("work", outcome.row.strategy), bar_chart(title, bars, "tokens"))
            )
    return found


_ROLES = ("single", "prefill", "decode")
_ROLE_COLOURS = {"single": 0, "prefill": 1, "decode": 5}


def _named(*words: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=-]+", "-", "-".join(words))


def _queues(series: Series, places: list[int], title: str) -> str:
    times, queue = np.array(series.sample_t_s), _table(series.queue, len(series.pods))[:, places]
    names = [series.pods[place].id for place in places]
    if len(places) > MOST_LINES:
        return heat_map(title, queue.T, names, _SECONDS, times, unit="requests")
    lines = [
        Line(name=name, x=times, y=queue[:, number], colour=number)
        for number, name in enumerate(names)
    ]
    return line_chart(title, lines, _SECONDS, Axis(name="requests waiting or running", least=0.0))


def _weights(series: Series, places: list[int], title: str) -> str:
    times, weights = (
        np.array(series.sample_t_s),
        _table(series.weights, len(series.pods))[:, places],
    )
    names = [series.pods[place].id for place in places]
    if len(places) > MOST_LINES:
        return heat_map(title, weights.T, names, _SECONDS, times)
    lines = [
        Line(name=name, x=times, y=weights[:, number], colour=number)
        for number, name in enumerate(names)
    ]
    return line_chart(title, lines, _SECONDS, Axis(name="weight, mean 1", least=0.0))


def _expected(series: Series, places: list[int], title: str, unit: str) -> str:
    """What the controller expects one step ahead as lines; some whole horizons, dashed."""
    width, step_s = len(series.pods), series.forecast_step_s
    times: Floats = np.array(series.expected_t_s, dtype=float) + step_s
    expected = _table(series.expected, width)[:, places]
    names = [series.pods[place].id for place in places]
    if len(places) > MOST_LINES:
        return heat_map(title, expected.T, names, _SECONDS, times, unit=unit)
    lines = [
        Line(name=name, x=times, y=expected[:, number], colour=number)
        for number, name in enumerate(names)
    ]
    for forecast in series.forecasts:
        ahead = _table(forecast.queue, width)[:, places]
        when: Floats = forecast.t_s + step_s * np.arange(1.0, len(ahead) + 1.0)
        lines += [
            Line(name=name, x=when, y=ahead[:, number], colour=number, is_forecast=True)
            for number, name in enumerate(names)
        ]
    return line_chart(title, lines, _SECONDS, Axis(name=unit, least=0.0))


def _firsts(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Each strategy's first run."""
    return list({one.row.strategy: one for one in reversed(outcomes)}.values())[::-1]


def _curves(outcomes: Sequence[Outcome], field: str) -> list[Line]:
    lines = []
    for colour, first in enumerate(_firsts(outcomes)):
        own = [one for one in outcomes if one.row.strategy == first.row.strategy]
        values = np.array([_column(getattr(one.series, field)) for one in own])
        shares = np.array(first.series.shares)
        # The quickest requests are not drawn: the axis would be theirs.
        shown = shares >= 0.05
        if np.isfinite(values).all():
            mean = values.mean(axis=0)[shown]
            lines.append(Line(name=first.row.strategy, x=shares[shown], y=mean, colour=colour))
    return lines


def _over_time(outcomes: Sequence[Outcome], field: str) -> list[Line]:
    return [
        Line(
            name=one.row.strategy,
            x=np.array(one.series.t_s),
            y=_column(getattr(one.series, field)),
            colour=colour,
        )
        for colour, one in enumerate(_firsts(outcomes))
    ]


def _shares_by_rank(pods: Sequence[PodShare]) -> Floats:
    """Each pod's work beside the mean of its role, largest first."""
    shares: list[float] = []
    for role in sorted({pod.role for pod in pods}):
        work = np.array([pod.work for pod in pods if pod.role == role])
        shares += (work / (work.mean() or 1.0)).tolist()
    return np.sort(np.array(shares))[::-1]


def _column(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _table(rows: Sequence[Sequence[float | None]], width: int) -> Floats:
    """Shape (rows, width); null is NaN."""
    return np.array([_column(row) for row in rows], dtype=float).reshape(len(rows), width)
