"""What a pod works on: jobs and their stages, what happens to them, and the pod's totals."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import msgspec

from calinix.sim.kv_blocks import Block
from calinix.sim.step_clock import StepClock

_EPSILON_S = 1e-9
_EPSILON_STEPS = 1e-6


class Stage(enum.IntEnum):
    """How far a job is."""

    WAITING = 0
    """For a prefill slot or for KV blocks."""
    PREFILLING = 1
    """Its prompt is being computed, or comes from another pod."""
    DECODING = 2
    ENDED = 3


class Job(msgspec.Struct, eq=False, kw_only=True):
    """One sequence on its way through a pod. The model writes the fields below `local`."""

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
    local: bool = False
    """That other pod is on the same machine: the KV cache comes in no time."""
    stage: Stage = Stage.WAITING
    submitted_s: float = 0.0
    started_s: float | None = None
    prefilled_s: float | None = None
    """When the first token was there."""
    ended_s: float | None = None
    token_delay_s: float = 0.0
    """Between two tokens; where steps are shared the mean, known at the end."""
    clock: StepClock | None = None
    """The pod's steps, where answers share them."""
    first_step: float = 0.0
    """The step of the first token on that clock."""
    work_tokens: float = 0.0
    """Prefill work; while the job waits, what it would be with the cache of its arrival."""
    cached_tokens: int = 0
    external_tokens: int = 0
    blocks: list[Block] = msgspec.field(default_factory=list)

    def tokens_at(self, now: float) -> int:
        """How many tokens of the answer are there at `now`."""
        if self.prefilled_s is None or now < self.prefilled_s - _EPSILON_S:
            return 0
        if self.clock is not None:
            if self.ended_s is not None and now >= self.ended_s - _EPSILON_S:
                return self.output_tokens
            steps = math.floor(self.clock.steps_at(now) - self.first_step + _EPSILON_STEPS)
            return min(self.output_tokens, 1 + steps)
        if self.token_delay_s <= 0:
            return self.output_tokens
        steps = math.floor((now - self.prefilled_s + _EPSILON_S) / self.token_delay_s)
        return min(self.output_tokens, 1 + steps)

    def token_s(self, index: int) -> float:
        """When the answer's token `index` (from 0) is there; the prompt must be prefilled.

        Where steps are shared: if nobody comes or goes before that.
        """
        assert self.prefilled_s is not None
        if self.clock is not None and index:
            return self.clock.time_of(self.first_step + index)
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
    work_tokens: float = 0.0
    """Work of the prefills that were computed here."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were neither cached here nor loaded from another pod."""
        return self.prompt_tokens - self.cached_tokens - self.external_tokens
