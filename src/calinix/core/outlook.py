"""What is expected of a pool and of its pods, beside the prefill rates: what costs are made of.

Sums are collected on the request path and turned into estimates by core/steering.py, twice a
second: a request costs a few additions.
"""

from __future__ import annotations

from array import array
from typing import Final

from calinix.core.columns import Values

START_TOKEN_S: Final = 0.02
"""Time per output token of a pool that nothing has been measured of."""
NEW_QUEUE: Final = 0.05
"""Weight of one request in the mean queue."""


class Answers:
    """What one pod's answers took since they were last asked for."""

    __slots__ = ("count", "load", "seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = 0.0
        """From first to last token."""
        self.tokens = 0.0
        """In that time."""
        self.load = 0.0
        """Requests that the pod had, times tokens."""
        self.count = 0.0

    def add(self, seconds: float, tokens: float, load: float) -> None:
        """An answer took so long for so many tokens, on a pod with so many requests."""
        self.seconds += seconds
        self.tokens += tokens
        self.load += load * tokens
        self.count += 1.0


class Outlook:
    """Of one role."""

    __slots__ = (
        "context_s", "queue", "request_s", "requests", "token_s", "work",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = 0.0
        """Requests routed since the start."""
        self.work = 0.0
        """Their prefill work, in work tokens."""
        self.queue = 0.0
        """Mean requests that wait for their first token on a pod, as requests find it."""
        self.token_s = START_TOKEN_S
        """Seconds per output token on a pod with nothing else to do."""
        self.request_s = 0.0
        """What each further request of a pod adds to that."""
        self.context_s = 0.0
        """What each token in its KV cache adds."""

    def met(self, queue: float) -> None:
        """A request found so many mean requests waiting on the mean pod."""
        self.queue += NEW_QUEUE * (queue - self.queue)


def ones(slots: int) -> Values:
    """A column of ones."""
    return array("d", [1.0]) * slots
