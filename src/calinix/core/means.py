"""The mean request: what is expected of one that says nothing of itself."""

from __future__ import annotations

from typing import Final

from calinix.core.pods import Role

START_PROMPT_TOKENS: Final = 256.0
START_OUTPUT_TOKENS: Final = 128.0
_NEW: Final = 0.05


class RequestMeans:
    """Exponential means, in engine tokens."""

    def __init__(self) -> None:
        self._prompt: dict[Role, float] = {}
        self._output = START_OUTPUT_TOKENS

    def prompt_tokens(self, role: Role) -> float:
        """Uncached prompt tokens of the role's mean request."""
        return self._prompt.get(role, START_PROMPT_TOKENS)

    def output_tokens(self, limit: int | None) -> float:
        """Output tokens of the mean request, `limit` being the most it may have."""
        return self._output if limit is None or limit > self._output else float(max(limit, 0))

    def routed(self, role: Role, tokens: float) -> None:
        """A request with so many uncached prompt tokens."""
        mean = self._prompt.get(role, START_PROMPT_TOKENS)
        self._prompt[role] = mean + _NEW * (tokens - mean)

    def answered(self, tokens: int) -> None:
        """An answer of so many tokens."""
        if tokens >= 0:
            self._output += _NEW * (tokens - self._output)
