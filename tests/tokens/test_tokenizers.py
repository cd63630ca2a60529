"""Token ids: equal to what a real engine answered, whole or in pieces, for every family."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import hfkit
from calinix.config.tokens import Tokenizing
from calinix.edge.chat_template import TemplateRefusedError
from calinix.edge.hf_folder import load_folder
from calinix.edge.tokenizers import HfTokenizer, tokenizer_of
from calinix.engines.vllm_chat import UnusualError, read_chat, read_completion
from calinix.errors import ConfigError

DATA = Path(__file__).resolve().parent.parent / "data"
TINY = DATA / "tokens" / "tiny"


def loaded(folder: Path, template: str | None = None) -> HfTokenizer:
    """A folder's tokenizer, its template or another one."""
    return HfTokenizer(load_folder(str(folder)), template=template)


@functools.cache
def family(name: str) -> HfTokenizer:
    """One of the families."""
    with tempfile.TemporaryDirectory() as made:
        return loaded(hfkit.make_folder(Path(made) / name, name))


def text_of(tokenizer: HfTokenizer, body: dict[str, Any]) -> tuple[str, bool]:
    """(what is tokenised, whether with the tokenizer's own special tokens)."""
    raw = json.dumps(body).encode()
    if "prompt" in body:
        completion = read_completion(raw)
        assert completion is not None
        return completion
    request = read_chat(raw)
    assert request is not None
    return tokenizer.chat_text(request), request.add_special_tokens


def in_pieces(tokenizer: HfTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text, cut where it may be and tokenised piece by piece."""
    ids = b"".join(b"".join(tokenizer.encode([p])) for p in tokenizer.cutter.cut(text))
    around = tokenizer.around()
    if add_special_tokens:
        assert around is not None
        ids = around[0] + ids + around[1]
    return list(array("I", ids))


def rows() -> list[dict[str, Any]]:
    """Requests to a real vLLM, with the ids that it had of their prompts."""
    lines = (DATA / "tokens" / "vllm.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_ids_are_those_of_a_real_engine() -> None:
    """Chats with tools, parts, odd settings, and completions: every id as vLLM 0.32.0 had it."""
    tokenizer = loaded(TINY, hfkit.CHATML)
    assert len(rows()) > 80
    for row in rows():
        text, special = text_of(tokenizer, row["body"])
        assert in_pieces(tokenizer, text, add_special_tokens=special) == row["tokens"], row["body"]


def test_recorded_tokenize_answers() -> None:
    """The answers of the engine's /tokenize, for a text and for a chat, with its own template."""
    tokenizer = loaded(TINY)

    def recorded(name: str) -> list[int]:
        answer = (DATA / "samples" / name).read_bytes().partition(b"\r\n\r\n")[2]
        tokens: list[int] = json.loads(answer)["tokens"]
        return tokens

    chat = {"messages": [{"role": "user", "content": "hi"}]}
    text, special = text_of(tokenizer, chat)
    assert in_pieces(tokenizer, text, add_special_tokens=special) == recorded("tokenize_chat.http")
    tokens = recorded("tokenize.http")
    text = Tokenizer.from_file(str(TINY / "tokenizer.json")).decode(tokens)
    assert in_pieces(tokenizer, text, add_special_tokens=True) == tokens


@pytest.mark.parametrize("name", hfkit.FAMILIES)
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_pieces_have_the_ids_of_the_whole(name: str, seed: int) -> None:
    """However a conversation is cut, its ids are those of the text at once; turn after turn."""
    tokenizer = family(name)
    rng = random.Random(seed)
    body = hfkit.chat(rng, tools=name != "mistral")
    if rng.random() < 0.2:
        body = hfkit.completion(rng)
    try:
        text, special = text_of(tokenizer, body)
    except (UnusualError, TemplateRefusedError):
        return
    whole = tokenizer.whole(text, add_special_tokens=special)
    assert in_pieces(tokenizer, text, add_special_tokens=special) == list(array("I", whole))


def test_every_family_is_cut_at_its_own_marks() -> None:
    """As few marks as it takes for every message to be in a piece of its own."""
    assert family("chatml").cutter.marks == ("<|im_start|>",)
    assert family("llama").cutter.marks == ("<|start_header_id|>",)
    assert family("mistral").cutter.marks == ("</s>", "[/INST]")
    assert family("parts").cutter.marks == ("<|end|>",)
    talk = [{"role": r, "content": f"#{n}"} for n, r in enumerate(("user", "assistant") * 3)]
    request = read_chat(json.dumps({"messages": talk}).encode())
    assert request is not None
    for name in hfkit.FAMILIES:
        tokenizer = family(name)
        pieces = tokenizer.cutter.cut(tokenizer.chat_text(request))
        assert max(piece.count("#") for piece in pieces) == 1


def test_special_ids_around_a_text() -> None:
    """What the tokenizer itself puts before and behind a text is known by itself."""
    assert family("chatml").around() == (b"", b"")
    assert family("llama").around() == (b"\0\0\0\0", b"")
    assert family("mistral").around() == (b"\1\0\0\0", b"\2\0\0\0")


# --- folders -------------------------------------------------------------------------------------


def test_a_file_stands_for_its_folder(tmp_path: Path) -> None:
    """`hf:` may name the folder, or the tokenizer.json in it."""
    folder = hfkit.make_folder(tmp_path, "chatml")
    by_file = loaded(folder / "tokenizer.json")
    assert by_file.has_template
    assert by_file.cutter.marks == loaded(folder).cutter.marks


def test_templates_by_name(tmp_path: Path) -> None:
    """Files go before the configuration; tools have a template of their own where there is one."""
    folder = hfkit.make_folder(tmp_path, "llama")
    (folder / "chat_template.jinja").write_text("plain", "utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools", "utf-8")
    tokenizer = loaded(folder)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    assert text_of(tokenizer, chat)[0] == "plain"
    chat["tools"] = [{"type": "function", "function": {"name": "f"}}]
    assert text_of(tokenizer, chat)[0] == "tools"


def test_old_template_files(tmp_path: Path) -> None:
    """A template in chat_template.json counts where there is no other."""
    folder = hfkit.make_folder(tmp_path, "chatml")
    (folder / "chat_template.jinja").unlink()
    assert not loaded(folder).has_template
    (folder / "chat_template.json").write_text('{"chat_template": "old"}', "utf-8")
    assert text_of(loaded(folder), {"messages": [{"role": "user", "content": "hi"}]})[0] == "old"


def test_without_a_template_there_are_only_completions(tmp_path: Path) -> None:
    """A folder without a chat template refuses chats and takes completions."""
    folder = hfkit.make_folder(tmp_path, "chatml")
    (folder / "chat_template.jinja").unlink()
    tokenizer = loaded(folder)
    with pytest.raises(TemplateRefusedError, match="no chat template"):
        text_of(tokenizer, {"messages": [{"role": "user", "content": "hi"}]})
    assert tokenizer.cutter.marks == ()


def test_tokens_that_only_the_configuration_names(tmp_path: Path) -> None:
    """Added and special tokens of tokenizer_config.json are tokens, as engines have it."""
    folder = hfkit.make_folder(tmp_path, "chatml")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"9000": {"content": "<|late|>", "special": True}}
    config["extra_special_tokens"] = ["<|extra|>"]
    config["bos_token"] = {"content": "<|bos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = loaded(folder)
    for token in ("<|late|>", "<|extra|>", "<|bos|>"):
        assert len(tokenizer.whole(token, add_special_tokens=False)) == 4
    del config["added_tokens_decoder"], config["bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<|bos|>"}')
    assert len(loaded(folder).whole("<|bos|>", add_special_tokens=False)) == 4


def test_special_tokens_may_be_plain_text(tmp_path: Path) -> None:
    """With split_special_tokens they are text like any other, and nothing is cut at them."""
    folder = hfkit.make_folder(tmp_path, "chatml")
    config = {"split_special_tokens": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = loaded(folder)
    assert len(tokenizer.whole("<|im_end|>", add_special_tokens=False)) > 4
    assert tokenizer.cutter.marks == ()


def test_truncation_of_the_file_does_not_count(tmp_path: Path) -> None:
    """Engines truncate by their own rules: what the file says of length and padding is ignored."""
    folder = hfkit.make_folder(tmp_path, "chatml")
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=4)
    saved.save(str(folder / "tokenizer.json"))
    assert len(loaded(folder).whole("a b c d e f g h", add_special_tokens=False)) > 16


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
        ("chat_template.jinja", "{% for %}", "cannot be read"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
    ],
)
def test_folders_that_cannot_be_used(
    tmp_path: Path, file: str, content: str | bytes | None, problem: str
) -> None:
    """What is wrong in a folder is one line that names the file."""
    folder = hfkit.make_folder(tmp_path, "chatml")
    path = folder / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=problem):
        loaded(folder)


def test_settings_of_the_engine(tmp_path: Path) -> None:
    """Template, content format and template arguments stand for the engine's own options."""
    folder = hfkit.make_folder(tmp_path, "chatml")
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages[0].content }}{{ style }}", "utf-8")

    def told(content_format: str, arguments: str | None) -> str:
        settings = {
            "chatTemplate": str(template),
            "contentFormat": content_format,
            "templateArguments": arguments,
        }
        tokenizer = tokenizer_of(str(folder), msgspec.convert(settings, Tokenizing))
        return text_of(tokenizer, {"messages": [{"role": "user", "content": "hi"}]})[0]

    assert told("auto", '{"style": 1}') == "hi1"
    assert told("string", None) == "hi"
    assert told("openai", None) == "[{'type': 'text', 'text': 'hi'}]"
    with pytest.raises(ConfigError, match="templateArguments"):
        told("auto", "[]")
    template.unlink()
    with pytest.raises(ConfigError, match="no such file"):
        told("auto", None)
