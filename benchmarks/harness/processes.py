"""Children that never outlive the benchmark: each in a group of its own, all ended at the end."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Self

END_TIMEOUT_S = 5.0
READY_TIMEOUT_S = 30.0


class BenchmarkError(Exception):
    """A benchmark cannot go on, for a reason that its message names."""


class Child:
    """A running program with all that it started. Its output goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path):
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        """The first process, whose id is also the group's."""
        return self.process.pid

    def pids(self) -> list[int]:
        """Every process of the group that is alive now."""
        return [pid for pid, group in _groups() if group == self.pid]

    def log_tail(self, lines: int = 15) -> str:
        """The last lines that it wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def end(self) -> None:
        """SIGTERM to the group, then, when that does not help, SIGKILL."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class Children:
    """Starts children and, as a context manager, ends all of them on every way out."""

    def __init__(self) -> None:
        self._running: list[Child] = []

    def __enter__(self) -> Self:
        # SIGTERM would end this process without running any `finally`, and shells start what
        # runs in the background with SIGINT ignored.
        signal.signal(signal.SIGTERM, _leave)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        while self._running:
            self.end(self._running[-1])

    def start(
        self,
        command: Sequence[str],
        log: Path,
        *,
        core: int | None = None,
        stdout: IO[bytes] | int | None = None,
        folder: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> Child:
        """Starts `command`, pinned to `core` if one is given; `stdout` defaults to the log."""
        line = [*_prefix(core), *command]
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    stdout=output if stdout is None else stdout,
                    stderr=output,
                    cwd=folder,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise BenchmarkError(f"cannot start {command[0]}: {error.strerror}") from error
        child = Child(process, log)
        self._running.append(child)
        return child

    def end(self, child: Child) -> None:
        """Ends one child and forgets it."""
        try:
            child.end()
        finally:
            self._running.remove(child)

    @contextlib.contextmanager
    def running(self, command: Sequence[str], log: Path, core: int | None) -> Iterator[Child]:
        """A child for the time of a `with` block."""
        child = self.start(command, log, core=core)
        try:
            yield child
        finally:
            self.end(child)


def _prefix(core: int | None) -> list[str]:
    prefix = []
    if shutil.which("setpriv"):
        # Should this process itself be killed, the kernel still ends its children.
        prefix += ["setpriv", "--pdeathsig", "TERM"]
    if core is not None:
        prefix += ["taskset", "-c", str(core)]
    return prefix


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)


def _groups() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The name may hold spaces and brackets; the group is third behind its last bracket.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            yield int(entry.name), int(fields[2])


def rss_mb(pids: Sequence[int]) -> float:
    """Resident memory of all these processes, in MB of 2**20 bytes."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def runqueue_wait_s(pid: int) -> float:
    """How long the process's main thread has been ready but not running: others had its core."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def get(port: int, path: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """Status and body of one GET; raises OSError or HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def wait_ready(child: Child, port: int, path: str) -> None:
    """Waits until GET path answers 200; raises BenchmarkError with the child's own last words."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if child.process.poll() is not None:
            raise BenchmarkError(
                f"{child.log.stem} ended with {child.process.returncode}:\n{child.log_tail()}"
            )
        with contextlib.suppress(OSError, http.client.HTTPException):
            if get(port, path, timeout_s=1.0)[0] == 200:
                return
        time.sleep(0.05)
    raise BenchmarkError(
        f"{child.log.stem} was not ready within {READY_TIMEOUT_S:g} s:\n{child.log_tail()}"
    )
