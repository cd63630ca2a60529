"""The mock pods' language: a deterministic tokenizer, a chat template, and answers.

Words of up to eight letters with the blank before them are tokens, and an id is the hash of its
piece, so every pod and every process agrees without a vocabulary file. An answer depends on the
prompt's tokens only: a prefill/decode pair says what a single pod says.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from array import array
from collections.abc import Iterable, Sequence

START, END = 1, 2
"""Special tokens around every chat message."""
_FIRST_ID = 16
VOCABULARY_SIZE = 1 << 20

_PIECES = re.compile(r"\s?\w{1,8}|\s?[^\w\s]|\s+")
_MAX_REMEMBERED = 65_536
_U64 = (1 << 64) - 1

_ANSWER_LIST = """
able acid aged also area army away baby back ball band bank base bath bear beat been beer bell
belt best bill bird blow blue boat body bond bone book boot born boss both bowl bulk burn bush
busy call calm came camp card care case cash cast cell chat chip city club coal coat code cold
come cook cool copy core cost crew crop dark data date dawn days dead deal dear debt deep deny
desk dial diet disc disk door dose down draw drew drop drug dual duke dust duty each earn ease
east easy edge else even ever evil exit face fact fail fair fall farm fast fate fear feed feel
feet fell felt file fill film find fine fire firm fish five flag flat
"""
ANSWER_WORDS = tuple(" " + word for word in _ANSWER_LIST.split())
assert len(ANSWER_WORDS) == 128


class _Ids(dict[str, int]):
    """Ids by piece, remembered up to a bound."""

    def __missing__(self, piece: str) -> int:
        token = _FIRST_ID + zlib.crc32(piece.encode()) % (VOCABULARY_SIZE - _FIRST_ID)
        if len(self) >= _MAX_REMEMBERED:
            self.clear()
        self[piece] = token
        return token


class Tokenizer:
    """Text to token ids and, for pieces that it has met, back."""

    def __init__(self) -> None:
        self._ids = _Ids()
        self._answers = tuple(self._ids[piece] for piece in ANSWER_WORDS)
        self._answer_text = dict(zip(self._answers, ANSWER_WORDS, strict=True))

    def encode(self, text: str) -> list[int]:
        """The ids of the text's pieces, in order."""
        return list(map(self._ids.__getitem__, _PIECES.findall(text)))

    def encode_chat(
        self, turns: Iterable[tuple[str, str]], *, answer_follows: bool = True
    ) -> list[int]:
        """The ids of (role, text) turns in the chat template, up to where the answer begins."""
        newline = self._ids["\n"]
        ids: list[int] = []
        for role, text in turns:
            ids += (START, *self.encode(role), newline, *self.encode(text), END, newline)
        if answer_follows:
            ids += (START, *self.encode("assistant"), newline)
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id; `<id>` for one whose piece was never met here."""
        known = {token: piece for piece, token in self._ids.items()} | self._answer_text
        known |= {START: "<|im_start|>", END: "<|im_end|>"}
        return [known.get(token, f"<{token}>") for token in ids]

    def answer(self, prompt: Sequence[int], count: int, choice: int = 0) -> list[int]:
        """The first `count` tokens of the answer to this prompt. Longer answers only add to it."""
        digest = hashlib.blake2b(array("Q", prompt).tobytes(), digest_size=8)
        digest.update(choice.to_bytes(4, "little"))
        state = int.from_bytes(digest.digest(), "little")
        words = self._answers
        ids = []
        for _ in range(count):
            state = (state * 6364136223846793005 + 1442695040888963407) & _U64
            ids.append(words[state >> 57])
        return ids

    def answer_text(self, ids: Sequence[int]) -> list[str]:
        """The piece of each token of an answer."""
        text = self._answer_text
        return [text[token] for token in ids]
