"""Requests beside a storm of KV events: the same load with and without it, in turns."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console

from harness.contenders import calinix_contender, new_setup, started
from harness.machine import BENCHMARKS, Cores, choose_cores, free_port
from harness.processes import BenchmarkError, Child, Children, get
from harness.tools import POD_COUNT, Load, build_tools, start_load, start_mock_pods

STORM_PER_S = 20_000
"""Blocks stored a second, over all pods."""
LOADS = (
    ("paced", ("-c", "16", "-r", "1000", "-n", "2048")),
    ("single", ("-c", "1", "-n", "2048")),
)


class Slice(msgspec.Struct, frozen=True):
    """One load, with or without a storm beside it."""

    load: str
    storm: bool
    p50_us: float
    p99_us: float
    cpu_us: float
    util: float
    other: float
    stored_per_s: float
    faults: int


class _Run(msgspec.Struct, frozen=True):
    """One gateway that listens to its pods' events."""

    children: Children
    cores: Cores
    folder: Path
    port: int
    admin_port: int
    endpoint: str
    proxy: Child
    seconds: float

    def slice(self, name: str, arguments: tuple[str, ...], *, storm: bool) -> Slice:
        """One load; the storm covers all of it."""
        before = stored(self.admin_port)
        publisher = self._publish() if storm else None
        began = time.monotonic()
        load: Load = start_load(
            self.children,
            self.cores,
            self.folder,
            self.port,
            seconds=self.seconds,
            warm_up_s=0.5,
            arguments=arguments,
            watched=self.proxy.pids(),
        ).result()
        stored_per_s = (stored(self.admin_port) - before) / (time.monotonic() - began)
        if publisher is not None:
            self.children.end(publisher)
        return Slice(
            load=name,
            storm=storm,
            p50_us=load.p50,
            p99_us=load.p99,
            cpu_us=load.cpu_us_req,
            util=load.util,
            other=load.other,
            stored_per_s=round(stored_per_s),
            faults=load.faults,
        )

    def _publish(self) -> Child:
        return publish(self.children, self.cores, self.folder, self.endpoint, self.seconds + 3)


def publish(children: Children, cores: Cores, folder: Path, endpoint: str, seconds: float) -> Child:
    """A program that publishes STORM_PER_S stores a second of all pods; it has begun."""
    child = children.start(
        [
            *(sys.executable, "-m", "harness.kv_storm", endpoint),
            *(str(POD_COUNT), str(STORM_PER_S), f"{seconds:g}"),
        ],
        folder / "storm.log",
        core=cores.others,
        stdout=subprocess.PIPE,
        folder=BENCHMARKS,
        environment={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
    )
    assert child.process.stdout is not None
    if not child.process.stdout.readline():
        raise BenchmarkError(f"the publisher does not start:\n{child.log_tail()}")
    return child


def stored(admin_port: int) -> int:
    """Block stores that the gateway has taken in, of all pods."""
    status, body = get(admin_port, "/admin/pods")
    if status != 200:
        raise BenchmarkError(f"/admin/pods answers {status}")
    pods = msgspec.json.decode(body)["pods"]
    return sum(pod["kv"].get("stored", 0) for pod in pods)


def storms(program: str, console: Console, *, quick: bool) -> list[Slice]:
    """Loads with and without events, in turns, on one gateway (`program` is its command line)."""
    cores = choose_cores()
    if cores.warning:
        console.print(f"[bold red]Latencies are not to be trusted: {cores.warning}.[/bold red]")
    build_tools()
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    gateway = calinix_contender(program, kvEvents={"bind": endpoint, "apply": "blocks"})
    found = []
    with Children() as children, tempfile.TemporaryDirectory(prefix="calinix-bench-") as name:
        folder = Path(name)
        pods = start_mock_pods(children, cores, folder)
        setup = new_setup(pods.ports, folder / "gateway")
        with started(children, gateway, setup, cores.proxy) as proxy:
            run = _Run(
                children, cores, folder, setup.port, setup.admin_port, endpoint, proxy,
                2.0 if quick else 8.0,
            )  # fmt: skip
            for _ in range(2 if quick else 5):
                for load, line in LOADS:
                    for storm in (False, True):
                        with console.status(f"{load}, {'with' if storm else 'without'} events"):
                            found.append(run.slice(load, line, storm=storm))
    return found
