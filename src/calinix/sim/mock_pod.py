"""A mock pod: a real HTTP server in an engine's dialect that serves by the pod model, with faults.

It generates words instead of running a model; prefill time, queueing, prefix hits, KV use, token
gaps, P/D handles and errors are the model's. `GET /mock/state` says what it received and did,
`POST /mock/faults` makes it fail.
"""

from __future__ import annotations

import asyncio
import heapq
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Coroutine
from typing import Literal, Protocol, Self

import msgspec

from calinix.config import Limits, Timeouts
from calinix.edge.http_server import HttpServer, Request
from calinix.engines.vllm import LEASE_S
from calinix.sim.mock_bootstrap import MooncakeConnector, SglangConnector
from calinix.sim.mock_faults import Fault, FaultKind, FaultSet
from calinix.sim.mock_generate import Generation
from calinix.sim.mock_kv_events import KvEventsOptions, KvPublisher
from calinix.sim.mock_metrics import PodMetrics
from calinix.sim.mock_requests import Reader, Turns
from calinix.sim.mock_routes import Routes
from calinix.sim.mock_transfer import Connector, FailurePolicy, NixlConnector, url_of
from calinix.sim.pod_model import Job, PodFigures, PodModel, StepKind
from calinix.sim.words import Tokenizer

MockRole = Literal["single", "prefill", "decode"]
PodDialect = Literal["vllm", "sglang"]
ConnectorName = Literal["none", "nixl", "mooncake"]
"""vLLM's; SGLang pods have rooms."""

_TICK_S = 0.001
_NEVER_S = float("inf")
_MAX_KEPT_REQUESTS = 64
_MAX_KEPT_BODY_BYTES = 65_536
_MAX_RESPONSES = 1024
_TRANSFER_TIMEOUT_S = 300.0
"""SGLang's, for a decode pod that waits for a prefill."""
# The answer to the request that asked for it goes out before the listener closes.
_REFUSE_DELAY_S = 0.02


class Serving(Protocol):
    """A request under way: what the pod tells it."""

    jobs: list[Job]

    def on_prefilled(self, job: Job) -> None:
        """A prompt is computed and its first token is there."""
        ...

    def on_finished(self, job: Job) -> None:
        """A job has all its tokens."""
        ...

    def emit(self, now: float) -> None:
        """Tokens that `MockPod.due` was asked to call for are there."""
        ...

    def die(self) -> None:
        """The engine died under it."""
        ...


_DAY_MS = 86_400_000
_LIMITS = Limits(connections=65_536)
_TIMEOUTS = Timeouts(keep_alive_ms=_DAY_MS, client_ms=_DAY_MS)


class Received(msgspec.Struct, frozen=True):
    """A POST that the pod received."""

    path: str
    headers: dict[str, str]
    """Names in lower case; of repeated ones the last."""
    body: bytes
    """Its first 64 KiB."""


class MockPod:
    """One mock pod. `async with MockPod(...) as pod:` serves on `pod.url` until the block ends."""

    def __init__(
        self,
        *,
        role: MockRole = "single",
        dialect: PodDialect = "vllm",
        connector: ConnectorName = "nixl",
        figures: PodFigures | None = None,
        model: str = "mock",
        loras: tuple[str, ...] = (),
        max_model_len: int = 32_768,
        answer_tokens: int = 64,
        failure_policy: FailurePolicy = "fail",
        api_key: str | None = None,
        lease_s: float = LEASE_S,
        transfer_timeout_s: float = _TRANSFER_TIMEOUT_S,
        host: str = "127.0.0.1",
        port: int = 0,
        bootstrap_port: int = 0,
        kv_events: KvEventsOptions | None = None,
    ):
        self.role = role
        self.dialect = dialect
        self.figures = figures or PodFigures()
        self.failure_policy = failure_policy
        self.api_key = api_key
        self.host = host
        self.port = port
        """Where it serves; 0 until `start` has taken a free one."""
        fits = self.figures.capacity_blocks * self.figures.block_size
        self.words = Tokenizer()
        self.reader = Reader((model, *loras), min(max_model_len, fits), answer_tokens, self.words)
        self.faults = FaultSet()
        self.received: deque[Received] = deque(maxlen=_MAX_KEPT_REQUESTS)
        """The last inference requests, oldest first."""
        self.paths: Counter[str] = Counter()
        """Requests by path."""
        self.responses: OrderedDict[str, tuple[bytes, Turns]] = OrderedDict()
        """Of /v1/responses: the body and the turns so far, by id."""
        self.served = 0
        self.cancelled = 0
        """Requests whose client left before the answer was whole."""
        self.lease_s = lease_s
        self.transfer_timeout_s = transfer_timeout_s
        self._server: HttpServer | None = None
        self._routes = Routes(self)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = _NEVER_S
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self.engine_id = ""
        self.connector = self._connector(connector, bootstrap_port)
        self.kv_events: KvPublisher | None = None
        if kv_events is not None:
            self.kv_events = KvPublisher(kv_events, model, self.figures.block_size)
        self._new_engine()

    def _connector(self, name: ConnectorName, bootstrap_port: int) -> Connector:
        if self.dialect == "sglang":
            return SglangConnector(self, bootstrap_port)
        if name == "mooncake":
            return MooncakeConnector(self, bootstrap_port)
        return NixlConnector(self) if name == "nixl" else Connector(self)

    def _new_engine(self) -> None:
        """What a new engine process begins with."""
        self.dead = False
        self.engine_id = str(uuid.uuid4())
        self.started_s = time.time()
        self.model = PodModel(self.figures)
        if self.kv_events is not None:
            self.kv_events.new_engine()
            self.model.blocks.watcher = self.kv_events
        self.connector.new_engine()
        self.metrics = PodMetrics(self.reader.models[0], self.started_s)
        self._serving: dict[str, Serving] = {}
        self._due: list[tuple[float, int, Serving]] = []

    @property
    def address(self) -> str:
        """Where other pods reach it."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host  # noqa: S104

    @property
    def url(self) -> str:
        """Where it serves."""
        return url_of(self.address, self.port)

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Serves with an empty cache, on the same port as before if it has served.

        Raises OSError.
        """
        self.loop = asyncio.get_running_loop()
        await self._listen()
        await self.connector.start()
        self._new_engine()
        if self.kv_events is not None:
            self.kv_events.open(self.loop)

    async def stop(self) -> None:
        """Drops every connection and stops serving."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._close()
        if self.kv_events is not None:
            self.kv_events.close()
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = None, _NEVER_S
        await self.connector.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _listen(self) -> None:
        server = HttpServer(self._routes, self.loop, _LIMITS, _TIMEOUTS)
        await server.start(self.host, self.port)
        self._server = server
        self.port = server.port

    async def _close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.drain(0)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs `work` beside the requests; it is cancelled when the pod stops."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- what is remembered ------------------------------------------------------------------

    def keep(self, request: Request) -> None:
        """Remembers an inference request for `GET /mock/state`."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers
        }
        self.received.append(Received(request.path, headers, request.body[:_MAX_KEPT_BODY_BYTES]))

    def keep_response(self, response_id: str, body: bytes, turns: Turns) -> None:
        """Stores an answer of /v1/responses: it can be read and continued on this pod only."""
        self.responses[response_id] = (body, turns)
        if len(self.responses) > _MAX_RESPONSES:
            self.responses.popitem(last=False)

    def next_number(self) -> int:
        """A number that nothing else on this pod has."""
        self._number += 1
        return self._number

    # --- the model on the loop's clock -------------------------------------------------------

    def submit(self, serving: Serving) -> None:
        """Puts the request's jobs into the queue."""
        now = self.loop.time()
        for job in serving.jobs:
            self.model.submit(job, now)
            self._serving[job.id] = serving
        self.step(now)

    def due(self, at_s: float, serving: Serving) -> None:
        """`serving` has a token to send at `at_s`."""
        heapq.heappush(self._due, (at_s, self.next_number(), serving))

    def step(self, now: float) -> None:
        """Lets happen what is to happen by now, and sets the timer for what is next."""
        model = self.model
        model.slow_down(self.faults.slow_factor(now), now)
        for request_id in self.connector.expire(now):
            model.release(request_id, now)
        for step in model.advance(now):
            job = step.job
            serving = self._serving.get(job.id)
            if step.kind is StepKind.PREFILLED:
                if serving is not None:
                    serving.on_prefilled(job)
                continue
            self.metrics.finished(job)
            if serving is not None:
                del self._serving[job.id]
                serving.on_finished(job)
        due = self._due
        while due and due[0][0] <= now:
            heapq.heappop(due)[2].emit(now)
        self._arm(now)

    def _arm(self, now: float) -> None:
        """One timer for the whole pod, never more often than every `_TICK_S`."""
        model_s, lease_s = self.model.next_s(), self.connector.next_expiry_s()
        next_s = min(
            _NEVER_S if model_s is None else model_s,
            _NEVER_S if lease_s is None else lease_s,
            self._due[0][0] if self._due else _NEVER_S,
        )
        next_s = max(next_s, now + _TICK_S)
        if self._timer is not None:
            if self._timer_s <= next_s:
                return
            self._timer.cancel()
            self._timer = None
        if next_s < _NEVER_S:
            self._timer_s = next_s
            self._timer = self.loop.call_at(next_s, self._tick)

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = None, _NEVER_S
        if self._server is not None:
            self.step(self.loop.time())

    def done(self, serving: Serving) -> None:
        """A request was answered to its end."""
        self.served += 1
        if isinstance(serving, Generation):
            self.connector.over(serving)

    def give_up(self, serving: Serving, *, client_left: bool) -> None:
        """The request is over before its end; what its jobs hold is free again."""
        now = self.loop.time()
        for job in serving.jobs:
            self.model.cancel(job, now)
            self._serving.pop(job.id, None)
        self.cancelled += client_left
        if isinstance(serving, Generation):
            self.connector.over(serving)
        # Not here: the caller may be in the middle of `step`.
        self.loop.call_soon(self._tick)

    # --- prefill/decode ----------------------------------------------------------------------

    def release(self, request_id: str) -> None:
        """Another pod has loaded the blocks that were kept of a request: they are free."""
        self.model.release(request_id, self.loop.time())
        # Not here: the caller may be in the middle of `step`.
        self.loop.call_soon(self._tick)

    def die_of_client(self) -> None:
        """A client left that waited for KV that never came: real engines do not survive that."""
        self.cancelled += 1
        self.die()

    # --- faults ------------------------------------------------------------------------------

    def add_faults(self, faults: list[Fault]) -> None:
        """Puts faults in force. Raises BadRequest when there are too many."""
        for fault in faults:
            self.faults.add(fault, self.loop.time())
            if fault.kind == "refuse":
                self.spawn(self._refuse(fault.for_s))

    def clear_faults(self, kind: FaultKind | None = None) -> None:
        """Ends all faults, or those of one kind; a closed listener opens again."""
        self.faults.clear(kind)
        if self._server is None and kind in (None, "refuse"):
            self.spawn(self._listen())

    async def _refuse(self, for_s: float | None) -> None:
        await asyncio.sleep(_REFUSE_DELAY_S)
        await self._close()
        if for_s is not None:
            await asyncio.sleep(for_s)
            self.clear_faults("refuse")

    def die(self) -> None:
        """The engine dies: what is under way is lost, probes say 503 until `revive`."""
        self.dead = True
        lost = [*self._serving.values(), *self.connector.pending()]
        for serving in {id(one): one for one in lost}.values():
            serving.die()

    def revive(self) -> None:
        """A new engine with an empty cache takes the dead one's place."""
        self._new_engine()
