"""What a proxy takes besides CPU per request: the time until it answers, and memory with work."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from harness.compare import Spread, spread
from harness.contenders import Contender, Setup, new_setup, started
from harness.machine import Cores
from harness.processes import BenchmarkError, Child, Children, rss_mb
from harness.tools import MockPods, start_load

START_LIMIT_S = 60.0
ASK_EVERY_S = 0.005
PROMPT_BYTES = 4096
LOAD_LIMIT_S = 120.0
CHAT = json.dumps(
    {"model": "mock", "messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 1}
)


class ColdStart(msgspec.Struct, frozen=True, rename="camel"):
    """From the start of the process to the first chat answer that a client gets."""

    contender: str
    seconds: Spread
    starts: int


class Memory(msgspec.Struct, frozen=True, rename="camel"):
    """Resident memory of all processes of a proxy, in MB of 2**20 bytes."""

    contender: str
    prompt_bytes: int
    requests: int
    idle_mb: float
    after_mb: float
    errors: int


class Footprint:
    """Measures contenders one after the other, on the same mock pods."""

    def __init__(self, children: Children, cores: Cores, folder: Path, pods: MockPods):
        self._children = children
        self._cores = cores
        self._folder = folder
        self._pods = pods

    def cold_start(self, contender: Contender, starts: int) -> ColdStart:
        """Starts it so many times."""
        return ColdStart(
            contender.name, spread([self._start(contender) for _ in range(starts)]), starts
        )

    def _start(self, contender: Contender) -> float:
        setup = new_setup(self._pods.ports, self._folder / "cold")
        command = contender.command(setup)
        began = time.monotonic()
        with self._children.running(command, self._folder / "cold.log", self._cores.proxy) as child:
            while not _answers(setup.port):
                if child.process.poll() is not None or time.monotonic() - began > START_LIMIT_S:
                    raise BenchmarkError(f"{contender.name} does not start:\n{child.log_tail()}")
                time.sleep(ASK_EVERY_S)
            return time.monotonic() - began

    def memory(self, contender: Contender, requests: int) -> Memory:
        """Sends so many requests, whose prompts are all different (80 % is shared by one in 8)."""
        with self._running(contender) as (setup, proxy):
            idle_mb = rss_mb(proxy.pids())
            load = start_load(
                self._children,
                self._cores,
                self._folder,
                setup.port,
                seconds=LOAD_LIMIT_S,
                warm_up_s=0,
                arguments=("-c", "32", "-n", str(PROMPT_BYTES), "-N", str(requests)),
                watched=proxy.pids(),
                mock_pid=self._pods.child.pid,
            ).result()
        return Memory(
            contender.name, PROMPT_BYTES, load.requests, idle_mb, load.rss_mb, load.errs + load.bad
        )

    @contextlib.contextmanager
    def _running(self, contender: Contender) -> Iterator[tuple[Setup, Child]]:
        setup = new_setup(self._pods.ports, self._folder / "memory")
        with started(self._children, contender, setup, self._cores.proxy) as proxy:
            yield setup, proxy


def _answers(port: int) -> bool:
    """Whether a chat request is answered with 200 now."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", CHAT, headers)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def regular(contenders: Sequence[Contender]) -> list[Contender]:
    """Those that serve unified pods."""
    return [one for one in contenders if "" in one.handoffs]
