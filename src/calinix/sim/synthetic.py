"""Workloads that are made up: single requests, shared prefixes, sessions, agents."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec

from calinix.sim.arrivals import Rate, times
from calinix.sim.prompts import Blocks, Length, Level, Tree
from calinix.sim.workload import SimRequest

_OWN_BLOCKS = 1 << 40
"""Ids of blocks that only one conversation has begin here."""


class SingleRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests that know nothing of each other; a share of them begins with a shared prefix."""

    rate: Rate
    requests: int
    question: Length
    answer: Length
    tree: tuple[Level, ...] = ()
    """Of shared prefixes; none: nothing is shared."""
    shared: float = 1.0
    """Share of the requests that begin with a prefix of the tree."""
    unshared: Length = Length(mean=1.0, variation=0.0)
    """What the others have in its place."""
    block_tokens: int = 16

    def arrivals(self, rng: random.Random, load: float) -> Iterator[SimRequest]:
        """Requests in order of arrival."""
        size = self.block_tokens
        own, tree = Blocks(_OWN_BLOCKS), Tree(self.tree, rng)
        question, answer = self.question.sampler(rng), self.answer.sampler(rng)
        instead = self.unshared.sampler(rng)
        for at_s in times(self.rate, load, self.requests, rng):
            tokens, ids = 0, list[int]()
            if self.tree:
                is_shared = self.shared >= 1.0 or rng.random() < self.shared
                tokens, ids = tree.draw(size) if is_shared else (instead(), [])
            tokens += question()
            chain = ids + own.take(tokens // size - len(ids))
            yield SimRequest(at_s, tokens, answer(), chain)


class _Makers:
    """What the conversations of one run draw from."""

    def __init__(self, workload: Sessions | Agents, rng: random.Random):
        self.rng = rng
        self.size = workload.block_tokens
        self.own = Blocks(_OWN_BLOCKS)
        self.tree = Tree(workload.tree, rng)
        self.question = workload.question.sampler(rng)
        self.answer = workload.answer.sampler(rng)
        self.start = workload.start.sampler(rng)


class _Conversation:
    """Turns that each begin with all that was said before."""

    def __init__(
        self,
        makers: _Makers,
        name: str | None,
        turns: int,
        pause_s: Callable[[], float],
        after: Callable[[float], SimRequest | None] | None = None,
    ):
        self._makers = makers
        self._name = name
        self._left = turns
        self._pause_s = pause_s
        self._after = after
        tokens, ids = makers.tree.draw(makers.size)
        self._tokens = tokens + makers.start()
        self._ids = list(ids)

    def first(self, now: float) -> SimRequest:
        """The first turn, at `now`."""
        return self._ask(now)

    def follow(self, now: float) -> SimRequest | None:
        """The next turn after an answer at `now`; after the last one what comes after it."""
        if self._left:
            return self._ask(now + self._pause_s())
        return self._after(now) if self._after is not None else None

    def _ask(self, at_s: float) -> SimRequest:
        makers = self._makers
        self._left -= 1
        prompt = self._tokens + makers.question()
        answer = makers.answer()
        self._tokens = prompt + answer
        self._ids += makers.own.take(self._tokens // makers.size - len(self._ids))
        return SimRequest(at_s, prompt, answer, tuple(self._ids), self._name, self.follow)


class Sessions(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Chats of several turns, with a pause for thought between them."""

    rate: Rate
    """Of new sessions."""
    sessions: int
    question: Length
    answer: Length
    turns: Length = Length(mean=5.0, variation=0.0)
    pause_s: float = 10.0
    """Mean time between an answer and the next question."""
    start: Length = Length(mean=1.0, variation=0.0)
    """What a session begins with, beside the first question and what it shares."""
    tree: tuple[Level, ...] = ()
    named: bool = True
    """Requests carry a session key."""
    block_tokens: int = 16

    @property
    def requests(self) -> int:
        """About how many there will be."""
        return round(self.sessions * self.turns.mean)

    def arrivals(self, rng: random.Random, load: float) -> Iterator[SimRequest]:
        """First turns in order of arrival; the others follow."""
        makers, turns = _Makers(self, rng), self.turns.sampler(rng)

        def pause_s() -> float:
            return rng.expovariate(1.0 / self.pause_s)

        for number, at_s in enumerate(times(self.rate, load, self.sessions, rng)):
            name = f"session-{number}" if self.named else None
            yield _Conversation(makers, name, turns(), pause_s).first(at_s)


class Agents(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Agents that work one after the other: never more than one request at a time a lane.

    Each asks, runs a tool for a while, asks again with all that was said before; when it is done
    the next one begins.
    """

    agents: int
    turns: int
    question: Length
    answer: Length
    start: Length
    """What an agent begins with."""
    tool_s: float = 1.0
    """Mean time between an answer and the next question; divided by the load."""
    lanes: int = 1
    """Agents at work at the same time."""
    tree: tuple[Level, ...] = ()
    named: bool = False
    """Requests carry a session key."""
    block_tokens: int = 16

    @property
    def requests(self) -> int:
        """How many there will be."""
        return self.agents * self.turns

    def arrivals(self, rng: random.Random, load: float) -> Iterator[SimRequest]:
        """One first turn for every lane; the others follow."""
        makers, started = _Makers(self, rng), 0

        def pause_s() -> float:
            return rng.expovariate(load / self.tool_s)

        def begin(now: float) -> SimRequest | None:
            nonlocal started
            if started >= self.agents:
                return None
            started += 1
            name = f"agent-{started}" if self.named else None
            return _Conversation(makers, name, self.turns, pause_s, begin).first(now + pause_s())

        firsts = [first for _ in range(self.lanes) if (first := begin(0.0)) is not None]
        yield from sorted(firsts, key=lambda first: first.arrival_s)
