"""Mixed requests for real pods: prefixes shared, forked, salted, repeated, evicted, cancelled.

All are drawn from a seed. Forks go on from answers that pods gave, so which texts are sent depends
on the model too.
"""

from __future__ import annotations

import enum
import random
import threading

import msgspec

from realpods.vllm_pods import CONTEXT, MODEL

GROUPS = 8
SALTS = ("amber", "birch", "cedar")
WORDS = (
    "import", "return", "value", "index", "list", "tuple", "error", "class", "method", "open",
    "close", "read", "write", "file", "path", "thread", "lock", "queue", "event", "timer",
    "socket", "server", "client", "header", "token", "prefix", "block", "cache", "pod", "route",
    "plan", "score", "weight", "shard", "north", "south", "river", "stone", "cloud", "paper",
    "glass", "wheel",
)  # fmt: skip
MOST_FORKED_TOKENS = CONTEXT // 3
MOST_TALKS = 24
SHORT, LONG = (2, 8), (34, 70)
"""Tokens to generate; long answers fill blocks of their own, which a next turn finds."""
LONG_SHARE = 0.12
CANCELLED_TOKENS = 400


class Kind(enum.StrEnum):
    """What a request has in common with earlier ones."""

    SHARED = "shared prefix"
    FORKED = "forked"
    SALTED = "salted"
    REPEATED = "repeated"
    UNIQUE = "unique"
    TOKEN_IDS = "token ids"
    CANCELLED = "cancelled"


SHARES = {
    Kind.SHARED: 0.36,
    Kind.FORKED: 0.22,
    Kind.SALTED: 0.14,
    Kind.REPEATED: 0.08,
    Kind.UNIQUE: 0.06,
    Kind.TOKEN_IDS: 0.07,
    Kind.CANCELLED: 0.07,
}
TEXT_SHARE, PARTS_SHARE = 0.2, 0.15
"""Of the requests with a group's prefix: completions of a text, chats of content parts."""
Message = dict[str, object]


class Shot(msgspec.Struct, frozen=True):
    """One request that is to be sent."""

    number: int
    kind: Kind
    body: dict[str, object]
    leaves_early: bool
    """The client of a cancelled request: gone before the answer begins, or in the middle of it."""


class Traffic:
    """Draws one request after another; safe to use from several threads."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._number = 0
        self._prefixes = [self._words(30 + 12 * group) for group in range(GROUPS)]
        self._ids = [
            [self._random.randrange(300, 2000) for _ in range(64 + 48 * group)]
            for group in range(GROUPS // 2)
        ]
        self._talks: list[list[Message]] = []
        self._sent: list[dict[str, object]] = []

    def next(self) -> Shot:
        """The next request."""
        with self._lock:
            kind = self._random.choices(list(SHARES), list(SHARES.values()))[0]
            if kind is Kind.FORKED and not self._talks:
                kind = Kind.SHARED
            if kind is Kind.REPEATED and not self._sent:
                kind = Kind.SHARED
            self._number += 1
            body = self._body(kind)
            return Shot(self._number, kind, body, self._random.random() < 0.5)

    def answered(self, shot: Shot, text: str, prompt_tokens: int) -> None:
        """A whole answer came: conversations can go on from it."""
        with self._lock:
            self._sent = [*self._sent[-15:], shot.body]
            messages = shot.body.get("messages")
            if isinstance(messages, list) and prompt_tokens < MOST_FORKED_TOKENS:
                talk = [*messages, {"role": "assistant", "content": text}]
                self._talks = [*self._talks[1 - MOST_TALKS :], talk]

    def _body(self, kind: Kind) -> dict[str, object]:
        draw = self._random
        if kind is Kind.REPEATED:
            return draw.choice(self._sent)
        body: dict[str, object] = {
            "model": MODEL,
            "temperature": 0,
            "max_tokens": draw.randint(*(LONG if draw.random() < LONG_SHARE else SHORT)),
        }
        if kind is Kind.TOKEN_IDS:
            tail = [draw.randrange(300, 2000) for _ in range(draw.randint(1, 60))]
            return body | {"prompt": draw.choice(self._ids) + tail}
        if kind is Kind.FORKED:
            body["messages"] = self._fork()
        elif kind is Kind.UNIQUE:
            body["messages"] = [{"role": "user", "content": self._words(draw.randint(60, 200))}]
        elif kind is not Kind.CANCELLED and draw.random() < TEXT_SHARE:
            body["prompt"] = f"{draw.choice(self._prefixes)} {self._words(draw.randint(1, 30))}"
        else:
            body["messages"] = self._from_group(draw.randrange(GROUPS))
        if kind is Kind.SALTED:
            body["cache_salt"] = draw.choice(SALTS)
        if kind is Kind.CANCELLED:
            return body | {"max_tokens": CANCELLED_TOKENS, "ignore_eos": True, "stream": True}
        if draw.random() < 0.4:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def _from_group(self, group: int) -> list[Message]:
        question = f"{self._words(2)} {self._words(self._random.randint(1, 30))}"
        prefix: object = self._prefixes[group]
        if self._random.random() < PARTS_SHARE:
            prefix = [{"type": "text", "text": part} for part in self._prefixes[group].split(" t")]
        return [
            {"role": "system", "content": prefix},
            {"role": "user", "content": question},
        ]

    def _fork(self) -> list[Message]:
        """A conversation that goes on behind one of its answers, perhaps not its last."""
        talk = self._random.choice(self._talks)
        ends = [place + 1 for place, said in enumerate(talk) if said["role"] == "assistant"]
        kept = talk[: self._random.choice(ends)]
        return [*kept, {"role": "user", "content": self._words(self._random.randint(1, 20))}]

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS, k=count))
