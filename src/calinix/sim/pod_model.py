"""How a pod serves: prefill queue, decode steps, KV blocks. Pure, with `now` handed in.

The mock pod runs it on the wall clock, the simulator on a virtual one. Times are seconds on any
monotonic clock; tokens are the pod's own.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Sequence

import msgspec

from calinix.errors import CalinixError
from calinix.sim.kv_blocks import Block, KvBlocks

_EPSILON_S = 1e-9


class JobTooLargeError(CalinixError):
    """The prompt and its answer do not fit into the pod's KV blocks, not even alone."""


class PodFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod can do."""

    delay_s: float = 0.0
    """Fixed part of every prefill that is computed here."""
    prefill_tokens_per_s: float | None = None
    """Uncached prompt tokens per second; None: only the fixed part counts."""
    token_delay_s: float = 0.0
    """Between two tokens of one answer."""
    parallel: int = 1
    """Prompts prefilled at once; further ones wait, first in, first out."""
    block_size: int = 16
    kv_capacity_tokens: int = 524_288

    @property
    def capacity_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self.kv_capacity_tokens // self.block_size

    def prefill_s(self, computed_tokens: int) -> float:
        """How long the prefill of this many uncached tokens takes."""
        return self.delay_s + self.compute_s(computed_tokens)

    def compute_s(self, computed_tokens: int) -> float:
        """The part of a prefill that grows with its tokens."""
        rate = self.prefill_tokens_per_s
        return computed_tokens / rate if rate else 0.0


class Job(msgspec.Struct, eq=False, kw_only=True):
    """One sequence on its way through a pod. The model writes the fields below `external`."""

    id: str
    prompt_tokens: int
    output_tokens: int
    """Tokens to generate; 0 for what is only pooled."""
    chain: Sequence[int]
    """Chain hashes of the full blocks of prompt and answer together."""
    hold: bool = False
    """Keep the blocks pinned after the end, until `PodModel.release`."""
    external: bool = False
    """The prompt's KV comes from another pod: nothing but its last token is computed here."""
    submitted_s: float = 0.0
    started_s: float | None = None
    prefilled_s: float | None = None
    """When the first token was there."""
    ended_s: float | None = None
    token_delay_s: float = 0.0
    cached_tokens: int = 0
    external_tokens: int = 0
    blocks: list[Block] = msgspec.field(default_factory=list)

    def tokens_at(self, now: float) -> int:
        """How many tokens of the answer are there at `now`."""
        if self.prefilled_s is None or now < self.prefilled_s - _EPSILON_S:
            return 0
        if self.token_delay_s <= 0:
            return self.output_tokens
        steps = math.floor((now - self.prefilled_s + _EPSILON_S) / self.token_delay_s)
        return min(self.output_tokens, 1 + steps)

    def token_s(self, index: int) -> float:
        """When the answer's token `index` (from 0) is there; the prompt must be prefilled."""
        assert self.prefilled_s is not None
        return self.prefilled_s + index * self.token_delay_s


class StepKind(enum.Enum):
    """What happened to a job."""

    PREFILLED = "prefilled"
    """The prompt is computed and the first token is there."""
    FINISHED = "finished"
    """The last token is there."""


class Step(msgspec.Struct, frozen=True):
    """Something that happened at `at_s`."""

    at_s: float
    kind: StepKind
    job: Job


class PodCounters(msgspec.Struct):
    """Totals since the pod started, as engines count them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    external_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    cancelled: int = 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were neither cached here nor loaded from another pod."""
        return self.prompt_tokens - self.cached_tokens - self.external_tokens


class PodModel:
    """One pod. Facts go in by `submit`, `cancel` and `release`; `advance` says what came of them.

    Call `advance(now)` after each of these and again at `next_s()`; steps carry their exact
    times however late it is called.
    """

    def __init__(self, figures: PodFigures):
        self.figures = figures
        self.blocks = KvBlocks(figures.capacity_blocks)
        self.counters = PodCounters()
        self.slow_factor = 1.0
        """Stretches every prefill and decode step that begins from now on."""
        self._waiting: dict[str, Job] = {}
        self._prefilling: dict[str, Job] = {}
        self._decoding: dict[str, Job] = {}
        self._held: dict[str, Job] = {}
        self._agenda: list[tuple[float, int, StepKind, Job]] = []
        self._count = 0
        self._clock_s = -math.inf

    @property
    def waiting(self) -> int:
        """Jobs that wait for a prefill slot or for KV blocks."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Jobs in prefill or decode."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def held(self) -> int:
        """Finished jobs whose blocks are kept for another pod."""
        return len(self._held)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that jobs hold, in [0, 1]; blocks merely cached do not count."""
        return self.blocks.used / max(1, self.blocks.capacity)

    def submit(self, job: Job, now: float) -> None:
        """Puts the job at the end of the queue. Raises JobTooLargeError."""
        if self._room_for(job) > self.blocks.capacity:
            tokens = job.prompt_tokens + job.output_tokens
            raise JobTooLargeError(
                f"{tokens} tokens do not fit into {self.blocks.capacity} KV blocks"
            )
        job.submitted_s = now
        self._waiting[job.id] = job

    def cancel(self, job: Job, now: float) -> bool:
        """Ends the job wherever it is and frees what it holds; False when it had ended before."""
        for jobs in (self._waiting, self._prefilling, self._decoding):
            if jobs.get(job.id) is job:
                del jobs[job.id]
                break
        else:
            return False
        self._clock_s = max(self._clock_s, now)
        self.counters.output_tokens += job.tokens_at(now)
        self.counters.cancelled += 1
        job.ended_s = now
        self._free(job, job.tokens_at(now))
        return True

    def release(self, job_id: str, now: float) -> bool:
        """Unpins the blocks of a finished job with `hold`; False when none are held."""
        job = self._held.pop(job_id, None)
        if job is None:
            return False
        self._clock_s = max(self._clock_s, now)
        self._free(job, job.output_tokens)
        return True

    def next_s(self) -> float | None:
        """When `advance` has something to do next, if nothing else happens; None: never."""
        while self._agenda and not self._is_due(*self._agenda[0][2:]):
            heapq.heappop(self._agenda)
        return self._agenda[0][0] if self._agenda else None

    def advance(self, now: float) -> list[Step]:
        """Everything that has happened until `now`, in order of time."""
        steps: list[Step] = []
        while True:
            event_s = self.next_s()
            if self._start_next(now if event_s is None else min(now, event_s)):
                continue
            if event_s is None or event_s > now:
                return steps
            at_s, _, kind, job = heapq.heappop(self._agenda)
            self._clock_s = max(self._clock_s, at_s)
            if kind is StepKind.PREFILLED:
                self._prefilled(job, at_s)
            else:
                self._finished(job, at_s)
            steps.append(Step(at_s, kind, job))

    def _start_next(self, until_s: float) -> bool:
        """Starts the first waiting job if it can start by `until_s`; whether it did."""
        job = next(iter(self._waiting.values()), None)
        if job is None or len(self._prefilling) >= self.figures.parallel:
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
        job.blocks, hits = allocated
        job.cached_tokens = hits * size
        if job.external:
            job.external_tokens = job.prompt_tokens - job.cached_tokens
            duration_s = self.figures.compute_s(1)
        else:
            duration_s = self.figures.prefill_s(job.prompt_tokens - job.cached_tokens)
        del self._waiting[job.id]
        self._prefilling[job.id] = job
        job.started_s = start_s
        self._plan(start_s + duration_s * self.slow_factor, StepKind.PREFILLED, job)
        return True

    def _prefilled(self, job: Job, at_s: float) -> None:
        del self._prefilling[job.id]
        self._decoding[job.id] = job
        job.prefilled_s = at_s
        job.token_delay_s = self.figures.token_delay_s * self.slow_factor
        counters = self.counters
        counters.prompt_tokens += job.prompt_tokens
        counters.cached_tokens += job.cached_tokens
        counters.external_tokens += job.external_tokens
        self.blocks.publish(job.blocks, job.chain[: job.prompt_tokens // self.figures.block_size])
        self._plan(job.token_s(max(0, job.output_tokens - 1)), StepKind.FINISHED, job)

    def _finished(self, job: Job, at_s: float) -> None:
        del self._decoding[job.id]
        job.ended_s = at_s
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

    def _plan(self, at_s: float, kind: StepKind, job: Job) -> None:
        self._count += 1
        heapq.heappush(self._agenda, (at_s, self._count, kind, job))

    def _is_due(self, kind: StepKind, job: Job) -> bool:
        """Whether this entry of the agenda still stands: cancelled jobs leave theirs behind."""
        jobs = self._prefilling if kind is StepKind.PREFILLED else self._decoding
        return jobs.get(job.id) is job
