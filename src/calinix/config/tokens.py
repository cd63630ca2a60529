"""What prompts are cut into, and the keys of exact tokens: `gateway.tokenizer` and its section.

The docstring under a field is its one description, as in schema.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from calinix.config.fields import Base, FileName, Ms, PositiveInt, Text

TokenizerName = Annotated[
    str,
    Meta(
        pattern=r"^(bytes|words|hf:.+)$",
        max_length=4096,
        extra={"expected": "bytes, words or hf:FOLDER", "near": ("bytes", "words")},
    ),
]
TextKey = Literal["bytes", "words"]
"""What a prompt goes by as a text."""


def text_key(tokenizer: str) -> TextKey:
    """What texts are cut into: with exact tokens, where there are none, bytes."""
    return "words" if tokenizer == "words" else "bytes"


def hf_path(tokenizer: str) -> str | None:
    """The folder (or file) with a model's own tokenizer; None: prompts go by their text."""
    return tokenizer[3:] if tokenizer.startswith("hf:") else None


class Tokenizing(Base, frozen=True):
    """Exact tokens (`tokenizer: hf:FOLDER`): as the engine makes them, and at what cost."""

    chat_template: FileName | None = None
    """File with the chat template, as the engine's --chat-template; by default the folder's own."""
    content_format: Literal["auto", "string", "openai"] = "auto"
    """What templates get of a message's parts, as the engine's --chat-template-content-format."""
    template_arguments: Text | None = None
    """Further variables of the template, a JSON object, as the engine's
    --default-chat-template-kwargs."""
    wait_ms: Annotated[int, Meta(ge=0, le=10_000)] = 50
    """How long a prompt that is not tokenised yet is waited for; then it is routed by its bytes."""
    processes: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Processes that tokenise, each with the tokenizer in its memory; by default two, or one where
    there are only two processors: the gateway needs one."""
    cache_bytes: PositiveInt = 67_108_864
    """Memory for pieces of conversations whose tokens are known (a token takes 8 to 10 bytes), of
    all processes together."""
    check_ms: Ms = 600_000
    """Between two comparisons with a pod's own /tokenize; the first is made at once."""
