"""The token ids of requests' prompts, made by a few processes: never by the gateway's own.

The loop does nothing for a prompt but to find its process, to write its body and to take its ids:
edge/token_link.py counts what that may be. A conversation goes to the process that has tokenised
it before and remembers its pieces.
"""

from __future__ import annotations

import asyncio
import os

import structlog

from calinix.config.tokens import Tokenizing
from calinix.core.kv import hash_bytes
from calinix.core.prompt import Endpoint
from calinix.edge.token_frames import MAX_BODY_BYTES, Settings
from calinix.edge.token_link import Job, TokenLink
from calinix.errors import CalinixError, ConfigError

log = structlog.get_logger()

STUCK_S = 60.0
"""A process that has prompts in hand and says nothing for so long is ended."""
MAX_HOMES = 32_768
MAX_PREFIX_BYTES = 65_536
MIN_PREFIX_BYTES = 256
"""Two conversations that begin alike for so long may be the same one."""
MAX_SPARE = 2
"""So many processes are enough by default."""
_START_S = 120.0
_FIRST_RESTART_S, _LAST_RESTART_S = 1.0, 30.0
_FAR_AHEAD_BYTES = 262_144
"""A conversation leaves its process where that has so much more in hand than another one."""


def _spare_processors() -> int:
    """One is the loop's."""
    there_are = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        there_are = len(os.sched_getaffinity(0))
    return max(1, min(there_are - 1, MAX_SPARE))


class TokensLostError(CalinixError):
    """Nothing can be said about a prompt: too much is in hand, or its process ended."""


class Homes:
    """Beginning of a prompt -> which process has seen it; bounded, the oldest go first."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def keys(self, prompt: bytes) -> tuple[int, ...]:
        """By what a prompt is known: its longest beginning first.

        Beginnings are powers of two long, and a conversation that has grown by less than twice
        since its last turn has one in common with it.
        """
        size = min(len(prompt), MAX_PREFIX_BYTES)
        if size < MIN_PREFIX_BYTES:
            return ()
        longest = 1 << (size.bit_length() - 1)
        return tuple(hash_bytes(0, prompt, n, 1)[0] for n in (longest, longest // 2))

    def find(self, keys: tuple[int, ...]) -> int | None:
        """The process that knows the longest of these beginnings."""
        places = self._places
        return next((places[key] for key in keys if key in places), None)

    def keep(self, keys: tuple[int, ...], place: int) -> None:
        """This process will know them."""
        places = self._places
        for key in keys:
            places.pop(key, None)
            places[key] = place
        while len(places) > MAX_HOMES:
            del places[next(iter(places))]


class PromptTokenizer:
    """Prompts' ids as little-endian u32, as the engine would have them."""

    def __init__(self, path: str, tokenizing: Tokenizing, loop: asyncio.AbstractEventLoop):
        """`path`: the folder, or the file, with the tokenizer."""
        self._loop = loop
        count = tokenizing.processes or _spare_processors()
        self._settings = Settings(path, tokenizing, max(1, tokenizing.cache_bytes // count))
        self._links = [self._new_link() for _ in range(count)]
        self._homes = Homes()
        self._restart_s = [_FIRST_RESTART_S] * count
        self._timers: list[asyncio.TimerHandle | None] = [None] * count
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self) -> None:
        """Starts the processes, and waits until all can be asked. Raises ConfigError."""
        opening = [link.open(self._settings) for link in self._links]
        try:
            async with asyncio.timeout(_START_S):
                ends = await asyncio.gather(*opening, return_exceptions=True)
        except TimeoutError:
            ends = [ConfigError([f"gateway.tokenizer: not read within {_START_S:.0f} s"])]
        for end in ends:
            if isinstance(end, BaseException):
                self.close()
                raise end

    @property
    def jobs(self) -> int:
        """Prompts that processes have in hand."""
        return sum(link.jobs for link in self._links)

    @property
    def cache_bytes(self) -> int:
        """About what the remembered pieces take, of all processes."""
        return sum(link.cache_bytes for link in self._links)

    @property
    def pids(self) -> list[int]:
        """The processes that can be asked."""
        return [link.pid for link in self._links if link.is_ready]

    def close(self) -> None:
        """Ends the processes; what is under way is not waited for."""
        self._closed = True
        for timer in self._timers:
            if timer is not None:
                timer.cancel()
        for task in self._tasks:
            task.cancel()
        for link in self._links:
            link.close()

    def start(self, endpoint: Endpoint, body: bytes, prompt: bytes) -> Job | None:
        """Begins to tokenise a request's prompt; None: it will have no ids.

        `prompt` is what the conversation is known by: any bytes that only grow from turn to turn.
        There are none where too much is in hand already, or the body is too long.
        """
        size = len(body)
        if size > MAX_BODY_BYTES:
            return None
        links = self._links
        self._end_the_stuck()
        able = [n for n, link in enumerate(links) if link.has_room(size)]
        if not able:
            return None
        place = min(able, key=lambda n: (links[n].bytes_in_hand, links[n].asked))
        keys = self._homes.keys(prompt)
        known = self._homes.find(keys)
        if known in able and known is not None:
            ahead = links[known].bytes_in_hand - links[place].bytes_in_hand
            if ahead <= _FAR_AHEAD_BYTES:
                place = known
        self._homes.keep(keys, place)
        return links[place].ask(endpoint, body)

    async def ids_of(self, endpoint: Endpoint, body: bytes) -> bytes | None:
        """The ids of a request's prompt; None: there are none. Raises TokensLostError."""
        job = self.start(endpoint, body, b"")
        if job is None:
            raise TokensLostError("no process can be asked")
        found: asyncio.Future[bytes | None] = self._loop.create_future()
        job.when_done = lambda ids: None if found.done() else found.set_result(ids)
        ids = await found
        if job.lost:
            raise TokensLostError("the process ended")
        return ids

    # --- processes that end ------------------------------------------------------------------

    def _new_link(self) -> TokenLink:
        return TokenLink(self._loop, self._lost)

    def _end_the_stuck(self) -> None:
        now = self._loop.time()
        for link in self._links:
            if link.jobs and now - link.heard_s > STUCK_S:
                link.give_up()

    def _lost(self, link: TokenLink) -> None:
        """A process ended by itself: another one follows, sooner where this one was of use."""
        place = self._links.index(link)
        if link.answered:
            self._restart_s[place] = _FIRST_RESTART_S
        log.error("tokenizing_process_lost", pid=link.pid, restart_s=self._restart_s[place])
        self._restart_later(place)

    def _restart_later(self, place: int) -> None:
        delay_s = self._restart_s[place]
        self._restart_s[place] = min(2.0 * delay_s, _LAST_RESTART_S)
        self._timers[place] = self._loop.call_later(delay_s, self._restart, place)

    def _restart(self, place: int) -> None:
        task = self._loop.create_task(self._reopen(place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reopen(self, place: int) -> None:
        link = self._links[place] = self._new_link()
        try:
            async with asyncio.timeout(_START_S):
                await link.open(self._settings)
        except (ConfigError, OSError, TimeoutError) as error:
            link.close()
            log.error("tokenizing_process_refused", problems=str(error).splitlines())
            if not self._closed:
                self._restart_later(place)
