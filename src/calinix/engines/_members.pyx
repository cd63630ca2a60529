# cython: boundscheck=False, wraparound=False, initializedcheck=False
"""Where the members of a JSON object are, compiled; members.py says what it does and why."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Next
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from libc.string cimport memchr, memcmp, memcpy

from calinix.engines.members import MAX_CHANGES, MAX_COMPARED

cdef extern from *:
    """
    #include <string.h>
    #ifdef __SSE2__
    #include <emmintrin.h>
    #endif
    /* How far the next of `"[]{}` is; `length`: there is none. */
    static inline Py_ssize_t calinix_structure(const unsigned char *at, Py_ssize_t length) {
        Py_ssize_t i = 0;
    #if defined(__SSE2__) && defined(__GNUC__)
        const __m128i quote = _mm_set1_epi8(34), open = _mm_set1_epi8(123);
        const __m128i shut = _mm_set1_epi8(125), bit = _mm_set1_epi8(32);
        for (; i + 16 <= length; i += 16) {
            __m128i word = _mm_loadu_si128((const __m128i *)(at + i));
            __m128i brace = _mm_or_si128(word, bit); /* a bracket becomes a brace */
            int found = _mm_movemask_epi8(_mm_or_si128(
                _mm_cmpeq_epi8(word, quote),
                _mm_or_si128(_mm_cmpeq_epi8(brace, open), _mm_cmpeq_epi8(brace, shut))));
            if (found) return i + __builtin_ctz((unsigned)found);
        }
    #endif
        for (; i < length; i++) {
            unsigned char brace = at[i] | 32;
            if (at[i] == 34 || brace == 123 || brace == 125) break;
        }
        return i;
    }
    /* How long the string is that begins there, where it is short and has no escape; else -1. */
    static inline Py_ssize_t calinix_short_string(const unsigned char *at, Py_ssize_t length) {
    #if defined(__SSE2__) && defined(__GNUC__)
        if (length >= 16) {
            __m128i word = _mm_loadu_si128((const __m128i *)at);
            unsigned quote = _mm_movemask_epi8(_mm_cmpeq_epi8(word, _mm_set1_epi8(34)));
            unsigned slash = _mm_movemask_epi8(_mm_cmpeq_epi8(word, _mm_set1_epi8(92)));
            if (quote && !(slash & (quote - 1) & ~quote)) return __builtin_ctz(quote);
        }
    #endif
        return -1;
    }
    static inline int calinix_is_space(unsigned char c) {
        return c == ' ' || c == '\\n' || c == '\\r' || c == '\\t';
    }
    static inline int calinix_is_literal(unsigned char c) {
        return (unsigned)(c - '0') <= 9 || (unsigned)((c | 32) - 'a') <= 25
            || c == '-' || c == '+' || c == '.';
    }
    """
    Py_ssize_t calinix_structure(const unsigned char *at, Py_ssize_t length) noexcept nogil
    Py_ssize_t calinix_short_string(const unsigned char *at, Py_ssize_t length) noexcept nogil
    bint is_space "calinix_is_space"(unsigned char c) noexcept nogil
    bint is_literal "calinix_is_literal"(unsigned char c) noexcept nogil

cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL

cdef enum:
    CHANGES = 24
    PIECES = 6 * CHANGES + 4
    COMPARED = 64
    INSIDE = 12  # members that need no memory of their own: few requests have more

assert CHANGES == MAX_CHANGES and COMPARED == MAX_COMPARED

cdef struct Member:
    Py_ssize_t begin, name_size, start, end

cdef struct Change:
    const char *name
    Py_ssize_t size, place  # of which member; -1: there is none yet
    PyObject *value

cdef struct Piece:
    const char *at
    Py_ssize_t size

cdef struct Edit:
    const char *text
    Py_ssize_t at, last  # how far it is copied or cut, and where the last member ended
    bint kept, dangling  # dangling: the first members are gone, their comma not yet
    int count
    Piece pieces[PIECES]


cdef inline Py_ssize_t past_space(
    const unsigned char *text, Py_ssize_t at, Py_ssize_t size
) noexcept nogil:
    while at < size and is_space(text[at]):
        at += 1
    return at


cdef inline Py_ssize_t past_string(
    const unsigned char *text, Py_ssize_t at, Py_ssize_t size
) noexcept nogil:
    """Behind the string whose first byte is at `at`; -1: it has no end."""
    cdef const unsigned char *quote
    cdef Py_ssize_t place = calinix_short_string(text + at, size - at), slash
    if place >= 0:
        return at + place + 1
    place = at
    while True:
        quote = <const unsigned char *>memchr(text + place, 34, size - place)
        if quote == NULL:
            return -1
        place = quote - text
        slash = place
        while slash > at and text[slash - 1] == 92:
            slash -= 1
        place += 1
        if ((place - 1 - slash) & 1) == 0:
            return place


cdef Py_ssize_t past_value(
    const unsigned char *text, Py_ssize_t at, Py_ssize_t size
) noexcept nogil:
    """Behind the value that begins there; -1: there is none, or it has no end."""
    cdef Py_ssize_t start = at, depth = 0
    if at >= size:
        return -1
    if text[at] == 34:
        return past_string(text, at + 1, size)
    if text[at] != 91 and text[at] != 123:
        while at < size and is_literal(text[at]):
            at += 1
        return at if at > start else -1
    while True:
        at += calinix_structure(text + at, size - at)
        if at >= size:
            return -1
        if text[at] == 34:
            at = past_string(text, at + 1, size)
            if at < 0:
                return -1
            continue
        depth += 1 if (text[at] | 32) == 123 else -1
        at += 1
        if depth == 0:
            return at


cdef class Members:
    cdef bytes body
    cdef const char *text
    cdef Member *members
    cdef Py_ssize_t count, room
    cdef uint64_t sizes  # bit k: a name has k bytes, give or take multiples of 64
    cdef Member inside[INSIDE]

    def __init__(self):
        raise TypeError("made by find_members")

    def __dealloc__(self):
        if self.members != self.inside:
            PyMem_Free(self.members)

    cdef int add(self, Member *member) except -1:
        cdef Member *more
        if self.count == self.room:
            self.room *= 2
            if self.members == self.inside:
                more = <Member *>PyMem_Malloc(self.room * sizeof(Member))
                if more != NULL:
                    memcpy(more, self.inside, sizeof(self.inside))
            else:
                more = <Member *>PyMem_Realloc(self.members, self.room * sizeof(Member))
            if more == NULL:
                raise MemoryError
            self.members = more
        self.members[self.count] = member[0]
        self.sizes |= <uint64_t>1 << (member.name_size & 63)
        self.count += 1
        return 0

    cdef inline Py_ssize_t place(self, const char *name, Py_ssize_t size) noexcept:
        """Which member has this name; -1: none."""
        cdef Py_ssize_t i
        if not self.sizes >> (size & 63) & 1:
            return -1
        for i in range(self.count):
            if self.members[i].name_size == size and memcmp(
                self.text + self.members[i].begin + 1, name, size
            ) == 0:
                return i
        return -1

    cdef inline Py_ssize_t named(self, object name) except -2:
        cdef Py_ssize_t size
        cdef const char *text = PyUnicode_AsUTF8AndSize(name, &size)
        return self.place(text, size)

    cdef inline bytes value_at(self, Py_ssize_t i):
        cdef Member *member = &self.members[i]
        return PyBytes_FromStringAndSize(self.text + member.start, member.end - member.start)

    def span(self, str name not None):
        cdef Py_ssize_t i = self.named(name)
        return None if i < 0 else (self.members[i].start, self.members[i].end)

    def value(self, str name not None):
        cdef Py_ssize_t i = self.named(name)
        return None if i < 0 else self.value_at(i)

    def among(self, tuple names not None, str prefix not None):
        cdef dict found = {}
        cdef Py_ssize_t i, size
        cdef const char *begins
        for name in names:
            i = self.named(name)
            if i >= 0:
                found[name] = self.value_at(i)
        begins = PyUnicode_AsUTF8AndSize(prefix, &size)
        for i in range(self.count):
            if self.members[i].name_size >= size and memcmp(
                self.text + self.members[i].begin + 1, begins, size
            ) == 0:
                start = self.members[i].begin + 1
                name = self.body[start:start + self.members[i].name_size]
                found[name.decode("utf-8", "replace")] = self.value_at(i)
        return found

    def edited(self, dict changes not None):
        cdef Edit edit
        cdef Change wanted[CHANGES]
        cdef PyObject *key
        cdef PyObject *value
        cdef Py_ssize_t position = 0, i
        cdef int count = 0, which
        if len(changes) > CHANGES:
            raise ValueError(f"more than {CHANGES} changes")
        while PyDict_Next(changes, &position, &key, &value):
            if <object>value is not None and not isinstance(<object>value, bytes):
                raise TypeError("a value is of bytes")
            wanted[count].name = PyUnicode_AsUTF8AndSize(<object>key, &wanted[count].size)
            wanted[count].place = self.place(wanted[count].name, wanted[count].size)
            wanted[count].value = value
            count += 1
        edit.text, edit.at, edit.last, edit.count = self.text, 0, 0, 0
        edit.kept = edit.dangling = False
        for i in range(self.count):
            which = 0
            while which < count and wanted[which].place != i:
                which += 1
            pass_member(&edit, &self.members[i], wanted[which].value if which < count else NULL)
        if edit.last == 0:
            edit.last = self.body.find(b"{") + 1
        for which in range(count):
            if wanted[which].place < 0 and <object>wanted[which].value is not None:
                append(&edit, &wanted[which])
        if edit.at >= 0:
            put(&edit, edit.text + edit.at, PyBytes_GET_SIZE(self.body) - edit.at)
        else:
            put(&edit, b"}", 1)
        return joined(edit.pieces, edit.count)


cdef inline void put(Edit *edit, const char *at, Py_ssize_t size) noexcept:
    if size:
        edit.pieces[edit.count].at = at
        edit.pieces[edit.count].size = size
        edit.count += 1


cdef inline void pass_member(Edit *edit, const Member *member, PyObject *change) noexcept:
    """The next member, which is kept (NULL), taken out (None) or set."""
    if edit.dangling:
        edit.at, edit.dangling = member.begin, False
    if change == NULL:
        edit.kept = True
    elif <object>change is not None:
        put(edit, edit.text + edit.at, member.start - edit.at)
        put(edit, PyBytes_AS_STRING(<object>change), PyBytes_GET_SIZE(<object>change))
        edit.at, edit.kept = member.end, True
    else:
        put(edit, edit.text + edit.at, (edit.last if edit.kept else member.begin) - edit.at)
        edit.at, edit.dangling = member.end, not edit.kept
    edit.last = member.end


cdef inline void append(Edit *edit, const Change *change) noexcept:
    """A member that was not there, behind the last one; the end is then not copied but written."""
    if edit.at >= 0:
        put(edit, edit.text + edit.at, edit.last - edit.at)
        edit.at = -1
    put(edit, b',"' if edit.kept else b'"', 1 + edit.kept)
    put(edit, change.name, change.size)
    put(edit, b'":', 2)
    put(edit, PyBytes_AS_STRING(<object>change.value), PyBytes_GET_SIZE(<object>change.value))
    edit.kept = True


cdef bytes joined(const Piece *pieces, int count):
    cdef Py_ssize_t size = 0
    cdef int i
    for i in range(count):
        size += pieces[i].size
    cdef bytes whole = PyBytes_FromStringAndSize(NULL, size)
    cdef char *to = PyBytes_AS_STRING(whole)
    for i in range(count):
        memcpy(to, pieces[i].at, pieces[i].size)
        to += pieces[i].size
    return whole


def find_members(bytes body not None, bint written_anew=False):
    cdef const unsigned char *text = <const unsigned char *>PyBytes_AS_STRING(body)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(body), begin, quote
    cdef Members found
    cdef Member member
    cdef bint is_end
    begin = past_space(text, 0, size)
    if begin >= size or text[begin] != 123:
        return None
    found = Members.__new__(Members)
    found.body, found.text, found.count, found.sizes = body, <const char *>text, 0, 0
    found.members, found.room = found.inside, INSIDE
    begin = past_space(text, begin + 1, size)
    is_end = begin < size and text[begin] == 125
    while not is_end:
        if begin >= size or text[begin] != 34:
            return None
        quote = past_string(text, begin + 1, size)
        if quote < 0:
            return None
        member.begin, member.name_size = begin, quote - begin - 2
        member.start = past_space(text, quote, size)
        if member.start >= size or text[member.start] != 58:
            return None
        member.start = past_space(text, member.start + 1, size)
        member.end = past_value(text, member.start, size)
        if member.end < 0:
            return None
        if not written_anew and (
            found.count == COMPARED
            or found.place(<const char *>text + begin + 1, member.name_size) >= 0
            or memchr(text + begin, 92, quote - begin) != NULL
        ):
            return None
        found.add(&member)
        begin = past_space(text, member.end, size)
        is_end = begin < size and text[begin] == 125
        if not is_end:
            if begin >= size or text[begin] != 44:
                return None
            begin = past_space(text, begin + 1, size)
    return found if past_space(text, begin + 1, size) == size else None
