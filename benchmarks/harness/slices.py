"""Takes slices: a fresh proxy, the load on it, taken again while others disturb it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from harness.cases import Case
from harness.compare import NOISY_CORES, Slice
from harness.contenders import DIRECT, NIXL, SGLANG, UNIFIED, Contender, new_setup, started
from harness.machine import Cores
from harness.processes import BenchmarkError, Child, Children
from harness.tools import Load, Loadgen, MockPods, start_load, start_mock_pods

LEGS = {UNIFIED: (), NIXL: ("prefills", "handles"), SGLANG: ("meetings",)}
"""What the mock pods must have seen of every request, by the way that KV is handed on."""


class Plan(msgspec.Struct, frozen=True):
    """What is measured, how long and how often."""

    cases: tuple[Case, ...]
    repeats: int | None
    """Slices of each contender in each case; none: as many as the case is worth."""
    seconds: float
    warm_up_s: float
    retries: int
    """How many times a noisy slice is taken again."""


class Bench:
    """One run: the mock pods stay, each slice starts and ends its own proxy."""

    def __init__(self, plan: Plan, children: Children, cores: Cores, folder: Path):
        self.plan = plan
        self._children = children
        self._cores = cores
        self._folder = folder
        self._count = 0
        self._pods: dict[str, MockPods] = {}

    def pods(self, handoff: str) -> MockPods:
        """The mock pods that hand KV on in this way; started when they are first asked for."""
        if handoff not in self._pods:
            self._pods[handoff] = start_mock_pods(
                self._children, self._cores, self._folder, handoff=handoff
            )
        return self._pods[handoff]

    def schedule(
        self, contenders: Sequence[Contender]
    ) -> Iterator[tuple[int, Case, Contender | None]]:
        """Every slice to be taken; no contender: straight to a mock pod."""
        wanted = self.plan.repeats
        for repeat in range(wanted or max(case.repeats for case in self.plan.cases)):
            for case in self.plan.cases:
                if case.of or (not wanted and repeat >= case.repeats):
                    continue
                if case.direct:
                    yield repeat, case, None
                able = [one for one in contenders if case.handoff in one.handoffs]
                # Whoever comes first this time comes last next time.
                turn = repeat % max(len(able), 1)
                for contender in [*able[turn:], *able[:turn]]:
                    yield repeat, case, contender

    def take(self, repeat: int, case: Case, contender: Contender | None) -> Slice:
        """One slice; of noisy attempts the quietest is kept."""
        best = self._measure(case, contender)
        attempts = 1
        while best.other > NOISY_CORES and attempts <= self.plan.retries:
            again = self._measure(case, contender)
            best = min(best, again, key=lambda load: load.other)
            attempts += 1
        name = contender.name if contender else DIRECT
        return Slice(case.name, name, repeat, attempts, best)

    def _measure(self, case: Case, contender: Contender | None) -> Load:
        pods = self.pods(case.handoff)
        before = pods.counts()
        with self.under_load(case, contender) as (_, load):
            result = load.result()
        legs = {name: count - before[name] for name, count in pods.counts().items()}
        if any(legs[name] < result.requests for name in LEGS[case.handoff]):
            # Its figures would be those of a proxy that does not hand on.
            raise BenchmarkError(
                f"{contender.name if contender else DIRECT}, {case.name}: "
                f"{result.requests} answers, but the pods saw {legs}"
            )
        return result

    @contextlib.contextmanager
    def under_load(
        self, case: Case, contender: Contender | None
    ) -> Iterator[tuple[Child | None, Loadgen]]:
        """A fresh proxy with the load of a case just begun on it; read the load's result inside."""
        if contender is None:
            yield None, self._load(case, self.pods(case.handoff).ports[0], ())
            return
        self._count += 1
        folder = self._folder / str(self._count)
        setup = new_setup(self.pods(case.handoff).ports, folder, case.handoff)
        with started(self._children, contender, setup, self._cores.proxy) as proxy:
            yield proxy, self._load(case, setup.port, proxy.pids())
        shutil.rmtree(folder)

    def _load(self, case: Case, port: int, watched: Sequence[int]) -> Loadgen:
        return start_load(
            self._children,
            self._cores,
            self._folder,
            port,
            seconds=self.plan.seconds,
            warm_up_s=self.plan.warm_up_s,
            arguments=case.arguments,
            watched=watched,
            mock_pid=self.pods(case.handoff).child.pid,
        )
