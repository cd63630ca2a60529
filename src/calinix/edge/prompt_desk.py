"""Prompts that are being tokenised by one process: the shortest first, a step at a time.

A long prompt does not hold up those that come behind it, and what conversations have in common is
tokenised once.
"""

from __future__ import annotations

from collections.abc import Generator

from calinix.core.prompt import Endpoint
from calinix.core.segments import TokenMemory
from calinix.edge.chat_template import TemplateRefusedError
from calinix.edge.token_frames import MAX_TOKENS
from calinix.edge.tokenizers import MAX_PIECE_CHARS, HfTokenizer
from calinix.engines.vllm_chat import UnusualError, read_chat, read_completion

BATCH_CHARS = 65_536
"""About so many letters are tokenised in one step."""

Steps = Generator[None, None, bytes | None]


class PromptDesk:
    """Prompts in hand, and what is remembered of those before. One thread."""

    def __init__(self, tokenizer: HfTokenizer, cache_bytes: int):
        self._tokenizer = tokenizer
        self._memory = TokenMemory(cache_bytes)
        self._in_hand: dict[int, tuple[int, Steps]] = {}

    def __len__(self) -> int:
        """Prompts in hand."""
        return len(self._in_hand)

    @property
    def cache_bytes(self) -> int:
        """About what the remembered pieces take."""
        return self._memory.size_bytes

    def take(self, number: int, endpoint: Endpoint, body: bytes) -> None:
        """One more prompt, by a number that no other one in hand has."""
        self._in_hand[number] = (len(body), self._steps(endpoint, body))

    def step(self) -> tuple[int, bytes | None] | None:
        """Goes on with the shortest prompt; (its number, its ids) where that was its last step.

        No ids: they cannot be foretold, or are too many.
        """
        number = min(self._in_hand, key=lambda one: self._in_hand[one][0])
        try:
            next(self._in_hand[number][1])
        except StopIteration as end:
            del self._in_hand[number]
            return number, end.value
        return None

    def _steps(self, endpoint: Endpoint, body: bytes) -> Steps:
        try:
            written = self._written(endpoint, body)
        except (UnusualError, TemplateRefusedError):
            return None
        if written is None:
            return None
        text, special = written
        around = self._tokenizer.around()
        pieces = self._tokenizer.cutter.cut(text)
        if special and around is None:
            return None
        if pieces and max(map(len, pieces)) > MAX_PIECE_CHARS:
            return None
        yield
        memory = self._memory
        ids = {piece: memory.find(piece) for piece in pieces}
        size = sum(len(known) for known in ids.values() if known is not None)
        for batch in batches([piece for piece, known in ids.items() if known is None]):
            for piece, found in zip(batch, self._tokenizer.encode(batch), strict=True):
                ids[piece] = found
                memory.keep(piece, found)
                size += len(found)
            if size > 4 * MAX_TOKENS:
                return None
            yield
        before, behind = around if special and around is not None else (b"", b"")
        whole = b"".join([before, *(ids[piece] or b"" for piece in pieces), behind])
        return whole if len(whole) <= 4 * MAX_TOKENS else None

    def _written(self, endpoint: Endpoint, body: bytes) -> tuple[str, bool] | None:
        """(the prompt, whether special tokens go around it); None: it cannot be told.

        Raises UnusualError, TemplateRefusedError.
        """
        if endpoint is Endpoint.COMPLETIONS:
            return read_completion(body)
        request = read_chat(body)
        if request is None:
            return None
        return self._tokenizer.chat_text(request), request.add_special_tokens


def batches(pieces: list[str]) -> list[list[str]]:
    """The pieces in groups of not too many letters: between two groups others get their turn."""
    groups: list[list[str]] = []
    size = BATCH_CHARS
    for piece in pieces:
        if size >= BATCH_CHARS:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += len(piece)
    return groups
