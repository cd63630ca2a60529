"""Prompt to chain of block hashes: the reference form, and the one description of the algorithm.

All numbers are unsigned 64-bit and wrap. Another language reproduces it from this:

    OFFSET = 0xCBF29CE484222325        (FNV-1a, 64 bit)
    PRIME  = 0x00000100000001B3        (FNV-1a, 64 bit)
    GOLDEN = 0x9E3779B97F4A7C15        (2**64 / golden ratio)

    step(h, w):   h = (h xor w) * PRIME; h = h xor (h >> 32)
                  h = h * GOLDEN;        h = h xor (h >> 29)

FNV-1a over whole words is `(h xor w) * PRIME`; it never moves the top byte of a word down, so
texts that differ only in every eighth byte would collide. The rest of `step` is the avalanche
that repairs this. For a fixed `h`, `step` is a bijection in `w`, and the other way round.

    digest(data): four lanes, lane i starting as OFFSET + i * GOLDEN; the data as little-endian
                  8-byte words, the last one filled up with zero bytes; word i goes into lane
                  i mod 4 by lane = step(lane, word). At the end
                  step(step(step(step(len(data), lane 0), lane 1), lane 2), lane 3).

    seed(namespace) = step(OFFSET, digest(namespace))
    chain[k]        = step(chain[k - 1], digest(block k)), where chain[-1] is the seed

A result of 0 is replaced by OFFSET in both, so 0 is never a chain hash. A chain hash is all the
state there is: hashing on from `seed=chain[k]` gives the rest of the same chain.

A block is `block_bytes` bytes, or `block_words` words joined by one space (a word holds no
whitespace, so no two lists of words give the same bytes). Only full blocks count.

Blocks may grow with depth: with `steady` > 0 the first `steady` blocks are of width 1 (that is,
`block_bytes`), the next steady / 2 of width 2, the next steady / 2 of width 4, and so on, so that
each group reaches as far again as all before it. A block is then never wider than 2 / steady of
what it ends, and a prompt of any length has few blocks. Depths are counted in widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Final, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

OFFSET: Final = 0xCBF29CE484222325
PRIME: Final = 0x00000100000001B3
GOLDEN: Final = 0x9E3779B97F4A7C15
MASK: Final = 0xFFFFFFFFFFFFFFFF
LIMIT_BLOCKS: Final = 1 << 20
"""Longest chain that is made unless the caller says otherwise (8 MiB of hashes)."""

_BATCH_BYTES: Final = 1 << 20
_U64 = npt.NDArray[np.uint64]


class Chain:
    """An immutable sequence of chain hashes, one per full block: u64, never 0."""

    __slots__ = ("_hashes", "_steady")
    _hashes: tuple[int, ...]
    _steady: int

    @classmethod
    def of(cls, hashes: Iterable[int], steady: int = 0) -> Chain:
        """The chain of these hashes. Raises ValueError for 0 and for what is no u64."""
        return _chain(tuple(checked_hash(value) for value in hashes), _checked_steady(steady))

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, position: SupportsIndex) -> int:
        return self._hashes[index(position)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._hashes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chain):
            return NotImplemented
        return self._hashes == other._hashes and self._steady == other._steady

    def __hash__(self) -> int:
        return hash(self._hashes)

    def __repr__(self) -> str:
        return f"Chain({len(self)} blocks{f', last {self[-1]:016x}' if self._hashes else ''})"

    def packed(self) -> bytes:
        """The hashes as little-endian u64."""
        return b"".join(value.to_bytes(8, "little") for value in self._hashes)

    @classmethod
    def unpacked(cls, data: bytes, at: int, count: int, steady: int = 0) -> Chain:
        """The chain of `count` hashes that `packed` put at `at`. Raises ValueError."""
        if at < 0 or count < 0 or at + 8 * count > len(data):
            raise ValueError(f"no {count} hashes at {at} of {len(data)} bytes")
        return cls.of(
            (int.from_bytes(data[i : i + 8], "little") for i in range(at, at + 8 * count, 8)),
            steady,
        )

    def head(self, blocks: int) -> Chain:
        """The chain of the first `blocks` blocks (all of it when it is no longer than that)."""
        if blocks >= len(self):
            return self
        return _chain(self._hashes[: max(blocks, 0)], self._steady)

    @property
    def steady(self) -> int:
        """How many blocks there are before they grow; 0: they never do."""
        return self._steady

    def depth(self, blocks: int | None = None) -> int:
        """What the first `blocks` blocks (by default all) cover, in widths."""
        return depth_of(len(self) if blocks is None else blocks, self._steady)


def _chain(hashes: tuple[int, ...], steady: int = 0) -> Chain:
    chain = Chain()
    chain._hashes = hashes  # noqa: SLF001  the maker of chains
    chain._steady = steady  # noqa: SLF001
    return chain


def width_of(position: int, steady: int) -> int:
    """The width of the block at `position`, from 0; `steady` 0: all are of width 1."""
    over = position - steady
    return 1 if not steady or over < 0 else 2 << (over // (steady // 2))


def depth_of(blocks: int, steady: int) -> int:
    """The widths of that many leading blocks, together."""
    over = blocks - steady
    if not steady or over <= 0:
        return blocks
    level, rest = divmod(over, steady // 2)
    return (steady << level) + (rest * 2 << level)


def blocks_in(depth: int, steady: int) -> int:
    """How many leading blocks fit into that many widths."""
    if not steady or depth <= steady:
        return depth
    level = (depth // steady).bit_length() - 1
    return steady + level * (steady // 2) + ((depth - (steady << level)) >> (level + 1))


def checked_hash(value: int) -> int:
    """`value` when it can be a chain hash; else ValueError (or TypeError)."""
    value = index(value)
    if not 0 < value <= MASK:
        raise ValueError(f"not a chain hash: {value}")
    return value


def checked_seed(value: int) -> int:
    """`value` when it is a u64; else ValueError (or TypeError)."""
    value = index(value)
    if not 0 <= value <= MASK:
        raise ValueError(f"not an unsigned 64-bit number: {value}")
    return value


def step(state: int, word: int) -> int:
    """One word into the state: FNV-1a's xor and multiply, then the avalanche."""
    state = ((state ^ word) * PRIME) & MASK
    state ^= state >> 32
    state = (state * GOLDEN) & MASK
    return state ^ (state >> 29)


def digest(data: bytes) -> int:
    """The u64 digest of one block."""
    lanes = [(OFFSET + lane * GOLDEN) & MASK for lane in range(4)]
    for number, start in enumerate(range(0, len(data), 8)):
        word = int.from_bytes(data[start : start + 8], "little")
        lanes[number % 4] = step(lanes[number % 4], word)
    state = len(data)
    for lane in lanes:
        state = step(state, lane)
    return state


Piece: TypeAlias = str | bytes | memoryview


def join(pieces: Sequence[Piece]) -> bytes:
    """Texts as UTF-8 and bytes, one after the other. Raises ValueError for lone surrogates."""
    return b"".join([piece.encode() if isinstance(piece, str) else piece for piece in pieces])


def lift(
    body: bytes,  # noqa: ARG001  the signature of the compiled form
    least: int,  # noqa: ARG001
    strings: int,  # noqa: ARG001
    mark: str,  # noqa: ARG001
) -> tuple[bytes, dict[str, bytes | memoryview]] | None:
    """Takes the texts of at least `least` bytes out of a JSON body, for names from `mark`.

    (shorter body, texts by name), the texts decoded to UTF-8. None: nothing was taken out, or
    the body is not valid JSON. It stops behind `strings` shorter ones. This form takes none out:
    it would cost more than it saves.
    """
    return None


def seed_of(namespace: bytes) -> int:
    """The first state of every chain in this namespace (u64, never 0)."""
    return step(OFFSET, digest(_checked_bytes(namespace))) or OFFSET


def hash_bytes(
    seed: int, data: bytes, block_bytes: int, limit_blocks: int = LIMIT_BLOCKS, steady: int = 0
) -> Chain:
    """The chain over the full blocks of `data`, `block_bytes` bytes each, at most `limit_blocks`.

    Token ids are hashed as little-endian u32 with `block_bytes` = 4 x tokens per block.
    `steady`, an even number, lets blocks grow behind so many (see above); 0: all are alike.
    Raises ValueError for a block size below 1, a negative limit, a seed that is no u64, an odd
    or negative `steady`.
    """
    state = checked_seed(seed)
    data = _checked_bytes(data)
    steady = _checked_steady(steady)
    depth = len(data) // _checked_block(block_bytes)
    blocks = min(blocks_in(depth, steady), _checked_limit(limit_blocks))
    hashes: list[int] = []
    start = 0
    while len(hashes) < blocks:
        size = block_bytes * width_of(len(hashes), steady)
        alike = blocks - len(hashes)
        if steady:
            over = len(hashes) - steady
            alike = min(alike, -over if over < 0 else steady // 2 - over % (steady // 2))
        part = data[start : start + size * min(alike, max(1, _BATCH_BYTES // size))]
        start += len(part)
        for value in _digests(part, size).tolist():
            state = step(state, value) or OFFSET
            hashes.append(state)
    return _chain(tuple(hashes), steady)


def hash_words(seed: int, data: bytes, block_words: int, limit_blocks: int = LIMIT_BLOCKS) -> Chain:
    r"""The chain over blocks of `block_words` words; any run of ASCII whitespace separates words.

    Whitespace is space, \t, \n, \r, \v and \f. The last, partial block does not count.
    Raises ValueError as `hash_bytes` does.
    """
    state = checked_seed(seed)
    data = _checked_bytes(data)
    limit = min(_checked_block(block_words) * _checked_limit(limit_blocks), len(data))
    words = data.split(None, limit)[:limit]
    hashes: list[int] = []
    for first in range(0, len(words) - len(words) % block_words, block_words):
        block = b" ".join(words[first : first + block_words])
        state = step(state, digest(block)) or OFFSET
        hashes.append(state)
    return _chain(tuple(hashes))


def _digests(data: bytes, block_bytes: int) -> _U64:
    """`digest` of every block of `data` (a whole number of blocks), all blocks at once."""
    blocks = len(data) // block_bytes
    words_count = -(-block_bytes // 8)
    padded = np.zeros((blocks, words_count * 8), dtype=np.uint8)
    padded[:, :block_bytes] = np.frombuffer(data, dtype=np.uint8).reshape(blocks, block_bytes)
    words = padded.view("<u8")
    lanes = np.empty((blocks, 4), dtype=np.uint64)
    lanes[:] = [(OFFSET + lane * GOLDEN) & MASK for lane in range(4)]
    for first in range(0, words_count, 4):
        group = words[:, first : first + 4]
        lanes[:, : group.shape[1]] = _steps(lanes[:, : group.shape[1]], group)
    state = np.full(blocks, block_bytes, dtype=np.uint64)
    for lane in range(4):
        state = _steps(state, lanes[:, lane])
    return state


def _steps(state: _U64, word: _U64) -> _U64:
    """`step` over arrays; numpy's u64 arithmetic on arrays wraps by itself."""
    state = (state ^ word) * np.uint64(PRIME)
    state ^= state >> np.uint64(32)
    state *= np.uint64(GOLDEN)
    return state ^ (state >> np.uint64(29))


def _checked_bytes(data: bytes) -> bytes:
    if not isinstance(data, bytes):
        raise TypeError(f"expected bytes, got {type(data).__name__}")
    return data


def _checked_block(size: int) -> int:
    if index(size) < 1:
        raise ValueError(f"a block holds at least 1, not {size}")
    return size


def _checked_steady(steady: int) -> int:
    if index(steady) < 0 or steady % 2:
        raise ValueError(f"steady must be even and not negative: {steady}")
    return steady


def _checked_limit(limit_blocks: int) -> int:
    if index(limit_blocks) < 0:
        raise ValueError(f"limit_blocks must not be negative: {limit_blocks}")
    return limit_blocks
