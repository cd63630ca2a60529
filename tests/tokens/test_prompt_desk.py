"""Prompts' ids in the process that makes them: remembered, a step at a time, always the same."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

import hfkit
from calinix.core.prompt import Endpoint
from calinix.edge import prompt_desk
from calinix.edge.hf_folder import load_folder
from calinix.edge.prompt_desk import PromptDesk
from calinix.edge.tokenizers import MAX_PIECE_CHARS, HfTokenizer

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    """The family whose every text has ids."""
    folder = hfkit.make_folder(tmp_path_factory.mktemp("chatml"), "chatml")
    return HfTokenizer(load_folder(str(folder)))


def ids_of(
    desk: PromptDesk, body: dict[str, Any], endpoint: Endpoint | None = None
) -> bytes | None:
    """The ids of one prompt, alone on the desk."""
    if endpoint is None:
        endpoint = COMPLETIONS if "prompt" in body else CHAT
    desk.take(1, endpoint, json.dumps(body).encode())
    while True:
        found = desk.step()
        if found is not None:
            assert found[0] == 1
            assert not len(desk)
            return found[1]


def whole(tokenizer: HfTokenizer, body: dict[str, Any]) -> bytes | None:
    """The ids of a body's text at once."""
    return tokenizer.ids_of(COMPLETIONS if "prompt" in body else CHAT, json.dumps(body).encode())


@pytest.mark.parametrize("batch_chars", [1, 65_536])
def test_ids_are_the_same_however_they_are_made(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch, batch_chars: int
) -> None:
    """Random conversations, one turn more each time, with a small memory: the ids of the whole."""
    monkeypatch.setattr(prompt_desk, "BATCH_CHARS", batch_chars)
    desk = PromptDesk(tokenizer, 20_000)
    rng = random.Random(7)
    for _ in range(25):
        chat = hfkit.chat(rng)
        for turns in range(1, len(chat["messages"]) + 1):
            body = {**chat, "messages": chat["messages"][:turns]}
            assert ids_of(desk, body) == whole(tokenizer, body)
        completion = hfkit.completion(rng)
        assert ids_of(desk, completion) == whole(tokenizer, completion)
    assert 0 < desk.cache_bytes <= 20_000


def test_a_conversation_that_goes_on_is_not_tokenised_again(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one turn more, only the new piece is tokenised."""
    encoded: list[str] = []
    encode = tokenizer.encode

    def listen(pieces: list[str]) -> list[bytes]:
        encoded.extend(pieces)
        return encode(pieces)

    monkeypatch.setattr(tokenizer, "encode", listen)
    desk = PromptDesk(tokenizer, 1 << 20)
    talk = [
        {"role": role, "content": f"{number} " + "prefix cache " * 400}
        for number in range(5)
        for role in ("user", "assistant")
    ]
    ids_of(desk, {"messages": talk})
    assert len(encoded) == len(talk) + 1
    encoded.clear()
    talk.append({"role": "user", "content": "next"})
    ids_of(desk, {"messages": talk})
    assert encoded == ["<|im_start|>user\nnext<|im_end|>\n"]


def test_short_prompts_do_not_wait_for_long_ones(tokenizer: HfTokenizer) -> None:
    """Between two steps of a long prompt the short ones behind it are done, shortest first."""
    desk = PromptDesk(tokenizer, 1 << 20)
    talk = [{"role": "user", "content": f"{n}" + "word " * 14_000} for n in range(5)]
    desk.take(1, CHAT, json.dumps({"messages": talk}).encode())
    assert desk.step() is None
    assert desk.step() is None
    desk.take(2, COMPLETIONS, b'{"prompt": "bb"}')
    desk.take(3, COMPLETIONS, b'{"prompt": "a"}')
    ended, steps = [], 0
    while len(desk):
        steps += 1
        if (found := desk.step()) is not None:
            ended.append(found[0])
    assert ended == [3, 2, 1]
    # Two for each of the short ones and the long one's last: it is in many steps.
    assert steps > 8


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"},
        {"messages": [{"role": 1}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": []},
        {"prompt": [1, 2]},
        {"prompt": "x" * (MAX_PIECE_CHARS + 1)},
    ],
)
def test_prompts_without_ids(tokenizer: HfTokenizer, body: dict[str, Any]) -> None:
    """Media, templates of the client's own and what is too long have none, and leave nothing."""
    desk = PromptDesk(tokenizer, 1 << 20)
    assert ids_of(desk, body) is None
    assert desk.cache_bytes == 0


def test_too_many_tokens_are_not_told(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of MAX_TOKENS has ids, a longer one has none."""
    monkeypatch.setattr(prompt_desk, "MAX_TOKENS", 64)
    desk = PromptDesk(tokenizer, 1 << 20)
    marks = "<|im_end|>"
    assert ids_of(desk, {"prompt": marks * 64}) == bytes([2, 0, 0, 0]) * 64
    assert ids_of(desk, {"prompt": marks * 65}) is None


def test_ids_are_little_endian(tokenizer: HfTokenizer) -> None:
    """Four bytes an id, the least one first."""
    found = ids_of(PromptDesk(tokenizer, 1 << 20), {"prompt": "<|im_start|>ab"})
    assert found is not None
    assert found[:4] == b"\1\0\0\0"
    assert len(array("I", found)) == len(found) // 4


def test_special_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    """Texts get the tokenizer's own tokens around them; chats do where they ask for them."""
    folder = hfkit.make_folder(tmp_path, "llama")
    tokenizer = HfTokenizer(load_folder(str(folder)))
    desk = PromptDesk(tokenizer, 1 << 20)
    chat = {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}
    for body in ({"prompt": "a"}, {"prompt": "a", "add_special_tokens": False}, chat):
        assert ids_of(desk, body) == whole(tokenizer, body)
