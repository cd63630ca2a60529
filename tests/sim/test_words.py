"""The mock tokenizer and its answers: deterministic, consistent, the same in every process."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import assume, given
from hypothesis import strategies as st

from calinix.sim.words import ANSWER_WORDS, END, START, VOCABULARY_SIZE, Tokenizer


@given(st.text(max_size=200))
def test_text_comes_back(text: str) -> None:
    """Pieces cover the text, so that what was tokenized can be told again."""
    words = Tokenizer()
    ids = words.encode(text)
    assert all(END < token < VOCABULARY_SIZE for token in ids)
    assume(len(set(words._ids.values())) == len(words._ids))  # two pieces may share an id
    assert "".join(words.pieces(ids)) == text


def test_longer_text_keeps_earlier_tokens() -> None:
    """More text behind a word boundary changes no token before it."""
    words = Tokenizer()
    start = words.encode("Explain cache aware routing")
    assert words.encode("Explain cache aware routing, in simple words")[: len(start)] == start


def test_unknown_ids_are_named() -> None:
    """An id that was never met is shown as such, and special tokens by name."""
    assert Tokenizer().pieces([START, 77, END]) == ["<|im_start|>", "<77>", "<|im_end|>"]


def test_an_answer_depends_on_the_prompt_only() -> None:
    """Same prompt, same answer, also in another tokenizer; a longer answer only adds."""
    one, other = Tokenizer(), Tokenizer()
    prompt = one.encode("Once upon a time")
    assert one.answer(prompt, 20) == other.answer(prompt, 40)[:20]
    assert one.answer(prompt, 20) != one.answer(prompt, 20, choice=1)
    assert one.answer(prompt, 20) != one.answer([*prompt, 1], 20)


def test_an_answer_is_what_its_text_would_be() -> None:
    """An answer sent back in the next turn has the tokens that were generated."""
    words = Tokenizer()
    ids = words.answer([1, 2, 3], 50)
    text = "".join(words.answer_text(ids))
    assert words.encode(text) == ids
    assert set(words.answer_text(ids)) <= set(ANSWER_WORDS)
    first = words.encode_chat([("user", "x")])
    second = words.encode_chat([("user", "x"), ("assistant", text), ("user", "y")])
    assert second[: len(first) + len(ids)] == first + ids


def test_every_process_agrees() -> None:
    """Ids and answers are the same in a process with another hash seed."""
    code = (
        "from calinix.sim.words import Tokenizer as T; t = T(); i = t.encode('a b, c');"
        "print(i, t.answer(i, 9))"
    )
    command = [sys.executable, "-c", code]
    outputs = {
        subprocess.run(
            command, env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    words = Tokenizer()
    ids = words.encode("a b, c")
    assert outputs == {f"{ids} {words.answer(ids, 9)}\n".encode()}


def test_memory_is_bounded() -> None:
    """More different words than are remembered: ids stay the same."""
    words = Tokenizer()
    before = words.encode("again")
    for number in range(70_000):
        words.encode(f"w{number}")
    assert words.encode("again") == before
    assert len(words._ids) <= 65_536
