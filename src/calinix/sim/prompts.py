"""What requests hold: lengths, and blocks that some of them share."""

from __future__ import annotations

import random
from bisect import bisect
from itertools import accumulate
from math import log, sqrt

import msgspec

_MIN_TOKENS = 1


class Length(msgspec.Struct, frozen=True, kw_only=True):
    """A lognormal number of tokens, at least 1."""

    mean: float
    variation: float = 1.0
    """Standard deviation over mean; 0: always the mean."""
    most: int = 100_000

    def draw(self, rng: random.Random) -> int:
        """One number of tokens."""
        if self.variation <= 0.0:
            return max(_MIN_TOKENS, round(self.mean))
        variance = log(1.0 + self.variation * self.variation)
        drawn = rng.lognormvariate(log(self.mean) - 0.5 * variance, sqrt(variance))
        return min(self.most, max(_MIN_TOKENS, round(drawn)))


class Zipf:
    """Numbers 0..count - 1, number k in proportion to 1 / (k + 1) ** skew."""

    def __init__(self, count: int, skew: float):
        self._bounds = list(accumulate(1.0 / (k + 1) ** skew for k in range(count)))

    def draw(self, rng: random.Random) -> int:
        """One number."""
        return bisect(self._bounds, rng.random() * self._bounds[-1])


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One level of a tree of shared prefixes."""

    choices: int
    """Different continuations of each prefix of the level above."""
    tokens: int
    skew: float = 1.0
    """Of their popularity (Zipf); 0: all alike."""


class Tree:
    """Prefixes that share their beginnings: each is a path from the root, level by level."""

    def __init__(self, levels: tuple[Level, ...]):
        self._levels = levels
        self._zipfs = [Zipf(level.choices, level.skew) for level in levels]
        self._blocks = Blocks()
        self._paths: dict[tuple[int, ...], list[int]] = {}

    def draw(self, block_tokens: int, rng: random.Random) -> tuple[int, list[int]]:
        """(tokens, ids of the full blocks) of one prefix; equal prefixes have equal ids."""
        tokens = 0
        path: tuple[int, ...] = ()
        ids: list[int] = []
        for level, zipf in zip(self._levels, self._zipfs, strict=True):
            path = (*path, zipf.draw(rng))
            tokens += level.tokens
            known = self._paths.get(path)
            if known is None:
                fresh = tokens // block_tokens - len(ids)
                known = self._paths[path] = ids + self._blocks.take(fresh)
            ids = known
        return tokens, ids


class Blocks:
    """Ids that nobody else has; `first` keeps several of these apart."""

    __slots__ = ("_next",)

    def __init__(self, first: int = 1):
        self._next = first

    def take(self, count: int) -> list[int]:
        """So many of them."""
        start = self._next
        self._next = start + max(0, count)
        return list(range(start, self._next))
