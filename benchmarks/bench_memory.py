"""Memory, pauses and hits of the gateway under prompts that never repeat.

    python benchmarks/bench_memory.py [--quick] [--json [FILE]]

200,000 unique prompts of 8192 characters go through the sockets at full speed; each 500th request
is a hot prompt instead, whose first 80 % stay the same. Meanwhile GET /health, which the gateway
answers itself, is asked a millisecond after each of its answers: its longest answer time bounds
every pause of the event loop (and holds the wait behind what else came in). The same question to a
mock pod tells how much of that was the machine's own doing.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import sys
import tempfile
import time
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from calinix.bench.results import Finding
from harness.contenders import Setup, calinix_contender, new_setup, started
from harness.machine import BENCHMARKS, Cores, choose_cores, describe_machine, write_json
from harness.processes import BenchmarkError, Child, Children, get, rss_mb, runqueue_wait_s
from harness.tables import new_console
from harness.tools import (
    POD_COUNT,
    Load,
    Loadgen,
    MockPods,
    build_tools,
    start_load,
    start_mock_pods,
)

RESULTS = BENCHMARKS / "results" / "memory.json"
PROMPT_BYTES = 8192
BLOCK_BYTES = 128
"""One block of the `bytes` tokenizer, which is the default."""
BYTES_PER_TOKEN = 4
"""What the mock pods' usage says; the gateway sizes its mirrors by what it learns from usage."""
BYTES_PER_BLOCK = 128
"""What one block held by one pod may take of memory: index, mirror and tables."""
FIXED_MB = 48.0
"""What may come on top: connections, the ring of decisions, buffers, the allocator's slack."""
GROWTH_MB = 4.0
"""How much more memory the last third of the run may show than the second."""
PAUSE_MS = 50.0
HOT_SHARE = 0.95
HOT_EVERY = 500
SAMPLE_S = 0.1
LEAST_SAMPLES = 6
LONGEST_RUN_S = 900.0
UNIQUE = ("-c", "32", "-n", str(PROMPT_BYTES), "-S", "0", "-H", str(HOT_EVERY))
PROBE = ("-c", "1", "-z", "1000", "-G", "/health", "-A")


T = TypeVar("T")


class Sample(msgspec.Struct, frozen=True):
    """One look at the gateway."""

    at_s: float
    requests: int
    rss_mb: float


class Mirror(msgspec.Struct, frozen=True, rename="camel"):
    """What the gateway's admin port says of one pod's entries in the index."""

    blocks: int
    capacity_blocks: int


class _Pods(msgspec.Struct, frozen=True):
    pods: tuple[Mirror, ...]


class _State(msgspec.Struct, frozen=True, rename="camel"):
    max_tick_lag_seconds: float | None = None


class Measured(msgspec.Struct, frozen=True, rename="camel"):
    """Everything that was seen."""

    idle_rss_mb: float
    samples: tuple[Sample, ...]
    load: Load
    probe: Load
    control: Load
    runqueue_wait_s: float
    max_tick_lag_s: float | None
    """The longest delay of the gateway's own timer, as it counts it itself."""
    kv_capacity_tokens: int
    """Of each pod, as configured."""
    mirrors: tuple[Mirror, ...]

    @property
    def capacity_blocks(self) -> int:
        """Of all mirrors: as the gateway says, and by the config until it says it."""
        configured = self.kv_capacity_tokens * BYTES_PER_TOKEN // BLOCK_BYTES
        return sum(one.capacity_blocks for one in self.mirrors) or POD_COUNT * configured

    @property
    def bound_mb(self) -> float:
        """What the index may take when every pod's mirror is full."""
        return self.capacity_blocks * BYTES_PER_BLOCK / 2**20


def main() -> int:
    """The command line; 1 when something does not hold."""
    arguments = _arguments()
    console = new_console()
    try:
        measured = measure(arguments, console)
    except BenchmarkError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130
    findings = judge(measured)
    _print(console, findings)
    if arguments.json:
        results = {
            "method": __doc__,
            "machine": describe_machine(),
            "quick": arguments.quick,
            "findings": findings,
            "boundMb": measured.bound_mb,
            "measured": measured,
        }
        write_json(arguments.json, results)
        console.print(f"written: {arguments.json}", highlight=False)
    return int(any(one.holds is False for one in findings))


def measure(arguments: argparse.Namespace, console: Console) -> Measured:
    """Runs the gateway under the load."""
    cores = choose_cores()
    if cores.warning:
        console.print(f"[bold red]Pauses are not to be trusted: {cores.warning}.[/bold red]")
    build_tools()
    tokens = arguments.kv_capacity_tokens
    gateway = calinix_contender(arguments.calinix, cacheRegistry={"kvCapacityTokens": tokens})
    with (
        Children() as children,
        tempfile.TemporaryDirectory(prefix="calinix-bench-") as name,
    ):
        folder = Path(name)
        pods = start_mock_pods(children, cores, folder)
        setup = new_setup(pods.ports, folder / "gateway")
        with started(children, gateway, setup, cores.proxy) as proxy:
            run = _Run(children, cores, folder, setup, pods, proxy)
            return run.measure(arguments.requests, tokens, console)


class _Run(msgspec.Struct, frozen=True):
    """One gateway under load, watched."""

    children: Children
    cores: Cores
    folder: Path
    setup: Setup
    pods: MockPods
    proxy: Child

    def measure(self, requests: int, tokens: int, console: Console) -> Measured:
        pids = self.proxy.pids()
        idle_rss_mb = rss_mb(pids)
        waited_s = runqueue_wait_s(self.proxy.pid)
        probe = self._start("probe", self.setup.port, PROBE)
        control = self._start("control", self.pods.ports[0], PROBE)
        load = self._start(
            "load",
            self.setup.port,
            (*UNIQUE, "-N", str(requests), "-P", ",".join(map(str, pids))),
        )
        samples = self._watch(load, requests, pids, console)
        return Measured(
            idle_rss_mb=idle_rss_mb,
            samples=tuple(samples),
            load=load.result(),
            probe=probe.stop(),
            control=control.stop(),
            runqueue_wait_s=runqueue_wait_s(self.proxy.pid) - waited_s,
            max_tick_lag_s=self._admin("/admin/state", _State, _State()).max_tick_lag_seconds,
            kv_capacity_tokens=tokens,
            mirrors=self._admin("/admin/pods", _Pods, _Pods(())).pods,
        )

    def _start(self, name: str, port: int, arguments: tuple[str, ...]) -> Loadgen:
        return start_load(
            self.children,
            self.cores,
            self.folder,
            port,
            seconds=LONGEST_RUN_S,
            warm_up_s=0.0,
            arguments=arguments,
            name=name,
        )

    def _watch(
        self, load: Loadgen, requests: int, pids: list[int], console: Console
    ) -> list[Sample]:
        began = time.monotonic()
        samples = []
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
        )
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            task = progress.add_task("unique prompts", total=requests)
            while load.is_running and time.monotonic() < began + LONGEST_RUN_S:
                done = self._answered()
                sample = Sample(round(time.monotonic() - began, 3), done, rss_mb(pids))
                samples.append(sample)
                progress.update(task, completed=done, description=f"RSS {sample.rss_mb:.0f} MB")
                time.sleep(SAMPLE_S)
        return samples

    def _answered(self) -> int:
        """Requests that the mock pods have seen."""
        lines = get(self.pods.ports[0], "/stats")[1].decode().split("\n")
        return sum(int(line.split()[1]) for line in lines if line and not line.startswith("bytes"))

    def _admin(self, path: str, form: type[T], otherwise: T) -> T:
        """What the admin port answers; `otherwise` when it does not."""
        with contextlib.suppress(OSError, http.client.HTTPException, msgspec.MsgspecError):
            status, body = get(self.setup.admin_port, path)
            if status == 200:
                return msgspec.json.decode(body, type=form)
        return otherwise


def judge(seen: Measured) -> list[Finding]:
    """What must hold, against what was seen."""
    load = seen.load
    share = load.hot_hits / load.hot if load.hot else 0.0
    return [
        Finding(
            "every answer 200 and whole",
            f"{load.requests:,} requests, {load.rps:,.0f}/s, {load.faults} faults",
            "0 faults",
            load.is_whole and seen.probe.errs == 0,
        ),
        *_judge_memory(seen),
        _judge_pause(seen),
        Finding(
            "the hot prefix still hits",
            f"{load.hot_hits} of {load.hot}",
            f"{HOT_SHARE:.0%}",
            share >= HOT_SHARE,
        ),
        Finding(
            "a new prompt never hits",
            f"{load.hits - load.hot_hits} false hits",
            "0",
            load.hits == load.hot_hits,
        ),
    ]


def _judge_memory(seen: Measured) -> list[Finding]:
    rss = [sample.rss_mb for sample in seen.samples]
    second, last = rss[len(rss) // 3 : 2 * len(rss) // 3], rss[2 * len(rss) // 3 :]
    growth = max(last, default=0.0) - max(second, default=0.0)
    highest = max(rss, default=0.0)
    limit_mb = seen.idle_rss_mb + seen.bound_mb + FIXED_MB
    blocks = seen.load.requests * PROMPT_BYTES // BLOCK_BYTES
    return [
        Finding(
            "every mirror was full long before the end",
            f"{blocks / seen.capacity_blocks:.1f} times their capacity was sent",
            "3 times",
            blocks >= 3 * seen.capacity_blocks,
        ),
        Finding(
            "memory under its bound",
            f"{highest:.0f} MB; {seen.idle_rss_mb:.0f} when idle",
            f"{limit_mb:.0f} MB: idle + {seen.bound_mb:.0f} "
            f"({seen.capacity_blocks:,} blocks of {POD_COUNT} pods x {BYTES_PER_BLOCK} B) "
            f"+ {FIXED_MB:.0f}",
            highest <= limit_mb,
        ),
        Finding(
            "memory flat",
            f"{growth:+.1f} MB from the second to the last third ({len(rss)} samples)",
            f"{GROWTH_MB:+.1f} MB",
            len(rss) >= LEAST_SAMPLES and growth <= GROWTH_MB,
        ),
    ]


def _judge_pause(seen: Measured) -> Finding:
    pause_ms, control_ms = seen.probe.max / 1000, seen.control.max / 1000
    # A pod's answer took long, too: the machine held everybody up.
    noisy = pause_ms > PAUSE_MS and control_ms > PAUSE_MS / 2
    lag = f", own count {seen.max_tick_lag_s * 1000:.1f}" if seen.max_tick_lag_s else ""
    return Finding(
        "no long pause",
        f"{pause_ms:.1f} ms{lag} (p99 {seen.probe.p99 / 1000:.1f}); a mock pod {control_ms:.1f} ms",
        f"{PAUSE_MS:.0f} ms",
        None if noisy else pause_ms <= PAUSE_MS,
    )


def _print(console: Console, findings: list[Finding]) -> None:
    table = Table(title="Unique prompts at full speed", title_justify="left")
    for name in ("must hold", "seen", "at most / at least", ""):
        table.add_column(name)
    verdicts = {True: "[green]holds[/green]", False: "[red]does not hold[/red]"}
    for one in findings:
        verdict = verdicts.get(one.holds is True) if one.holds is not None else "[yellow]noisy"
        table.add_row(one.what, one.figure, one.limit, verdict)
    console.print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    calinix = Path(sys.executable).with_name("calinix")
    parser.add_argument("--requests", type=int, help="200,000 by default")
    parser.add_argument("--kv-capacity-tokens", type=int, help="of each of the 8 pods")
    parser.add_argument("--quick", action="store_true", help="20,000 requests, small mirrors")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, metavar="FILE")
    parser.add_argument("--calinix", default=str(calinix), help="the gateway's command line")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.requests = arguments.requests or (20_000 if quick else 200_000)
    arguments.kv_capacity_tokens = arguments.kv_capacity_tokens or (524_288 if quick else 4_194_304)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
