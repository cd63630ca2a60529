"""What a run records: one line per request, in columns, and samples of the pods over time."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

OPEN = 0
"""Status of a request that has not ended."""
_NAN = float("nan")
FIRST_INTERVAL_S = 1.0
"""Between two samples; it doubles whenever there are too many."""
MAX_SAMPLES = 1024
MAX_PREDICTIONS = 128


class Requests(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Requests in order of arrival; one array entry each, shape (requests,)."""

    arrival_s: Floats
    ttft_s: Floats
    """From arrival to first token; NaN where there was none. Likewise:"""
    tpot_s: Floats
    """Mean time per token after the first; NaN for answers of one token."""
    e2e_s: Floats
    """From arrival to last token."""
    pod: Ints
    """Index of the pod that answered; -1 where there was none. Likewise:"""
    prefill_pod: Ints
    """Index of the pod that prefilled it, where that is another one."""
    prompt_tokens: Ints
    cached_tokens: Ints
    """Found in the KV cache of the pod that prefilled."""
    output_tokens: Ints
    status: Ints
    """HTTP status; 0 for one that had no end."""
    retries: Ints
    streamed: npt.NDArray[np.bool_]
    ideal_prefill_s: Floats
    """The prefill of the whole prompt, alone on a pod of mean speed and with nothing cached."""


class Samples(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The pods at k moments."""

    times_s: Floats
    """Shape (k,)."""
    queue: Floats
    """Requests waiting or running, shape (k, pods)."""
    weights: Floats
    """The controller's weights as the first gateway has them, shape (k, pods); NaN without."""


class Recorder:
    """Columns that grow by one entry per request; samples that are thinned out, not grown."""

    def __init__(self, pods: int):
        self._pods = pods
        self.arrival_s = array("d")
        self.first_s = array("d")
        self.end_s = array("d")
        self.pod = array("i")
        self.prefill_pod = array("i")
        self.prompt_tokens = array("i")
        self.cached_tokens = array("i")
        self.output_tokens = array("i")
        self.status = array("i")
        self.retries = array("b")
        self.streamed = array("b")
        self._interval_s = FIRST_INTERVAL_S
        self._times_s: list[float] = []
        self._queues: list[array[float]] = []
        self._weights: list[array[float]] = []
        self.predicted: list[tuple[float, Floats]] = []
        self._next_prediction_s = 0.0
        self._prediction_s = FIRST_INTERVAL_S

    def arrived(self, now: float, prompt_tokens: int, output_tokens: int, *, streamed: bool) -> int:
        """A request comes; its number."""
        self.arrival_s.append(now)
        self.first_s.append(_NAN)
        self.end_s.append(_NAN)
        self.pod.append(-1)
        self.prefill_pod.append(-1)
        self.prompt_tokens.append(prompt_tokens)
        self.cached_tokens.append(0)
        self.output_tokens.append(output_tokens)
        self.status.append(OPEN)
        self.retries.append(0)
        self.streamed.append(streamed)
        return len(self.arrival_s) - 1

    @property
    def next_sample_s(self) -> float:
        """When a sample is due, so that all that are kept are the same time apart."""
        return self._times_s[-1] + self._interval_s if self._times_s else 0.0

    def sample(self, now: float, queue: list[int], weights: Floats) -> None:
        """The pods' queues and weights now."""
        self._times_s.append(now)
        self._queues.append(array("d", queue))
        self._weights.append(array("d", weights.tobytes()))
        if len(self._times_s) >= MAX_SAMPLES:
            self._interval_s *= 2.0
            del self._times_s[1::2], self._queues[1::2], self._weights[1::2]

    def predict(self, now: float, queues: Floats) -> None:
        """What the controller expects of the queues, shape (H, pods)."""
        if now < self._next_prediction_s:
            return
        self.predicted.append((now, queues))
        if len(self.predicted) >= MAX_PREDICTIONS:
            del self.predicted[1::2]
            self._prediction_s *= 2.0
        self._next_prediction_s = self.predicted[-1][0] + self._prediction_s

    def requests(self, ideal_prefill_s: Floats) -> Requests:
        """The columns, as arrays."""
        arrival_s, first_s, end_s = (
            np.array(column) for column in (self.arrival_s, self.first_s, self.end_s)
        )
        output_tokens = np.array(self.output_tokens)
        gaps = output_tokens - 1
        tpot_s = np.full(len(gaps), _NAN)
        several = gaps > 0
        tpot_s[several] = (end_s - first_s)[several] / gaps[several]
        return Requests(
            arrival_s=arrival_s,
            ttft_s=first_s - arrival_s,
            tpot_s=tpot_s,
            e2e_s=end_s - arrival_s,
            pod=_ints(self.pod),
            prefill_pod=_ints(self.prefill_pod),
            prompt_tokens=_ints(self.prompt_tokens),
            cached_tokens=_ints(self.cached_tokens),
            output_tokens=_ints(self.output_tokens),
            status=_ints(self.status),
            retries=_ints(self.retries),
            streamed=np.array(self.streamed, dtype=np.bool_),
            ideal_prefill_s=ideal_prefill_s,
        )

    def samples(self) -> Samples:
        """The samples, as arrays."""
        return Samples(
            times_s=np.array(self._times_s, dtype=np.float64),
            queue=_table(self._queues, self._pods),
            weights=_table(self._weights, self._pods),
        )


def _ints(column: Any) -> Ints:
    return np.array(column, dtype=np.int32)


def _table(rows: list[array[float]], width: int) -> Floats:
    return np.array(rows, dtype=np.float64).reshape(len(rows), width)
