"""One generation request inside a mock pod: its jobs, and its answer as the tokens come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from calinix.edge.http_wire import frame_chunk
from calinix.sim.kv_blocks import chain_of
from calinix.sim.mock_answers import DONE, Answer, Choice, Json, Tally
from calinix.sim.mock_requests import EngineError, Wanted
from calinix.sim.pod_model import Job

if TYPE_CHECKING:
    from calinix.edge.http_server import ServerConnection
    from calinix.sim.mock_pod import MockPod

# What was written just before must leave the socket before the reset does.
_RESET_DELAY_S = 0.01
# Tokens of one write. What is more waits a moment, so that a client that lags is noticed.
_MAX_BURST = 256
_BURST_PAUSE_S = 0.001
_NEVER_S = float("inf")


class Unanswered:
    """A client that is never answered: hears only that it has left."""

    __slots__ = ("_gone",)

    def __init__(self, gone: Callable[[], None]):
        self._gone = gone

    def on_client_blocked(self) -> None:
        """Nothing is written."""

    def on_client_ready(self) -> None:
        """Nothing is written."""

    def on_client_gone(self) -> None:
        """The client gave up."""
        self._gone()


class Generation:
    """A request's way from its prompt to the last byte of its answer.

    The pod calls `on_prefilled` and `on_finished` for its jobs and `emit` when tokens are due;
    the connection says whether the client keeps up (ResponseStream).
    """

    __slots__ = (
        "_blocked", "_choices", "_conn", "_due_s", "_events", "_job_of", "_opened",
        "_pod", "_sent", "_unfinished", "answer", "head", "jobs", "on_answered", "on_computed",
        "over", "reset_after", "wanted",
    )  # fmt: skip

    def __init__(self, pod: MockPod, conn: ServerConnection, answer: Answer, head: bytes):
        self._pod = pod
        self._conn = conn
        self.answer = answer
        self.head = head
        self.wanted: Wanted = answer.wanted
        self.on_computed: Callable[[Job], Json | None] | None = None
        """Told each finished job; its answer's `kv_transfer_params`, where there are any."""
        self.reset_after: int | None = None
        """Drop the connection after this many events (a fault)."""
        self.on_answered: Callable[[bytes, str], None] | None = None
        """Told the whole answer's JSON and its text at the end."""
        self.jobs: list[Job] = []
        self._choices: list[Choice] = []
        self._job_of: list[Job] = []
        self._sent: list[int] = []
        self._unfinished = 0
        self._events = 0
        self._opened = False
        self._blocked = False
        self._due_s = _NEVER_S
        self.over = False
        """Answered, given up or left by its client."""
        self._make_jobs()

    def _make_jobs(self) -> None:
        pod, wanted = self._pod, self.wanted
        words = pod.words
        namespace = f"{wanted.model}\0{wanted.salt}".encode()
        for number, prompt in enumerate(wanted.prompts):
            answers = [
                words.answer(prompt, wanted.max_tokens, choice) for choice in range(wanted.choices)
            ]
            chain = chain_of(namespace, prompt + answers[0], pod.figures.block_size)
            if pod.kv_events is not None:
                pod.kv_events.note(chain, prompt + answers[0], wanted.model, wanted.salt)
            job = Job(
                id=f"{self.answer.id}-{number}-{pod.next_number():08x}",
                prompt_tokens=len(prompt),
                output_tokens=wanted.max_tokens,
                chain=chain,
            )
            self.jobs.append(job)
            for ids in answers:
                pieces = words.answer_text(ids)
                index = len(self._choices)
                self._choices.append(Choice(index=index, prompt=prompt, ids=ids, pieces=pieces))
                self._job_of.append(job)
                self._sent.append(0)
        self._unfinished = len(self.jobs)

    def announce(self) -> None:
        """A stream's head goes out at once, as vLLM sends it, long before the first token."""
        if self.wanted.stream:
            self._conn.begin(200, self.head, None)
            if not self.answer.head_waits:
                self._write(self.answer.announced(), last=False)
        self._conn.stream = self

    def keep(self, on_computed: Callable[[Job], Json | None]) -> None:
        """The prompt's blocks stay pinned at the end, for a decode pod."""
        self.on_computed = on_computed
        for job in self.jobs:
            job.hold = True

    def hang(self, listener: Unanswered) -> None:
        """Nothing comes any more; `listener` hears that the client has left."""
        self.over = True
        self._conn.stream = listener

    def tally(self) -> Tally:
        """The tokens of the whole answer."""
        jobs = self.jobs
        size = self._pod.figures.block_size
        created = sum(
            job.prompt_tokens // size * size - job.cached_tokens for job in jobs if not job.external
        )
        return Tally(
            prompt_tokens=sum(job.prompt_tokens for job in jobs),
            output_tokens=self.wanted.max_tokens * len(self._choices),
            cached_tokens=sum(job.cached_tokens for job in jobs),
            created_tokens=created,
        )

    # --- the model's news --------------------------------------------------------------------

    def on_prefilled(self, job: Job) -> None:
        """A prompt is computed: its first token is there."""
        if self.wanted.stream:
            self._plan(job.token_s(0))

    def on_finished(self, job: Job) -> None:
        """A job has all its tokens."""
        self._unfinished -= 1
        if self.over:
            return
        transfer = self.on_computed(job) if self.on_computed is not None else None
        if self._unfinished or self.wanted.stream:
            return
        body = self.answer.whole(self._choices, self.tally(), transfer)
        if self.reset_after is not None:
            self._conn.begin(200, self.head, len(body))
            self._conn.write(body[: len(body) // 2])
            self._reset()
            return
        self.over = True
        self._pod.done(self)
        self._conn.respond(200, self.head, body)
        self._tell(body)

    # --- tokens as they come -----------------------------------------------------------------

    def emit(self, now: float) -> None:
        """Writes every token that is there and not sent yet, in one write."""
        if self.over or self._blocked or now < self._due_s:
            return
        self._due_s = _NEVER_S
        events: list[bytes] = []
        tally = self.tally()
        if not self._opened:
            self._opened = True
            events += self.answer.opening(self._choices, tally)
        next_s = _NEVER_S
        room = _MAX_BURST
        for index, choice in enumerate(self._choices):
            job, first = self._job_of[index], self._sent[index]
            ready = job.tokens_at(now)
            for at in range(first, min(ready, first + room)):
                events.append(self.answer.token(choice, at, self._so_far(tally)))
                self._sent[index] = at + 1
            room -= self._sent[index] - first
            if self._sent[index] < ready:
                next_s = now + _BURST_PAUSE_S
            elif ready < job.output_tokens and job.prefilled_s is not None:
                next_s = min(next_s, job.token_s(ready))
        last = all(
            sent == len(choice.ids) for sent, choice in zip(self._sent, self._choices, strict=True)
        )
        if last:
            events += self.answer.closing(self._choices, tally)
        self._write_or_reset(events, last)
        if not last and not self.over:
            self._plan(next_s)

    def _plan(self, at_s: float) -> None:
        """Asks for `emit` at `at_s`, unless it comes before that; later calls are then ignored."""
        if at_s < self._due_s:
            self._due_s = at_s
            self._pod.due(at_s, self)

    def _so_far(self, tally: Tally) -> Tally:
        if not self.wanted.continuous_usage:
            return tally
        return msgspec.structs.replace(tally, output_tokens=sum(self._sent) + 1)

    def _write_or_reset(self, events: list[bytes], last: bool) -> None:
        limit = self.reset_after
        if limit is not None and self._events + len(events) >= limit:
            self._write(events[: limit - self._events], last=False)
            self._reset()
            return
        self._events += len(events)
        if last:
            self.over = True
            self._pod.done(self)
        self._write(events, last)
        if last:
            self._tell(None)

    def _tell(self, body: bytes | None) -> None:
        if self.on_answered is None:
            return
        whole = body or self.answer.whole(self._choices, self.tally(), None)
        self.on_answered(whole, "".join(self._choices[0].pieces))

    def _write(self, events: list[bytes], last: bool) -> None:
        wire = b"".join([frame_chunk(event) for event in events])
        self._conn.write(b"".join(events), wire, last)

    def fail(self, message: str, status: int = 500, kind: str = "InternalServerError") -> None:
        """The engine cannot serve it: an error, or inside a stream that has begun an event."""
        error = EngineError(message, status, kind)
        self.over = True
        self._pod.give_up(self, client_left=False)
        if self.wanted.stream:
            self._write([self.answer.error_event(error), DONE], last=True)
        else:
            self._conn.respond(status, self.head, self.answer.error_body(error))

    def die(self) -> None:
        """The engine died: nothing more comes."""
        self.over = True
        self._pod.give_up(self, client_left=False)
        self._conn.abort()

    def _reset(self) -> None:
        self.over = True
        self._pod.give_up(self, client_left=False)
        self._pod.loop.call_later(_RESET_DELAY_S, self._conn.abort)

    # --- the client --------------------------------------------------------------------------

    def on_client_blocked(self) -> None:
        """The client does not keep up: tokens wait."""
        self._blocked = True

    def on_client_ready(self) -> None:
        """The client has caught up: what has waited goes out."""
        self._blocked = False
        prefilled = any(job.prefilled_s is not None for job in self.jobs)
        if self.wanted.stream and prefilled and not self.over:
            now = self._pod.loop.time()
            self._due_s = _NEVER_S
            self._plan(now)
            self._pod.step(now)

    def on_client_gone(self) -> None:
        """The client left: the pod stops generating for it."""
        if not self.over:
            self.over = True
            self._pod.give_up(self, client_left=True)


class Pooling:
    """A request that is prefilled and generates nothing; its answer is known beforehand."""

    __slots__ = ("_answer", "_conn", "_head", "_over", "_pod", "_unfinished", "jobs")

    def __init__(
        self,
        pod: MockPod,
        conn: ServerConnection,
        head: bytes,
        answer: Json,
        inputs: list[list[int]],
    ):
        self._pod = pod
        self._conn = conn
        self._head = head
        self._answer = msgspec.json.encode(answer)
        self._over = False
        self.jobs = [
            Job(
                id=f"pool-{pod.next_number():08x}",
                prompt_tokens=len(ids),
                output_tokens=0,
                chain=(),
            )
            for ids in inputs
        ]
        self._unfinished = len(self.jobs)
        conn.stream = self

    def on_prefilled(self, job: Job) -> None:
        """Nothing follows but the end."""

    def on_finished(self, job: Job) -> None:  # noqa: ARG002
        """The last one answers the request."""
        self._unfinished -= 1
        if not self._unfinished and not self._over:
            self._over = True
            self._pod.done(self)
            self._conn.respond(200, self._head, self._answer)

    def emit(self, now: float) -> None:
        """Never asked for."""

    def die(self) -> None:
        """The engine died."""
        self._over = True
        self._pod.give_up(self, client_left=False)
        self._conn.abort()

    def on_client_blocked(self) -> None:
        """One short answer: nothing to hold back."""

    def on_client_ready(self) -> None:
        """One short answer: nothing was held back."""

    def on_client_gone(self) -> None:
        """The client left."""
        if not self._over:
            self._over = True
            self._pod.give_up(self, client_left=True)
