"""Two prefill and two decode pods of unequal speed on real sockets, beside the same in simulation.

The pods are mock pods, the gateway is the real one, requests come as a Poisson process over HTTP.
roundRobin and powerOfTwo run in turn, each without the controller and with it (weightedRoundRobin,
weightedPowerOfTwo). Half-way the fast decode pod takes five times as long per token, and then
recovers. `calinix.sim` plays the very same requests on the same pods in virtual time.

What must agree is the order of the strategies: where two differ by more than MARGIN in the
simulation, the same one is better on sockets. Ends with 1 where that does not hold.

    python benchmarks/live_2p2d.py [--out FOLDER] [--seconds 25] [--seed 1]    (make 2p2d)

Everything but the network runs in this one process: its load adds milliseconds to each latency, so
compare orders and ratios, not absolute figures. The busiest the loop was is told as `loop lag`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from calinix import headers as h
from calinix.app import App, running_gateway
from calinix.config import Log, parse_config
from calinix.edge.http_client import PodClient, ResponseHead, UpstreamFailure
from calinix.engines.sse import EventCounter
from calinix.engines.usage import TAIL_BYTES, read_usage
from calinix.sim.faults import SlowPod
from calinix.sim.fleet_config import merged
from calinix.sim.measures import Outcome, Row, outcome_of
from calinix.sim.mock_faults import Fault
from calinix.sim.mock_pod import MockPod
from calinix.sim.prompts import Length
from calinix.sim.recorder import Recorder
from calinix.sim.report import COLUMNS, Report, as_json, results, shown, write
from calinix.sim.scenarios import SCENARIOS, Scenario
from calinix.sim.simulate import PodSummary, Run, run
from calinix.sim.synthetic import SingleRequests
from calinix.sim.workload import SimRequest, prompt_bytes
from calinix.telemetry import configure_logging

STRATEGIES = ("roundRobin", "weightedRoundRobin", "powerOfTwo", "weightedPowerOfTwo")
FAST_DECODE = 2
"""Index of the pod that slows down: prefill 0 and 1, decode 2 and 3."""
SLOW_FACTOR = 5.0
MARGIN, NOISE = 1.25, 1.15
"""Pairs that are further apart in the simulation must not be reversed by more than the noise."""
ORDERED_BY = ("ttft_mean_s", "e2e_mean_s")
MOST_ANSWER_TOKENS = 256
"""So that a run does not wait for one long answer on the slow pod."""
SAMPLE_S = 0.5
PATIENCE_S = 60.0


def scenario_of(seconds: float, most_answer_tokens: int = MOST_ANSWER_TOKENS) -> Scenario:
    """The second seed's scenario, shorter, with the step in one decode delay."""
    base = SCENARIOS["seed-2p2d"]
    workload = base.workload
    assert isinstance(workload, SingleRequests)
    replace = msgspec.structs.replace
    answer = Length(mean=workload.answer.mean, most=most_answer_tokens)
    return replace(
        base,
        name="2p2d",
        description="Two prefill and two decode pods, one of each five to six times as slow; "
        f"half-way the fast decode pod takes {SLOW_FACTOR:g} times as long per token, for a "
        "fifth of the time.",
        workload=replace(workload, requests=round(40 * seconds), answer=answer),
        faults=(
            SlowPod(
                pods=(FAST_DECODE,), factor=SLOW_FACTOR, at_s=0.45 * seconds, for_s=0.2 * seconds
            ),
        ),
    )


class Shot:
    """One request and what comes back (ResponseListener)."""

    __slots__ = ("_counter", "_field", "_number", "_tail")

    def __init__(self, field: Field, number: int):
        self._field = field
        self._number = number
        self._counter = EventCounter()
        self._tail = b""

    def on_head(self, head: ResponseHead) -> None:
        """Which pods serve it."""
        named = dict(head.headers)
        self._field.served_by(
            self._number, head.status, named.get(h.DECODE_POD_ID), named.get(h.PREFILL_POD_ID)
        )

    def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:  # noqa: ARG002
        """Tokens."""
        field, recorder = self._field, self._field.recorder
        self._tail = (self._tail + body)[-TAIL_BYTES:]
        if self._counter.feed(body) and np.isnan(recorder.first_s[self._number]):
            recorder.first_s[self._number] = field.now()
        if last:
            usage = read_usage(self._tail)
            field.ended(self._number, usage.cached_tokens if usage is not None else None)

    def on_failure(self, failure: UpstreamFailure, detail: str) -> None:  # noqa: ARG002
        """No whole answer."""
        self._field.ended(self._number, None, failed=True)


class Field:
    """The pods, the gateway and one run of requests on them."""

    def __init__(self, scenario: Scenario, app: App, pods: Sequence[MockPod], client: PodClient):
        self._scenario = scenario
        self._app = app
        self._pods = pods
        self._client = client
        self._described = scenario.pods()
        self._index = {pod.id.encode(): place for place, pod in enumerate(self._described)}
        self._start_s = 0.0
        self._left = 0
        self._done = asyncio.Event()
        self.recorder = Recorder(len(pods))
        self.lag_s = 0.0

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._start_s

    async def play(self, asked: Sequence[SimRequest]) -> None:
        """Sends every request at its time, and waits for the answers."""
        self._left = len(asked)
        host, size = self._client.host, self._scenario.workload.block_tokens
        bodies = [_request(one, number, host, size) for number, one in enumerate(asked)]
        gc.collect()
        gc.freeze()
        self._start_s = time.perf_counter()
        loop = asyncio.get_running_loop()
        for fault in self._scenario.faults:
            assert isinstance(fault, SlowPod)
            for place in fault.pods:
                slow = Fault(kind="slow", factor=fault.factor, for_s=fault.for_s)
                loop.call_later(fault.at_s, self._pods[place].add_faults, [slow])
        watch = asyncio.ensure_future(self._watch())
        for one, data in zip(asked, bodies, strict=True):
            delay_s = one.arrival_s - self.now()
            if delay_s > 0.0:
                await asyncio.sleep(delay_s)
            number = self.recorder.arrived(
                one.arrival_s, one.prompt_tokens, one.output_tokens, streamed=True
            )
            self._client.send(data, Shot(self, number))
        async with asyncio.timeout(PATIENCE_S):
            await self._done.wait()
        watch.cancel()
        gc.unfreeze()

    def served_by(self, number: int, status: int, pod: bytes | None, prefill: bytes | None) -> None:
        """What an answer's head says."""
        self.recorder.status[number] = status
        self.recorder.pod[number] = self._index.get(pod or b"", -1)
        self.recorder.prefill_pod[number] = self._index.get(prefill or b"", -1)

    def ended(self, number: int, cached: int | None, *, failed: bool = False) -> None:
        """An answer is whole, or lost."""
        recorder = self.recorder
        if failed:
            recorder.status[number] = 0
        else:
            recorder.end_s[number] = self.now()
            recorder.cached_tokens[number] = cached or 0
        self._left -= 1
        if not self._left:
            self._done.set()

    async def _watch(self) -> None:
        """Samples of queues, weights and forecasts; and how late this loop is."""
        width = len(self._pods)
        for number in itertools.count(1):
            due_s = number * SAMPLE_S
            await asyncio.sleep(max(0.0, due_s - self.now()))
            self.lag_s = max(self.lag_s, self.now() - due_s)
            weights = np.full(width, np.nan)
            ahead: list[tuple[list[int], np.ndarray[Any, np.dtype[np.float64]]]] = []
            for report in self._app.router.controllers(time.monotonic()).values():
                weights[report.slots] = report.weights
                if report.queue_trajectory:
                    ahead.append((report.slots, np.array(report.queue_trajectory)))
            queues = [pod.model.waiting + pod.model.running for pod in self._pods]
            self.recorder.sample(self.now(), queues, weights)
            if ahead:
                expected = np.full((max(len(one) for _, one in ahead), width), np.nan)
                for slots, one in ahead:
                    expected[: len(one), slots] = one
                self.recorder.predict(self.now(), expected)

    def run(self, strategy: str, seed: int, config: dict[str, Any]) -> Run:
        """What happened, as a run of the simulator has it."""
        recorder = self.recorder
        counters = [pod.model.counters for pod in self._pods]
        return Run(
            scenario=self._scenario.name,
            strategy=strategy,
            seed=seed,
            load=self._scenario.load,
            config=config,
            requests=recorder.requests(np.zeros(len(recorder.arrival_s))),
            pods=tuple(
                PodSummary(
                    id=pod.id,
                    role=pod.role,
                    speed=1.0,
                    work_done=one.work_tokens + one.output_tokens,
                )
                for pod, one in zip(self._described, counters, strict=True)
            ),
            samples=recorder.samples(),
            predicted_queue=tuple(recorder.predicted),
            duration_s=self.now(),
        )


def _request(asked: SimRequest, number: int, host: bytes, block_tokens: int) -> tuple[bytes, bytes]:
    """Head and body of a streamed completion of the request's token ids."""
    data = prompt_bytes(asked.chain, asked.prompt_tokens, block_tokens, number)
    body = msgspec.json.encode(
        {
            "model": "mock",
            "prompt": (np.frombuffer(data, dtype="<u4") % 32_768).tolist(),
            "max_tokens": asked.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % (host, len(body))
    )
    return head, body


@contextlib.asynccontextmanager
async def field_of(
    scenario: Scenario, strategy: str, seed: int
) -> AsyncIterator[tuple[Field, dict[str, Any]]]:
    """Fresh pods, a fresh gateway before them, and a client."""
    async with contextlib.AsyncExitStack() as stack:
        pods = []
        groups: dict[str, list[dict[str, str]]] = {"prefill": [], "decode": []}
        for one in scenario.pods():
            assert one.role != "single"
            pod = MockPod(role=one.role, figures=one.figures)
            pods.append(await stack.enter_async_context(pod))
            groups[one.role].append({"id": one.id, "url": pod.url})
        config = merged(
            {
                "gateway": {
                    "host": "127.0.0.1", "port": 0, "strategy": {"name": strategy}, "seed": seed,
                },
                "admin": {"enabled": False},
                "cacheRegistry": {"tokenBlockSize": scenario.workload.block_tokens},
                "log": {"requests": False},
                "upstreams": {
                    "dispatch": {
                        "protocol": "nixl",
                        **{role: {"pods": members} for role, members in groups.items()},
                    }
                },
            },
            scenario.settings,
        )  # fmt: skip
        text = msgspec.json.encode(config).decode()
        app = await stack.enter_async_context(running_gateway(parse_config(text, "2p2d")))
        async with asyncio.timeout(10.0):
            while len(app.router.usable_pods()) < len(pods):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        client = PodClient(
            app.base_url, asyncio.get_running_loop(), connect_timeout_s=2.0, max_idle=1024
        )
        stack.callback(client.close)
        yield Field(scenario, app, pods, client), config


async def live(scenario: Scenario, strategy: str, seed: int) -> tuple[Outcome, float]:
    """One strategy on sockets; and the loop's lag."""
    workload = scenario.workload
    asked = list(workload.arrivals(random.Random(f"{seed}/arrivals"), scenario.load))
    async with field_of(scenario, strategy, seed) as (field, config):
        await field.play(asked)
        return outcome_of(field.run(strategy, seed, config)), field.lag_s


def disagreements(simulated: Sequence[Row], measured: Sequence[Row]) -> list[str]:
    """Pairs that the simulation tells apart and that came out the other way round on sockets."""
    found = []
    for field in ORDERED_BY:
        for (sim_a, live_a), (sim_b, live_b) in itertools.permutations(
            zip(simulated, measured, strict=True), 2
        ):
            expected = getattr(sim_b, field) / getattr(sim_a, field)
            seen = getattr(live_b, field) / getattr(live_a, field)
            if expected > MARGIN and seen * NOISE < 1.0:
                found.append(
                    f"{field}: {sim_b.strategy} / {sim_a.strategy} is {seen:.2f}, "
                    f"simulated {expected:.2f}"
                )
    return found


def say(words: str = "") -> None:
    """To the terminal, at once."""
    print(words, flush=True)


def table(simulated: Sequence[Row], measured: Sequence[Row]) -> None:
    """Both, side by side."""
    shows = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s")
    say(f"{'':20}" + "".join(f"{COLUMNS[name][0]:>22}" for name in shows))
    say(f"{'':20}" + f"{'sockets':>11}{'simulated':>11}" * len(shows))
    for sim, real in zip(simulated, measured, strict=True):
        cells = (f"{shown(name, getattr(row, name)):>11}" for name in shows for row in (real, sim))
        say(f"{sim.strategy:20}" + "".join(cells))


def main() -> int:
    """The experiment. The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/2p2d"))
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals, per strategy")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    configure_logging(Log(level="error"))
    scenario = scenario_of(options.seconds)
    simulated = [outcome_of(run(scenario, name, options.seed)) for name in STRATEGIES]
    measured = []
    for name in STRATEGIES:
        say(f"{name}: {simulated[0].row.requests} requests over HTTP ...")
        outcome, lag_s = uvloop.run(live(scenario, name, options.seed))
        say(f"    {outcome.series.t_s[-1]:.0f} s, loop lag {lag_s * 1e3:.0f} ms")
        measured.append(outcome)
    sim_rows, live_rows = [one.row for one in simulated], [one.row for one in measured]
    say()
    table(sim_rows, live_rows)
    wrong = disagreements(sim_rows, live_rows)
    say()
    say("the order of the strategies agrees" if not wrong else "the order does NOT agree:")
    for line in wrong:
        say(f"    {line}")
    keep(scenario, simulated, measured, wrong, options)
    return 1 if wrong else 0


def keep(
    scenario: Scenario,
    simulated: list[Outcome],
    measured: list[Outcome],
    wrong: list[str],
    options: argparse.Namespace,
) -> None:
    """The pictures of both, and all figures in one file."""
    config = {
        "seconds": options.seconds,
        "seed": options.seed,
        "faults": msgspec.to_builtins(scenario.faults),
        "pods": [msgspec.to_builtins(pod) for pod in scenario.pods()],
    }
    for name, outcomes in (("simulated", simulated), ("sockets", measured)):
        report = Report(
            scenario=f"2p2d, {name}",
            description=scenario.description,
            config=config,
            outcomes=outcomes,
        )
        say(f"pictures: {write(report, options.out / name)}")
    whole = results(Report(scenario="2p2d", description="", config=config, outcomes=measured))
    more = {"simulated": [one.row for one in simulated], "disagreements": wrong}
    (options.out / "results.json").write_bytes(as_json({**whole, **more}))


if __name__ == "__main__":
    sys.exit(main())
