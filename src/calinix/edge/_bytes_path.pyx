# cython: boundscheck=False, wraparound=False, initializedcheck=False
"""The innermost steps of the bytes path, compiled; bytes_path.py says what they do and why."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memchr, memcmp, memcpy

from asyncio import get_running_loop
from weakref import WeakKeyDictionary

from calinix.edge import bytes_path

cdef enum:
    KEPT_BYTES = 2048  # of reads that fit no more after others, one is longer than half of it
cdef Py_ssize_t SHORT_BYTES = bytes_path.SHORT_BYTES
assert SHORT_BYTES <= KEPT_BYTES // 2

cdef extern from *:
    """
    #include <string.h>
    #include <sys/types.h>
    #include <sys/socket.h>
    #include <sys/uio.h>
    #ifndef MSG_NOSIGNAL
    #define MSG_NOSIGNAL 0  /* there, Python itself ignores SIGPIPE */
    #endif
    static inline Py_ssize_t calinix_send(int fd, const char *data, size_t size) {
        return send(fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    static inline Py_ssize_t calinix_send_both(
        int fd, const char *first, size_t size, const char *second, size_t more
    ) {
        struct iovec parts[2] = {{(void *)first, size}, {(void *)second, more}};
        struct msghdr message;
        memset(&message, 0, sizeof message);
        message.msg_iov = parts;
        message.msg_iovlen = 2;
        return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    /* The size that a chunk's line states, and where the line ends; -1: it is no plain line. */
    static inline Py_ssize_t calinix_chunk_size(
        const char *data, Py_ssize_t at, Py_ssize_t size, Py_ssize_t *end
    ) {
        Py_ssize_t found = 0, stop = at + 8, start = at;
        for (; at < size && at <= stop; at++) {
            unsigned char c = (unsigned char)data[at];
            unsigned digit = c - '0';
            if (digit > 9) {
                digit = (c | 0x20) - 'a';
                if (digit > 5) break;
                digit += 10;
            }
            found = found * 16 + digit;
        }
        if (at == start || at > stop || at + 2 > size) return -1;
        if (data[at] != '\\r' || data[at + 1] != '\\n') return -1;
        *end = at + 2;
        return found;
    }
    /* The bytes of body in data that is whole chunks, and its events; 0: it is anything else. */
    static Py_ssize_t calinix_passed(const char *data, Py_ssize_t size, Py_ssize_t *events) {
        Py_ssize_t at = 0, total = 0, found = 0, body = 0, matched = 0;
        while (at < size) {
            Py_ssize_t length = calinix_chunk_size(data, at, size, &body);
            if (length <= 0 || length > size - body - 2) return 0;
            const char *from = data + body, *end = from + length;
            if (end[0] != '\\r' || end[1] != '\\n') return 0;
            /* `matched`: how much of "data:" the line has so far; -1: it begins otherwise. */
            while (from < end) {
                if (matched < 0) {
                    from = memchr(from, '\\n', end - from);
                    if (!from) break;
                    from++;
                    matched = 0;
                } else if (*from == "data:"[matched]) {
                    from++;
                    if (++matched == 5) {
                        found++;
                        matched = -1;
                    }
                } else {
                    matched = -1;
                }
            }
            at = body + length + 2;
            total += length;
        }
        *events = found;
        return total;
    }
    """
    Py_ssize_t calinix_passed(const char *data, Py_ssize_t size, Py_ssize_t *events) nogil
    Py_ssize_t calinix_send(int fd, const char *data, size_t size) nogil
    Py_ssize_t calinix_send_both(
        int fd, const char *first, size_t size, const char *second, size_t more
    ) nogil
    Py_ssize_t calinix_chunk_size(
        const char *data, Py_ssize_t at, Py_ssize_t size, Py_ssize_t *end
    ) nogil


def whole_chunks(bytes data):
    cdef const char *source = PyBytes_AS_STRING(data)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data), at = 0, total = 0, length, body = 0
    cdef char *target
    while at < size:
        length = calinix_chunk_size(source, at, size, &body)
        if length <= 0 or length > size - body - 2:
            return None
        at = body + length
        if source[at] != 13 or source[at + 1] != 10:
            return None
        at += 2
        total += length
    if not total:
        return None
    found = PyBytes_FromStringAndSize(NULL, total)
    target = PyBytes_AS_STRING(found)
    at = 0
    while at < size:
        length = calinix_chunk_size(source, at, size, &body)
        memcpy(target, source + body, length)
        target += length
        at = body + length + 2
    return found


def count_events(bytes data):
    cdef const char *at = PyBytes_AS_STRING(data)
    cdef const char *end = at + PyBytes_GET_SIZE(data)
    cdef Py_ssize_t count = 0
    while end - at >= 5:
        if memcmp(at, "data:", 5) == 0:
            count += 1
        at = <const char *>memchr(at, 10, end - at)
        if at == NULL:
            break
        at += 1
    return count


cdef Py_ssize_t GATHERED_WRITES = 32  # a turn that brings more lets go in between
cdef Py_ssize_t JOINED_BYTES = 64 * 1024  # longer writes to one connection are not joined
cdef int LONE_TURNS = 4  # so many turns of one write each in a row: gathering is given up,
cdef int DIRECT_WRITES = 64  # and tried again after so many writes

_corks = WeakKeyDictionary()  # one for each event loop


cdef class Cork:
    cdef list waiting
    cdef object end_turn
    cdef bint asked
    cdef Py_ssize_t gathered
    cdef int lone, direct

    def __init__(self):
        self.waiting = []
        self.end_turn = self._end_turn
        self.asked = False
        self.gathered = 0
        self.lone = self.direct = 0

    cdef bint takes(self) noexcept:
        if self.direct == 0:
            return True
        self.direct -= 1
        return False

    cdef add(self, Outlet outlet):
        self.waiting.append(outlet)
        self.gathered += 1
        if not self.asked:
            self.asked = True
            get_running_loop().call_soon(self.end_turn)
        if len(self.waiting) >= GATHERED_WRITES:
            self.let_go()

    def _end_turn(self):
        self.asked = False
        if self.gathered != 1:
            self.lone = 0
        elif self.lone < LONE_TURNS:
            self.lone += 1
        if self.lone == LONE_TURNS:
            self.direct = DIRECT_WRITES
        self.gathered = 0
        self.let_go()

    cdef let_go(self):
        cdef Outlet outlet
        waiting = self.waiting
        self.waiting = []
        for outlet in waiting:
            try:
                outlet.flush()
            except Exception as error:
                get_running_loop().call_exception_handler(
                    {
                        "message": "writing to a connection failed",
                        "exception": error,
                        "transport": outlet.transport,
                    }
                )


cdef class Outlet:
    cdef object transport
    cdef Cork cork
    cdef int fd
    cdef bint spilled
    cdef bytes first, second  # what waits for the end of this turn

    def __init__(self, transport, loop):
        self.transport = transport
        self.fd = -1
        self.spilled = False
        sock = transport.get_extra_info("socket")
        if sock is not None and transport.get_extra_info("sslcontext") is None:
            self.fd = sock.fileno()
            self.cork = _corks.get(loop)
            if self.cork is None:
                self.cork = _corks[loop] = Cork()

    cdef Py_ssize_t waiting_bytes(self) noexcept:
        cdef Py_ssize_t size = 0
        if self.first is not None:
            size = PyBytes_GET_SIZE(self.first)
        if self.second is not None:
            size += PyBytes_GET_SIZE(self.second)
        return size

    cdef bint _is_free(self) except *:
        if self.fd < 0:
            return False
        if self.spilled:
            self.spilled = self.transport.get_write_buffer_size() > 0
        return not self.spilled

    cpdef write(self, bytes data):
        if PyBytes_GET_SIZE(data) > JOINED_BYTES or self.waiting_bytes() > JOINED_BYTES:
            self.flush()
        if self.first is not None:
            if self.second is None:
                self.first += data
            else:
                self.second += data
        elif self.fd >= 0 and self.cork.takes():
            self.first = data
            self.cork.add(self)
        else:
            self._send(data)

    def write_both(self, bytes first, bytes second):
        self.flush()
        if self.fd >= 0 and self.cork.takes():
            self.first, self.second = first, second
            self.cork.add(self)
        else:
            self._send_both(first, second)

    cpdef flush(self):
        cdef bytes first = self.first, second = self.second
        if first is None:
            return
        self.first = self.second = None
        if second is None:
            self._send(first)
        else:
            self._send_both(first, second)

    cdef _send(self, bytes data):
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data), sent = 0
        if self._is_free():
            sent = calinix_send(self.fd, PyBytes_AS_STRING(data), size)
            if sent == size:
                return
            self.spilled = True
        self.transport.write(data[sent:] if sent > 0 else data)

    cdef _send_both(self, bytes first, bytes second):
        cdef Py_ssize_t size = PyBytes_GET_SIZE(first), more = PyBytes_GET_SIZE(second), sent = 0
        if self._is_free():
            sent = calinix_send_both(
                self.fd, PyBytes_AS_STRING(first), size, PyBytes_AS_STRING(second), more
            )
            if sent == size + more:
                return
            self.spilled = True
        if sent <= 0:
            self.transport.writelines((first, second))
        elif sent < size:
            self.transport.writelines((first[sent:], second))
        else:
            self.transport.write(second[sent - size:])

    def close(self):
        self.fd = -1
        self.first = self.second = None


cpdef tuple with_end(tuple tail, bytes piece):
    cdef bytes earlier = tail[0], latest = tail[1]
    if PyBytes_GET_SIZE(latest) < SHORT_BYTES:
        return (earlier, latest + piece)
    return (latest, piece) if piece else tail


cdef class Relay:
    cdef Outlet outlet
    cdef object clock
    cdef bytes earlier
    cdef char recent[KEPT_BYTES]  # what came after `earlier`, or nothing
    cdef Py_ssize_t filled
    cdef readonly Py_ssize_t events, body_bytes
    cdef readonly double last_s

    def __init__(self, Outlet outlet, clock):
        self.outlet = outlet
        self.clock = clock
        self.earlier = b""
        self.filled = self.events = self.body_bytes = 0
        self.last_s = 0.0

    cdef keep(self, bytes data):
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        if size > KEPT_BYTES:
            self.earlier = data
            self.filled = 0
            return
        if size > KEPT_BYTES - self.filled:
            self.earlier = self.recent[:self.filled]
            self.filled = 0
        memcpy(self.recent + self.filled, PyBytes_AS_STRING(data), size)
        self.filled += size

    def pass_on(self, bytes data):
        cdef Py_ssize_t events = 0
        cdef Py_ssize_t size = calinix_passed(
            PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), &events
        )
        if size <= 0:
            return False
        self.events += events
        self.body_bytes += size
        self.last_s = self.clock()
        self.keep(data)
        self.outlet.write(data)
        return True

    def take(self):
        found = whole_chunks(self.earlier + self.recent[:self.filled]) or b""
        self.earlier = b""
        self.filled = self.events = self.body_bytes = 0
        self.last_s = 0.0
        return found
