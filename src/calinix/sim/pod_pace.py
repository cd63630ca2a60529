"""When things happen inside a pod: each answer at its own pace, or in steps that all share."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from calinix.sim.pod_figures import PodFigures
from calinix.sim.pod_jobs import Job, Stage
from calinix.sim.step_clock import StepClock

NEVER_S = float("inf")
_PREFILLING, _DECODING = Stage.PREFILLING, Stage.DECODING


class Pace:
    """Each answer at its own pace: prefills and decodes do not touch each other.

    Whoever calls `prefill`, `transfer` and `decode` sets the job's stage; what is planned for a
    job in another stage is void.
    """

    def __init__(self, figures: PodFigures, noise: Callable[[], float] | None):
        self._figures = figures
        self._noise = noise
        self._prefills = 0
        self._agenda: list[tuple[float, int, Stage, Job]] = []
        self._count = 0
        self.slow_factor = 1.0

    def has_slot(self, job: Job) -> bool:  # noqa: ARG002
        """Whether one more prefill can begin."""
        return self._prefills < self._figures.parallel

    def prefill(self, job: Job, at_s: float) -> None:
        """The job's `work_tokens` are to be computed."""
        figures = self._figures
        rate = figures.prefill_tokens_per_s
        duration_s = figures.delay_s + (job.work_tokens / rate if rate else 0.0)
        if self._noise is not None:
            duration_s *= self._noise()
        self._prefills += 1
        self._plan(at_s + duration_s * self.slow_factor, _PREFILLING, job)

    def transfer(self, job: Job, at_s: float) -> None:
        """The job's `external_tokens` come from another pod, and one token is computed."""
        figures = self._figures
        duration_s = 0.0 if job.local else figures.transfer_s(job.external_tokens)
        self._prefills += 1
        self._plan(at_s + (duration_s + figures.compute_s(1)) * self.slow_factor, _PREFILLING, job)

    def decode(self, job: Job, at_s: float) -> None:
        """The first token is there; the others follow."""
        self._prefills -= 1
        job.token_delay_s = self._figures.token_delay_s * self.slow_factor
        self._plan(at_s + max(0, job.output_tokens - 1) * job.token_delay_s, _DECODING, job)

    def leave(self, job: Job, at_s: float) -> None:  # noqa: ARG002
        """The job ends, wherever it is; its stage is still that."""
        if job.stage is _PREFILLING:
            self._prefills -= 1

    def slow_down(self, factor: float, at_s: float) -> None:  # noqa: ARG002
        """Stretches what begins from now on."""
        self.slow_factor = factor

    def next_s(self) -> float:
        """When something happens next, if nothing else does; inf: never."""
        agenda = self._agenda
        while agenda and agenda[0][3].stage is not agenda[0][2]:
            heapq.heappop(agenda)
        return agenda[0][0] if agenda else NEVER_S

    def pop(self) -> tuple[float, Job]:
        """What happens next: the job's stage is over. Only after `next_s`."""
        at_s, _, _, job = heapq.heappop(self._agenda)
        return at_s, job

    def backlog_s(self, work_tokens: float) -> float:
        """How long this much prefill work takes at present, nothing else being in the way."""
        rate = self._figures.prefill_tokens_per_s
        seconds = work_tokens / rate if rate else 0.0
        return seconds * self.slow_factor / self._figures.parallel

    def token_gap_s(self) -> float:
        """Between two tokens of an answer that joins now."""
        return self._figures.token_delay_s * self.slow_factor

    def head_work_tokens(self, now: float) -> float:
        """What is left to do of the prefills under way."""
        rate = self._figures.prefill_tokens_per_s or 0.0
        left = 0.0
        for at_s, _, stage, job in self._agenda:
            if stage is _PREFILLING and job.stage is stage and not job.external:
                left += max(0.0, at_s - now) / self.slow_factor * rate
        return left

    def _plan(self, at_s: float, stage: Stage, job: Job) -> None:
        self._count += 1
        heapq.heappush(self._agenda, (at_s, self._count, stage, job))


class StepPace(Pace):
    """Decodes share steps; a prefill is chunked into them, or computed beside them."""

    def __init__(self, figures: PodFigures, noise: Callable[[], float] | None):
        super().__init__(figures, noise)
        self.clock = StepClock()
        rate = figures.prefill_tokens_per_s
        self._chunk_tokens = figures.chunk_tokens
        self._chunk_s = figures.chunk_tokens / rate if rate else 0.0
        self._decodes = 0
        self._kv_offset = 0.0
        """KV tokens of all decodes, less `decodes * steps`."""
        self._head: Job | None = None
        self._head_end = NEVER_S
        """Step at which the chunked prefill is done."""
        self._ends: list[tuple[float, int, Job]] = []
        """Decodes by their last step."""

    def has_slot(self, job: Job) -> bool:
        """Whether one more prefill can begin; a transfer takes no slot."""
        if job.external:
            return True
        return self._head is None if self._chunk_tokens else super().has_slot(job)

    def prefill(self, job: Job, at_s: float) -> None:
        """The job's `work_tokens` are to be computed."""
        if not self._chunk_tokens:
            super().prefill(job, at_s)
            return
        figures = self._figures
        work = job.work_tokens + figures.delay_s * (figures.prefill_tokens_per_s or 0.0)
        if self._noise is not None:
            work *= self._noise()
        steps = self.clock.steps_at(at_s)
        self._head = job
        self._head_end = steps + work / self._chunk_tokens
        self._anchor(at_s, steps)

    def transfer(self, job: Job, at_s: float) -> None:
        """The job's `external_tokens` come from another pod, and one token is computed."""
        super().transfer(job, at_s)
        self._prefills -= 1

    def decode(self, job: Job, at_s: float) -> None:
        """The first token is there; the others follow, one a step."""
        if self._head is job:
            self._head = None
            self._head_end = NEVER_S
        elif not job.external:
            self._prefills -= 1
        clock = self.clock
        steps = clock.steps_at(at_s)
        job.clock = clock
        job.first_step = steps
        self._decodes += 1
        self._kv_offset += job.prompt_tokens + 1 - steps
        self._count += 1
        heapq.heappush(self._ends, (steps + max(0, job.output_tokens - 1), self._count, job))
        self._anchor(at_s, steps)

    def leave(self, job: Job, at_s: float) -> None:
        """The job ends, wherever it is; its stage is still that."""
        if job.stage is _DECODING:
            self._decodes -= 1
            self._kv_offset -= job.prompt_tokens + 1 - job.first_step
            if not self._decodes:
                self._kv_offset = 0.0  # what rounding has left of it
        elif self._head is job:
            self._head = None
            self._head_end = NEVER_S
        else:
            if job.stage is _PREFILLING and not job.external:
                self._prefills -= 1
            return
        self._anchor(at_s, self.clock.steps_at(at_s))

    def slow_down(self, factor: float, at_s: float) -> None:
        """Stretches every step from now on, and what begins beside the steps."""
        if factor != self.slow_factor:
            self.slow_factor = factor
            self._anchor(at_s, self.clock.steps_at(at_s))

    def next_s(self) -> float:
        """When something happens next, if nothing else does; inf: never."""
        planned_s = super().next_s() if self._agenda else NEVER_S
        step = self._next_step()
        return planned_s if step == NEVER_S else min(planned_s, self.clock.time_of(step))

    def pop(self) -> tuple[float, Job]:
        """What happens next: the job's stage is over. Only after `next_s`."""
        clock, step = self.clock, self._next_step()
        at_s = clock.time_of(step) if step < NEVER_S else NEVER_S
        if self._agenda and self._agenda[0][0] <= at_s:
            return super().pop()
        # Both are known exactly here; `decode` or `leave` sets the new pace.
        clock.at_s, clock.steps = at_s, step
        if self._head is not None and self._head_end == step:
            return at_s, self._head
        return at_s, heapq.heappop(self._ends)[2]

    def backlog_s(self, work_tokens: float) -> float:
        """How long this much prefill work takes at present, nothing else being in the way."""
        if not self._chunk_tokens:
            return super().backlog_s(work_tokens)
        step_s = self._step_s(self.clock.steps, self._decodes) + self._chunk_s
        return work_tokens / self._chunk_tokens * step_s * self.slow_factor

    def token_gap_s(self) -> float:
        """Between two tokens of an answer that joins now."""
        return self._step_s(self.clock.steps, self._decodes + 1) * self.slow_factor

    def head_work_tokens(self, now: float) -> float:
        """What is left to do of the prefills under way."""
        if self._head is None:
            return 0.0 if self._chunk_tokens else super().head_work_tokens(now)
        return max(0.0, self._head_end - self.clock.steps_at(now)) * self._chunk_tokens

    def _next_step(self) -> float:
        ends = self._ends
        while ends and ends[0][2].stage is not _DECODING:
            heapq.heappop(ends)
        if ends and ends[0][0] < self._head_end:
            return ends[0][0]
        return self._head_end

    def _step_s(self, steps: float, decodes: int) -> float:
        """How long a step of so many decodes takes, without a prefill's chunk."""
        figures = self._figures
        kv_tokens = self._kv_offset + self._decodes * steps
        return figures.token_delay_s + figures.sequence_s * decodes + figures.kv_token_s * kv_tokens

    def _anchor(self, at_s: float, steps: float) -> None:
        """From here on the steps take as long as what is under way says."""
        decodes = self._decodes
        if not decodes and self._head is None:
            self.clock.anchor(at_s, steps, 0.0, 0.0)
            return
        factor = self.slow_factor if self._noise is None else self.slow_factor * self._noise()
        step_s = self._step_s(steps, decodes)
        if self._head is not None:
            step_s += self._chunk_s
        growth_s = self._figures.kv_token_s * decodes
        self.clock.anchor(at_s, steps, step_s * factor, growth_s * factor)
