"""One tokenizing process, as the gateway's loop has it: questions out, answers in, a piece a turn.

What the loop does is counted, not timed: WRITE_BYTES of questions and one answer per turn, however
much is asked and answered at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from calinix.core.prompt import Endpoint
from calinix.edge.token_frames import HEAD, Answer, Question, Settings, frame
from calinix.errors import ConfigError

WRITE_BYTES = 131_072
"""So much of the questions is written in one turn of the loop."""
BUFFER_BYTES = 1_048_576
"""Of the socket, as far as the system grants it: a prompt passes in one piece, not in several."""
MAX_JOBS = 64
MAX_BYTES = 16_777_216
"""Prompts in hand and their bodies; one more would be late anyway."""

_QUESTIONS = {Endpoint.CHAT: Question.CHAT, Endpoint.COMPLETIONS: Question.COMPLETIONS}
_COMMAND = ("-P", "-m", "calinix.edge.token_process")
_LOST = -1
"""In the place of an answer that will not come."""


class Job:
    """A prompt that is being tokenised."""

    __slots__ = ("body_bytes", "done", "lost", "when_done")

    def __init__(self, body_bytes: int):
        self.body_bytes = body_bytes
        self.done = False
        self.lost = False
        """Its process ended: nothing was said about this prompt."""
        self.when_done: Callable[[bytes | None], None] | None = None
        """Called once, by the loop, with the ids, little-endian u32; None: there are none."""

    def end(self, ids: bytes | None) -> None:
        """Tells whoever waits for it."""
        self.done = True
        if self.when_done is not None:
            self.when_done(ids)


class TokenLink(asyncio.BufferedProtocol):
    """A process and the socket to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, when_lost: Callable[[TokenLink], None]):
        """`when_lost`: called when it has ended by itself, after it was ready."""
        self._loop = loop
        self._when_lost = when_lost
        self._child: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._started: asyncio.Future[None] = loop.create_future()
        self._jobs: dict[int, Job] = {}
        self._numbers = 0
        self._out: deque[memoryview] = deque()
        self._paused = self._writing = False
        self._head = bytearray(HEAD.size)
        self._into = memoryview(self._head)
        self._body: bytearray | None = None
        self._answers: deque[tuple[int, int, int, bytearray]] = deque()
        self._closed = self._gone = self._was_ready = False
        self.is_ready = False
        """It can be asked."""
        self.bytes_in_hand = 0
        """Of the bodies that are being tokenised."""
        self.asked = 0
        """Prompts, in all."""
        self.answered = 0
        self.heard_s = 0.0
        """When it last answered, or was first asked after that, in the loop's time."""
        self.cache_bytes = 0
        """About what the pieces take that it remembers."""

    async def open(self, settings: Settings) -> None:
        """Starts the process, and waits until it has read the tokenizer. Raises ConfigError."""
        ours = self._begin_process()
        await self._loop.create_unix_connection(lambda: self, sock=ours)
        self._put(frame(Question.SETTINGS, body=msgspec.json.encode(settings)))
        await self._started

    @property
    def pid(self) -> int:
        """Of the process."""
        return 0 if self._child is None else self._child.pid

    @property
    def jobs(self) -> int:
        """Prompts in hand."""
        return len(self._jobs)

    def _begin_process(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        with theirs:
            self._child = subprocess.Popen(  # noqa: S603  it is our own
                [sys.executable, *_COMMAND],
                stdin=theirs.fileno(),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        return ours

    def has_room(self, body_bytes: int) -> bool:
        """Whether it can be asked for one more prompt of this size."""
        has_room = self.bytes_in_hand + body_bytes <= MAX_BYTES
        return self.is_ready and has_room and len(self._jobs) < MAX_JOBS

    def ask(self, endpoint: Endpoint, body: bytes) -> Job:
        """Begins to have a prompt tokenised."""
        self._numbers = number = (self._numbers + 1) & 0xFFFFFFFF
        if not self._jobs:
            self.heard_s = self._loop.time()
        job = self._jobs[number] = Job(len(body))
        self.asked += 1
        self.bytes_in_hand += job.body_bytes
        self._put(HEAD.pack(len(body), number, _QUESTIONS[endpoint], 0))
        self._put(body)
        return job

    def give_up(self) -> None:
        """Ends the process, as if it had ended by itself."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """Ends the process; whoever waits for a job hears nothing more."""
        self._closed = True
        self.is_ready = False
        self._jobs.clear()
        self._answers.clear()
        self._out.clear()
        self._end_process()

    def _end_process(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    # --- out ---------------------------------------------------------------------------------

    def _put(self, data: bytes) -> None:
        self._out.append(memoryview(data))
        self._write_soon()

    def _write_soon(self) -> None:
        if not self._writing and not self._paused and self._out:
            self._writing = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        """Writes as much as one turn may; the rest follows in later ones."""
        self._writing = False
        transport = self._transport
        if self._paused or transport is None or not self._out:
            return
        room = WRITE_BYTES
        now: list[memoryview] = []
        while self._out and room:
            view = self._out.popleft()
            if len(view) > room:
                self._out.appendleft(view[room:])
                view = view[:room]
            now.append(view)
            room -= len(view)
        transport.writelines(now)
        self._write_soon()

    def pause_writing(self) -> None:
        """Of asyncio: the socket is full."""
        self._paused = True

    def resume_writing(self) -> None:
        """Of asyncio: it has room again."""
        self._paused = False
        self._write_soon()

    # --- in ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio: the socket is there."""
        self._transport = cast("asyncio.Transport", transport)
        # What the socket does not take stays here, in pieces.
        self._transport.set_write_buffer_limits(high=0)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  asyncio's
        """Of asyncio: where the next bytes go."""
        return self._into

    def buffer_updated(self, nbytes: int) -> None:
        """Of asyncio: so many have come."""
        self._into = self._into[nbytes:]
        if self._into:
            return
        size, number, kind, cache_bytes = HEAD.unpack(self._head)
        if self._body is None and size:
            self._body = bytearray(size)
            self._into = memoryview(self._body)
            return
        body = self._body or bytearray()
        self._body = None
        self._into = memoryview(self._head)
        self._answers.append((kind, number, cache_bytes, body))
        if len(self._answers) == 1:
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        """Acts on one answer: others that wait for the loop have a turn before the next one."""
        if not self._answers:
            return
        kind, number, cache_bytes, body = self._answers.popleft()
        if self._answers:
            self._loop.call_soon(self._deliver)
        self.heard_s = self._loop.time()
        if kind == Answer.READY:
            self.is_ready = True
            self._begun(None)
        elif kind == Answer.REFUSED:
            self._begun(body.decode().splitlines())
        else:
            job = self._jobs.pop(number)
            self.bytes_in_hand -= job.body_bytes
            job.lost = kind == _LOST
            if not job.lost:
                self.cache_bytes = cache_bytes
                self.answered += 1
            job.end(bytes(body) if kind == Answer.TOKENS else None)
        if self._gone and not self._answers:
            self._end()

    def _begun(self, problems: list[str] | None) -> None:
        if self._started.done():
            return
        if problems is None:
            self._started.set_result(None)
        else:
            self._started.set_exception(ConfigError(problems))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  asyncio's
        """Of asyncio: the process ended."""
        if self._closed:
            return
        self._gone = True
        self._out.clear()
        self._end_process()
        is_idle = not self._answers
        told = {number for _, number, _, _ in self._answers}
        lost = [number for number in self._jobs if number not in told]
        self._answers += [(_LOST, number, 0, bytearray()) for number in lost]
        self._was_ready, self.is_ready = self.is_ready, False
        if not self._answers:
            self._end()
        elif is_idle:
            self._loop.call_soon(self._deliver)

    def _end(self) -> None:
        code = None if self._child is None else self._child.returncode
        self._begun([f"gateway.tokenizer: its process ended as it began, with {code}"])
        if self._was_ready and not self._closed:
            self._when_lost(self)
