"""Replay requests to publishers: a few at a time, over connections that are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from calinix.edge.kv_sockets import Inlet, Sockets
from calinix.engines.kv_events import Message, read_replayed, replay_request

AT_ONCE = 8
"""Replays under way: each may bring thousands of batches, which wait in memory until their turn."""


class Places:
    """Who may ask now, and who is next."""

    __slots__ = ("_free", "_waiting")

    def __init__(self, count: int = AT_ONCE):
        self._free = count
        self._waiting: deque[ReplayLine] = deque()

    def take(self, line: ReplayLine) -> bool:
        """True: there is a place. False: the line stands in the queue, once, for the next one."""
        if self._free > 0:
            self._free -= 1
            return True
        if line not in self._waiting:
            self._waiting.append(line)
        return False

    def give_back(self) -> None:
        """A place is free."""
        self._free += 1
        for _ in range(len(self._waiting)):
            if self._free <= 0:
                return
            self._waiting.popleft().send()

    def leave(self, line: ReplayLine) -> None:
        """The line does not want to ask any more."""
        if line in self._waiting:
            self._waiting.remove(line)


class ReplayLine:
    """The way to one publisher's replay endpoint (kv_stream.Line); None: it has none."""

    __slots__ = (
        "_deliver", "_endpoint", "_first", "_inlet", "_places", "_sent", "_sockets", "_wanted",
    )  # fmt: skip

    def __init__(
        self,
        sockets: Sockets,
        places: Places,
        endpoint: str | None,
        deliver: Callable[[Message | Literal["end"]], None],
    ):
        self._sockets = sockets
        self._places = places
        self._endpoint = endpoint
        self._deliver = deliver
        self._inlet: Inlet | None = None
        self._first = 0
        self._wanted = False
        """Asked for, and not answered to the end."""
        self._sent = False
        """The request is out, and a place is taken."""

    def ask(self, first: int) -> bool:
        """Asks for every batch from `first` on, as soon as there is a connection and a place."""
        if self._endpoint is None:
            return False
        if self._inlet is None:
            self._inlet = self._sockets.dial(self._endpoint, self._receive)
        self._first, self._wanted = first, True
        self.send()
        return True

    def send(self) -> None:
        """Sends what was asked for if that is possible now; harmless at any time."""
        inlet = self._inlet
        if inlet is None or not self._wanted or self._sent or not self._sockets.can_send(inlet):
            return
        if self._places.take(self):
            self._sent = True
            if not self._sockets.send(inlet, replay_request(self._first)):
                self._sent = False
                self._places.give_back()

    def waits(self) -> bool:
        """There is a connection, but no place."""
        inlet = self._inlet
        return (
            self._wanted and not self._sent and inlet is not None and self._sockets.can_send(inlet)
        )

    def hang_up(self) -> None:
        """Whatever is still answered is not for us: the connection ends."""
        self._done()
        if self._inlet is not None:
            self._sockets.close(self._inlet)
            self._inlet = None

    def _receive(self, frames: list[bytes]) -> None:
        answer = read_replayed(frames)
        if answer is None or not self._sent:
            return
        if answer == "end":
            self._done()
        self._deliver(answer)

    def _done(self) -> None:
        self._wanted = False
        self._places.leave(self)
        if self._sent:
            self._sent = False
            self._places.give_back()
