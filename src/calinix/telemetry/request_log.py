"""The request log: one JSON line for every finished request, written in batches.

It never blocks the event loop on a slow reader, never grows beyond its bound and never raises:
a request must not fail because its log line cannot be written.
"""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Iterable

import msgspec
import structlog

from calinix.config import Log
from calinix.errors import ConfigError

log = structlog.get_logger()

GATHERED_BYTES = 16 * 1024
"""So many bytes of lines are written at once; fewer with the next `flush`."""
MAX_BUFFERED_BYTES = 1024 * 1024
# POSIX: a pipe that polls writable takes this much without blocking, and takes it whole, so that
# lines of several processes on one pipe stay whole.
PIPE_BYTES = 4096
STDOUT = 1

MAX_FIELD_CHARS = 128

_encoder = msgspec.json.Encoder()


class LogLine(msgspec.Struct, gc=False, rename="camel", omit_defaults=True):
    """A line of the log: `RequestRecord`, which documents the fields, cut to MAX_FIELD_CHARS."""

    request_id: str
    endpoint: str = ""
    mode: str = ""
    strategy: str = ""
    model: str = ""
    status: int = 0
    pod_id: str = ""
    prefill_pod_id: str = ""
    received_at: float = 0.0
    ttft_us: int | None = None
    itl_us: int | None = None
    e2e_us: int = 0
    decision_us: int | None = None
    prompt_blocks: int = 0
    cached_blocks: int = 0
    predicted_cached_tokens: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    chunks: int = 0
    retries: int = 0
    retry_reason: str = ""
    error: str = ""
    bytes_out: int = 0


class RequestLog:
    """Lines to one file descriptor.

    A regular file takes all that has gathered. Anything else (pipe, terminal, socket) only gets
    what it can take; the rest waits in a buffer of MAX_BUFFERED_BYTES, and what does not fit is
    dropped and counted.
    """

    def __init__(self, fd: int, *, owned: bool = False, path: str | None = None):
        """To `fd`, which is closed here if it is `owned`; `path`: the file that it is."""
        self.dropped_lines = 0
        self._owned = owned
        self._path = path
        self._buffer = bytearray()
        self._take(fd)

    def _take(self, fd: int) -> None:
        self.enabled = True
        self._fd = fd
        self._poll: select.poll | None = None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                self._poll = select.poll()
                self._poll.register(fd, select.POLLOUT)
        except OSError as error:
            self._disable(error)

    @classmethod
    def open(cls, config: Log) -> RequestLog | None:
        """As configured; None when request lines are off. Raises ConfigError."""
        if not config.requests:
            return None
        path = config.requests_file
        if path is None:
            return cls(STDOUT)
        try:
            return cls(_appended(path), owned=True, path=path)
        except OSError as error:
            raise ConfigError(
                [f"log.requestsFile: cannot open {path!r}: {error.strerror or error}"]
            ) from error

    def reopen(self) -> None:
        """Opens its file anew, by name: the one that was open has been renamed by who rotates it.

        Where that fails, and for descriptors without a name, all stays as it is.
        """
        if self._path is None:
            return
        try:
            fd = _appended(self._path)
        except OSError as error:
            reason = error.strerror or str(error)
            log.warning("request_log_not_reopened", path=self._path, reason=reason)
            return
        self.flush()
        os.close(self._fd)
        self._take(fd)

    def write(self, records: list[LogLine]) -> None:
        """A line per record, written when enough have gathered, or by `flush`."""
        if not self.enabled:
            return
        lines = _lines(records)
        if len(self._buffer) + len(lines) > MAX_BUFFERED_BYTES:
            self._drop(len(records))
        else:
            self._buffer += lines
        if len(self._buffer) >= GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what is kept, as far as that is possible without waiting."""
        try:
            while self._buffer and self.enabled:
                if self._poll is not None and not self._poll.poll(0):
                    return
                written = os.write(self._fd, self._next_piece())
                del self._buffer[:written]
        except BlockingIOError:
            return
        except OSError as error:
            self._disable(error)

    def close(self, timeout_s: float = 1.0) -> None:
        """Writes the rest, waiting for a slow reader at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self._buffer and self._poll is not None and (left := deadline - time.monotonic()) > 0:
            self._poll.poll(left * 1e3)
            self.flush()
        self.enabled = False
        self._path = None
        if self._owned:
            os.close(self._fd)
            self._owned = False

    def _next_piece(self) -> bytes | memoryview:
        """All of it for a file; for others whole lines up to PIPE_BYTES, or one longer line."""
        if self._poll is None or len(self._buffer) <= PIPE_BYTES:
            return bytes(self._buffer)
        end = self._buffer.rfind(b"\n", 0, PIPE_BYTES) + 1
        return bytes(self._buffer[: end or PIPE_BYTES])

    def _drop(self, lines: int) -> None:
        if not self.dropped_lines:
            log.warning("request_log_slow", hint="its reader is behind; lines are dropped")
        self.dropped_lines += lines

    def _disable(self, error: OSError) -> None:
        self.enabled = False
        self._buffer.clear()
        log.warning("request_log_off", reason=error.strerror or str(error))


def _appended(path: str) -> int:
    # Appending, so that rotation by copy-and-truncate works and workers can share a file.
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def _lines(records: Iterable[LogLine]) -> bytes:
    try:
        return _encoder.encode_lines(records)
    except UnicodeEncodeError:
        return b"".join(_line(record) for record in records)


def _line(record: LogLine) -> bytes:
    """One line, whatever its texts hold: lone surrogates cannot be written as UTF-8."""
    fields = {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in msgspec.to_builtins(record).items()
    }
    return _encoder.encode(fields) + b"\n"
