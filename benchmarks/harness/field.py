"""The simulator's requests over HTTP: mock pods with a scenario's figures, a gateway, a client."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import numpy as np

from calinix import headers as h
from calinix.app import App, running_gateway
from calinix.config import parse_config
from calinix.edge.http_client import PodClient, ResponseHead, UpstreamFailure
from calinix.engines.sse import EventCounter
from calinix.engines.usage import TAIL_BYTES, read_usage
from calinix.sim.faults import SlowPod
from calinix.sim.fleet_config import merged
from calinix.sim.mock_faults import Fault
from calinix.sim.mock_pod import MockPod
from calinix.sim.recorder import Recorder
from calinix.sim.scenarios import Scenario
from calinix.sim.simulate import PodSummary, Run
from calinix.sim.workload import SimRequest, prompt_bytes

SAMPLE_S, LAG_S = 0.5, 0.01
PATIENCE_S = 60.0


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
        self._late_s: list[float] = []

    @property
    def lag_s(self) -> float:
        """How late this loop wakes up, in the mean."""
        return sum(self._late_s) / max(1, len(self._late_s))

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
        watches = [asyncio.ensure_future(one) for one in (self._watch(), self._wake_up())]
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
        for watch in watches:
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
        """Samples of queues, weights and forecasts."""
        width = len(self._pods)
        for number in itertools.count(1):
            due_s = number * SAMPLE_S
            await asyncio.sleep(max(0.0, due_s - self.now()))
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

    async def _wake_up(self) -> None:
        """Notes how late that is."""
        while True:
            due_s = self.now() + LAG_S
            await asyncio.sleep(LAG_S)
            self._late_s.append(self.now() - due_s)

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
