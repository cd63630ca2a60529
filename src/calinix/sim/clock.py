"""Virtual time: what is to happen, in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class VirtualClock:
    """Runs callbacks in order of their times; those of one time in the order of planning."""

    __slots__ = ("_count", "_heap", "now", "stopped")

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.stopped = False
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def at(self, at_s: float, call: Callable[[Any], None], what: Any = None) -> None:
        """`call(what)` at `at_s`; at once if that is over."""
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, call, what))

    def stop(self) -> None:
        """Nothing more happens."""
        self.stopped = True

    def run(self) -> None:
        """Lets everything happen until `stop` or until nothing is left."""
        heap, pop = self._heap, heapq.heappop
        while heap and not self.stopped:
            at_s, _, call, what = pop(heap)
            if at_s > self.now:  # noqa: PLR1730  a call of max() is slow
                self.now = at_s
            call(what)
