"""Tiny tokenizer folders, made on the spot: four families as models have them, and random chats."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("chatml", "llama", "mistral", "parts")

CHATML = """\
{%- if tools %}
<|im_start|>system
{%- if messages[0].role == 'system' %}
{{- '\\n' + messages[0].content }}
{%- endif %}
{{- '\\n\\nTools:' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}{% continue %}{% endif %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<answer>' + m.content + '</answer><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content is defined and loop.last %}
{{- '<think>' + m.reasoning_content + '</think>' }}
{%- endif %}
{%- generation %}{{ m.content }}{% endgeneration %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<call>' + ({'name': call.function.name, 'with': call.function.arguments} | tojson) }}
{{- '</call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}
{%- endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- set found = namespace(system='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set found.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if date is defined %}{{ 'Today: ' + date + '\\n\\n' }}{% endif %}
{{- found.system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- message.tool_calls[0].function | tojson }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if tools is not none %}{{ tools | length }}{{ tools[0] | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{{ bos_token }}{% for m in messages %}
{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% elif m['role'] == 'assistant' %}
 {{ m['content'] }}{{ eos_token }}{% elif m['role'] == 'tool' %}[TOOL]{{ m['content'] }}[/TOOL]
{%- else %}{{ raise_exception('only users and assistants speak here') }}{% endif %}
{% endfor %}
"""
PARTS = """\
{% macro write(content) %}
{%- if content is string %}{{ content }}
{%- else %}
{%- for part in content %}{{ part.text if part.type == 'text' else '<media>' }}{% endfor %}
{%- endif %}
{%- endmacro %}
{% for message in messages %}
<|{{ message.role }}|>
{{ write(message.content) }}<|end|>
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""


def corpus() -> list[str]:
    """Text to train on: the project's own pages."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return [page.read_text("utf-8") for page in pages] + ["naïve 中文 текст 😀 \t\r\n" * 20]


def byte_level(special: list[str | AddedToken], vocab_size: int = 600) -> Tokenizer:
    """A byte-level BPE with these special tokens, the first ids being theirs."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(corpus(), trainer)
    return found


def spaced(special: list[str]) -> Tokenizer:
    """As sentencepiece does it: spaces are a letter, and every text between marks begins so."""
    found = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", *special], show_progress=False
    )
    found.train_from_iterator(corpus(), trainer)
    return found


def make_folder(path: Path, family: str) -> Path:
    """Writes one family's folder and gives it back."""
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if family == "chatml":
        tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"])
        config |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        (path / "chat_template.jinja").write_text(CHATML, "utf-8")
    elif family == "llama":
        marks = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        tokenizer = byte_level([*marks, "<|eot"])
        tokenizer.post_processor = TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
        )
        config |= {"bos_token": marks[0], "eos_token": marks[3], "chat_template": LLAMA}
    elif family == "mistral":
        marks = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL]", "[/TOOL]"]
        tokenizer = spaced(marks)
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        templates = [{"name": "default", "template": MISTRAL}]
        config |= {"bos_token": "<s>", "eos_token": "</s>", "chat_template": templates}
    else:
        marks = [f"<|{name}|>" for name in ("system", "user", "assistant", "tool", "end")]
        tokenizer = byte_level([AddedToken(mark, rstrip=True, special=True) for mark in marks])
        tokenizer.add_tokens([AddedToken("wide", single_word=True), AddedToken("Cap", lstrip=True)])
        config |= {"eos_token": "<|end|>"}
        (path / "chat_template.jinja").write_text(PARTS, "utf-8")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return path


WORDS = (
    "pod", " cache", "prefix", "\n", "\n\n", " ", "  ", "\t", "naïve", "中文", "😀", "x" * 30,
    "1234", "<|im_end|>", "<|im_start|>user\n", "<|", "[INST]", "</s>", "<think>", "<|eot_id|>",
    "<|end|> ", " wide ", "wider", " Cap", "{{ x }}",
    "'", '"', "\\", "é", "<s>", "[", "INST]", "\u200b", "▁",
)  # fmt: skip


def text(rng: random.Random, most: int = 30) -> str:
    """Words of all kinds, marks among them."""
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(most)))


def chat(rng: random.Random, *, tools: bool = True) -> dict[str, Any]:
    """A body for /v1/chat/completions: several turns, parts, tools, odd settings."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(["system", "developer"]), "content": text(rng)})
    for turn in range(rng.randrange(1, 5)):
        messages.append({"role": "user", "content": _content(rng)})
        if rng.random() < 0.3 and tools:
            messages += _call(rng, turn)
        else:
            answer: dict[str, Any] = {"role": "assistant", "content": _content(rng)}
            if rng.random() < 0.2:
                answer["reasoning_content"] = text(rng)
            messages.append(answer)
    if rng.random() < 0.7:
        messages.append({"content": text(rng), "role": "user"})
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 1}
    if tools and rng.random() < 0.3:
        body["tools"] = [_tool(rng) for _ in range(rng.randrange(1, 3))]
    if messages[-1]["role"] == "assistant" and rng.random() < 0.5:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    elif rng.random() < 0.1:
        body["add_generation_prompt"] = False
    if rng.random() < 0.1:
        body["add_special_tokens"] = True
    if rng.random() < 0.2:
        body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5, "date": "1 May"}
    return body


def _content(rng: random.Random) -> object:
    if rng.random() < 0.7:
        return text(rng)
    return [{"type": "text", "text": text(rng)} for _ in range(rng.randrange(1, 4))]


def _call(rng: random.Random, turn: int) -> list[dict[str, Any]]:
    call = {"b": rng.randrange(9), "a": [1.5, None, "ü"]}
    arguments = rng.choice([json.dumps(call), "{}", "", "[]", "{broken"])
    return [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "type": "function",
                    "id": f"c{turn}",
                    "function": {"name": "find", "arguments": arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": f"c{turn}", "content": _content(rng)},
    ]


def _tool(rng: random.Random) -> dict[str, Any]:
    function: dict[str, Any] = {
        "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}},
        "name": "find",
    }
    if rng.random() < 0.5:
        function["description"] = "Finds <things> & 'more'"
    if rng.random() < 0.2:
        function["strict"] = True
    return {"function": function, "type": "function"}


def completion(rng: random.Random) -> dict[str, Any]:
    """A body for /v1/completions."""
    body: dict[str, Any] = {"model": "tiny", "prompt": text(rng, 80) or "a", "max_tokens": 1}
    if rng.random() < 0.3:
        body["add_special_tokens"] = rng.random() < 0.5
    return body
