"""The order of one publisher's batches: what is next, what is missing, who has started anew.

Numbers run from 0 per engine process and DP rank. A number that does not rise is another process.
One that leaves others out is a gap: a replay is asked for from the last batch that is known, which
it repeats, so that another process behind the same address is told apart. What no replay brings
back is lost: then the stream is gapped until its cache has turned over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

from calinix.engines.kv_events import AllCleared, BatchReader, Message, UnreadableBatch
from calinix.engines.kv_mirror import KvMirror

REPLAY_TIMEOUT_S = 2.0
"""A replay without a word for so long is given up."""
REST_S = 5.0
"""After that, none is asked for."""
MAX_MISSES = 3
"""A publisher that leaves so many requests unanswered is not there: its events are history."""
KEEP_LOST = 1000
"""With more batches lost than this, what was known before is forgotten."""
_MAX_PENDING = 4096
_MAX_PENDING_BYTES = 16 << 20
_MAX_ROUNDS = 4
"""Replays in a row that may each bring only part of what is missing."""
_CLEARED = b"AllBlocksCleared"

Source = Literal["history", "events", "gapped"]
"""What is believed of a pod's cache stands on: requests only, its events, or events with a gap."""


class Line(Protocol):
    """What a stream asks of its host: to carry replay requests."""

    def ask(self, first: int) -> bool:
        """Asks for every batch from `first` on; False: nobody can be asked."""
        ...

    def hang_up(self) -> None:
        """No answer to what was asked is wanted any more."""
        ...

    def waits(self) -> bool:
        """The request stands in a queue: so many others are under way."""
        ...


class KvStream:
    """One DP rank of one pod: takes messages as they come, gives their batches to the mirror.

    `now` is in seconds, monotonic. The host calls `live` and `replayed` for what it receives and
    `tick` some times a second.
    """

    __slots__ = (
        "_asked_s", "_asking", "_check", "_check_s", "_checks", "_clears_only", "_fingerprint",
        "_heal_at", "_heard", "_last", "_line", "_misses", "_pending", "_pending_bytes", "_reader",
        "_rest_until_s", "_restarted", "_rounds", "_skip", "_started", "capacity_tokens",
        "generation", "lost", "mirror", "replays", "source", "unreadable",
    )  # fmt: skip

    def __init__(
        self,
        mirror: KvMirror,
        line: Line,
        restarted: Callable[[KvStream, float], None],
        *,
        check_s: float,
        capacity_tokens: int,
        clears_only: bool = False,
    ):
        """`restarted` is called when another process publishes, before its first batch counts.

        `check_s`: how often a silent publisher is asked for its last batch. `clears_only`: the
        mirror is told of cleared caches alone.
        """
        self.mirror = mirror
        self.source: Source = "history"
        self.lost = 0
        """Batches that never came."""
        self.unreadable = 0
        """Batches and events that were not understood."""
        self.replays = 0
        self.generation = 0
        """Of the pod's restarts, the last one that this rank has seen."""
        self.capacity_tokens = capacity_tokens
        self._line = line
        self._restarted = restarted
        self._clears_only = clears_only
        self._checks = check_s
        self._reader = BatchReader()
        self._last = -1
        self._fingerprint = 0
        self._heard = -1
        """Number of the last live message; later ones may have been replayed since."""
        self._pending: deque[Message] = deque()
        self._pending_bytes = 0
        self._asking = False
        self._asked_s = 0.0
        self._check: tuple[int, int] | None = None
        """Number and fingerprint of the batch that the first answer has to repeat."""
        self._started = False
        self._skip = False
        """The rest of the answers is of no use; then it is asked again."""
        self._rounds = 0
        self._misses = 0
        self._check_s = 0.0
        self._rest_until_s = 0.0
        self._heal_at = 0

    @property
    def last(self) -> int:
        """Number of the last batch that counts; -1: none yet."""
        return self._last

    # --- what the host calls -----------------------------------------------------------------

    def live(self, message: Message, now: float) -> None:
        """A message of the publisher, in the order in which it was sent."""
        if message.sequence <= self._heard:
            self._start_anew(now)
        self._heard = message.sequence
        self._misses = 0
        if self._pending or not self._take(message, now):
            self._keep(message)

    def replayed(self, answer: Message | Literal["end"], now: float) -> None:
        """An answer to what was asked for."""
        if not self._asking:
            return
        self._asked_s = now
        self._misses = 0
        if answer == "end":
            self._end(now)
        elif not self._skip:
            self._answer(answer, now)

    def drain(self, now: float) -> bool:
        """Lets one batch count that has waited for a replay; whether more can follow it."""
        if self.behind:
            message = self._pending[0]
            if self._take(message, now) and self._pending:
                self._pending.popleft()
                self._pending_bytes -= len(message.payload)
        return self.behind

    @property
    def behind(self) -> bool:
        """Batches have waited for a replay, and need not wait any more: `drain` takes them."""
        return bool(self._pending) and not self._asking

    def tick(self, now: float) -> None:
        """Gives up on a replay that does not come; asks a silent publisher whether it lives."""
        if self._asking:
            if self._line.waits():
                self._asked_s = now
            elif now - self._asked_s > REPLAY_TIMEOUT_S:
                self._give_up(now)
        elif now >= self._check_s:
            self._ask(now)

    def resume(self, now: float) -> None:
        """What the index knew is gone, not what the engine has: begins with all that is kept."""
        self._forget_place()
        self.mirror.forget()
        self._check_s = now

    # --- in order ----------------------------------------------------------------------------

    def _take(self, message: Message, now: float) -> bool:
        """Lets the batch count if it is next; False: what is before it is asked for."""
        missing = message.sequence - self._last - 1
        if missing < 0:
            return True
        if missing:
            if self._asking or (now >= self._rest_until_s and self._ask(now)):
                return False
            self._lose(missing)
        self._count(message, now)
        return True

    def _count(self, message: Message, now: float) -> None:
        self._last = message.sequence
        self._fingerprint = hash(message.payload)
        self._check_s = now + self._checks
        if self.source == "history":
            self.source = "events"
        # Looking for the word is cheap, reading is not.
        if self._clears_only and _CLEARED not in message.payload:
            return
        try:
            batch = self._reader.read(message.payload)
        except UnreadableBatch:
            self.unreadable += 1
            self._lose(1)
            return
        self.unreadable += batch.unreadable
        if self._clears_only:
            self.mirror.apply([event for event in batch.events if isinstance(event, AllCleared)])
            return
        self.mirror.apply(batch.events)
        if self.source == "gapped" and self.mirror.stored_tokens >= self._heal_at:
            self.source = "events"

    def _lose(self, batches: int) -> None:
        """Removals may be among what is lost."""
        self.lost += batches
        if batches > KEEP_LOST and self._last >= 0 and not self._clears_only:
            self.mirror.clear()
        self.mirror.doubt()
        self.source = "gapped"
        # An engine that has stored its whole capacity since has evicted, or used, all of it.
        self._heal_at = self.mirror.stored_tokens + self.capacity_tokens

    def _start_anew(self, now: float) -> None:
        """Another process: numbers begin at 0, and its cache began empty."""
        self._forget_place()
        self._rest_until_s = 0.0
        self._restarted(self, now)

    def _forget_place(self) -> None:
        self._hang_up()
        self._last, self._fingerprint = -1, 0
        self._pending.clear()
        self._pending_bytes = 0
        self.source = "history"

    def _keep(self, message: Message) -> None:
        """Until the replay is there. What finds no room is a gap later."""
        size = len(message.payload)
        if len(self._pending) < _MAX_PENDING and self._pending_bytes + size <= _MAX_PENDING_BYTES:
            self._pending.append(message)
            self._pending_bytes += size

    # --- replays -----------------------------------------------------------------------------

    def _ask(self, now: float) -> bool:
        """Asks for the last batch that counts and all behind it; False: nobody can be asked."""
        self._check_s = now + self._checks
        if not self._line.ask(max(self._last, 0)):
            return False
        self.replays += 1
        self._asking, self._asked_s = True, now
        self._check = (self._last, self._fingerprint) if self._last >= 0 else None
        self._started = self._skip = False
        return True

    def _hang_up(self) -> None:
        if self._asking:
            self._asking = False
            self._line.hang_up()

    def _give_up(self, now: float) -> None:
        self._hang_up()
        self._rest_until_s = now + REST_S
        self._misses += 1
        if self._misses >= MAX_MISSES and self.source == "events":
            self.source = "history"

    def _answer(self, message: Message, now: float) -> None:
        if self._check is not None and message.sequence >= self._check[0]:
            known, self._check = self._check, None
            if message.sequence == known[0] and hash(message.payload) != known[1]:
                self._is_another(now)
                return
        missing = message.sequence - self._last - 1
        if missing < 0:
            return
        if missing and self._started:
            # The publisher drops answers that nobody takes in time.
            self._skip = True
            return
        if missing:
            self._lose(missing)
        self._started = True
        self._count(message, now)

    def _is_another(self, now: float) -> None:
        """Another process answers; what it has published is asked for from its beginning."""
        self._asking = False
        self._start_anew(now)
        self._asking = self._skip = True

    def _end(self, now: float) -> None:
        if self._check is not None:
            # It has not come as far as that: it is younger than what counted.
            self._is_another(now)
        self._asking = False
        if self._skip:
            self._rounds += 1
            if self._rounds <= _MAX_ROUNDS and self._ask(now):
                return
            self._rest_until_s = now + REST_S
        self._rounds = 0
        if self.source == "history":
            self.source = "events"
