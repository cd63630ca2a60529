"""A router at work and requests to ask it with: the same code that the gateway calls."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter_ns

import msgspec

from calinix.config import Config, Gateway, PodConfig, SingleUpstream, Strategy, Upstreams
from calinix.core.events import Finished, FirstToken, ProbeSucceeded
from calinix.core.prompt import Endpoint, ParsedBody, read_body
from calinix.core.requests import RoutePlan, RouteRequest
from calinix.core.router import Router

SHAPES = ("100 words", "2 KB", "32 KB")
"""Of prompts: a chat of about 600 bytes, mostly new; a chat of 2 KB of which the first two thirds
were seen before; a chat of 32 KB of which the first four fifths were."""
INFLIGHT_PER_POD = 3
TICK_S = 0.05
"""Between two ticks of the router, as in the gateway."""
PREFIXES_PER_POD = 4
"""Prefixes that requests share: more pods have more traffic, and not the same one hotter."""
_SHARED = {"2 KB": (1_400, 600), "32 KB": (26_000, 6_500)}
"""Characters that are shared and that are not."""
_WORDS = [f"w{number:x}" + "aeiou"[number % 5] * (number % 6) for number in range(4000)]


def bodies(shape: str, rng: random.Random, count: int, pods: int = 16) -> Iterator[bytes]:
    """Requests of one shape, as clients of so many pods send them."""
    if shape == "100 words":
        for _ in range(count):
            yield _body("You are a helpful assistant.", _text(rng, 560))
        return
    first, rest = _SHARED[shape]
    # Each comes up four times or more.
    prefixes = min(PREFIXES_PER_POD * pods, max(1, count // 4))
    shared = [_text(rng, first) for _ in range(prefixes)]
    for number in range(count):
        yield _body(shared[number % len(shared)], _text(rng, rest))


Clock = Callable[[], float]
"""Seconds, never going back."""


def stepping(step_s: float) -> Clock:
    """A clock that goes on by so much whenever it is asked."""
    return itertools.count(1.0, step_s).__next__


class Desk:
    """A router whose pods are alive and have three requests each, and one way to ask it.

    With every decision the oldest request of all ends, so that load stays uneven, as in service.
    """

    def __init__(self, pods: int, strategy: str, clock: Clock):
        named = tuple(PodConfig(f"pod-{i:03}", f"http://127.0.0.1:{9000 + i}") for i in range(pods))
        config = Config(
            upstreams=Upstreams(single=SingleUpstream(pods=named)),
            gateway=Gateway(strategy=msgspec.convert({"name": strategy}, Strategy), seed=1),
        )
        self.router = Router(config, random.Random(1))
        for pod in named:
            self.router.observe(ProbeSucceeded(pod.id), clock())
        self._most_inflight = INFLIGHT_PER_POD * pods
        self._inflight: deque[int] = deque()
        self._clock = clock
        self._due_s = clock() + TICK_S

    def decide(self, octets: bytes) -> None:
        """One decision and all that it takes: the body is read, routed, an older request ends.

        Routing is prepare, filter, score and pick; the new blocks are stored, the explanation is
        kept, a lease is taken; another one is given back.
        """
        now = self._next()
        lease_id = self._route(read_body(_CHAT, octets), now)
        oldest = self._oldest(lease_id)
        if oldest:
            self.router.observe(Finished(oldest, 200, None, None, 20), now)

    def steps(self, octets: bytes) -> tuple[int, int, int, int]:
        """The same in ns: body, route, first token (which streams show), end; 0 for no end."""
        now = self._next()
        began = perf_counter_ns()
        parsed = read_body(_CHAT, octets)
        read = perf_counter_ns()
        lease_id = self._route(parsed, now)
        routed = perf_counter_ns()
        self.router.observe(FirstToken(lease_id), now + 0.01)
        answered = perf_counter_ns()
        oldest = self._oldest(lease_id)
        if not oldest:
            return read - began, routed - read, answered - routed, 0
        ending = perf_counter_ns()
        self.router.observe(Finished(oldest, 200, None, None, 20), now + 0.02)
        return read - began, routed - read, answered - routed, perf_counter_ns() - ending

    def _next(self) -> float:
        """The time of the next request; now and then the router does what is due."""
        now = self._clock()
        if now >= self._due_s:
            self._due_s = now + TICK_S
            self.router.tick(now)
        return now

    def _route(self, parsed: ParsedBody, now: float) -> int:
        plan = self.router.route(
            RouteRequest(
                request_id="r",
                mode=None,
                work=_WORK,
                model=parsed.model,
                prompt=parsed.prompt,
                prompt_is_tokens=parsed.prompt_is_tokens,
                other_bytes=parsed.other_bytes,
                tenant=parsed.cache_salt,
                session_key=parsed.session_key,
                max_output_tokens=parsed.max_output_tokens,
                streamed=parsed.stream,
            ),
            now,
        )
        assert isinstance(plan, RoutePlan)
        return plan.lease_id

    def _oldest(self, lease_id: int) -> int:
        """Takes in a lease; the one that is to be given back for it, 0 while there are too few."""
        self._inflight.append(lease_id)
        return self._inflight.popleft() if len(self._inflight) > self._most_inflight else 0


# As in the gateway, where an endpoint comes out of a table.
_CHAT, _WORK = Endpoint.CHAT, Endpoint.CHAT.work


def _text(rng: random.Random, size: int) -> str:
    """Random words, `size` characters in all."""
    words: list[str] = []
    length = 0
    while length < size:
        word = rng.choice(_WORDS)
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:size]


def _body(system: str, user: str) -> bytes:
    """A streamed chat."""
    return msgspec.json.encode(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": user},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 128,
            "temperature": 0.7,
        }
    )
