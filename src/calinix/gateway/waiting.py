"""The bounded queue of requests that found every pod full."""

from __future__ import annotations

import heapq
from typing import Final, Protocol


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


_OFFERS: Final = 16
"""Waiters that one wake-up asks: it must not walk the whole queue."""
_OLDEST: Final = 8
"""Of these, so many are of the keys that have waited longest; the other keys take turns."""

_Queue = dict[Waiter, tuple[int, float]]
"""(number, deadline) of each waiter, in order of arrival."""


class WaitQueue:
    """Waiters with a deadline each, bounded in number.

    Those that want the same pods are served first come, first served. Among others the longest
    waiting is asked first, but nobody waits behind those whose pods are still full.
    """

    def __init__(self, max_requests: int, timeout_s: float):
        self.max_requests = max_requests
        self.timeout_s = timeout_s
        self._count = 0
        self._arrivals = 0
        self._turn = 0
        self._queues: dict[object, _Queue] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, waiter: Waiter, now: float) -> bool:
        """Queues a waiter; False: the queue is at its bound."""
        if self._count >= self.max_requests:
            return False
        self._count += 1
        self._arrivals += 1
        queue = self._queues.setdefault(waiter.wait_key, {})
        queue[waiter] = (self._arrivals, now + self.timeout_s)
        return True

    def remove(self, waiter: Waiter) -> None:
        """Forgets a waiter whose client has left; harmless when it does not wait."""
        key = waiter.wait_key
        queue = self._queues.get(key)
        if queue is not None and queue.pop(waiter, None) is not None:
            self._count -= 1
            if not queue:
                del self._queues[key]

    def wake(self, now: float) -> bool:
        """Places may be free: offers them to those that wait.

        True: it stopped at its bound while places were being taken; there may be more of them.
        """
        heads = self._heads()
        offers = taken = 0
        while heads and offers < _OFFERS:
            _, key = heapq.heappop(heads)
            offers += 1
            waiter = next(iter(self._queues[key]))
            if waiter.try_again(now):
                taken += 1
                self.remove(waiter)
                if key in self._queues:
                    heapq.heappush(heads, (_first_number(self._queues[key]), key))
        return taken > 0 and offers == _OFFERS

    def sweep(self, now: float) -> None:
        """Ends the waits whose deadline has passed."""
        late = [
            waiter
            for queue in self._queues.values()
            for waiter, (_, deadline_s) in queue.items()
            if deadline_s <= now
        ]
        for waiter in late:
            self.remove(waiter)
            waiter.give_up_waiting()

    def _heads(self) -> list[tuple[int, object]]:
        """(number of its first waiter, key), as a heap; of very many keys only some."""
        heads = sorted((_first_number(queue), key) for key, queue in self._queues.items())
        if len(heads) <= _OFFERS:
            return heads
        rest = heads[_OLDEST:]
        start = self._turn % len(rest)
        self._turn = start + _OFFERS - _OLDEST
        in_turn = (rest[start:] + rest[:start])[: _OFFERS - _OLDEST]
        return heads[:_OLDEST] + sorted(in_turn)


def _first_number(queue: _Queue) -> int:
    return next(iter(queue.values()))[0]
