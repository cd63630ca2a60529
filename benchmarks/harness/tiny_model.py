"""A tokenizer that is trained on the spot, and conversations to tokenise with it."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TURNS = 64
"""Messages of a conversation at first."""
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{%- if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{%- set last = namespace(at=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > last.at and m.reasoning_content is defined %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}
{%- endif %}
{{- m.content }}
{%- if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def sources() -> list[str]:
    """Text that every machine with Python has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py"))[:120]]


def build_folder(folder: Path, texts: list[str]) -> None:
    """A tokenizer of 16,384 tokens and its template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=16_384,
        special_tokens=MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")


class Talk:
    """A conversation of TURNS messages over pieces of text, each of so many letters."""

    def __init__(self, rng: random.Random, text: str, chars: int):
        self._rng = rng
        self._text = text
        self.messages: list[dict[str, str]] = [{"role": "system", "content": self._piece(400)}]
        while len(self.messages) < TURNS:
            self.go_on(chars)

    def _piece(self, chars: int) -> str:
        start = self._rng.randrange(len(self._text) - chars)
        return f"{self._rng.random()} {self._text[start : start + chars]}"

    def go_on(self, chars: int = 600) -> None:
        """An answer and the next question."""
        self.messages += [
            {"role": "assistant", "content": self._piece(chars)},
            {"role": "user", "content": self._piece(chars)},
        ]

    def body(self) -> bytes:
        """The request."""
        return msgspec.json.encode({"model": "m", "messages": self.messages, "stream": True})
