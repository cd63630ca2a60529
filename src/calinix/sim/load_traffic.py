"""The requests of a load run: prompts with shared prefixes, sessions of several turns. Seeded."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from calinix.sim.words import ANSWER_WORDS


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests look like. Lengths are in words, each about one token."""

    model: str
    prompt_tokens: int = 256
    """Length of a session's first prompt."""
    shared_prefix: float = 0.8
    """Share of it that other sessions have too, in [0, 1]."""
    prefixes: int = 8
    """How many different shared prefixes there are."""
    turns: int = 1
    """Requests of one session; each repeats what was said before."""
    turn_tokens: int = 32
    """Length of the later questions of a session."""
    max_tokens: int = 64
    stream: bool = True


class Session:
    """One conversation: ask for `body`, send it, tell `answered`, until `over`."""

    __slots__ = ("_messages", "_rng", "_shape", "key", "turn")

    def __init__(self, shape: Shape, key: str, first: str, rng: random.Random):
        self.key = key
        self.turn = 0
        self._shape = shape
        self._rng = rng
        self._messages: list[dict[str, str]] = [{"role": "user", "content": first}]

    @property
    def over(self) -> bool:
        """Nothing more to ask."""
        return self.turn >= self._shape.turns

    def body(self) -> bytes:
        """The next request's JSON body."""
        shape = self._shape
        body: dict[str, Any] = {
            "model": shape.model,
            "messages": self._messages,
            "max_tokens": shape.max_tokens,
            "ignore_eos": True,
            "stream": shape.stream,
        }
        if shape.stream:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)

    def answered(self, text: str) -> None:
        """The answer to the last request; the next question follows it."""
        self.turn += 1
        question = words(self._rng, self._shape.turn_tokens)
        self._messages += (
            {"role": "assistant", "content": text},
            {"role": "user", "content": question},
        )


class Traffic:
    """Sessions without end, the same for the same seed."""

    def __init__(self, shape: Shape, seed: int):
        self.shape = shape
        self._seed = seed
        self._rng = random.Random(seed)
        self._count = 0
        length = round(shape.prompt_tokens * shape.shared_prefix)
        self._prefixes = [
            words(random.Random(f"{seed}/prefix/{number}"), length)
            for number in range(shape.prefixes)
        ]

    def session(self) -> Session:
        """The next session: one of the shared prefixes, then words of its own."""
        rng = random.Random(f"{self._seed}/session/{self._count}")
        key = f"load-{self._seed}-{self._count}"
        self._count += 1
        prefix = rng.choice(self._prefixes)
        shape = self.shape
        own = shape.prompt_tokens - round(shape.prompt_tokens * shape.shared_prefix)
        return Session(shape, key, prefix + words(rng, own), rng)

    def gap_s(self, rate_per_s: float) -> float:
        """Time to the next arrival of a Poisson process."""
        return self._rng.expovariate(rate_per_s)


def words(rng: random.Random, count: int) -> str:
    """So many random words, each with a blank before it."""
    return "".join(rng.choices(ANSWER_WORDS, k=count))
