"""The two C tools from Python: built when they are older than their source, started, and read."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from harness.machine import BENCHMARKS, Cores
from harness.processes import BenchmarkError, Child, Children, get

BUILD = BENCHMARKS / ".build"
ANSWER_BYTES = 400
"""The length of the mock's whole answer: what every proxy must hand on."""
POD_COUNT = 8
SPARE_S = 30.0
"""How much longer than asked a load may take before it is given up."""


class Load(msgspec.Struct, frozen=True):
    """One line of the load generator. Times in us unless the name says otherwise."""

    c: int
    n: int
    requests: int
    seconds: float
    rps: float
    errs: int
    bad: int
    recon: int
    p50: float
    p90: float
    p99: float
    max: float
    cpu_us_req: float
    util: float
    rss_mb: float
    lg_util: float
    mock_util: float
    other: float
    body_bytes: int
    hits: int
    hot: int
    hot_hits: int
    stream: int = 0
    chunks_s: float = 0.0
    cpu_us_chunk: float = 0.0
    ttft50: float = 0.0
    ttft99: float = 0.0

    @property
    def faults(self) -> int:
        """Requests that were not answered with 200 and the whole body."""
        return self.errs + self.bad

    @property
    def is_whole(self) -> bool:
        """Every answer had status 200 and the bytes that the mock sent."""
        right_body = bool(self.stream) or self.body_bytes == ANSWER_BYTES
        return self.faults == 0 and self.requests > 0 and right_body


def build_tools() -> None:
    """Runs make; raises BenchmarkError with the compiler's words."""
    done = subprocess.run(
        ["make", "--silent", "-C", str(BENCHMARKS / "tools"), f"BUILD={BUILD}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"the C tools do not build (is there a C compiler?):\n{done.stderr}")


class MockPods:
    """The mock upstream, running: `ports` has one port a pod."""

    def __init__(self, child: Child, ports: list[int]):
        self.child = child
        self.ports = ports

    def counts(self) -> dict[str, int]:
        """What came so far: requests by port, and what mock_upstream.c counts by name."""
        _, page = get(self.ports[0], "/stats")
        return {name: int(count) for name, count in map(str.split, page.decode().splitlines())}


def start_mock_pods(
    children: Children,
    cores: Cores,
    folder: Path,
    *,
    handoff: str = "",
    service_us: Sequence[int] = (),
) -> MockPods:
    """Starts POD_COUNT mock pods on free ports, beside the load generator.

    `handoff` is how pairs of them hand KV on (nixl, sglang), `service_us` how long each of them
    takes for an answer.
    """
    options = ["-x", handoff] if handoff else []
    if service_us:
        options += ["-w", ",".join(str(us) for us in service_us)]
    child = children.start(
        [str(BUILD / "mock_upstream"), *options, *["0"] * POD_COUNT],
        folder / "mock_upstream.log",
        core=cores.others,
        stdout=subprocess.PIPE,
    )
    line = _stdout(child).readline()
    if not line:
        raise BenchmarkError(f"the mock pods do not start:\n{child.log_tail()}")
    return MockPods(child, [int(port) for port in line.split()])


class Loadgen:
    """A load under way."""

    def __init__(self, children: Children, child: Child, limit_s: float):
        self._children = children
        self._limit_s = limit_s
        self.child = child

    @property
    def is_running(self) -> bool:
        """Whether it has not yet ended by itself."""
        return self.child.process.poll() is None

    def stop(self) -> Load:
        """Ends it early; its report so far."""
        self.child.process.terminate()
        return self.result()

    def result(self) -> Load:
        """Waits for its report; raises BenchmarkError when there is none."""
        try:
            line, _ = self.child.process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"the load did not end within {self._limit_s:g} s") from error
        finally:
            self._children.end(self.child)
        if not line:
            raise BenchmarkError(f"the load generator failed:\n{self.child.log_tail()}")
        return msgspec.json.decode(line, type=Load)


def start_load(
    children: Children,
    cores: Cores,
    folder: Path,
    port: int,
    *,
    seconds: float,
    warm_up_s: float,
    arguments: Sequence[str],
    name: str = "loadgen",
    watched: Sequence[int] = (),
    mock_pid: int | None = None,
) -> Loadgen:
    """Starts the load generator against `port`; CPU is counted of the `watched` processes."""
    command = [str(BUILD / "loadgen"), "-p", str(port), "-d", f"{seconds:g}"]
    command += ["-w", f"{warm_up_s:g}", *arguments]
    if watched:
        command += ["-P", ",".join(str(pid) for pid in watched)]
    if mock_pid is not None:
        command += ["-M", str(mock_pid)]
    child = children.start(
        command, folder / f"{name}.log", core=cores.others, stdout=subprocess.PIPE
    )
    return Loadgen(children, child, seconds + warm_up_s + SPARE_S)


def _stdout(child: Child) -> IO[bytes]:
    stream = child.process.stdout
    if stream is None:
        raise BenchmarkError("started without a pipe")
    return stream
