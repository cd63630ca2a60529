# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The compiled part: chains, the sharded index, the mirrors of the pods, NativePrefixRegistry;
sums and searches over the candidates; the columns of load.

The behaviour is that of hashing.py, index.py, registry.py and columns.py, which say what and why;
here is only how it is done fast, in little memory and without long pauses:

- A u64 is mixed with a secret of the process before any probing, so chosen hashes cannot be
  made to cluster. Of the mixed value the upper half picks the shard, the lower half the home.
- Tables are open-addressed with linear probing; home = (lower half * size) >> 32 lets them grow
  by a half instead of doubling. Deleting shifts back: there are no tombstones.
- The index has `shards` tables, each mirror 64, and nodes live in pages that never move: the
  longest step is rebuilding one shard.
- Forgetting a slot drops its mirror and marks its bit dead in every shard; a shard is cleaned
  when that slot next stores there, when it grows, or by `sweep`. Readers mask dead bits.
- A block that one slot holds keeps its number in place; only shared blocks have a bitmap.

No Python code runs while a table is being changed: every argument is converted first. Memory is
taken before anything is linked, so a MemoryError leaves a consistent registry.
"""

import array as arrays

from cpython cimport array
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from cpython.number cimport PyNumber_Index
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy, memset

cdef extern from *:
    """
    #include <string.h>
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    #define CALINIX_LITTLE(word) __builtin_bswap64(word)
    #else
    #define CALINIX_LITTLE(word) (word)
    #endif
    #define CALINIX_OFFSET 0xCBF29CE484222325ULL
    #define CALINIX_PRIME  0x00000100000001B3ULL
    #define CALINIX_GOLDEN 0x9E3779B97F4A7C15ULL
    #define CALINIX_MIX    0xD6E8FEB86659FD93ULL
    #if defined(__GNUC__) || defined(__clang__)
    #define CALINIX_PREFETCH(p) __builtin_prefetch(p)
    #define CALINIX_LOWEST(word) ((uint32_t)__builtin_ctzll(word))
    #else
    #define CALINIX_PREFETCH(p) ((void)(p))
    static uint32_t CALINIX_LOWEST(uint64_t word) {
        uint32_t place = 0;
        while (!(word & 1)) { word >>= 1; place++; }
        return place;
    }
    #endif
    /* The lanes of four blocks of `length` bytes, each a multiple of 32; 0: not on this CPU. */
    #if defined(__x86_64__) && defined(__GNUC__)
    typedef uint64_t calinix_lanes __attribute__((vector_size(32)));
    #define CALINIX_STEP(state, at) do { \
            calinix_lanes word; \
            memcpy(&word, at, 32); \
            state = (state ^ word) * CALINIX_PRIME; \
            state ^= state >> 32; \
            state *= CALINIX_GOLDEN; \
            state ^= state >> 29; \
        } while (0)
    __attribute__((target("avx512dq,avx512vl")))
    static void calinix_four_lanes(const uint8_t *at, size_t length, uint64_t *out) {
        const calinix_lanes first = {
            CALINIX_OFFSET, CALINIX_OFFSET + CALINIX_GOLDEN, CALINIX_OFFSET + 2 * CALINIX_GOLDEN,
            CALINIX_OFFSET + 3 * CALINIX_GOLDEN,
        };
        calinix_lanes a = first, b = first, c = first, d = first;
        for (const uint8_t *end = at + length; at < end; at += 32) {
            CALINIX_STEP(a, at);
            CALINIX_STEP(b, at + length);
            CALINIX_STEP(c, at + 2 * length);
            CALINIX_STEP(d, at + 3 * length);
        }
        memcpy(out, &a, 32);
        memcpy(out + 4, &b, 32);
        memcpy(out + 8, &c, 32);
        memcpy(out + 12, &d, 32);
    }
    static inline int calinix_four(const uint8_t *at, size_t length, uint64_t *out) {
        if (!__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) return 0;
        calinix_four_lanes(at, length, out);
        return 1;
    }
    #else
    #define calinix_four(at, length, out) 0
    #endif
    /* How many bytes from `at` on belong to a JSON string as they are: no quote, no backslash, no
       control character. Short runs are found a word at a time; behind those, windows that grow
       are searched by memchr and by a loop that compilers turn into vectors. */
    #define CALINIX_ONES 0x0101010101010101ULL
    #define CALINIX_TOPS 0x8080808080808080ULL
    static inline uint64_t calinix_special(uint64_t word) {
        /* The top bit of special bytes; above the lowest of them it may be wrong. */
        uint64_t quote = word ^ CALINIX_ONES * 34, slash = word ^ CALINIX_ONES * 92;
        return (((word - CALINIX_ONES * 32) & ~word) | ((quote - CALINIX_ONES) & ~quote)
                | ((slash - CALINIX_ONES) & ~slash)) & CALINIX_TOPS;
    }
    static inline size_t calinix_plain(const uint8_t *at, size_t length, uint8_t *high) {
        size_t i = 0;
        uint64_t word, all = 0;
        while (i + 8 <= length && i < 32) {
            memcpy(&word, at + i, 8);
            uint64_t special = calinix_special(CALINIX_LITTLE(word));
            all |= word;
            if (special) {
                *high |= (all & CALINIX_TOPS) ? 128 : 0;
                return i + CALINIX_LOWEST(special) / 8;
            }
            i += 8;
        }
        for (size_t window = 256; i < length; window *= 2) {
            size_t left = length - i < window ? length - i : window;
            const uint8_t *quote = memchr(at + i, 34, left);
            if (quote) left = quote - (at + i);
            const uint8_t *slash = memchr(at + i, 92, left);
            if (slash) left = slash - (at + i);
            uint8_t least = 255, group = 0;
            for (size_t k = 0; k < left; k++) {
                uint8_t byte = at[i + k];
                least = byte < least ? byte : least;
                group |= byte;
            }
            if (least < 32) break;
            *high |= group;
            i += left;
            if (quote || slash) break;
        }
        *high |= (all & CALINIX_TOPS) ? 128 : 0;
        while (i < length && at[i] >= 32 && at[i] != 34 && at[i] != 92) *high |= at[i++];
        return i;
    }
    /* The same, copying on the way; `to` has room for 8 bytes more. */
    static inline size_t calinix_copy(
        const uint8_t *at, size_t length, uint8_t *to, uint8_t *high
    ) {
        size_t i = 0;
        uint64_t word, all = 0;
        while (i + 8 <= length) {
            memcpy(&word, at + i, 8);
            memcpy(to + i, &word, 8);
            uint64_t special = calinix_special(CALINIX_LITTLE(word));
            all |= word;
            if (special) {
                i += CALINIX_LOWEST(special) / 8;
                break;
            }
            i += 8;
        }
        *high |= (all & CALINIX_TOPS) ? 128 : 0;
        while (i < length && at[i] >= 32 && at[i] != 34 && at[i] != 92) *high |= to[i] = at[i], i++;
        return i;
    }
    """
    int four_at_once "calinix_four"(
        const uint8_t *at, size_t length, uint64_t *out
    ) noexcept nogil
    size_t plain_run "calinix_plain"(
        const uint8_t *at, size_t length, uint8_t *high
    ) noexcept nogil
    size_t copy_run "calinix_copy"(
        const uint8_t *at, size_t length, uint8_t *to, uint8_t *high
    ) noexcept nogil
    const uint64_t OFFSET "CALINIX_OFFSET"
    const uint64_t PRIME "CALINIX_PRIME"
    const uint64_t GOLDEN "CALINIX_GOLDEN"
    const uint64_t MIX "CALINIX_MIX"
    uint64_t little "CALINIX_LITTLE"(uint64_t word) noexcept nogil
    void prefetch "CALINIX_PREFETCH"(const void *address) noexcept nogil
    uint32_t lowest_bit "CALINIX_LOWEST"(uint64_t word) noexcept nogil  # of a word that is not 0

cdef extern from "Python.h":
    # With NULL a number too large for Py_ssize_t is clipped, not refused.
    Py_ssize_t PyNumber_AsSsize_t(object value, void *error) except? -1
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL
    Py_ssize_t Py_SIZE(object values) noexcept

cdef enum:
    WORD_BITS = 64
    PAGE_SHIFT = 10
    PAGE_ITEMS = 1 << 10
    SUBS = 64
    PREFETCH_AHEAD = 6
    MAX_SLOTS = 4096
    MAX_SHARDS = 65536
    MAX_CAPACITY = 0x7FFFFFFF
    MAX_COPIES = 0xFFFF
    EVICTIONS_PER_BLOCK = 4
    EVICTIONS_AT_ONCE = 4096
    LIMIT_BLOCKS = 1 << 20
    FRAMES = 66  # a binary search over at most 2**63 blocks never keeps more ranges open
    SPECULATIVE = 1
    HIDDEN = 2

cdef enum Use:
    ROUTED
    CONFIRMED
    STORED


# ---- Chains ------------------------------------------------------------------------------------

cdef inline uint64_t step(uint64_t state, uint64_t word) noexcept nogil:
    state = (state ^ word) * PRIME
    state ^= state >> 32
    state *= GOLDEN
    return state ^ (state >> 29)


cdef inline uint64_t load(const uint8_t *at) noexcept nogil:
    # Little-endian on every platform; compilers make one load of it.
    return (
        <uint64_t>at[0] | <uint64_t>at[1] << 8 | <uint64_t>at[2] << 16 | <uint64_t>at[3] << 24
        | <uint64_t>at[4] << 32 | <uint64_t>at[5] << 40 | <uint64_t>at[6] << 48
        | <uint64_t>at[7] << 56
    )


cdef inline uint64_t load_part(const uint8_t *at, size_t count) noexcept nogil:
    cdef uint64_t word = 0
    cdef size_t i
    for i in range(count if count < 8 else 8):
        word |= <uint64_t>at[i] << (8 * i)
    return word


cdef inline uint64_t digest(const uint8_t *data, size_t length) noexcept nogil:
    cdef uint64_t a = OFFSET
    cdef uint64_t b = OFFSET + GOLDEN
    cdef uint64_t c = OFFSET + 2 * GOLDEN
    cdef uint64_t d = OFFSET + 3 * GOLDEN
    cdef size_t left = length
    while left >= 32:
        a = step(a, load(data))
        b = step(b, load(data + 8))
        c = step(c, load(data + 16))
        d = step(d, load(data + 24))
        data += 32
        left -= 32
    if left > 0:
        a = step(a, load_part(data, left))
    if left > 8:
        b = step(b, load_part(data + 8, left - 8))
    if left > 16:
        c = step(c, load_part(data + 16, left - 16))
    if left > 24:
        d = step(d, load_part(data + 24, left - 24))
    return step(step(step(step(length, a), b), c), d)


cdef void digest_four(const uint8_t *data, size_t length, uint64_t *out) noexcept nogil:
    """`digest` of four blocks that follow one another, of a whole number of words for each lane.

    Lanes side by side in vectors, where the processor multiplies those: half the time.
    """
    cdef uint64_t lanes[16]
    cdef int i
    if length % 32 or not four_at_once(data, length, lanes):
        for i in range(4):
            out[i] = digest(data + i * length, length)
        return
    for i in range(4):
        out[i] = step(
            step(step(step(length, lanes[4 * i]), lanes[4 * i + 1]), lanes[4 * i + 2]),
            lanes[4 * i + 3],
        )


cdef inline uint64_t advance(uint64_t state, uint64_t word) noexcept nogil:
    state = step(state, word)
    return state if state != 0 else OFFSET


cdef uint64_t checked_u64(object value) except? 0:
    cdef object number = PyNumber_Index(value)
    try:
        return <uint64_t>number
    except OverflowError:
        raise ValueError(f"not an unsigned 64-bit number: {number}") from None


cdef uint64_t checked_hash(object value) except 0:
    cdef uint64_t number = checked_u64(value)
    if number == 0:
        raise ValueError("not a chain hash: 0")
    return number


cdef Py_ssize_t checked_block(object size) except -1:
    cdef Py_ssize_t number = PyNumber_AsSsize_t(size, NULL)
    if number < 1:
        raise ValueError(f"a block holds at least 1, not {size}")
    return number


cdef Py_ssize_t checked_steady(object steady) except -1:
    cdef Py_ssize_t number = PyNumber_AsSsize_t(steady, NULL)
    if number < 0 or number % 2:
        raise ValueError(f"steady must be even and not negative: {steady}")
    return number


cdef Py_ssize_t checked_limit(object limit_blocks) except -1:
    cdef Py_ssize_t number = PyNumber_AsSsize_t(limit_blocks, NULL)
    if number < 0:
        raise ValueError(f"limit_blocks must not be negative: {limit_blocks}")
    return number


cdef class Chain:
    """An immutable sequence of chain hashes, one per full block: u64, never 0."""

    cdef uint64_t *hashes
    cdef Py_ssize_t count
    cdef readonly Py_ssize_t steady

    def __dealloc__(self):
        PyMem_RawFree(self.hashes)

    @staticmethod
    def of(hashes, steady=0):
        """The chain of these hashes. Raises ValueError for 0 and for what is no u64."""
        cdef list values = list(hashes)
        cdef Chain chain = new_chain(len(values))
        cdef Py_ssize_t i = 0
        chain.steady = checked_steady(steady)
        for value in values:
            chain.hashes[i] = checked_hash(value)
            i += 1
        chain.count = i
        return chain

    def __len__(self):
        return self.count

    def __getitem__(self, position):
        cdef Py_ssize_t at = PyNumber_AsSsize_t(position, NULL)
        if at < 0:
            at += self.count
        if not 0 <= at < self.count:
            raise IndexError("chain index out of range")
        return self.hashes[at]

    def __iter__(self):
        cdef Py_ssize_t i
        for i in range(self.count):
            yield self.hashes[i]

    def __eq__(self, other):
        if not isinstance(other, Chain):
            return NotImplemented
        cdef Chain chain = other
        cdef Py_ssize_t i
        if self.count != chain.count or self.steady != chain.steady:
            return False
        for i in range(self.count):
            if self.hashes[i] != chain.hashes[i]:
                return False
        return True

    def __hash__(self):
        return hash((self.count, self.hashes[self.count - 1] if self.count else 0))

    def __repr__(self):
        last = f", last {self.hashes[self.count - 1]:016x}" if self.count else ""
        return f"Chain({self.count} blocks{last})"

    def packed(self):
        """The hashes as little-endian u64."""
        cdef bytes data = PyBytes_FromStringAndSize(NULL, self.count * 8)
        cdef char *to = PyBytes_AS_STRING(data)
        cdef uint64_t word
        cdef Py_ssize_t i
        for i in range(self.count):
            word = little(self.hashes[i])
            memcpy(to + 8 * i, &word, 8)
        return data

    @staticmethod
    def unpacked(bytes data not None, Py_ssize_t at, Py_ssize_t count, steady=0):
        """The chain of `count` hashes that `packed` put at `at`. Raises ValueError."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        if at < 0 or count < 0 or at > size or count > (size - at) // 8:
            raise ValueError(f"no {count} hashes at {at} of {size} bytes")
        cdef Chain chain = new_chain(count)
        cdef const uint8_t *source = <const uint8_t *>PyBytes_AS_STRING(data) + at
        cdef Py_ssize_t i
        chain.steady = checked_steady(steady)
        for i in range(count):
            chain.hashes[i] = load(source + 8 * i)
            if chain.hashes[i] == 0:
                raise ValueError("not a chain hash: 0")
        chain.count = count
        return chain

    def head(self, blocks):
        """The chain of the first `blocks` blocks (all of it when it is no longer than that)."""
        cdef Py_ssize_t count = PyNumber_AsSsize_t(blocks, NULL)
        if count >= self.count:
            return self
        cdef Chain chain = new_chain(count if count > 0 else 0)
        chain.count = count if count > 0 else 0
        chain.steady = self.steady
        memcpy(chain.hashes, self.hashes, chain.count * sizeof(uint64_t))
        return chain

    def depth(self, blocks=None):
        """What the first `blocks` blocks (by default all) cover, in widths."""
        return depth_of(
            self.count if blocks is None else PyNumber_AsSsize_t(blocks, NULL), self.steady
        )


cdef inline int level_of(Py_ssize_t position, Py_ssize_t steady) noexcept nogil:
    """The width of the block at `position` is two to this."""
    if steady == 0 or position < steady:
        return 0
    return 1 + <int>((position - steady) // (steady // 2))


cdef inline Py_ssize_t depth_of(Py_ssize_t blocks, Py_ssize_t steady) noexcept nogil:
    """The widths of that many leading blocks, together."""
    cdef Py_ssize_t over = blocks - steady, half = steady // 2
    if steady == 0 or over <= 0:
        return blocks
    return (steady << (over // half)) + (over % half * 2 << (over // half))


cdef inline Py_ssize_t blocks_in(Py_ssize_t depth, Py_ssize_t steady) noexcept nogil:
    """How many leading blocks fit into that many widths."""
    cdef int level = 0
    if steady == 0 or depth <= steady:
        return depth
    while (depth >> (level + 1)) >= steady:
        level += 1
    return steady + level * (steady // 2) + ((depth - (steady << level)) >> (level + 1))


cdef Chain new_chain(Py_ssize_t room):
    """An empty chain with memory for `room` hashes; its maker fills it and sets the count."""
    cdef Chain chain = Chain.__new__(Chain)
    if <size_t>room > <size_t>-1 // 16:
        raise MemoryError
    chain.hashes = <uint64_t *>PyMem_RawMalloc(room * sizeof(uint64_t))
    if chain.hashes == NULL:
        raise MemoryError
    return chain


def seed_of(bytes namespace not None):
    """The first state of every chain in this namespace (u64, never 0)."""
    return advance(
        OFFSET,
        digest(<const uint8_t *>PyBytes_AS_STRING(namespace), PyBytes_GET_SIZE(namespace)),
    )


def hash_bytes(
    seed, bytes data not None, block_bytes, limit_blocks=LIMIT_BLOCKS, steady=0
):
    """The chain over the full blocks of `data`; see `calinix.core.hashing.hash_bytes`."""
    cdef uint64_t state = checked_u64(seed)
    cdef Py_ssize_t alike = checked_steady(steady)
    cdef Py_ssize_t size = checked_block(block_bytes)
    cdef Py_ssize_t limit = checked_limit(limit_blocks)
    cdef Py_ssize_t blocks = min(blocks_in(PyBytes_GET_SIZE(data) // size, alike), limit)
    cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(data)
    cdef Chain chain = new_chain(blocks)
    cdef uint64_t *hashes = chain.hashes
    cdef Py_ssize_t i = 0, k, count, grows = alike if alike else blocks
    cdef uint64_t four[4]
    while i < blocks:
        if i == grows:
            size *= 2
            grows += alike // 2
        count = min(grows, blocks) - i
        if count >= 4:
            count = 4
            digest_four(at, size, four)
        else:
            count = 1
            four[0] = digest(at, size)
        for k in range(count):
            state = hashes[i + k] = advance(state, four[k])
        at += count * size
        i += count
    chain.count = blocks
    chain.steady = alike
    return chain


cdef inline bint is_space(uint8_t byte) noexcept nogil:
    return byte == 32 or 9 <= byte <= 13


def hash_words(seed, bytes data not None, block_words, limit_blocks=LIMIT_BLOCKS):
    """The chain over blocks of whitespace words; see `calinix.core.hashing.hash_words`."""
    cdef uint64_t state = checked_u64(seed)
    cdef Py_ssize_t block = checked_block(block_words)
    cdef Py_ssize_t length = PyBytes_GET_SIZE(data)
    cdef Py_ssize_t limit = min(checked_limit(limit_blocks), (length + 1) // 2 // block)
    cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(data)
    cdef Chain chain = new_chain(limit)
    # Holds the words of one block, joined by single spaces; pages never reached cost nothing.
    cdef uint8_t *joined = <uint8_t *>PyMem_RawMalloc(length + 1)
    cdef Py_ssize_t used = 0, words = 0, i
    cdef bint inside = False
    if joined == NULL:
        raise MemoryError
    for i in range(length + 1):
        if chain.count == limit:
            break
        if i < length and not is_space(at[i]):
            if not inside and words > 0:
                joined[used] = 32
                used += 1
            inside = True
            joined[used] = at[i]
            used += 1
        elif inside:
            inside = False
            words += 1
            if words == block:
                state = advance(state, digest(joined, used))
                chain.hashes[chain.count] = state
                chain.count += 1
                words = used = 0
    PyMem_RawFree(joined)
    return chain


# ---- Tables: what the index and the mirrors share ------------------------------------------------

cdef struct Table:
    # Lines of eight cells, each line followed by the eight payloads of its cells (`words` u64
    # each; the mirrors have none). A cell's home is a line; when that is full it goes into the
    # next that is not. 0 is an empty cell, and the used cells of a line come first.
    uint64_t *cells
    void *memory
    uint32_t lines
    uint32_t used


cdef struct Place:
    uint64_t *line
    uint32_t number
    int cell  # -1: not found
    int used  # of the line, then


cdef inline uint64_t mixed(uint64_t block, uint64_t secret) noexcept nogil:
    block = (block ^ secret) * GOLDEN
    block ^= block >> 32
    block *= MIX
    block ^= block >> 32
    # One block of 2**64 would be the empty cell; it shares the cell of another one.
    return block if block != 0 else 1


cdef inline uint32_t home_of(uint64_t cell, uint32_t lines) noexcept nogil:
    return <uint32_t>((<uint64_t><uint32_t>cell * lines) >> 32)


cdef inline uint64_t *line_of(Table *table, uint32_t number, uint32_t words) noexcept nogil:
    return table.cells + <size_t>number * (8 * (1 + words))


cdef inline uint64_t *payload(Place place, uint32_t words) noexcept nogil:
    return place.line + 8 + place.cell * words


cdef inline int scan(
    const uint64_t *line, uint64_t cell, uint64_t mask, int *found
) noexcept nogil:
    """How many cells of a line are used; `found`: which is `cell` as far as `mask` goes, or 8.

    All eight are looked at without a branch: how many there are cannot be predicted.
    """
    cdef int i, used = 0, at = 8
    for i in range(8):
        used += line[i] != 0
        at = i if line[i] & mask == cell else at
    found[0] = at
    return used


cdef inline void look_up(Table *table, uint64_t cell, uint32_t words, Place *place) noexcept nogil:
    """Where a cell is that is likely to be there."""
    cdef int i
    place.cell = -1
    place.line = table.cells
    place.number = 0
    if table.used == 0:
        return
    place.number = home_of(cell, table.lines)
    while True:
        place.line = line_of(table, place.number, words)
        for i in range(8):
            if place.line[i] == cell:
                place.cell = i
                return
            if place.line[i] == 0:
                return
        place.number += 1
        if place.number == table.lines:
            place.number = 0


cdef inline void look_for_room(
    Table *table, uint64_t cell, uint32_t words, Place *place
) noexcept nogil:
    """Where a cell is that is not likely to be there, or where it is to go; there is room."""
    place.number = home_of(cell, table.lines)
    while True:
        place.line = line_of(table, place.number, words)
        place.used = scan(place.line, cell, ~<uint64_t>0, &place.cell)
        if place.cell < 8:
            return
        if place.used < 8:
            place.cell = -1
            return
        place.number += 1
        if place.number == table.lines:
            place.number = 0


cdef inline void put_there(Table *table, uint64_t cell, Place *place) noexcept nogil:
    """Puts a cell where it is to go."""
    place.line[place.used] = cell
    place.cell = place.used
    table.used += 1


cdef inline void put(Table *table, uint64_t cell, uint32_t words, Place *place) noexcept nogil:
    """Puts a cell that is not in the table where it belongs; there is room."""
    look_for_room(table, cell, words, place)
    put_there(table, cell, place)


cdef inline bint passed_over(uint32_t hole, uint32_t at, uint32_t home) noexcept nogil:
    # Whether a cell in line `at` with this home was put there because `hole` was full.
    if hole <= at:
        return not hole < home <= at
    return at < home <= hole


cdef inline void take_out(Table *table, Place place, uint32_t words) noexcept nogil:
    """Empties a cell; what had to pass over its line may come back: no tombstones."""
    cdef uint64_t *hole
    cdef uint32_t hole_number
    cdef int last, i
    table.used -= 1
    while True:
        hole = place.line
        hole_number = place.number
        last = 7
        while hole[last] == 0:
            last -= 1
        if place.cell != last:
            hole[place.cell] = hole[last]
            memcpy(payload(place, words), hole + 8 + last * words, words * sizeof(uint64_t))
        hole[last] = 0
        if last != 7:
            return
        while True:
            place.number += 1
            if place.number == table.lines:
                place.number = 0
            place.line = line_of(table, place.number, words)
            place.cell = -1
            for i in range(8):
                if place.line[i] == 0:
                    return
                if passed_over(
                    hole_number, place.number, home_of(place.line[i], table.lines)
                ):
                    place.cell = i
                    break
            if place.cell >= 0:
                break
        hole[7] = place.line[place.cell]
        memcpy(hole + 8 + 7 * words, payload(place, words), words * sizeof(uint64_t))


cdef inline bint is_full(Table *table) noexcept nogil:
    # 85 %, and at least one line that is not full ends every search.
    return <uint64_t>(table.used + 1) * 20 > <uint64_t>table.lines * (8 * 17)


cdef int make_table(Table *table, uint32_t used, uint32_t words) except -1:
    """An empty table for `used` cells, which grows by a half: every cell is moved twice in all."""
    cdef size_t lines = (<size_t>used * 30 + (8 * 17 - 1)) // (8 * 17) + 2
    cdef size_t size = lines * (8 * (1 + words)) * sizeof(uint64_t)
    # Lines start where cache lines do.
    cdef uint32_t n
    table.memory = PyMem_RawMalloc(size + 63)
    if table.memory == NULL:
        raise MemoryError
    table.cells = <uint64_t *>((<size_t>table.memory + 63) & ~<size_t>63)
    table.lines = <uint32_t>lines
    table.used = 0
    for n in range(table.lines):
        memset(line_of(table, n, words), 0, 8 * sizeof(uint64_t))
    return 0


# ---- Arenas: items that never move -------------------------------------------------------------

cdef struct Arena:
    # Items are numbered from 1; number 0 is there too, for the owner's own use.
    char **pages
    uint32_t pages_count
    uint32_t pages_room
    uint32_t fresh  # this item and those behind it were never used
    uint32_t free  # first of the freed items; each holds the number of the next


cdef inline char *item_of(Arena *arena, uint32_t number, size_t item_bytes) noexcept nogil:
    return arena.pages[number >> PAGE_SHIFT] + (number & (PAGE_ITEMS - 1)) * item_bytes


cdef inline bint has_room(Arena *arena) noexcept nogil:
    return arena.free != 0 or arena.fresh >> PAGE_SHIFT < arena.pages_count


cdef int add_page(Arena *arena, size_t item_bytes) except -1:
    cdef uint32_t room = arena.pages_room * 2 if arena.pages_room else 4
    cdef char **pages
    if arena.pages_count == arena.pages_room:
        pages = <char **>PyMem_RawRealloc(arena.pages, <size_t>room * sizeof(char *))
        if pages == NULL:
            raise MemoryError
        arena.pages = pages
        arena.pages_room = room
    arena.pages[arena.pages_count] = <char *>PyMem_RawMalloc(PAGE_ITEMS * item_bytes)
    if arena.pages[arena.pages_count] == NULL:
        raise MemoryError
    arena.pages_count += 1
    if arena.pages_count == 1:
        memset(arena.pages[0], 0, item_bytes)
        arena.fresh = 1
    return 0


cdef inline uint32_t take_item(Arena *arena, size_t item_bytes) noexcept nogil:
    """A zeroed item; there is room."""
    cdef uint32_t number = arena.free
    cdef char *item
    if number == 0:
        number = arena.fresh
        arena.fresh += 1
        item = item_of(arena, number, item_bytes)
    else:
        item = item_of(arena, number, item_bytes)
        arena.free = (<uint32_t *>item)[0]
    memset(item, 0, item_bytes)
    return number


cdef inline void give_item(Arena *arena, uint32_t number, size_t item_bytes) noexcept nogil:
    (<uint32_t *>item_of(arena, number, item_bytes))[0] = arena.free
    arena.free = number


cdef void drop_items(Arena *arena, uint32_t pages_kept, size_t item_bytes) noexcept nogil:
    """Forgets all items and frees all pages but the first `pages_kept`."""
    while arena.pages_count > pages_kept:
        arena.pages_count -= 1
        PyMem_RawFree(arena.pages[arena.pages_count])
    if arena.pages_count == 0:
        PyMem_RawFree(arena.pages)
        arena.pages = NULL
        arena.pages_room = 0
    else:
        memset(arena.pages[0], 0, item_bytes)
    arena.fresh = 1
    arena.free = 0


# ---- Index ---------------------------------------------------------------------------------------

cdef struct Index:
    # Cells are mixed blocks. A payload with its lowest bit set is the one slot that holds the
    # block, as most blocks have, times 2; else it is the number of a bitmap times 2; 0: no slot.
    Table *shards
    uint64_t *dead  # per shard one bitmap: slots to be taken as not holding anything there
    uint8_t *dirty  # per shard, whether some are
    Arena bitmaps
    uint64_t *lone  # a bitmap of one slot, for readers
    uint32_t lone_slot
    uint32_t count
    uint32_t words
    uint32_t dirty_count
    uint32_t cursor
    uint64_t secret


cdef inline uint32_t shard_of(Index *index, uint64_t mix) noexcept nogil:
    return <uint32_t>(((mix >> 32) * index.count) >> 32)


cdef inline uint64_t *bitmap_of(Index *index, uint64_t held) noexcept nogil:
    cdef size_t size = index.words * sizeof(uint64_t)
    return <uint64_t *>item_of(&index.bitmaps, <uint32_t>(held >> 1), size)


cdef inline uint64_t *dead_of(Index *index, uint32_t number) noexcept nogil:
    return index.dead + <size_t>number * index.words


cdef inline bint bit(const uint64_t *bits, uint32_t slot) noexcept nogil:
    return (bits[slot // WORD_BITS] >> (slot % WORD_BITS)) & 1


cdef inline void set_bit(uint64_t *bits, uint32_t slot) noexcept nogil:
    bits[slot // WORD_BITS] |= <uint64_t>1 << (slot % WORD_BITS)


cdef inline void clear_bit(uint64_t *bits, uint32_t slot) noexcept nogil:
    bits[slot // WORD_BITS] &= ~(<uint64_t>1 << (slot % WORD_BITS))


cdef inline bint shows(Index *index, uint64_t block, uint32_t slot) noexcept nogil:
    cdef uint64_t mix = mixed(block, index.secret)
    cdef uint32_t number = shard_of(index, mix)
    cdef Place place
    cdef uint64_t held
    look_up(&index.shards[number], mix, 1, &place)
    if place.cell < 0 or bit(dead_of(index, number), slot):
        return False
    held = payload(place, 1)[0]
    return held >> 1 == slot if held & 1 else bit(bitmap_of(index, held), slot)


cdef inline const uint64_t *holders_of(Index *index, uint64_t mix) noexcept nogil:
    """The bitmap of a block, dead bits included, until the next call; NULL: no slot holds it."""
    cdef Place place
    cdef uint64_t held
    look_up(&index.shards[shard_of(index, mix)], mix, 1, &place)
    if place.cell < 0:
        return NULL
    held = payload(place, 1)[0]
    if not held & 1:
        return bitmap_of(index, held)
    clear_bit(index.lone, index.lone_slot)
    index.lone_slot = <uint32_t>(held >> 1)
    set_bit(index.lone, index.lone_slot)
    return index.lone


cdef inline uint64_t narrowed(Index *index, uint64_t held) noexcept nogil:
    """Gives a bitmap back that is down to one slot, or none; returns what is to stand instead."""
    cdef uint64_t *bits = bitmap_of(index, held)
    cdef uint64_t lone = 0
    cdef uint32_t w
    for w in range(index.words):
        if bits[w]:
            if lone or bits[w] & (bits[w] - 1):
                return held
            lone = <uint64_t>(w * WORD_BITS + lowest_bit(bits[w])) << 1 | 1
    give_item(&index.bitmaps, <uint32_t>(held >> 1), index.words * sizeof(uint64_t))
    return lone


cdef void bury(Index *index, uint32_t number) noexcept nogil:
    """Takes the dead slots out of what a shard holds; a block may be left without a slot."""
    cdef Table *shard = &index.shards[number]
    cdef uint64_t *dead = dead_of(index, number)
    cdef uint64_t *bits
    cdef uint64_t *held
    cdef uint32_t n, w
    cdef int i
    for n in range(shard.lines):
        for i in range(8):
            held = line_of(shard, n, 1) + 8 + i
            if line_of(shard, n, 1)[i] == 0 or held[0] == 0:
                continue
            if held[0] & 1:
                if bit(dead, <uint32_t>(held[0] >> 1)):
                    held[0] = 0
                continue
            bits = bitmap_of(index, held[0])
            for w in range(index.words):
                bits[w] &= ~dead[w]
            held[0] = narrowed(index, held[0])
    index.dirty[number] = 0
    index.dirty_count -= 1
    memset(dead, 0, index.words * sizeof(uint64_t))


cdef int rebuild(Index *index, uint32_t number) except -1:
    """Moves what a shard holds into a table that fits, with room for one more."""
    cdef Table *shard = &index.shards[number]
    cdef Table table
    cdef uint32_t live = 0, n
    cdef uint64_t *line
    cdef Place place
    cdef int i
    if index.dirty[number]:
        bury(index, number)
    for n in range(shard.lines):
        line = line_of(shard, n, 1)
        for i in range(8):
            live += line[i] != 0 and line[8 + i] != 0
    make_table(&table, live + 1, 1)
    for n in range(shard.lines):
        line = line_of(shard, n, 1)
        for i in range(8):
            if line[i] != 0 and line[8 + i] != 0:
                put(&table, line[i], 1, &place)
                payload(place, 1)[0] = line[8 + i]
    PyMem_RawFree(shard.memory)
    shard[0] = table
    return 0


cdef inline int reserve(Index *index, uint64_t mix, uint32_t slot) except -1:
    """Makes sure that `add` of this block and slot needs no memory and meets no dead bit."""
    cdef uint32_t number = shard_of(index, mix)
    if is_full(&index.shards[number]) or bit(dead_of(index, number), slot):
        rebuild(index, number)
    if not has_room(&index.bitmaps):
        add_page(&index.bitmaps, index.words * sizeof(uint64_t))
    return 0


cdef inline void add(Index *index, uint64_t mix, uint32_t slot) noexcept nogil:
    """`slot` holds the block from now on; `reserve` has made room."""
    cdef Table *shard = &index.shards[shard_of(index, mix)]
    cdef uint64_t lone = <uint64_t>slot << 1 | 1
    cdef Place place
    cdef uint64_t *held
    cdef uint64_t before
    look_for_room(shard, mix, 1, &place)
    if place.cell < 0:
        put_there(shard, mix, &place)
        payload(place, 1)[0] = lone
        return
    held = payload(place, 1)
    before = held[0]
    if before == 0 or before == lone:
        held[0] = lone
        return
    if before & 1:
        held[0] = <uint64_t>take_item(&index.bitmaps, index.words * sizeof(uint64_t)) << 1
        set_bit(bitmap_of(index, held[0]), <uint32_t>(before >> 1))
    set_bit(bitmap_of(index, held[0]), slot)


cdef void discard(Index *index, uint64_t mix, uint32_t slot) noexcept nogil:
    """`slot` does not hold the block any more; one that no slot holds leaves the index."""
    cdef Table *shard = &index.shards[shard_of(index, mix)]
    cdef Place place
    cdef uint64_t *held
    look_up(shard, mix, 1, &place)
    if place.cell < 0:
        return
    held = payload(place, 1)
    if held[0] & 1:
        if held[0] >> 1 != slot:
            return
        held[0] = 0
    elif held[0] != 0:
        clear_bit(bitmap_of(index, held[0]), slot)
        held[0] = narrowed(index, held[0])
    if held[0] == 0:
        take_out(shard, place, 1)


cdef void forget(Index *index, uint32_t slot) noexcept nogil:
    """Marks the slot dead in every shard."""
    cdef uint32_t number
    for number in range(index.count):
        if index.shards[number].used == 0:
            continue
        set_bit(dead_of(index, number), slot)
        index.dirty_count += not index.dirty[number]
        index.dirty[number] = 1


cdef struct Range:
    Py_ssize_t low
    Py_ssize_t high


cdef inline bint next_group(
    Index *index, const uint64_t *chain, Range *ranges, uint64_t *sets, int *open_count
) noexcept nogil:
    """Splits the open range on top until it is one depth; False when no range is left.

    `ranges[n]` and the bitmap `sets[n * words:]` are a stack of `open_count` open ranges. The
    group found is left right above the top: its depth in `low`. The probes are those of
    `ShardedIndex.match`.
    """
    cdef uint32_t words = index.words, w
    cdef Range *top
    cdef uint64_t *stay
    cdef uint64_t *move
    cdef const uint64_t *bits
    cdef const uint64_t *dead
    cdef uint64_t mix, holders, some_move, some_stay
    cdef Py_ssize_t middle
    while open_count[0] > 0:
        top = &ranges[open_count[0] - 1]
        if top.low == top.high:
            open_count[0] -= 1
            return True
        middle = (top.low + top.high + 1) // 2
        mix = mixed(chain[middle - 1], index.secret)
        bits = holders_of(index, mix)
        if bits == NULL:
            top.high = middle - 1
            continue
        dead = dead_of(index, shard_of(index, mix))
        stay = sets + <size_t>(open_count[0] - 1) * words
        move = stay + words
        some_move = some_stay = 0
        for w in range(words):
            holders = stay[w] & bits[w] & ~dead[w]
            move[w] = holders
            stay[w] &= ~holders
            some_move |= holders
            some_stay |= stay[w]
        if some_move == 0:
            top.high = middle - 1
        elif some_stay == 0:
            memcpy(stay, move, words * sizeof(uint64_t))
            top.low = middle
        else:
            ranges[open_count[0]].low = middle
            ranges[open_count[0]].high = top.high
            top.high = middle - 1
            open_count[0] += 1
    return False


# ---- Mirror: one pod's cache -------------------------------------------------------------------

cdef struct Node:
    # Number 0 is no block: in the tree it means none, in the LRU list it closes the ring.
    uint64_t block
    uint32_t ahead
    uint32_t behind
    uint32_t parent
    uint32_t child
    uint32_t next
    uint32_t previous
    uint32_t ticket
    uint16_t copies
    uint8_t flags
    uint8_t level  # the width is two to this


cdef struct Mirror:
    Arena nodes
    uint32_t count
    uint32_t capacity
    uint64_t held  # the widths of its blocks
    Table tables[SUBS]  # cells: node << 32 | lower half of the mixed block


cdef inline Node *node_of(Mirror *pod, uint32_t number) noexcept nogil:
    return &(<Node *>pod.nodes.pages[number >> PAGE_SHIFT])[number & (PAGE_ITEMS - 1)]


cdef void empty_mirror(Mirror *pod, uint32_t pages_kept) noexcept nogil:
    """Drops all blocks and all pages of nodes but the first `pages_kept`."""
    cdef int i
    for i in range(SUBS):
        PyMem_RawFree(pod.tables[i].memory)
    memset(pod.tables, 0, sizeof(pod.tables))
    drop_items(&pod.nodes, pages_kept, sizeof(Node))
    pod.count = 0
    pod.held = 0


cdef void free_mirror(Mirror *pod) noexcept nogil:
    if pod != NULL:
        empty_mirror(pod, 0)
        PyMem_RawFree(pod)


cdef Mirror *new_mirror(uint32_t capacity) except NULL:
    cdef Mirror *pod = <Mirror *>PyMem_RawCalloc(1, sizeof(Mirror))
    if pod == NULL:
        raise MemoryError
    pod.capacity = capacity
    try:
        add_page(&pod.nodes, sizeof(Node))
    except MemoryError:
        free_mirror(pod)
        raise
    return pod


cdef inline Table *table_of(Mirror *pod, uint64_t mix) noexcept nogil:
    return &pod.tables[mix >> 58]


cdef inline uint64_t cell_of(uint32_t number, uint64_t mix) noexcept nogil:
    return <uint64_t>number << 32 | <uint32_t>mix


cdef inline uint32_t find(Mirror *pod, uint64_t block, uint64_t mix, Place *place) noexcept nogil:
    """The node of a block; 0 when the slot does not hold it, and `place` is where it would go."""
    cdef Table *table = table_of(pod, mix)
    cdef uint64_t tag = <uint32_t>mix
    cdef int i
    place.line = NULL
    place.used = 0
    if table.lines == 0:
        return 0
    place.number = home_of(mix, table.lines)
    while True:
        place.line = line_of(table, place.number, 0)
        place.used = scan(place.line, tag, 0xFFFFFFFF, &place.cell)
        if place.cell < 8:
            # Two blocks may have the same lower half; so may an empty cell.
            for i in range(place.used):
                if (
                    <uint32_t>place.line[i] == tag
                    and node_of(pod, <uint32_t>(place.line[i] >> 32)).block == block
                ):
                    place.cell = i
                    return <uint32_t>(place.line[i] >> 32)
        if place.used < 8:
            return 0
        place.number += 1
        if place.number == table.lines:
            place.number = 0


cdef int grow(Table *table) except -1:
    cdef Table larger
    cdef Place place
    cdef uint32_t n
    cdef int i
    make_table(&larger, table.used + 1, 0)
    for n in range(table.lines):
        for i in range(8):
            if line_of(table, n, 0)[i] != 0:
                put(&larger, line_of(table, n, 0)[i], 0, &place)
    PyMem_RawFree(table.memory)
    table[0] = larger
    return 0


cdef inline uint32_t new_node(
    Mirror *pod, uint64_t block, uint64_t mix, int level, Place *place
) except 0:
    """A node for a block that the slot does not hold: in the table, in no list and no tree.

    `place` is what `find` left, or has no line when the table was changed since.
    """
    cdef Table *table = table_of(pod, mix)
    cdef uint32_t number
    if not has_room(&pod.nodes):
        add_page(&pod.nodes, sizeof(Node))
    if is_full(table):
        grow(table)
        place.line = NULL
    number = take_item(&pod.nodes, sizeof(Node))
    node_of(pod, number).block = block
    node_of(pod, number).level = <uint8_t>level
    if place.line == NULL:
        put(table, cell_of(number, mix), 0, place)
    else:
        put_there(table, cell_of(number, mix), place)
    pod.count += 1
    pod.held += <uint64_t>1 << level
    return number


cdef void free_node(Mirror *pod, uint32_t number, uint64_t mix) noexcept nogil:
    """Takes a node that is in no list and no tree out of the table."""
    cdef Place place
    look_up(table_of(pod, mix), cell_of(number, mix), 0, &place)
    take_out(table_of(pod, mix), place, 0)
    pod.count -= 1
    pod.held -= <uint64_t>1 << node_of(pod, number).level
    give_item(&pod.nodes, number, sizeof(Node))


cdef inline void unlink(Mirror *pod, uint32_t number) noexcept nogil:
    cdef Node *node = node_of(pod, number)
    node_of(pod, node.ahead).behind = node.behind
    node_of(pod, node.behind).ahead = node.ahead


cdef inline void orphan(Mirror *pod, uint32_t number) noexcept nogil:
    """Out of the tree, from under its parent."""
    cdef Node *node = node_of(pod, number)
    if node.parent == 0:
        return
    if node.previous:
        node_of(pod, node.previous).next = node.next
    else:
        node_of(pod, node.parent).child = node.next
    if node.next:
        node_of(pod, node.next).previous = node.previous
    node.parent = node.next = node.previous = 0


cdef inline void mark(Node *node, bint new, Use use, uint32_t ticket) noexcept nogil:
    """What a use says of a block."""
    if use == ROUTED:
        if new:
            node.flags |= SPECULATIVE
        if node.flags & SPECULATIVE:
            node.ticket = ticket
        return
    node.flags &= ~SPECULATIVE
    if use == STORED and node.copies < MAX_COPIES:
        node.copies += 1


cdef void touch(Mirror *pod, uint32_t last, Use use, uint32_t ticket) noexcept nogil:
    """Moves the path from `last` up to the root to the front and, unless STORED, marks it.

    The same as moving one block after the other, `last` first; but blocks that follow each
    other in the list as in the path, which is the rule, move together.
    """
    cdef uint32_t bottom = last, top, before, after, first
    cdef Node *node
    while bottom:
        top = bottom
        while True:
            node = node_of(pod, top)
            if use != STORED:
                mark(node, False, use, ticket)
            if node.parent == 0 or node.parent != node.ahead:
                break
            top = node.parent
        before = node.ahead
        if before != 0:
            after = node_of(pod, bottom).behind
            node_of(pod, before).behind = after
            node_of(pod, after).ahead = before
            first = node_of(pod, 0).behind
            node_of(pod, bottom).behind = first
            node_of(pod, first).ahead = bottom
            node_of(pod, 0).behind = top
            node.ahead = 0
        bottom = node.parent


# ---- Columns and candidates ----------------------------------------------------------------------

cdef array.array DOUBLES = arrays.array("d")
cdef array.array INTS = arrays.array("i")


cdef array.array doubles(object values):
    """The values as an array of doubles: itself, or a copy of another buffer of doubles."""
    cdef array.array found
    if isinstance(values, arrays.array):
        found = values
        if found.ob_descr.typecode == c"d":
            return found
    view = memoryview(values)
    if view.format != "d" or view.ndim != 1:
        raise ValueError(f"expected one dimension of float64, got {view.format!r}")
    found = array.clone(DOUBLES, 0, False)
    found.frombytes(view.tobytes())
    return found


cdef inline array.array ints(object slots):
    cdef array.array found = slots
    if found.ob_descr.typecode != c"i":
        raise ValueError("slots have to be an array of the typecode 'i'")
    return found


def slots_of(bitmap):
    """The slots of a bitmap; see `calinix.core.columns.slots_of`."""
    cdef bytes octets = bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")
    cdef array.array found = array.clone(INTS, bitmap.bit_count(), False)
    cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(octets)
    cdef Py_ssize_t i, count = 0
    cdef uint32_t byte
    for i in range(PyBytes_GET_SIZE(octets)):
        byte = at[i]
        while byte:
            found.data.as_ints[count] = <int>(8 * i + lowest_bit(byte))
            count += 1
            byte &= byte - 1
    return found


cdef inline int inside(array.array cells, array.array places) except -1:
    """Raises ValueError where there is no slot, or one outside of the column."""
    cdef Py_ssize_t count = Py_SIZE(places), limit = Py_SIZE(cells), i
    cdef int slot
    if count == 0:
        raise ValueError("there are no slots to look at")
    for i in range(count):
        slot = places.data.as_ints[i]
        if not 0 <= slot < limit:
            raise ValueError(f"slot {slot} is outside of the column")
    return 0


cdef array.array gathered(array.array cells, array.array places, object more):
    """The column at these slots, those of `more` added if it is not None."""
    cdef Py_ssize_t count = Py_SIZE(places), i
    cdef array.array out, others
    cdef double *values
    inside(cells, places)
    out = array.clone(DOUBLES, count, False)
    values = out.data.as_doubles
    for i in range(count):
        values[i] = cells.data.as_doubles[places.data.as_ints[i]]
    if more is not None:
        others = doubles(more)
        inside(others, places)
        for i in range(count):
            values[i] += others.data.as_doubles[places.data.as_ints[i]]
    return out


def look(column, slots, more=None):
    """The column at these slots, and the largest; see `calinix.core.columns.look`."""
    cdef array.array out = gathered(doubles(column), ints(slots), more)
    cdef double *values = out.data.as_doubles
    cdef double largest = values[0]
    cdef Py_ssize_t i
    for i in range(1, Py_SIZE(out)):
        if values[i] > largest:
            largest = values[i]
    return out, largest


def balanced(values, slots, double factor, double offset):
    """Who is not far above the mean; see `calinix.core.columns.balanced`."""
    cdef array.array loads = doubles(values), places = ints(slots)
    cdef Py_ssize_t count = Py_SIZE(places), i, kept = 0
    cdef double bound = 0.0
    if Py_SIZE(loads) != count:
        raise ValueError(f"slots and values differ in length: {count} and {Py_SIZE(loads)}")
    if count == 0:
        return 0
    for i in range(count):
        bound += loads.data.as_doubles[i]
    bound = factor * bound / count + offset
    for i in range(count):
        kept += loads.data.as_doubles[i] <= bound
    if kept == count or kept == 0:
        return 0
    cdef bytearray octets = bytearray(MAX_SLOTS // 8)
    cdef int slot, size = 0
    for i in range(count):
        slot = places.data.as_ints[i]
        if not 0 <= slot < MAX_SLOTS:
            raise ValueError(f"slot {slot} is outside of 0..{MAX_SLOTS - 1}")
        if loads.data.as_doubles[i] <= bound:
            (<uint8_t *><char *>octets)[slot >> 3] |= <uint8_t>1 << (slot & 7)
            size = max(size, (slot >> 3) + 1)
    return int.from_bytes(octets[:size], "little")


def weigh(list terms not None, tuple weights not None, Py_ssize_t count):
    """The weighted sum of the terms; see `calinix.core.columns.weigh`."""
    cdef array.array out = array.clone(DOUBLES, count, True)
    cdef double *total = out.data.as_doubles
    cdef array.array values
    cdef tuple term
    cdef const double *value
    cdef double factor
    cdef Py_ssize_t n, i
    if len(terms) != len(weights):
        raise ValueError(f"{len(terms)} terms, but {len(weights)} weights")
    for n in range(len(weights)):
        term = terms[n]
        if term is None:
            continue
        if len(term) != 3:
            raise ValueError(f"a term is (values, scale, offset), not {term!r}")
        values = doubles(term[0])
        if Py_SIZE(values) != count:
            raise ValueError(f"a term of {Py_SIZE(values)} values for {count} candidates")
        factor = <double>weights[n] * <double>term[1]
        value = values.data.as_doubles
        for i in range(count):
            total[i] += value[i] * factor
    return out


def only_highest(scores):
    """Where the highest stands, if there is one; see `calinix.core.columns.only_highest`."""
    cdef array.array values = doubles(scores)
    cdef const double *value = values.data.as_doubles
    cdef Py_ssize_t count = Py_SIZE(values), place = 0, i
    cdef bint alone = True
    if count == 0:
        raise ValueError("there are no scores")
    for i in range(1, count):
        if value[i] >= value[place]:
            alone = value[i] > value[place]
            place = i
    return place if alone else -1


def least_of_highest(scores, loads, double draw):
    """One of those that tie; see `calinix.core.columns.least_of_highest`."""
    cdef array.array values = doubles(scores), held = doubles(loads)
    cdef const double *value = values.data.as_doubles
    cdef const double *load = held.data.as_doubles
    cdef Py_ssize_t count = Py_SIZE(values), place = 0, tied = 1, i, left
    if count == 0 or Py_SIZE(held) != count or not 0.0 <= draw < 1.0:
        raise ValueError("scores and loads have to be of one length, a draw in [0, 1)")
    for i in range(1, count):
        if value[i] > value[place] or (value[i] == value[place] and load[i] < load[place]):
            place = i
            tied = 1
        elif value[i] == value[place] and load[i] == load[place]:
            tied += 1
    left = <Py_ssize_t>(draw * tied)
    for i in range(place, count):
        if value[i] == value[place] and load[i] == load[place]:
            if left == 0:
                return i
            left -= 1
    return place


def near_highest(
    scores, loads, double draw, double slack, double share, Py_ssize_t favourite=-1
):
    """One of those near the top; see `calinix.core.columns.near_highest`."""
    cdef array.array values = doubles(scores), held = doubles(loads)
    cdef const double *value = values.data.as_doubles
    cdef const double *load = held.data.as_doubles
    cdef Py_ssize_t count = Py_SIZE(values), tied = 0, i, left
    cdef double bound, least = 0.0
    if count == 0 or Py_SIZE(held) != count or not 0.0 <= draw < 1.0:
        raise ValueError("scores and loads have to be of one length, a draw in [0, 1)")
    bound = value[0]
    for i in range(1, count):
        if value[i] > bound:
            bound = value[i]
    bound -= slack + share * (bound if bound >= 0.0 else -bound)
    if 0 <= favourite < count and value[favourite] >= bound:
        return favourite
    for i in range(count):
        if value[i] >= bound:
            if tied == 0 or load[i] < least:
                least = load[i]
                tied = 1
            elif load[i] == least:
                tied += 1
    left = <Py_ssize_t>(draw * tied)
    for i in range(count):
        if value[i] >= bound and load[i] == least:
            if left == 0:
                return i
            left -= 1
    return 0


def smooth_turn(owed, weights, slots):
    """Whose turn it is; see `calinix.core.columns.smooth_turn`."""
    cdef array.array rich = doubles(owed), wanted = doubles(weights), places = ints(slots)
    cdef double *credit = rich.data.as_doubles
    cdef Py_ssize_t place = 0, i
    cdef double total = 0.0, weight
    cdef int slot, best
    inside(wanted, places)
    if Py_SIZE(rich) != Py_SIZE(wanted) or rich is not owed:
        raise ValueError("owed has to be an array of doubles as long as the weights")
    best = places.data.as_ints[0]
    for i in range(Py_SIZE(places)):
        slot = places.data.as_ints[i]
        weight = wanted.data.as_doubles[slot]
        credit[slot] += weight
        total += weight
        if credit[slot] > credit[best]:
            best = slot
            place = i
    credit[best] -= total
    return place


def drawn(weights, slots, double draw, Py_ssize_t without=-1):
    """A place drawn by weight; see `calinix.core.columns.drawn`."""
    cdef array.array wanted = doubles(weights), places = ints(slots)
    cdef Py_ssize_t count = Py_SIZE(places), last = -1, i
    cdef double total = 0.0
    inside(wanted, places)
    for i in range(count):
        if i != without:
            total += wanted.data.as_doubles[places.data.as_ints[i]]
            last = i
    if last < 0 or not 0.0 <= draw < 1.0:
        raise ValueError("nobody to draw, or a draw outside of [0, 1)")
    total *= draw
    for i in range(count):
        if i != without:
            total -= wanted.data.as_doubles[places.data.as_ints[i]]
            if total < 0.0:
                return i
    return last


def backlog_s(work, paces, slots, double pace, more=None):
    """Seconds of backlog; see `calinix.core.columns.backlog_s`."""
    cdef array.array speeds = doubles(paces), places = ints(slots)
    cdef array.array out = gathered(doubles(work), places, more)
    cdef double *values = out.data.as_doubles
    cdef Py_ssize_t count = Py_SIZE(places), i
    cdef double speed, total = 0.0
    inside(speeds, places)
    for i in range(count):
        speed = speeds.data.as_doubles[places.data.as_ints[i]]
        values[i] *= speed if speed > 0.0 else pace
        total += values[i]
    return out, total / count


def prefill_s(
    depths, paces, slots, double pace, double tokens, double block_tokens, double cap_blocks,
    double attention, double fixed
):
    """Seconds of own prefill; see `calinix.core.columns.prefill_s`."""
    cdef array.array held, speeds = doubles(paces), places = ints(slots)
    cdef Py_ssize_t count = Py_SIZE(places), i
    cdef array.array out = array.clone(DOUBLES, count, False)
    cdef const double *depth = NULL
    cdef double speed, cached = 0.0, uncached
    inside(speeds, places)
    if depths is not None:
        held = doubles(depths)
        if Py_SIZE(held) != count:
            raise ValueError(f"slots and depths differ in length: {count} and {Py_SIZE(held)}")
        depth = held.data.as_doubles
    for i in range(count):
        if depth != NULL:
            cached = (depth[i] if depth[i] < cap_blocks else cap_blocks) * block_tokens
        uncached = tokens - cached
        if uncached < 0.0:
            uncached = 0.0
        speed = speeds.data.as_doubles[places.data.as_ints[i]]
        out.data.as_doubles[i] = (
            uncached * (1.0 + attention * (cached + uncached * 0.5)) + fixed
        ) * (speed if speed > 0.0 else pace)
    return out


def token_s(
    inflight, context, slowness, slots, double base_s, double request_s, double context_s, more=None
):
    """Seconds per output token; see `calinix.core.columns.token_s`."""
    cdef array.array loads = doubles(inflight), factors = doubles(slowness), places = ints(slots)
    cdef array.array out = gathered(doubles(context), places, more)
    cdef double *values = out.data.as_doubles
    cdef Py_ssize_t count = Py_SIZE(places), i
    inside(factors, places)
    if Py_SIZE(loads) != count:
        raise ValueError(f"slots and loads differ in length: {count} and {Py_SIZE(loads)}")
    for i in range(count):
        values[i] = factors.data.as_doubles[places.data.as_ints[i]] * (
            base_s + request_s * (loads.data.as_doubles[i] + 1.0) + context_s * values[i]
        )
    return out


cdef class Loads:
    """The compiled `calinix.core.columns.Loads`, which documents every method."""

    cdef readonly array.array inflight
    cdef readonly array.array prefill_tokens
    cdef readonly array.array decode_tokens
    cdef readonly array.array bounds
    cdef readonly array.array work
    cdef readonly array.array context
    cdef readonly array.array done
    cdef readonly array.array busy_s
    cdef readonly array.array busy_from
    cdef tuple views
    cdef Py_ssize_t count

    def __cinit__(self, Py_ssize_t slots):
        if not 1 <= slots <= MAX_SLOTS:
            raise ValueError(f"slots must be in 1..{MAX_SLOTS}, not {slots}")
        self.count = slots
        self.inflight = array.clone(DOUBLES, slots, True)
        self.prefill_tokens = array.clone(DOUBLES, slots, True)
        self.decode_tokens = array.clone(DOUBLES, slots, True)
        self.bounds = array.clone(DOUBLES, slots, True)
        self.work = array.clone(DOUBLES, slots, True)
        self.context = array.clone(DOUBLES, slots, True)
        self.done = array.clone(DOUBLES, slots, True)
        self.busy_s = array.clone(DOUBLES, slots, True)
        self.busy_from = array.clone(DOUBLES, slots, True)
        # An array that is viewed cannot be made longer or shorter.
        columns = (
            self.inflight, self.prefill_tokens, self.decode_tokens, self.bounds, self.work,
            self.context, self.done, self.busy_s, self.busy_from,
        )
        self.views = tuple([memoryview(column) for column in columns])

    cdef inline int check(self, Py_ssize_t slot) except -1:
        if not 0 <= slot < self.count:
            raise IndexError(f"slot {slot} is outside of 0..{self.count - 1}")
        return 0

    def take(
        self, Py_ssize_t slot, Py_ssize_t prefill_slot, double prefill_tokens,
        double decode_tokens, double work=0.0, double context=0.0, double now=0.0
    ):
        cdef Py_ssize_t prefiller = slot if prefill_slot < 0 else prefill_slot
        self.check(slot)
        self.check(prefiller)
        self.decode_tokens.data.as_doubles[slot] += decode_tokens
        self.context.data.as_doubles[slot] += context
        self.prefill_tokens.data.as_doubles[prefiller] += prefill_tokens
        self.work.data.as_doubles[prefiller] += work
        if self.inflight.data.as_doubles[slot] == 0.0:
            self.busy_from.data.as_doubles[slot] = now
        self.inflight.data.as_doubles[slot] += 1.0
        if prefill_slot >= 0:
            self.inflight.data.as_doubles[prefiller] += 1.0
        return self.is_full(slot) or self.is_full(prefiller)

    def give_prefill(self, Py_ssize_t slot, double prefill_tokens, bint request, double work=0.0):
        cdef bint was_full
        self.check(slot)
        self.prefill_tokens.data.as_doubles[slot] -= prefill_tokens
        self.work.data.as_doubles[slot] -= work
        if not request:
            return False
        was_full = self.is_full(slot)
        self.inflight.data.as_doubles[slot] -= 1.0
        return was_full

    def give(
        self, Py_ssize_t slot, double prefill_tokens, double decode_tokens, double work=0.0,
        double context=0.0, double now=0.0, bint completed=True
    ):
        cdef bint was_full
        self.check(slot)
        was_full = self.is_full(slot)
        self.prefill_tokens.data.as_doubles[slot] -= prefill_tokens
        self.work.data.as_doubles[slot] -= work
        self.decode_tokens.data.as_doubles[slot] -= decode_tokens
        self.context.data.as_doubles[slot] -= context
        self.inflight.data.as_doubles[slot] -= 1.0
        self.done.data.as_doubles[slot] += completed
        if self.inflight.data.as_doubles[slot] == 0.0:
            self.busy_s.data.as_doubles[slot] += now - self.busy_from.data.as_doubles[slot]
        return was_full

    cdef inline bint is_full(self, Py_ssize_t slot) noexcept:
        return self.inflight.data.as_doubles[slot] >= self.bounds.data.as_doubles[slot]


# ---- Texts ---------------------------------------------------------------------------------------

def join(list pieces not None):
    """Texts as UTF-8 and bytes, one after the other; see `calinix.core.hashing.join`."""
    cdef Py_ssize_t total = 0, size = 0
    cdef const uint8_t[::1] view
    cdef const char *at
    cdef char *to
    cdef bytes joined
    for piece in pieces:
        if isinstance(piece, str):
            PyUnicode_AsUTF8AndSize(piece, &size)
            total += size
        else:
            total += len(piece)
    joined = PyBytes_FromStringAndSize(NULL, total)
    to = PyBytes_AS_STRING(joined)
    for piece in pieces:
        if isinstance(piece, bytes):
            at, size = PyBytes_AS_STRING(piece), PyBytes_GET_SIZE(piece)
        elif isinstance(piece, str):
            at = PyUnicode_AsUTF8AndSize(piece, &size)
        else:
            view = piece
            at, size = <const char *>&view[0] if len(view) else NULL, len(view)
        memcpy(to, at, size)
        to += size
    return joined


cdef inline int hex_digit(uint8_t byte) noexcept nogil:
    if 48 <= byte <= 57:
        return byte - 48
    byte |= 32
    return byte - 87 if 97 <= byte <= 102 else -1


cdef inline int code_unit(const uint8_t *at) noexcept nogil:
    """The number of four hex digits; -1 where they are none."""
    cdef int value = 0, i, digit
    for i in range(4):
        digit = hex_digit(at[i])
        if digit < 0:
            return -1
        value = value << 4 | digit
    return value


cdef inline int put_utf8(uint8_t *to, int point) noexcept nogil:
    """Writes a code point; returns its length in bytes."""
    if point < 0x80:
        to[0] = <uint8_t>point
        return 1
    if point < 0x800:
        to[0] = <uint8_t>(0xC0 | point >> 6)
        to[1] = <uint8_t>(0x80 | point & 63)
        return 2
    if point < 0x10000:
        to[0] = <uint8_t>(0xE0 | point >> 12)
        to[1] = <uint8_t>(0x80 | point >> 6 & 63)
        to[2] = <uint8_t>(0x80 | point & 63)
        return 3
    to[0] = <uint8_t>(0xF0 | point >> 18)
    to[1] = <uint8_t>(0x80 | point >> 12 & 63)
    to[2] = <uint8_t>(0x80 | point >> 6 & 63)
    to[3] = <uint8_t>(0x80 | point & 63)
    return 4


cdef Py_ssize_t read_escape(const uint8_t *at, Py_ssize_t left, uint8_t **to) noexcept nogil:
    """Decodes the escape at `at` (a backslash) to `to`; returns its length, 0 for a wrong one."""
    cdef int point, low
    if left < 2:
        return 0
    if at[1] != 117:  # u
        if at[1] == 110:
            to[0][0] = 10
        elif at[1] == 116:
            to[0][0] = 9
        elif at[1] == 114:
            to[0][0] = 13
        elif at[1] == 98:
            to[0][0] = 8
        elif at[1] == 102:
            to[0][0] = 12
        elif at[1] == 34 or at[1] == 92 or at[1] == 47:
            to[0][0] = at[1]
        else:
            return 0
        to[0] += 1
        return 2
    if left < 6:
        return 0
    point = code_unit(at + 2)
    if point < 0 or 0xDC00 <= point <= 0xDFFF:
        return 0
    if point < 0xD800 or point > 0xDFFF:
        to[0] += put_utf8(to[0], point)
        return 6
    if left < 12 or at[6] != 92 or at[7] != 117:
        return 0
    low = code_unit(at + 8)
    if not 0xDC00 <= low <= 0xDFFF:
        return 0
    to[0] += put_utf8(to[0], 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00))
    return 12


cdef Py_ssize_t read_text(
    const uint8_t *at, Py_ssize_t place, Py_ssize_t size, uint8_t *to, uint8_t *high,
    Py_ssize_t *written,
) noexcept nogil:
    """Decodes a string from `place` up to its closing quote, whose place it returns; -1: none."""
    cdef uint8_t *first = to
    cdef Py_ssize_t run
    while True:
        run = copy_run(at + place, size - place, to, high)
        place += run
        to += run
        if place >= size:
            return -1
        if at[place] == 34:
            written[0] = to - first
            return place
        run = read_escape(at + place, size - place, &to) if at[place] == 92 else 0
        if run == 0:
            return -1
        place += run


cdef Py_ssize_t skip_text(
    const uint8_t *at, Py_ssize_t place, Py_ssize_t size, uint8_t *high
) noexcept nogil:
    """The same without decoding."""
    while True:
        place += plain_run(at + place, size - place, high)
        if place >= size or at[place] == 34:
            return place if place < size else -1
        if at[place] != 92 or place + 2 >= size:
            return -1
        place += 2


def lift(bytes body not None, Py_ssize_t least, Py_ssize_t strings, str mark not None):
    """Takes long texts out of JSON; see `calinix.core.hashing.lift`."""
    cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(body)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(body), place = 0, kept = 0, end, length = 0
    cdef const uint8_t *quote
    cdef uint8_t *room = NULL
    cdef uint8_t high
    cdef list short = []
    cdef dict texts = {}
    whole = memoryview(body)
    try:
        while strings > 0:
            quote = <const uint8_t *>memchr(at + place, 34, size - place)
            if quote == NULL:
                break
            place = quote - at + 1
            high = 0
            end = place + <Py_ssize_t>plain_run(at + place, size - place, &high)
            if end < size and at[end] == 92:
                if size - place < least:
                    break
                end = skip_text(at, end, min(size, place + least), &high)
                if end < 0 and place + least <= size:
                    if room == NULL:
                        room = <uint8_t *>PyMem_RawMalloc(size - place + 8)
                        if room == NULL:
                            raise MemoryError
                    end = read_text(at, place, size, room, &high, &length)
                    text = PyBytes_FromStringAndSize(<char *>room, length) if end >= 0 else None
                else:
                    text = None
            else:
                text = whole[place:end] if end - place >= least else None
            if end < 0 or end >= size or at[end] != 34:
                return None
            if text is None:
                strings -= 1
            else:
                if high >= 128:
                    str(text, "utf-8")
                name = f"{mark}{len(texts)}"
                texts[name] = text
                short.append(body[kept:place])
                short.append(name.encode())
                kept = end
            place = end + 1
    except UnicodeDecodeError:
        return None
    finally:
        PyMem_RawFree(room)
    if not texts:
        return None
    short.append(body[kept:])
    return b"".join(short), texts


# ---- Registry ----------------------------------------------------------------------------------

cdef uint32_t checked_capacity(object capacity_blocks) except? 0:
    cdef Py_ssize_t capacity = PyNumber_AsSsize_t(capacity_blocks, NULL)
    if capacity < 0:
        raise ValueError(f"a capacity must not be negative: {capacity_blocks}")
    return <uint32_t>min(capacity, <Py_ssize_t>MAX_CAPACITY)


cdef uint32_t checked_ticket(object ticket) except? 0:
    cdef Py_ssize_t number = PyNumber_AsSsize_t(ticket, NULL)
    if not 0 <= number <= <Py_ssize_t>0xFFFFFFFF:
        raise ValueError(f"not an unsigned 32-bit ticket: {ticket}")
    return <uint32_t>number


cdef Chain chain_of(object blocks):
    return <Chain>blocks if isinstance(blocks, Chain) else Chain.of(blocks)


cdef class NativePrefixRegistry:
    """The compiled `calinix.core.registry.PrefixRegistry`, which documents every method."""

    cdef Index index
    cdef Mirror **pods
    cdef uint32_t max_pods
    cdef uint64_t *sets
    cdef uint32_t *found

    def __cinit__(self, max_pods=256, shards=256):
        cdef Py_ssize_t pods_count = PyNumber_AsSsize_t(max_pods, NULL)
        cdef Py_ssize_t shards_count = PyNumber_AsSsize_t(shards, NULL)
        if not 1 <= pods_count <= MAX_SLOTS:
            raise ValueError(f"max_pods must be in 1..{MAX_SLOTS}, not {max_pods}")
        if not 1 <= shards_count <= MAX_SHARDS:
            raise ValueError(f"shards must be in 1..{MAX_SHARDS}, not {shards}")
        self.max_pods = <uint32_t>pods_count
        self.index.count = <uint32_t>shards_count
        self.index.words = (self.max_pods + WORD_BITS - 1) // WORD_BITS
        # Differs from process to process (unless PYTHONHASHSEED says otherwise).
        self.index.secret = <uint64_t><Py_ssize_t>hash(b"calinix.core.registry")
        self.index.shards = <Table *>PyMem_RawCalloc(shards_count, sizeof(Table))
        self.index.dirty = <uint8_t *>PyMem_RawCalloc(shards_count, sizeof(uint8_t))
        self.index.dead = <uint64_t *>PyMem_RawCalloc(
            <size_t>shards_count * self.index.words, sizeof(uint64_t)
        )
        self.index.lone = <uint64_t *>PyMem_RawCalloc(self.index.words, sizeof(uint64_t))
        self.pods = <Mirror **>PyMem_RawCalloc(self.max_pods, sizeof(Mirror *))
        self.sets = <uint64_t *>PyMem_RawCalloc(
            <size_t>FRAMES * self.index.words, sizeof(uint64_t)
        )
        self.found = <uint32_t *>PyMem_RawCalloc(self.max_pods, sizeof(uint32_t))
        if (
            self.index.shards == NULL or self.index.dead == NULL or self.pods == NULL
            or self.sets == NULL or self.found == NULL or self.index.dirty == NULL
            or self.index.lone == NULL
        ):
            raise MemoryError

    def __dealloc__(self):
        cdef uint32_t i
        if self.pods != NULL:
            for i in range(self.max_pods):
                free_mirror(self.pods[i])
        if self.index.shards != NULL:
            for i in range(self.index.count):
                PyMem_RawFree(self.index.shards[i].memory)
        PyMem_RawFree(self.pods)
        PyMem_RawFree(self.index.shards)
        PyMem_RawFree(self.index.dead)
        PyMem_RawFree(self.index.dirty)
        PyMem_RawFree(self.index.lone)
        drop_items(&self.index.bitmaps, 0, self.index.words * sizeof(uint64_t))
        PyMem_RawFree(self.sets)
        PyMem_RawFree(self.found)

    def __len__(self):
        cdef uint32_t i
        cdef Py_ssize_t total = 0
        for i in range(self.index.count):
            total += self.index.shards[i].used
        return total

    def open_slot(self, slot, capacity_blocks):
        cdef uint32_t capacity = checked_capacity(capacity_blocks)
        cdef uint32_t number = self.number(slot)
        if self.pods[number] != NULL:
            self.forget_all(number)
            self.pods[number].capacity = capacity
        else:
            self.pods[number] = new_mirror(capacity)

    def set_capacity(self, slot, capacity_blocks):
        cdef uint32_t capacity = checked_capacity(capacity_blocks)
        cdef uint32_t number = self.open_number(slot)
        cdef Mirror *pod = self.pods[number]
        cdef int i
        pod.capacity = capacity
        for i in range(EVICTIONS_AT_ONCE):
            if pod.held <= capacity:
                break
            self.delete(number, pod, node_of(pod, 0).ahead)

    def close_slot(self, slot):
        cdef uint32_t number = self.open_number(slot)
        self.forget_all(number)
        free_mirror(self.pods[number])
        self.pods[number] = NULL

    def is_open(self, slot):
        return self.pods[self.number(slot)] != NULL

    def blocks(self, slot):
        return self.pods[self.open_number(slot)].held

    def sweep(self):
        cdef Index *index = &self.index
        if index.dirty_count == 0:
            return False
        while not index.dirty[index.cursor]:
            index.cursor = (index.cursor + 1) % index.count
        rebuild(index, index.cursor)
        return index.dirty_count > 0

    def depths(self, Chain chain not None, const int32_t[:] slots not None, double[:] out not None):
        cdef Py_ssize_t count = slots.shape[0], i
        cdef uint32_t deepest
        if count != out.shape[0]:
            raise ValueError(f"slots and out differ in length: {count} and {out.shape[0]}")
        if count == 0:
            return 0
        memset(self.sets, 0, self.index.words * sizeof(uint64_t))
        for i in range(count):
            self.ask_for(slots[i])
        deepest = self.search(chain)
        for i in range(count):
            out[i] = self.found[slots[i]]
        return deepest

    def held(self, Chain chain not None, slots not None):
        cdef array.array asked = ints(slots)
        cdef Py_ssize_t count = Py_SIZE(asked), i
        cdef array.array out
        cdef double *depth
        cdef uint32_t deepest
        memset(self.sets, 0, self.index.words * sizeof(uint64_t))
        for i in range(count):
            self.ask_for(asked.data.as_ints[i])
        deepest = self.search(chain) if count else 0
        if deepest == 0:
            return None, 0
        out = array.clone(DOUBLES, count, False)
        depth = out.data.as_doubles
        for i in range(count):
            depth[i] = self.found[asked.data.as_ints[i]]
        return out, deepest

    cdef inline int ask_for(self, int32_t slot) except -1:
        """One of the slots that the next `search` is for."""
        if not 0 <= slot < <int32_t>self.max_pods or self.pods[slot] == NULL:
            self.open_number(slot)
        set_bit(self.sets, slot)
        return 0

    cdef uint32_t search(self, Chain chain) noexcept:
        """Writes into `found` how much of the chain each slot asked for holds; the largest."""
        cdef Range ranges[FRAMES]
        cdef int open_count = 1
        cdef uint32_t deepest = 0
        cdef Py_ssize_t depth
        memset(self.found, 0, self.max_pods * sizeof(uint32_t))
        ranges[0].low = 0
        ranges[0].high = chain.count
        while next_group(&self.index, chain.hashes, ranges, self.sets, &open_count):
            depth = depth_of(ranges[open_count].low, chain.steady)
            if depth > 0:
                self.note(self.sets + <size_t>open_count * self.index.words, depth)
            if depth > deepest:
                deepest = <uint32_t>depth
        return deepest

    def match(self, Chain chain not None, candidates):
        cdef object wanted = PyNumber_Index(candidates)
        if wanted < 0 or wanted >> self.max_pods:
            raise ValueError(f"candidates outside of {self.max_pods} slots")
        cdef list groups = []
        if not wanted:
            return groups
        cdef Py_ssize_t size = self.index.words * sizeof(uint64_t)
        cdef bytearray sets = bytearray(FRAMES * size)
        cdef uint64_t *words = <uint64_t *><char *>sets
        cdef Range ranges[FRAMES]
        cdef int open_count = 1
        cdef uint32_t w
        for w in range(self.index.words):
            words[w] = <uint64_t>((wanted >> (w * WORD_BITS)) & MASK)
        ranges[0].low = 0
        ranges[0].high = chain.count
        while next_group(&self.index, chain.hashes, ranges, words, &open_count):
            bitmap = 0
            for w in range(self.index.words):
                bitmap |= <object>words[<size_t>open_count * self.index.words + w] << (
                    w * WORD_BITS
                )
            groups.append((depth_of(ranges[open_count].low, chain.steady), bitmap))
        return groups

    def route(self, slot, Chain chain not None, ticket):
        cdef uint32_t owner = checked_ticket(ticket)
        return self.use(self.open_number(slot), chain, ROUTED, owner)

    def confirm(self, slot, Chain chain not None):
        self.use(self.open_number(slot), chain, CONFIRMED, 0)

    def withdraw(self, slot, Chain chain not None, ticket):
        cdef uint32_t owner = checked_ticket(ticket)
        cdef uint32_t number = self.open_number(slot)
        cdef Mirror *pod = self.pods[number]
        cdef Py_ssize_t i
        cdef uint32_t at
        cdef Node *node
        cdef Place place
        for i in range(chain.count - 1, -1, -1):
            at = find(pod, chain.hashes[i], mixed(chain.hashes[i], self.index.secret), &place)
            if at:
                node = node_of(pod, at)
                if node.flags & SPECULATIVE and node.ticket == owner:
                    self.delete(number, pod, at)

    def stored(self, slot, parent, blocks):
        cdef Chain chain = chain_of(blocks)
        cdef uint64_t root = 0 if parent is None else checked_hash(parent)
        cdef uint32_t number = self.open_number(slot)
        cdef Mirror *pod = self.pods[number]
        cdef uint32_t above = 0, at
        cdef Py_ssize_t known = 0, i
        if root != 0:
            above = self.shown(pod, root)
            if above == 0:
                return False
        while known < chain.count:
            at = self.shown(pod, chain.hashes[known])
            if at == 0:
                break
            above = at
            mark(node_of(pod, at), False, STORED, 0)
            known += 1
        touch(pod, above, STORED, 0)
        self.store(number, pod, above, chain, known, STORED, 0)
        return True

    def removed(self, slot, blocks):
        cdef Chain chain = chain_of(blocks)
        cdef uint32_t number = self.open_number(slot)
        cdef Mirror *pod = self.pods[number]
        cdef Py_ssize_t i
        cdef uint32_t at
        cdef Place place
        for i in range(chain.count):
            at = find(pod, chain.hashes[i], mixed(chain.hashes[i], self.index.secret), &place)
            if at == 0:
                continue
            if node_of(pod, at).copies > 1:
                node_of(pod, at).copies -= 1
            else:
                self.delete(number, pod, at)

    def clear(self, slot):
        self.forget_all(self.open_number(slot))

    def dump(self, slot):
        cdef Mirror *pod = self.pods[self.open_number(slot)]
        cdef uint32_t at = node_of(pod, 0).behind, i, count = pod.count
        cdef Node *nodes = <Node *>PyMem_RawMalloc(<size_t>(count + 1) * 2 * sizeof(Node))
        cdef list states = []
        if nodes == NULL:
            raise MemoryError
        for i in range(count):
            nodes[2 * i] = node_of(pod, at)[0]
            nodes[2 * i + 1] = node_of(pod, nodes[2 * i].parent)[0]
            at = nodes[2 * i].behind
        try:
            for i in range(count):
                states.append((
                    nodes[2 * i].block,
                    nodes[2 * i + 1].block,
                    nodes[2 * i].ticket,
                    nodes[2 * i].copies,
                    bool(nodes[2 * i].flags & SPECULATIVE),
                    bool(nodes[2 * i].flags & HIDDEN),
                    1 << nodes[2 * i].level,
                ))
        finally:
            PyMem_RawFree(nodes)
        return states

    cdef uint32_t number(self, object slot) except? 0:
        cdef Py_ssize_t number = PyNumber_AsSsize_t(slot, NULL)
        if not 0 <= number < <Py_ssize_t>self.max_pods:
            raise ValueError(f"slot {slot} is outside of 0..{self.max_pods - 1}")
        return <uint32_t>number

    cdef uint32_t open_number(self, object slot) except? 0:
        cdef uint32_t number = self.number(slot)
        if self.pods[number] == NULL:
            raise ValueError(f"slot {slot} is not open")
        return number

    cdef void forget_all(self, uint32_t slot) noexcept:
        if self.pods[slot].count:
            forget(&self.index, slot)
        empty_mirror(self.pods[slot], 1)

    cdef inline void note(self, const uint64_t *bits, Py_ssize_t depth) noexcept nogil:
        """Writes the depth of every slot of a group into `found`."""
        cdef uint32_t w
        cdef uint64_t word
        for w in range(self.index.words):
            word = bits[w]
            while word:
                self.found[w * WORD_BITS + lowest_bit(word)] = <uint32_t>depth
                word &= word - 1

    cdef inline uint32_t shown(self, Mirror *pod, uint64_t block) noexcept nogil:
        cdef Place place
        cdef uint32_t at = find(pod, block, mixed(block, self.index.secret), &place)
        return 0 if at == 0 or node_of(pod, at).flags & HIDDEN else at

    cdef Py_ssize_t use(self, uint32_t slot, Chain chain, Use use, uint32_t ticket) except -1:
        """Touches what the slot shows of the chain, stores the rest; returns the former."""
        cdef Mirror *pod = self.pods[slot]
        cdef Py_ssize_t low = 0, high = chain.count, middle
        cdef uint32_t above = 0
        while low < high:
            middle = (low + high + 1) // 2
            if shows(&self.index, chain.hashes[middle - 1], slot):
                low = middle
            else:
                high = middle - 1
        if low:
            above = self.shown(pod, chain.hashes[low - 1])
            touch(pod, above, use, ticket)
        self.store(slot, pod, above, chain, low, use, ticket)
        return depth_of(low, chain.steady)

    cdef int store(
        self, uint32_t slot, Mirror *pod, uint32_t above, Chain chain, Py_ssize_t known,
        Use use, uint32_t ticket,
    ) except -1:
        """Makes the slot show the blocks from `known` on, each the child of the one before."""
        cdef Index *index = &self.index
        cdef const uint64_t *blocks = chain.hashes
        cdef Py_ssize_t count = chain.count, steady = chain.steady
        cdef uint64_t mix
        cdef uint32_t at
        cdef Node *before = node_of(pod, above)
        cdef Node *node
        cdef Place place
        cdef Py_ssize_t i
        cdef int level
        cdef bint new
        for i in range(known, min(count, known + PREFETCH_AHEAD)):
            self.fetch(pod, blocks[i])
        for i in range(known, count):
            if i + PREFETCH_AHEAD < count:
                self.fetch(pod, blocks[i + PREFETCH_AHEAD])
            mix = mixed(blocks[i], index.secret)
            at = find(pod, blocks[i], mix, &place)
            new = at == 0
            if new:
                level = level_of(i, steady)
                if pod.held + (<uint64_t>1 << level) > pod.capacity:
                    place.line = NULL
                    if not self.make_room(slot, pod, above, level):
                        return 0
                reserve(index, mix, slot)
                at = new_node(pod, blocks[i], mix, level, &place)
                node = node_of(pod, at)
            else:
                node = node_of(pod, at)
                if not node.flags & HIDDEN:
                    mark(node, False, use, ticket)
                    above, before = at, node
                    continue
                reserve(index, mix, slot)
                unlink(pod, at)
                node.flags &= ~HIDDEN
            node.ahead, node.behind = above, before.behind
            node_of(pod, before.behind).ahead = at
            before.behind = at
            if above:
                node.parent, node.next = above, before.child
                if before.child:
                    node_of(pod, before.child).previous = at
                before.child = at
            add(index, mix, slot)
            mark(node, new, use, ticket)
            above, before = at, node
        return 0

    cdef inline void fetch(self, Mirror *pod, uint64_t block) noexcept nogil:
        """Asks for the lines of the tables that storing this block will read."""
        cdef uint64_t mix = mixed(block, self.index.secret)
        cdef Table *shard = &self.index.shards[shard_of(&self.index, mix)]
        cdef Table *table = table_of(pod, mix)
        cdef uint64_t *line = line_of(shard, home_of(mix, shard.lines), 1)
        prefetch(line)
        prefetch(line + 8)
        prefetch(line_of(table, home_of(mix, table.lines), 0))

    cdef bint make_room(self, uint32_t slot, Mirror *pod, uint32_t above, int level) noexcept:
        """Evicts until one more block fits; False when only the path to `above` is left."""
        cdef uint64_t i
        cdef uint32_t last
        for i in range(<uint64_t>EVICTIONS_PER_BLOCK << level):
            if pod.held + (<uint64_t>1 << level) <= pod.capacity:
                break
            last = node_of(pod, 0).ahead
            if last == 0 or last == above:
                return False
            self.delete(slot, pod, last)
            # The next to go has not been touched for long: its lines are fetched meanwhile.
            last = node_of(pod, 0).ahead
            self.fetch(pod, node_of(pod, last).block)
            prefetch(node_of(pod, node_of(pod, last).ahead))
        return True

    cdef void delete(self, uint32_t slot, Mirror *pod, uint32_t number) noexcept:
        """The block goes; its descendants are hidden and lose their place in the tree."""
        cdef Node *node = node_of(pod, number)
        cdef Node *below
        cdef uint32_t at = number
        orphan(pod, number)
        if not node.flags & HIDDEN:
            discard(&self.index, mixed(node.block, self.index.secret), slot)
        while True:
            below = node_of(pod, at)
            if below.child:
                at = below.child
            elif at == number:
                break
            else:
                at = below.parent
                orphan(pod, <uint32_t>node_of(pod, at).child)
                discard(&self.index, mixed(below.block, self.index.secret), slot)
                below.flags |= HIDDEN
        unlink(pod, number)
        free_node(pod, number, mixed(node.block, self.index.secret))


cdef object MASK = (1 << 64) - 1
