"""Where texts may be cut, how they are, and what is remembered of the pieces."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from calinix.core.segments import MAX_PIECES, AddedToken, Cutter, TokenMemory, cuttable


def marks(*tokens: AddedToken | str) -> list[str]:
    """Those of the tokens that texts may be cut before."""
    return cuttable(AddedToken(t) if isinstance(t, str) else t for t in tokens)


def test_plain_added_tokens_are_marks() -> None:
    """Special tokens of the usual form can all be cut at, one that begins another too."""
    assert marks("<|a|>", "<|b|>", "<|b|>x", "</s>") == ["<|a|>", "<|b|>", "<|b|>x", "</s>"]


def test_what_may_belong_to_the_text_before_is_no_mark() -> None:
    """Tokens that take whitespace before them, or care what stands there, are not cut at."""
    assert marks(AddedToken("<a>", lstrip=True)) == []
    assert marks(AddedToken("<a>", single_word=True)) == []
    assert marks(AddedToken("<a>", normalized=True)) == []
    assert marks(" <a>", "") == []
    assert marks(AddedToken("<a>", rstrip=True)) == ["<a>"]
    assert marks("<a>", AddedToken("<a><b>", lstrip=True)) == []
    assert marks("word", AddedToken("other", single_word=True)) == []
    assert marks("<a>", AddedToken("other", single_word=True)) == ["<a>"]


def test_what_another_token_may_have_begun_is_no_mark() -> None:
    """A mark whose beginning can be the end of another token, or lie inside one, is not cut at."""
    assert marks("ab", "xa") == ["xa"]
    assert marks("a|", "x a|y") == ["x a|y"]
    assert marks("aba") == []
    assert "<|eot|>" not in marks("<|eot|>", "<|eot|><|eot|>")


@given(st.lists(st.sampled_from(["<|a|>", "<|b|>", "[X]", "<", "|", "a", " ", "é"]), max_size=60))
def test_pieces_are_the_text(parts: list[str]) -> None:
    """Joined, the pieces are the text; a mark begins each but the first, and is in none."""
    text = "".join(parts)
    pieces = Cutter(["<|a|>", "<|b|>", "[X]"]).cut(text)
    assert "".join(pieces) == text
    assert all(pieces)
    for piece in pieces[1:]:
        assert piece.startswith(("<|a|>", "<|b|>", "[X]"))
    for piece in pieces:
        assert not any(mark in piece[1:] for mark in ("<|a|>", "<|b|>", "[X]"))


def test_pieces_are_bounded_in_number() -> None:
    """A text full of marks gives MAX_PIECES pieces, the last of them long."""
    text = "-" + "<a>[b]" * MAX_PIECES
    pieces = Cutter(["<a>", "[b]"]).cut(text)
    assert len(pieces) == MAX_PIECES
    assert "".join(pieces) == text


def test_without_marks_a_text_is_one_piece() -> None:
    """No marks, no cuts; an empty text has no piece."""
    assert Cutter([]).cut("abc") == ["abc"]
    assert Cutter(["<a>"]).cut("") == []


def test_memory_gives_back_what_was_kept() -> None:
    """What is remembered is what was kept, for `find` and for `peek`."""
    memory = TokenMemory(10_000)
    memory.keep("a", b"1234")
    memory.keep("empty", b"")
    assert memory.find("a") == memory.peek("a") == b"1234"
    assert memory.find("empty") == memory.peek("empty") == b""
    assert memory.find("b") is None
    assert memory.peek("b") is None


def test_memory_is_bounded_and_keeps_what_is_used() -> None:
    """However much is kept, the bound holds, and what is asked for all along stays."""
    memory = TokenMemory(20_000)
    memory.keep("system", b"ids!")
    rng = random.Random(1)
    for number in range(5000):
        memory.keep(f"{number} " + "x" * rng.randrange(100), b"ids!" * rng.randrange(20))
        assert memory.find("system") == b"ids!"
        assert memory.size_bytes <= 20_000
    assert 0 < len(memory) < 200
    assert memory.find("0 ") is None


def test_memory_keeps_nothing_larger_than_its_half() -> None:
    """A piece that would drop everything else is not remembered."""
    memory = TokenMemory(1000)
    memory.keep("small", b"1234")
    memory.keep("x" * 1000, b"1234")
    assert memory.find("x" * 1000) is None
    assert memory.find("small") == b"1234"


def test_memory_does_not_grow_by_repeats() -> None:
    """Keeping a piece again changes nothing."""
    memory = TokenMemory(10_000)
    memory.keep("a", b"1234")
    size = memory.size_bytes
    for _ in range(100):
        memory.keep("a", b"1234")
    assert memory.size_bytes == size
    assert len(memory) == 1
