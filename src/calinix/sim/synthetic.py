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
        own, tree = Blocks(_OWN_BLOCKS), Tree(self.tree)
        for at_s in times(self.rate, load, self.requests, rng):
            tokens, ids = 0, list[int]()
            if self.tree:
                is_shared = self.shared >= 1.0 or rng.random() < self.shared
                tokens, ids = tree.draw(size, rng) if is_shared else (self.unshared.draw(rng), [])
            tokens += self.question.draw(rng)
            chain = ids + own.take(tokens // size - len(ids))
            yield SimRequest(at_s, tokens, self.answer.draw(rng), chain)


class _Conversation:
    """Turns that each begin with all that was said before.

    What is said comes from random numbers of its own, so that it is the same however long the
    answers take and whoever gives them.
    """

    def __init__(
        self,
        workload: Sessions | Agents,
        shared: tuple[Tree, Blocks],
        rng: random.Random,
        name: str | None,
        pause_s: float,
        turns: int,
        after: Callable[[float], SimRequest | None] | None = None,
    ):
        self._workload = workload
        self._rng = rng
        self._name = name
        self._pause_s = pause_s
        self._left = turns
        self._after = after
        tree, self._own = shared
        tokens, ids = tree.draw(workload.block_tokens, rng)
        self._tokens = tokens + workload.start.draw(rng)
        self._ids = list(ids)

    def first(self, now: float) -> SimRequest:
        """The first turn, at `now`."""
        return self._ask(now)

    def follow(self, now: float) -> SimRequest | None:
        """The next turn after an answer at `now`; after the last one what comes after it."""
        if self._left:
            return self._ask(now + self._rng.expovariate(1.0 / self._pause_s))
        return self._after(now) if self._after is not None else None

    def _ask(self, at_s: float) -> SimRequest:
        workload, rng = self._workload, self._rng
        self._left -= 1
        prompt = self._tokens + workload.question.draw(rng)
        answer = workload.answer.draw(rng)
        self._tokens = prompt + answer
        full = self._tokens // workload.block_tokens
        self._ids += self._own.take(full - len(self._ids))
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
        shared = Tree(self.tree), Blocks(_OWN_BLOCKS)
        for number, at_s in enumerate(times(self.rate, load, self.sessions, rng)):
            own = random.Random(rng.getrandbits(64))
            name = f"session-{number}" if self.named else None
            turns = self.turns.draw(own)
            yield _Conversation(self, shared, own, name, self.pause_s, turns).first(at_s)


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
        shared, seed, begun = (Tree(self.tree), Blocks(_OWN_BLOCKS)), rng.getrandbits(64), 0
        pause_s = self.tool_s / load

        def begin(now: float) -> SimRequest | None:
            nonlocal begun
            if begun >= self.agents:
                return None
            begun += 1
            own = random.Random(seed + begun)
            name = f"agent-{begun}" if self.named else None
            agent = _Conversation(self, shared, own, name, pause_s, self.turns, begin)
            return agent.first(now + own.expovariate(1.0 / pause_s))

        firsts = [first for _ in range(self.lanes) if (first := begin(0.0)) is not None]
        yield from sorted(firsts, key=lambda first: first.arrival_s)
