"""Exact tokens on the command line: whether a tokenizer can be used, and prompts' ids."""

from __future__ import annotations

from collections.abc import Callable

from calinix.config import Config
from calinix.config.tokens import Tokenizing, hf_path
from calinix.core.prompt import Endpoint

IdsOf = Callable[[Endpoint, bytes], bytes | None]


def exact_ids(config: Config) -> IdsOf | None:
    """What gives a request's token ids; None: prompts go by their text. Raises ConfigError."""
    path = hf_path(config.gateway.tokenizer)
    if path is None:
        return None
    from calinix.edge.tokenizers import tokenizer_of  # noqa: PLC0415  its libraries are an extra

    return tokenizer_of(path, config.gateway.tokenizing).ids_of


def token_notes(config: Config) -> list[str]:
    """Loads the tokenizer, if there is one, and says what to know of it. Raises ConfigError."""
    path = hf_path(config.gateway.tokenizer)
    if path is None:
        if config.gateway.tokenizing != Tokenizing():
            return ["gateway.tokenizing has no effect: gateway.tokenizer is not hf:FOLDER"]
        return []
    from calinix.edge.tokenizers import tokenizer_of  # noqa: PLC0415  its libraries are an extra

    tokenizer = tokenizer_of(path, config.gateway.tokenizing)
    if not tokenizer.has_template:
        return [f"gateway.tokenizer: no chat template in {path}: chats go by their bytes"]
    if not tokenizer.cutter.marks:
        return ["gateway.tokenizer: no special token to cut at: turns are tokenised from the start"]
    return []
