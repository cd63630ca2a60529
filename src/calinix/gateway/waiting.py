"""The bounded queue of requests that found every pod full."""

from __future__ import annotations

from itertools import islice
from typing import Protocol


class Waiter(Protocol):
    """A request that waits for a pod to have room."""

    @property
    def wait_key(self) -> object:
        """Waiters with equal keys want the same pods: where one finds no room, none does."""
        ...

    def try_again(self, now: float) -> bool:
        """Routes once more; False: still full. Called only from `wake`."""
        ...

    def give_up_waiting(self) -> None:
        """The deadline has passed."""
        ...


# How many waiters one freed place may be offered to: requests of a mode or model that is still
# full must not hide those behind them, nor may one wake-up walk the whole queue.
_OFFERS = 16


class WaitQueue:
    """First come, first served, with a deadline each; never longer than its bound."""

    def __init__(self, max_requests: int, timeout_s: float):
        self.max_requests = max_requests
        self.timeout_s = timeout_s
        self._deadlines_s: dict[Waiter, float] = {}

    def __len__(self) -> int:
        return len(self._deadlines_s)

    def add(self, waiter: Waiter, now: float) -> bool:
        """Queues a waiter; False: the queue is at its bound."""
        if len(self._deadlines_s) >= self.max_requests:
            return False
        self._deadlines_s[waiter] = now + self.timeout_s
        return True

    def remove(self, waiter: Waiter) -> None:
        """Forgets a waiter whose client has left; harmless when it does not wait."""
        self._deadlines_s.pop(waiter, None)

    def wake(self, now: float) -> None:
        """A place may be free: offers it to those that wait, the longest waiting first."""
        full: set[object] = set()
        for waiter in list(islice(self._deadlines_s, _OFFERS)):
            if waiter in self._deadlines_s and waiter.wait_key not in full:
                if waiter.try_again(now):
                    self._deadlines_s.pop(waiter, None)
                else:
                    full.add(waiter.wait_key)

    def sweep(self, now: float) -> None:
        """Ends the waits whose deadline has passed."""
        late = [waiter for waiter, deadline_s in self._deadlines_s.items() if deadline_s <= now]
        for waiter in late:
            self._deadlines_s.pop(waiter, None)
            waiter.give_up_waiting()
