"""Power of two choices, ours and vllm-router's, on pods of unequal speed: do they pick alike.

A load at a fixed rate runs through each in turn. The requests that each pod got are read once a
second; how much the shares of single seconds differ says how far two means may lie apart by chance.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from calinix.bench.results import Finding
from harness.compare import NOISY_CORES
from harness.contenders import CALINIX, Contender, new_setup, started
from harness.machine import Cores
from harness.processes import Children
from harness.tools import Load, MockPods, start_load, start_mock_pods

SERVICE_US = (4000, 4000, 8000, 8000, 12000, 16000, 24000, 32000)
"""How long each pod takes for an answer, however many it is at."""
RATE, CONNECTIONS = 1600, 256
WARM_UP_S = 1.0
MAX_Z = 3.5
"""How many standard errors apart the shares of a pod may lie: by chance, one of 8 pods is further
off in 1 of 270 runs."""
LATENCY_SHARE = 0.05
"""By how much latencies may differ: shares that agree fix them, but for the proxies' own time."""


class Share(msgspec.Struct, frozen=True, rename="camel"):
    """What one pod got of all requests."""

    contender: str
    pod: int
    service_ms: float
    share: float
    share_error: float
    """Standard error, of the shares in single seconds."""
    p50_us: float
    """Of the contender's requests to any pod."""
    p99_us: float
    requests: int
    """The same."""
    noisy: bool
    """Others used the machine during half of its rounds or more."""


def measure(
    contenders: Sequence[Contender],
    children: Children,
    cores: Cores,
    folder: Path,
    *,
    rounds: int,
    seconds: int,
) -> list[Share]:
    """One record for each contender and pod; every round takes the contenders in turn."""
    pods = start_mock_pods(children, cores, folder, service_us=SERVICE_US)
    windows: dict[str, list[list[float]]] = {one.name: [] for one in contenders}
    loads: dict[str, list[Load]] = {one.name: [] for one in contenders}
    for _ in range(rounds):
        for contender in contenders:
            setup = new_setup(pods.ports, folder / "power-of-two")
            with started(children, contender, setup, cores.proxy) as proxy:
                load = start_load(
                    children,
                    cores,
                    folder,
                    setup.port,
                    seconds=seconds,
                    warm_up_s=WARM_UP_S,
                    arguments=("-c", str(CONNECTIONS), "-r", str(RATE)),
                    watched=proxy.pids(),
                    mock_pid=pods.child.pid,
                )
                windows[contender.name] += _windows(pods, seconds)
                loads[contender.name].append(load.result())
    return [
        share for one in contenders for share in _shares(one, windows[one.name], loads[one.name])
    ]


def _windows(pods: MockPods, seconds: int) -> list[list[float]]:
    """The pods' shares in each second."""
    time.sleep(WARM_UP_S + 0.2)
    windows = []
    before = pods.counts()
    for _ in range(seconds - 1):
        time.sleep(1.0)
        after = pods.counts()
        counts = [after[str(port)] - before[str(port)] for port in pods.ports]
        windows.append([count / max(sum(counts), 1) for count in counts])
        before = after
    return windows


def _shares(
    contender: Contender, windows: Sequence[Sequence[float]], loads: Sequence[Load]
) -> list[Share]:
    shares = []
    for pod, service_us in enumerate(SERVICE_US):
        mine = [window[pod] for window in windows]
        shares.append(
            Share(
                contender=contender.name,
                pod=pod,
                service_ms=service_us / 1000,
                share=statistics.mean(mine),
                share_error=statistics.stdev(mine) / math.sqrt(len(mine)),
                p50_us=statistics.median(load.p50 for load in loads),
                p99_us=statistics.median(load.p99 for load in loads),
                requests=sum(load.requests for load in loads),
                noisy=2 * sum(load.other > NOISY_CORES for load in loads) >= len(loads),
            )
        )
    return shares


def judge(shares: Sequence[Share]) -> list[Finding]:
    """Whether shares and latencies agree; nothing when there is no pair to compare.

    Latencies that do not agree tell nothing where the machine was noisy: the time that the proxies
    take themselves is then not small.
    """
    ours = [one for one in shares if one.contender == CALINIX]
    theirs = [one for one in shares if one.contender != CALINIX]
    if not ours or len(ours) != len(theirs):
        return []
    furthest = max(
        abs(a.share - b.share) / max(math.hypot(a.share_error, b.share_error), 1e-9)
        for a, b in zip(ours, theirs, strict=True)
    )
    is_noisy = ours[0].noisy or theirs[0].noisy
    found = [
        Finding(
            "powerOfTwo: each pod's share of requests, beside vllm-router's power_of_two",
            f"at most {furthest:.1f} standard errors apart",
            f"<= {MAX_Z}",
            furthest <= MAX_Z,
        )
    ]
    for name, mine, peers in (
        ("p50", ours[0].p50_us, theirs[0].p50_us),
        ("p99", ours[0].p99_us, theirs[0].p99_us),
    ):
        found.append(
            Finding(
                f"powerOfTwo: {name}, beside vllm-router's power_of_two",
                f"{mine / 1000:.2f} ms, {peers / 1000:.2f} ms",
                f"within {LATENCY_SHARE:.0%}",
                _unless(is_noisy, abs(mine - peers) <= LATENCY_SHARE * peers),
            )
        )
    return found


def _unless(is_noisy: bool, holds: bool) -> bool | None:
    return None if is_noisy and not holds else holds
