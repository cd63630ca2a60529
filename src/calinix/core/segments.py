"""Texts cut where tokenising is exact, and the token ids of the pieces, remembered.

A tokenizer first takes the added tokens out of a text ("<|im_start|>") and then does the rest
between them piece by piece, each for itself. So a text may be cut before an added token, and the
ids of the pieces, one after the other, are the ids of the whole. A conversation that goes on is
the pieces that it had before and a few new ones: only these have to be tokenised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

import msgspec

MAX_PIECES = 2048
"""More cuts are not made: the rest of the text is the last piece."""
_ENTRY_BYTES = 160
"""What an entry takes beside its text and its ids."""


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is matched as a text of its own, before everything else."""

    content: str
    single_word: bool = False
    """Only where no letter or digit stands beside it."""
    lstrip: bool = False
    """Takes the whitespace before it."""
    rstrip: bool = False
    """Takes the whitespace behind it."""
    normalized: bool = False
    """Looked for in the normalised text: after the others, and only between them."""


def cuttable(tokens: Iterable[AddedToken]) -> list[str]:
    """The added tokens before which any text may be cut without a change of its token ids.

    Not those before which whitespace belongs to the token, nor those whose first letters another
    token may have taken: the longest match that begins first wins.
    """
    literal = [token for token in tokens if token.content and not token.normalized]
    return [token.content for token in literal if _opens_cleanly(token, literal)]


def _opens_cleanly(token: AddedToken, others: list[AddedToken]) -> bool:
    text = token.content
    if token.lstrip or token.single_word or text[0].isspace():
        return False
    begins_a_word = text[0].isalnum() or text[0] == "_" or not text[0].isascii()
    for other in others:
        if other.content.startswith(text) and (other.lstrip or other.single_word):
            return False
        if begins_a_word and other.single_word:
            return False
        if _may_reach_into(other.content, text):
            return False
    return True


def _may_reach_into(before: str, text: str) -> bool:
    """Whether an occurrence of `before` can begin ahead of one of `text` and end inside or behind.

    Two equal texts: whether it can overlap itself.
    """
    if text in before[1:]:
        return True
    longest = min(len(before) - 1, len(text) - 1)
    return any(text.startswith(before[-size:]) for size in range(1, longest + 1))


class Cutter:
    """Cuts texts before each of a few marks. Joined, the pieces are the text."""

    __slots__ = ("_finders", "marks")

    def __init__(self, marks: Iterable[str]):
        self.marks = tuple(dict.fromkeys(marks))
        # One search for all marks of one first letter: their common beginning is found fast.
        groups: dict[str, list[str]] = {}
        for mark in self.marks:
            groups.setdefault(mark[0], []).append(mark)
        self._finders = [
            re.compile("|".join(map(re.escape, sorted(group, key=len, reverse=True)))).finditer
            for group in groups.values()
        ]

    def cut(self, text: str) -> list[str]:
        """The pieces, in order; none is empty."""
        places: list[int] = []
        for find in self._finders:
            places += [match.start() for match in islice(find(text), MAX_PIECES)]
        if len(self._finders) > 1:
            places.sort()
        del places[MAX_PIECES - 1 :]
        pieces = []
        start = 0
        for place in places:
            if place > start:
                pieces.append(text[start:place])
                start = place
        if start < len(text):
            pieces.append(text[start:])
        return pieces


class TokenMemory:
    """Piece -> its token ids (little-endian u32), bounded in bytes; the least recent go first.

    Two halves: what is used moves to the younger one; when that is full, the older one is dropped.
    """

    __slots__ = ("_half_bytes", "_old", "_old_bytes", "_young", "_young_bytes")

    def __init__(self, capacity_bytes: int):
        self._half_bytes = capacity_bytes // 2
        self._young: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}
        self._young_bytes = 0
        self._old_bytes = 0

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        return self._young_bytes + self._old_bytes

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, piece: str) -> bytes | None:
        """The ids of a piece, which counts as a use of it."""
        ids = self._young.get(piece)
        if ids is None and self._old:
            ids = self._old.pop(piece, None)
            if ids is not None:
                self._old_bytes -= _entry_bytes(piece, ids)
                self.keep(piece, ids)
        return ids

    def peek(self, piece: str) -> bytes | None:
        """The ids of a piece; changes nothing, so any thread may ask."""
        ids = self._young.get(piece)
        return self._old.get(piece) if ids is None else ids

    def keep(self, piece: str, ids: bytes) -> None:
        """Remembers a piece, unless it alone is too large for that."""
        size = _entry_bytes(piece, ids)
        if size > self._half_bytes or piece in self._young:
            return
        if self._young_bytes + size > self._half_bytes:
            self._old, self._old_bytes = self._young, self._young_bytes
            self._young, self._young_bytes = {}, 0
        self._young[piece] = ids
        self._young_bytes += size


def _entry_bytes(piece: str, ids: bytes) -> int:
    # A text takes 1, 2 or 4 bytes a letter; two is near enough.
    return 2 * len(piece) + len(ids) + _ENTRY_BYTES
