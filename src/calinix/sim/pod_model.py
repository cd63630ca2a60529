"""How a pod serves: prefill queue, decode steps, KV blocks. Pure, with `now` handed in.

The mock pod runs it on the wall clock, the simulator on a virtual one. Times are seconds on any
monotonic clock; tokens are the pod's own.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from calinix.errors import CalinixError
from calinix.sim.kv_blocks import KvBlocks
from calinix.sim.pod_figures import PodFigures
from calinix.sim.pod_jobs import Job, PodCounters, Stage, Step, StepKind
from calinix.sim.pod_pace import NEVER_S, Pace, StepPace

__all__ = [
    "Job",
    "JobTooLargeError",
    "PodCounters",
    "PodFigures",
    "PodModel",
    "Step",
    "StepKind",
]

_WAITING, _PREFILLING, _DECODING, _ENDED = Stage
_PREFILLED, _FINISHED = StepKind


class JobTooLargeError(CalinixError):
    """The prompt and its answer do not fit into the pod's KV blocks, not even alone."""


class PodModel:
    """One pod. Facts go in by `submit`, `cancel` and `release`; `advance` says what came of them.

    Call `advance(now)` after each of these and again at `next_s()`; steps carry their exact
    times however late it is called. `noise` draws a factor for each prefill and, where steps are
    shared, for the steps between two changes of the batch.
    """

    def __init__(self, figures: PodFigures, noise: Callable[[], float] | None = None):
        self.figures = figures
        self.blocks = KvBlocks(figures.cache_blocks, figures.capacity_blocks)
        self.counters = PodCounters()
        self._pace: Pace = (StepPace if figures.in_steps else Pace)(figures, noise)
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._waiting_tokens = 0.0
        self._prefilling = 0
        self._decoding = 0
        self._held: dict[str, Job] = {}
        self._clock_s = -math.inf

    @property
    def waiting(self) -> int:
        """Jobs that wait for a prefill slot or for KV blocks."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Jobs in prefill or decode."""
        return self._prefilling + self._decoding

    @property
    def held(self) -> int:
        """Finished jobs whose blocks are kept for another pod."""
        return len(self._held)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that jobs hold, in [0, 1]; blocks merely cached do not count."""
        return self.blocks.used / max(1, self.blocks.room)

    @property
    def slow_factor(self) -> float:
        """Stretches every prefill and decode step that begins from now on."""
        return self._pace.slow_factor

    @slow_factor.setter
    def slow_factor(self, factor: float) -> None:
        """For a pod whose answers have their own pace; else see `slow_down`."""
        self._pace.slow_factor = factor

    def slow_down(self, factor: float, now: float) -> None:
        """Sets `slow_factor`; steps that are shared take that long from `now` on."""
        if factor != self._pace.slow_factor:
            # What is due and not told yet stays as it is.
            self._pace.slow_down(factor, min(now, self._pace.next_s()))

    def submit(self, job: Job, now: float) -> None:
        """Puts the job at the end of the queue. Raises JobTooLargeError."""
        if self._room_for(job) > self.blocks.room:
            tokens = job.prompt_tokens + job.output_tokens
            raise JobTooLargeError(f"{tokens} tokens do not fit into {self.blocks.room} KV blocks")
        job.submitted_s = now
        self._waiting[job.id] = job
        if not job.external:
            job.work_tokens = self._expected_work(job.chain, job.prompt_tokens)
            self._waiting_tokens += job.work_tokens

    def cancel(self, job: Job, now: float) -> bool:
        """Ends the job wherever it is and frees what it holds; False when it had ended before."""
        stage = job.stage
        if stage is _WAITING:
            if self._waiting.get(job.id) is not job:
                return False
            self._unqueue(job)
        elif stage is _ENDED:
            return False
        output_tokens = job.tokens_at(now)
        if stage is _PREFILLING:
            self._prefilling -= 1
        elif stage is _DECODING:
            self._decoding -= 1
        self._pace.leave(job, now)
        job.stage = _ENDED
        self._clock_s = max(self._clock_s, now)
        self.counters.output_tokens += output_tokens
        self.counters.cancelled += 1
        job.ended_s = now
        self._free(job, output_tokens)
        return True

    def release(self, job_id: str, now: float) -> bool:
        """Unpins the blocks of a finished job with `hold`; False when none are held."""
        job = self._held.pop(job_id, None)
        if job is None:
            return False
        self._clock_s = max(self._clock_s, now)
        self._free(job, job.output_tokens)
        return True

    # --- time --------------------------------------------------------------------------------

    def next_s(self) -> float | None:
        """When `advance` has something to do next, if nothing else happens; None: never."""
        next_s = self._pace.next_s()
        return next_s if next_s < NEVER_S else None

    def advance(self, now: float) -> list[Step]:
        """Everything that has happened until `now`, in order of time."""
        steps: list[Step] = []
        pace = self._pace
        while True:
            event_s = pace.next_s()
            if self._waiting and self._start_next(min(now, event_s)):
                continue
            if event_s > now:
                return steps
            at_s, job = pace.pop()
            self._clock_s = max(self._clock_s, at_s)
            if job.stage is _PREFILLING:
                self._prefilled(job, at_s)
                steps.append(Step(at_s, _PREFILLED, job))
            else:
                self._finished(job, at_s)
                steps.append(Step(at_s, _FINISHED, job))

    def _start_next(self, until_s: float) -> bool:
        """Starts the first waiting job if it can start by `until_s`; whether it did."""
        job = next(iter(self._waiting.values()))
        if not self._pace.has_slot(job):
            return False
        start_s = max(job.submitted_s, self._clock_s)
        if start_s > until_s:
            return False
        size = self.figures.block_size
        # An engine always computes the last prompt token, so its block cannot be a hit.
        usable = (job.prompt_tokens - 1) // size
        allocated = self.blocks.allocate(job.chain[:usable], self._room_for(job))
        if allocated is None:
            return False
        self._unqueue(job)
        job.blocks, hits = allocated
        job.cached_tokens = hits * size
        job.stage = _PREFILLING
        job.started_s = start_s
        self._prefilling += 1
        computed = job.prompt_tokens - job.cached_tokens
        if job.external:
            job.external_tokens = computed
            self._pace.transfer(job, start_s)
        else:
            job.work_tokens = self.figures.work_tokens(computed, job.cached_tokens)
            self._pace.prefill(job, start_s)
        return True

    def _prefilled(self, job: Job, at_s: float) -> None:
        self._prefilling -= 1
        self._decoding += 1
        job.prefilled_s = at_s
        self._pace.decode(job, at_s)
        job.stage = _DECODING
        counters = self.counters
        counters.prompt_tokens += job.prompt_tokens
        counters.cached_tokens += job.cached_tokens
        counters.external_tokens += job.external_tokens
        if not job.external:
            counters.work_tokens += job.work_tokens
        self.blocks.publish(job.blocks, job.chain[: job.prompt_tokens // self.figures.block_size])

    def _finished(self, job: Job, at_s: float) -> None:
        self._pace.leave(job, at_s)
        job.stage = _ENDED
        self._decoding -= 1
        job.ended_s = at_s
        if job.clock is not None and job.output_tokens > 1:
            assert job.prefilled_s is not None
            job.token_delay_s = (at_s - job.prefilled_s) / (job.output_tokens - 1)
        self.counters.output_tokens += job.output_tokens
        self.counters.finished += 1
        if job.hold:
            self._held[job.id] = job
        else:
            self._free(job, job.output_tokens)

    def _free(self, job: Job, output_tokens: int) -> None:
        """Gives the blocks back; those that are full and computed stay behind as cache."""
        if output_tokens:
            # The last token's KV would only be computed with the token after it.
            computed = job.prompt_tokens + output_tokens - 1
            self.blocks.publish(job.blocks, job.chain[: computed // self.figures.block_size])
        self.blocks.release(job.blocks)
        job.blocks = []

    def _room_for(self, job: Job) -> int:
        """Blocks for the prompt and the whole answer: taken at once, so nothing is preempted."""
        return -(-(job.prompt_tokens + job.output_tokens) // self.figures.block_size)

    def _unqueue(self, job: Job) -> None:
        del self._waiting[job.id]
        if not job.external:
            self._waiting_tokens -= job.work_tokens

    # --- what would be -----------------------------------------------------------------------

    def predicted_first_token_s(
        self, chain: Sequence[int], prompt_tokens: int, now: float
    ) -> float:
        """Seconds from `now` to the first token of a prompt that would come now.

        With the batch, the queue and the cache as they are; waiting for KV room is left out.
        """
        work = self._expected_work(chain, prompt_tokens)
        work += self._waiting_tokens + self._pace.head_work_tokens(now)
        return self._pace.backlog_s(work)

    def predicted_finish_s(
        self, chain: Sequence[int], prompt_tokens: int, output_tokens: int, now: float
    ) -> float:
        """Likewise to its last token."""
        decode_s = max(0, output_tokens - 1) * self._pace.token_gap_s()
        return self.predicted_first_token_s(chain, prompt_tokens, now) + decode_s

    def _expected_work(self, chain: Sequence[int], prompt_tokens: int) -> float:
        size = self.figures.block_size
        usable = (prompt_tokens - 1) // size
        cached = min(self.blocks.match(chain), usable) * size
        return self.figures.work_tokens(prompt_tokens - cached, cached)
