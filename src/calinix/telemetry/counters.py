"""Counters as plain numbers; metrics.py shows them when somebody asks.

Counting through prometheus_client costs 0.4 to 0.8 us each; an addition to a slot costs a
twentieth of that. Labels are bounded whatever is counted: modes, strategies and failure kinds by
their enums, statuses by STATUSES and classes, pods by the router's own list, endpoints by number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, Protocol, get_args

from calinix.config import Mode, StrategyName
from calinix.telemetry.record import RequestRecord

OTHER: Final = "other"
MODES = frozenset(get_args(Mode))
STRATEGIES = frozenset(get_args(StrategyName))
STATUSES = frozenset(
    {200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 431, 499, 500, 502, 503, 504}
)
FAILURES = frozenset(
    {
        "broken", "cancelled", "closed", "connect", "refused", "server_error", "timeout",
        "total_timeout",
    }
)  # fmt: skip
CLIENT_LEFT = frozenset({"client_left", "client_stalled"})
MAX_ENDPOINTS: Final = 64
MAX_CACHED_KEYS: Final = 4096

SECONDS = (
    0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
GAP_SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
DECISION_SECONDS = (
    5e-6, 1e-5, 2e-5, 4e-5, 6e-5, 8e-5, 1e-4, 1.5e-4, 2e-4, 4e-4, 8e-4, 1.5e-3, 3e-3, 1e-2, 1e-1,
)  # fmt: skip


class PodState(Protocol):
    """What the router tells of a pod."""

    @property
    def id(self) -> str:
        """Its name."""
        ...

    @property
    def role(self) -> str:
        """single, prefill or decode."""
        ...

    @property
    def inflight(self) -> int:
        """Requests that it has."""
        ...

    @property
    def healthy(self) -> bool:
        """Its probes are good."""
        ...

    @property
    def draining(self) -> bool:
        """It is to get no new work."""
        ...

    @property
    def ejected(self) -> bool:
        """Its answers were bad, and it rests."""
        ...

    @property
    def blocks(self) -> int:
        """Blocks believed in its cache."""
        ...


class PodSource(Protocol):
    """Whoever knows the pods: the router."""

    def pods(self) -> Sequence[PodState]:
        """Every pod."""
        ...


class Histogram:
    """Counts per bucket and a sum; `bounds` are upper ends, in seconds."""

    __slots__ = ("bounds", "counts", "total_s")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, value_s: float) -> None:
        """Counts one value; what is no duration (negative, NaN) would spoil the sum for ever."""
        if 0.0 <= value_s < 1e9:
            self.counts[bisect_left(self.bounds, value_s)] += 1
            self.total_s += value_s


class PodCounters:
    """What is counted of one pod."""

    __slots__ = ("failures", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.failures: dict[str, int] = {}


class Counters:
    """Every counter of this process. `observe` is called once per finished request."""

    __slots__ = (
        "_cells", "_endpoints", "_max_pods", "cached_blocks", "cached_tokens", "client_disconnects",
        "decision", "e2e", "gap", "output_tokens", "pods", "predicted_cached_tokens",
        "prompt_blocks", "prompt_tokens", "requests", "retries", "source", "ttft",
    )  # fmt: skip

    def __init__(self, source: PodSource, max_pods: int):
        self.source = source
        self.requests: dict[tuple[str, str, str, str], list[int]] = {}
        """[count] per (mode, strategy, status, endpoint), as they are shown."""
        self.ttft = Histogram(SECONDS)
        self.gap = Histogram(GAP_SECONDS)
        self.e2e = Histogram(SECONDS)
        self.decision = Histogram(DECISION_SECONDS)
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.predicted_cached_tokens = 0.0
        self.prompt_blocks = 0
        self.cached_blocks = 0
        self.client_disconnects = 0
        self.retries: dict[str, int] = {}
        self.pods: dict[str, PodCounters] = {}
        self._cells: dict[tuple[str, str, int, str], list[int]] = {}
        self._endpoints: set[str] = set()
        self._max_pods = max_pods

    def observe(self, record: RequestRecord) -> None:
        """Counts a finished request."""
        key = (record.mode, record.strategy, record.status, record.endpoint)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cell(key)
        cell[0] += 1
        if record.pod_id:
            self._observe_routed(record)
        if record.retries:
            reason = record.retry_reason if record.retry_reason in FAILURES else OTHER
            self.retries[reason] = self.retries.get(reason, 0) + record.retries
        if record.error in CLIENT_LEFT:
            self.client_disconnects += 1

    def _observe_routed(self, record: RequestRecord) -> None:
        """What there is to count once a pod was asked."""
        pod = self.pods.get(record.pod_id)
        if pod is None:
            pod = self._pod(record.pod_id)
        pod.requests += 1
        if record.prefill_pod_id:
            pod = self.pods.get(record.prefill_pod_id)
            if pod is None:
                pod = self._pod(record.prefill_pod_id)
            pod.requests += 1
        if (value_us := record.decision_us) is not None:
            self.decision.observe(value_us / 1e6)
        if (value_us := record.ttft_us) is not None:
            self.ttft.observe(value_us / 1e6)
        if (value_us := record.itl_us) is not None:
            self.gap.observe(value_us / 1e6)
        if 200 <= record.status < 300 and not record.error:
            # An early refusal or a broken answer says nothing of how long an answer takes.
            self.e2e.observe(record.e2e_us / 1e6)
        self.prompt_blocks += record.prompt_blocks
        self.cached_blocks += record.cached_blocks
        if (tokens := record.predicted_cached_tokens) is not None:
            self.predicted_cached_tokens += tokens
        if (count := record.prompt_tokens) is not None:
            self.prompt_tokens += count
        if (count := record.cached_tokens) is not None:
            self.cached_tokens += count
        if (count := record.output_tokens) is not None:
            self.output_tokens += count

    def pod_failed(self, pod_id: str, kind: str) -> None:
        """A leg to this pod failed; `kind` is a Failure's value."""
        failures = (self.pods.get(pod_id) or self._pod(pod_id)).failures
        kind = kind if kind in FAILURES else OTHER
        failures[kind] = failures.get(kind, 0) + 1

    def _cell(self, key: tuple[str, str, int, str]) -> list[int]:
        """The counter behind the labels that this key is shown under."""
        mode, strategy, status, endpoint = key
        if endpoint not in self._endpoints and len(self._endpoints) < MAX_ENDPOINTS and endpoint:
            self._endpoints.add(endpoint)
        labels = (
            mode if mode in MODES else OTHER,
            strategy if strategy in STRATEGIES else OTHER,
            status_label(status),
            endpoint if endpoint in self._endpoints else OTHER,
        )
        cell = self.requests.setdefault(labels, [0])
        if len(self._cells) < MAX_CACHED_KEYS:
            self._cells[key] = cell
        return cell

    def _pod(self, pod_id: str) -> PodCounters:
        """New counters for a pod that the router knows; one set for all others."""
        known = len(self.pods) < 4 * self._max_pods and any(
            pod.id == pod_id for pod in self.source.pods()
        )
        return self.pods.setdefault(pod_id if known else OTHER, PodCounters())


def status_label(status: int) -> str:
    """A known status by its number, others by class."""
    if status in STATUSES:
        return str(status)
    return f"{status // 100}xx" if 100 <= status < 600 else OTHER
