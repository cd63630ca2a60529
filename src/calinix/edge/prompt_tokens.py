"""The token ids of requests' prompts: remembered by the piece, and never in the loop's way.

What is known to be quick is done at once: a conversation that goes on has a few new pieces. The
rest is handed to a few threads: the library lets go of the interpreter while it works.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from calinix.core.prompt import Endpoint
from calinix.core.segments import TokenMemory
from calinix.edge.chat_template import TemplateRefusedError
from calinix.edge.tokenizers import MAX_PIECE_CHARS, HfTokenizer
from calinix.engines.vllm_chat import ChatRequest, UnusualError, read_chat, read_completion

log = structlog.get_logger()

LOOP_BUDGET_S = 0.0007
"""What one step may take of the loop's time; what is expected to take longer goes to threads."""
MAX_BODY_BYTES = 8_388_608
"""Longer bodies are not tokenised."""
MAX_DECODED_BYTES = 196_608
"""Longer bodies are not even decoded by the loop."""
REST = 1.5
"""Writing a prompt takes so many times as long as reading it: more, where it is in many parts, but
then reading takes long too."""
MAX_WAITING_PER_THREAD = 64
"""Jobs in hand, per thread; one more is refused: it would be late anyway."""

_MESSAGE_CHARS = 4096
"""Writing a message costs about as much as copying so many letters."""
_CALL_CHARS = 256
"""Calling the tokenizer costs about as much as so many letters."""
_REQUEST_CHARS = 20_480
"""Taking up any request, as much as copying so many."""
_BATCH_CHARS = 65_536
_START_WRITE_S = 1.5e-9
_START_ENCODE_S = 4e-7
_FASTER, _SLOWER = 0.3, 0.1


class Rate:
    """Seconds per letter, learned; it takes to good news faster than to bad."""

    __slots__ = ("value",)

    def __init__(self, start_s: float):
        self.value = start_s

    def learn(self, chars: int, seconds: float) -> None:
        """So many letters took so long."""
        if chars > 0:
            found = seconds / chars
            self.value += (_FASTER if found < self.value else _SLOWER) * (found - self.value)


class Job:
    """A prompt that is being tokenised."""

    __slots__ = (
        "add_special_tokens",
        "body",
        "done",
        "encoded",
        "endpoint",
        "pieces",
        "request",
        "when_done",
        "written",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint, body: bytes):
        self.endpoint = endpoint
        self.body = body
        self.request: ChatRequest | None = None
        self.pieces: list[str] | None = None
        self.add_special_tokens = False
        self.written = (0, 0.0)
        """(letters, seconds) that it took to write the prompt, as a thread found."""
        self.encoded = (0, 0.0)
        """Likewise to tokenise what was not known."""
        self.done = False
        self.when_done: Callable[[bytes | None], None] | None = None
        """Called once, by the loop, with the ids; None: there are none after all."""

    @property
    def weight_chars(self) -> int:
        """What reading and writing it costs, as so many letters to copy."""
        request = self.request
        items = 0 if request is None else len(request.messages) + 4 * len(request.tools or ())
        return len(self.body) + _REQUEST_CHARS + _MESSAGE_CHARS * items


class PromptTokenizer:
    """Prompts' ids as little-endian u32, as the engine would have them."""

    def __init__(
        self,
        tokenizer: HfTokenizer,
        loop: asyncio.AbstractEventLoop,
        *,
        threads: int,
        cache_bytes: int,
        budget_s: float | None = None,
    ):
        """`budget_s` in the place of LOOP_BUDGET_S."""
        self._tokenizer = tokenizer
        self._loop = loop
        self._budget_s = LOOP_BUDGET_S if budget_s is None else budget_s
        self._memory = TokenMemory(cache_bytes)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="calinix-tokenize")
        self._max_jobs = threads * MAX_WAITING_PER_THREAD
        self._jobs = 0
        self._write = Rate(_START_WRITE_S)
        self._encode = Rate(_START_ENCODE_S)

    @property
    def jobs(self) -> int:
        """Prompts that threads have in hand."""
        return self._jobs

    @property
    def cache_bytes(self) -> int:
        """About what the remembered pieces take."""
        return self._memory.size_bytes

    def close(self) -> None:
        """Begins nothing more; what is under way is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def start(self, endpoint: Endpoint, body: bytes) -> bytes | Job | None:
        """The ids of a request's prompt; a job where that takes a while; None: there are none.

        There are none where they cannot be foretold (media, a template of the client's own), or
        where too much is waiting to be tokenised already.
        """
        if len(body) > MAX_BODY_BYTES or self._jobs >= self._max_jobs:
            return None
        job = Job(endpoint, body)
        if len(body) > MAX_DECODED_BYTES:
            return self._hand_over(job)
        # The thread's own time: what others take of the processor is not this prompt's.
        started_s = time.thread_time()
        try:
            if not self._read(job):
                return None
            weight = job.weight_chars
            read_s = time.thread_time() - started_s
            if max(weight * self._write.value, read_s * (1.0 + REST)) > self._budget_s:
                return self._hand_over(job)
            pieces = self._pieces(job)
        except (UnusualError, TemplateRefusedError):
            return None
        if pieces is None:
            return None
        find = self._memory.find
        found = [find(piece) for piece in pieces]
        missing = [piece for piece, ids in zip(pieces, found, strict=True) if ids is None]
        taken_s = time.thread_time() - started_s
        self._write.learn(weight, taken_s)
        if not missing:
            return self._joined(job, pieces, found, {})
        needed_s = (sum(map(len, missing)) + _CALL_CHARS) * self._encode.value
        if needed_s > self._budget_s:
            return self._hand_over(job)
        if taken_s + needed_s > self._budget_s:
            # Not all at once: whoever waits for the loop has a turn first.
            self._jobs += 1
            self._loop.call_soon(self._go_on, job, pieces, found, missing)
            return job
        return self._encode_now(job, pieces, found, missing)

    def _go_on(
        self, job: Job, pieces: list[str], found: list[bytes | None], missing: list[str]
    ) -> None:
        self._end(job, self._encode_now(job, pieces, found, missing))

    def _encode_now(
        self, job: Job, pieces: list[str], found: list[bytes | None], missing: list[str]
    ) -> bytes:
        started_s = time.thread_time()
        fresh = dict(zip(missing, self._tokenizer.encode(missing), strict=True))
        self._encode.learn(sum(map(len, missing)) + _CALL_CHARS, time.thread_time() - started_s)
        for piece, ids in fresh.items():
            self._memory.keep(piece, ids)
        return self._joined(job, pieces, found, fresh)

    # --- steps, some of them in threads ------------------------------------------------------

    def _read(self, job: Job) -> bool:
        """Decodes the body; False: no ids can be foretold."""
        if job.endpoint is Endpoint.COMPLETIONS:
            completion = read_completion(job.body)
            if completion is None:
                return False
            text, job.add_special_tokens = completion
            job.pieces = self._tokenizer.cutter.cut(text)
            return True
        if job.endpoint is Endpoint.CHAT:
            job.request = read_chat(job.body)
        if job.request is None:
            return False
        job.add_special_tokens = job.request.add_special_tokens
        return True

    def _pieces(self, job: Job) -> list[str] | None:
        """The prompt in pieces; None: one of them is too long.

        Raises UnusualError, TemplateRefusedError.
        """
        pieces = job.pieces
        if pieces is None:
            assert job.request is not None
            text = self._tokenizer.chat_text(job.request)
            pieces = job.pieces = self._tokenizer.cutter.cut(text)
        if job.add_special_tokens and self._tokenizer.around() is None:
            return None
        if pieces and max(map(len, pieces)) > MAX_PIECE_CHARS:
            return None
        return pieces

    def _joined(
        self,
        job: Job,
        pieces: list[str],
        found: list[bytes | None],
        fresh: dict[str, bytes],
    ) -> bytes:
        ids = [
            fresh[piece] if known is None else known
            for piece, known in zip(pieces, found, strict=True)
        ]
        around = self._tokenizer.around()
        if job.add_special_tokens and around is not None:
            before, behind = around
            return b"".join([before, *ids, behind])
        return b"".join(ids)

    def _hand_over(self, job: Job) -> Job:
        self._jobs += 1
        future = self._loop.run_in_executor(self._threads, self._work, job)
        future.add_done_callback(lambda done: self._finish(job, done))
        return job

    def _work(self, job: Job) -> tuple[bytes, dict[str, bytes]] | None:
        """In a thread: all that is left to do. Changes nothing but the job."""
        started_s = time.thread_time()
        try:
            if job.request is None and job.pieces is None and not self._read(job):
                return None
            is_written = job.pieces is not None
            pieces = self._pieces(job)
        except (UnusualError, TemplateRefusedError):
            return None
        if pieces is None:
            return None
        peek = self._memory.peek
        found = [peek(piece) for piece in pieces]
        missing = list(
            dict.fromkeys(p for p, ids in zip(pieces, found, strict=True) if ids is None)
        )
        written_s = time.thread_time()
        if not is_written:
            job.written = (job.weight_chars, written_s - started_s)
        fresh: dict[str, bytes] = {}
        for batch in _batches(missing):
            fresh.update(zip(batch, self._tokenizer.encode(batch), strict=True))
        job.encoded = (sum(map(len, missing)) + _CALL_CHARS, time.thread_time() - written_s)
        return self._joined(job, pieces, found, fresh), fresh

    def _finish(
        self, job: Job, future: asyncio.Future[tuple[bytes, dict[str, bytes]] | None]
    ) -> None:
        tokens = None
        if not future.cancelled():
            if (error := future.exception()) is not None:
                self._loop.call_exception_handler(
                    {"message": "a prompt could not be tokenised", "exception": error}
                )
            elif (result := future.result()) is not None:
                tokens, fresh = result
                self._write.learn(*job.written)
                self._encode.learn(*job.encoded)
                for piece, ids in fresh.items():
                    self._memory.keep(piece, ids)
        self._end(job, tokens)

    def _end(self, job: Job, tokens: bytes | None) -> None:
        self._jobs -= 1
        job.done = True
        if job.when_done is not None:
            job.when_done(tokens)


def _batches(pieces: list[str]) -> list[list[str]]:
    """The pieces in groups of not too many letters: between two groups others get their turn."""
    groups: list[list[str]] = []
    size = _BATCH_CHARS
    for piece in pieces:
        if size >= _BATCH_CHARS:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += len(piece)
    return groups
