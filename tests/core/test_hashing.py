"""Chain hashes: fixed values, prefixes, namespaces, whitespace, avalanche; in both forms."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.core import hashing
from kvforms import FORMS, Form

MIB = 1 << 20
WHITESPACE = b" \t\n\r\v\f"


@pytest.fixture(params=FORMS, ids=lambda form: form.name)
def form(request: pytest.FixtureRequest) -> Form:
    """One form of the hashes."""
    chosen: Form = request.param
    return chosen


def test_fixed_values(form: Form) -> None:
    """The hashes are these, on every platform and in every release: replicas exchange them."""
    seed = form.seed_of(b"model")
    text = bytes(range(256))
    assert seed == 0xF723_4B87_08A1_2F1B
    assert list(form.hash_bytes(seed, text, 100)) == [0xDB6D_F1E9_E7CC_7C40, 0x52B4_016A_BA2B_A83B]
    assert list(form.hash_words(seed, b"a bc  def\n", 3)) == [0xB5CA_D592_6236_4745]
    assert form.seed_of(b"") == 0x23A4_6FBE_7385_43B9


def test_description_alone_gives_the_hashes(form: Form) -> None:
    """Whoever follows the module's docstring, and nothing else, gets the same chain."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def step(state: int, word: int) -> int:
        state = (state ^ word) * 0x100000001B3 & mask
        state = (state ^ state >> 32) * golden & mask
        return state ^ state >> 29

    def digest(data: bytes) -> int:
        lanes = [0xCBF29CE484222325 + lane * golden & mask for lane in range(4)]
        filled = data + bytes(-len(data) % 8)
        for i in range(0, len(filled), 8):
            lane = i // 8 % 4
            lanes[lane] = step(lanes[lane], int.from_bytes(filled[i : i + 8], "little"))
        state = len(data)
        for lane in range(4):
            state = step(state, lanes[lane])
        return state

    data = random.Random(1).randbytes(999)
    state = form.seed_of(b"ns")
    assert state == step(0xCBF29CE484222325, digest(b"ns"))
    for block_bytes in (1, 7, 8, 9, 24, 32, 33, 61, 128):
        chain, expected = [], state
        for i in range(999 // block_bytes):
            expected = step(expected, digest(data[i * block_bytes : (i + 1) * block_bytes]))
            chain.append(expected)
        assert list(form.hash_bytes(state, data, block_bytes)) == chain


@given(
    seed=st.integers(0, 2**64 - 1),
    data=st.binary(max_size=400),
    size=st.integers(1, 150),
    limit=st.integers(0, 20),
)
def test_forms_agree_on_bytes(seed: int, data: bytes, size: int, limit: int) -> None:
    """Every form gives the reference's chain for any bytes, block size and limit."""
    expected = list(hashing.hash_bytes(seed, data, size, limit))
    assert len(expected) == min(limit, len(data) // size)
    for form in FORMS:
        assert list(form.hash_bytes(seed, data, size, limit)) == expected


@given(
    words=st.lists(st.binary(min_size=1, max_size=12), max_size=30),
    gaps=st.lists(st.text(" \t\n\r\v\f", min_size=1, max_size=3), min_size=31, max_size=31),
    size=st.integers(1, 5),
    limit=st.integers(0, 9),
)
def test_any_whitespace_separates_words(
    words: list[bytes], gaps: list[str], size: int, limit: int
) -> None:
    """A chain of words is one of the words alone: runs and kinds of whitespace do not matter."""
    words = [word for word in (w.translate(None, WHITESPACE) for w in words) if word]
    plain = b" ".join(words)
    spaced = b"".join(gap.encode() + w for gap, w in zip(gaps, words, strict=False))
    spaced += gaps[-1].encode()
    expected = list(hashing.hash_words(3, plain, size, limit))
    assert len(expected) == min(limit, len(words) // size)
    for form in FORMS:
        assert list(form.hash_words(3, plain, size, limit)) == expected
        assert list(form.hash_words(3, spaced, size, limit)) == expected


def test_worked_example(form: Form) -> None:
    """Two of three blocks of two words match; the last, partial block does not count."""
    seed = form.seed_of(b"")
    simple = form.hash_words(seed, b"Explain cache aware routing in simple words", 2)
    deep = form.hash_words(seed, b"Explain cache aware routing in deep details", 2)
    assert len(simple) == len(deep) == 3
    assert [a == b for a, b in zip(simple, deep, strict=True)] == [True, True, False]


def test_where_a_word_ends_matters(form: Form) -> None:
    """Words that only together give the same letters give different hashes."""
    texts = [b"ab c", b"a bc", b"abc d", b"a b", b"ab  cd", b"a\xa0b c", b"a\xffb c", b"ab c\x00"]
    assert len({form.hash_words(1, text, 2)[0] for text in texts}) == len(texts)
    assert len(form.hash_words(1, b"a\xa0b\x85c\x1cd", 1)) == 1


@given(st.binary(min_size=1, max_size=600), st.data())
def test_equal_prefix_equal_chain(prompt: bytes, data: st.DataObject) -> None:
    """Chains are equal up to the first block that differs, and nowhere behind it."""
    at = data.draw(st.integers(0, len(prompt) - 1))
    other = prompt[:at] + bytes([prompt[at] ^ data.draw(st.integers(1, 255))]) + prompt[at + 1 :]
    size = data.draw(st.integers(1, 64))
    for form in FORMS:
        one = list(form.hash_bytes(9, prompt, size))
        two = list(form.hash_bytes(9, other, size))
        same = min(at // size, len(one))
        assert one[:same] == two[:same]
        assert not set(one[same:]) & set(two[same:])
        assert list(form.hash_bytes(9, prompt + b"more", size))[: len(one)] == one


def test_chain_goes_on_from_its_last_hash(form: Form) -> None:
    """Hashing on from a chain hash as the seed gives the rest of the same chain."""
    data = random.Random(2).randbytes(1024)
    chain = list(form.hash_bytes(form.seed_of(b"x"), data, 64))
    for at in (1, 5, 15):
        assert list(form.hash_bytes(chain[at - 1], data[at * 64 :], 64)) == chain[at:]


def test_namespaces_never_meet(form: Form) -> None:
    """Equal prompts in 5,000 namespaces have no hash in common."""
    seeds = [form.seed_of(f"model-{i}".encode()) for i in range(4_000)]
    seeds += [form.seed_of(bytes(i)) for i in range(1_000)]
    assert len(set(seeds)) == len(seeds)
    firsts = {form.hash_bytes(seed, b"the same prompt!", 8)[1] for seed in seeds}
    assert len(firsts) == len(seeds)


def test_near_identical_prompts_do_not_collide(form: Form) -> None:
    """65,536 prompts that differ only in bytes 7 and 15 have 65,536 hashes."""
    prompt = bytearray(b"You are a careful assistant. " * 5)[:128]
    hashes = set()
    for value in range(65_536):
        prompt[7], prompt[15] = value >> 8, value & 255
        hashes.add(form.hash_bytes(1, bytes(prompt), 128)[0])
    assert len(hashes) == 65_536


@pytest.mark.parametrize(
    "places",
    [(7, 39), (7, 15), (3, 7), (31, 63), (119, 127), (0, 8), (7, 32), (24, 56), (63, 95)],
    ids=str,
)
def test_no_two_bytes_cancel_each_other(places: tuple[int, int]) -> None:
    """Prompts that differ in any two bytes, of one lane, of two, of one word, never collide."""
    prompts = np.zeros((65_536, 128), dtype=np.uint8)
    prompts[:] = np.frombuffer(b"0123456789abcdef" * 8, dtype=np.uint8)
    prompts[:, places[0]] = np.arange(65_536) >> 8
    prompts[:, places[1]] = np.arange(65_536) & 255
    digests = hashing._digests(prompts.tobytes(), 128)
    assert len(np.unique(digests)) == 65_536
    # The halves must tell the prompts apart as well as random numbers would (3 pairs in 4 tries).
    low = len(np.unique(digests & np.uint64(0xFFFF_FFFF)))
    high = len(np.unique(digests >> np.uint64(32)))
    assert min(low, high) > 65_536 - 10


def test_avalanche(form: Form) -> None:
    """Any one flipped bit of a block flips every bit of its hash about half of the time."""
    rng = random.Random(3)
    flips = np.zeros(64)
    tries = 0
    for _ in range(4):
        block = rng.randbytes(128)
        before = form.hash_bytes(1, block, 128)[0]
        for bit in range(1024):
            other = bytearray(block)
            other[bit // 8] ^= 1 << bit % 8
            changed = form.hash_bytes(1, bytes(other), 128)[0] ^ before
            assert 10 <= changed.bit_count() <= 54
            flips += [changed >> i & 1 for i in range(64)]
            tries += 1
    assert flips.min() / tries > 0.45
    assert flips.max() / tries < 0.55


def test_huge_prompt(form: Form) -> None:
    """A prompt of 100 MB is hashed; `limit_blocks` bounds the chain without changing it."""
    prompt = b"0123456789abcdef" * (100 * MIB // 16)
    chain = form.hash_bytes(1, prompt, 128)
    assert len(chain) == 100 * MIB // 128
    assert list(form.hash_bytes(1, prompt, 128, 1000)) == list(chain.head(1000))
    words = form.hash_words(1, prompt[: 8 * MIB] + b" a b" * 1000, 2, limit_blocks=700)
    assert len(words) == 700


def test_longest_chain_by_default(form: Form) -> None:
    """Without a limit a chain ends at 2**20 blocks."""
    assert len(form.hash_bytes(1, bytes(hashing.LIMIT_BLOCKS + 5), 1)) == hashing.LIMIT_BLOCKS


def test_zero_is_never_a_hash(form: Form) -> None:
    """Where the arithmetic gives 0, OFFSET takes its place."""
    seed = hashing.digest(b"12345678")
    assert hashing.step(seed, hashing.digest(b"12345678")) == 0
    assert list(form.hash_bytes(seed, b"12345678", 8)) == [hashing.OFFSET]


@pytest.mark.parametrize("function", ["hash_bytes", "hash_words"])
def test_bad_arguments_are_refused(form: Form, function: str) -> None:
    """Numbers out of range are ValueErrors, other things TypeErrors."""
    call: Any = getattr(form, function)
    wrong: Any
    for wrong in [
        (-1, b"ab", 1, 9),
        (2**64, b"ab", 1, 9),
        (1, b"ab", 0, 9),
        (1, b"ab", -(2**70), 9),
        (1, b"ab", 1, -1),
    ]:
        with pytest.raises(ValueError, match=r"."):
            call(*wrong)
    for wrong in [
        (1.0, b"ab", 1, 9),
        (1, "ab", 1, 9),
        (1, None, 1, 9),
        (1, bytearray(b"ab"), 1, 9),
        (1, b"ab", 1.5, 9),
        (1, b"ab", 1, None),
    ]:
        with pytest.raises(TypeError):
            call(*wrong)
    seed_of: Any = form.seed_of
    with pytest.raises(TypeError):
        seed_of("text")
    assert len(call(1, b"a b", 2**70, 2**70)) == 0


def test_chain_is_a_sequence(form: Form) -> None:
    """Length, indexing from both ends, iteration, equality, hash and head."""
    values = [1, 2**64 - 1, 7]
    chain = form.chain.of(iter(values))
    assert len(chain) == 3
    assert [chain[0], chain[-1], chain[np.int64(1)]] == [1, 7, 2**64 - 1]
    assert list(chain) == values
    assert chain == form.chain.of(values)
    assert hash(chain) == hash(form.chain.of(values))
    assert chain != form.chain.of([1, 2**64 - 1])
    assert chain != form.chain.of([1, 2**64 - 1, 8])
    assert chain != (1, 2**64 - 1, 7)
    assert [list(chain.head(n)) for n in (-1, 0, 2, 3, 2**70)] == [
        [],
        [],
        values[:2],
        *[values] * 2,
    ]
    assert repr(chain) == "Chain(3 blocks, last 0000000000000007)"
    assert repr(chain.head(0)) == "Chain(0 blocks)"
    for position in (3, -4, 2**70):
        with pytest.raises(IndexError):
            chain[position]
    anything: Any = chain
    with pytest.raises(TypeError):
        anything["0"]


def test_chain_of_refuses_what_is_no_hash(form: Form) -> None:
    """0, negative and too large numbers are ValueErrors; other things TypeErrors."""
    of: Any = form.chain.of
    for value in (0, -1, 2**64):
        with pytest.raises(ValueError, match=r"."):
            of([5, value])
    for wrong in (1.0, "1", None):
        with pytest.raises(TypeError):
            of([5, wrong])
    with pytest.raises(TypeError):
        of(5)
    assert len(form.chain.of([])) == 0


def test_chains_of_a_growing_prompt_grow(form: Form) -> None:
    """Each longer prompt's chain begins with the chain of the shorter one."""
    prompt = random.Random(4).randbytes(700)
    chains = [list(form.hash_bytes(1, prompt[:n], 16)) for n in range(700)]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(chains))


STEADIES = st.sampled_from([0, 2, 4, 64])


@given(st.integers(0, 5000), STEADIES)
def test_depths_are_the_sums_of_widths(blocks: int, steady: int) -> None:
    """`depth_of` adds up `width_of`, `blocks_in` turns it round, and widths stay proportionate."""
    blocks = min(blocks, 40 * steady) if steady else blocks  # deeper than any prompt else
    widths = [hashing.width_of(i, steady) for i in range(blocks)]
    depth = sum(widths)
    assert hashing.depth_of(blocks, steady) == depth
    assert hashing.blocks_in(depth, steady) == blocks
    following = hashing.width_of(blocks, steady)
    assert hashing.blocks_in(depth + following - 1, steady) == blocks
    if steady and blocks > steady:
        assert widths[-1] <= 2 * depth / steady


@given(st.binary(max_size=3000), st.integers(1, 9), STEADIES, st.integers(0, 300))
def test_growing_blocks_are_hashed_as_wide_as_they_are(
    data: bytes, size: int, steady: int, limit: int
) -> None:
    """Block k is hashed over its own width, whichever form does it, and where batches end."""
    state, start = 7, 0
    expected: list[int] = []
    while len(expected) < limit:
        wide = size * hashing.width_of(len(expected), steady)
        if start + wide > len(data):
            break
        state = hashing.step(state, hashing.digest(data[start : start + wide])) or hashing.OFFSET
        expected.append(state)
        start += wide
    for form in FORMS:
        chain = form.hash_bytes(7, data, size, limit, steady)
        assert list(chain) == expected
        assert chain.depth() * size == start
        assert [chain.depth(i) for i in range(3)] == [hashing.depth_of(i, steady) for i in range(3)]
        assert chain.head(2).steady == steady
        assert chain == form.chain.of(expected, steady)
        assert not expected or chain != form.chain.of(expected, steady + 2)


def test_growing_blocks_across_batches(form: Form) -> None:
    """A prompt of many MiB gives the same chain as its parts hashed one after the other."""
    data = random.Random(3).randbytes(9 * MIB)
    chain = form.hash_bytes(3, data, 128, steady=64)
    assert chain.depth() == hashing.depth_of(len(chain), 64) <= len(data) // 128
    wide = 128 * hashing.width_of(len(chain) - 1, 64)
    end = 128 * chain.depth()
    last = hashing.step(chain[-2], hashing.digest(data[end - wide : end]))
    assert chain[-1] == last
    with pytest.raises(ValueError, match="even"):
        form.hash_bytes(3, data, 128, steady=3)
    with pytest.raises(ValueError, match="even"):
        form.chain.of([1], -2)
