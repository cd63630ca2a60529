"""A mock pod's part in prefill/decode: what it keeps for other pods, how it loads what they keep.

One connector a pod, as in engines. This module has the base, which moves nothing, and NIXL; the
connectors with a bootstrap server are in mock_bootstrap.py. How a decode pod knows that a handle
is true: it asks the prefill pod that the handle names (`POST /mock/kv/redeem`), which checks every
field against what it issued and frees the pinned blocks. So a handle works between processes, and
only once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Literal

import msgspec

from calinix.edge.http_client import FetchError, PodClient, fetch
from calinix.edge.http_server import Request
from calinix.engines.vllm import Ask, HandleError, HandleTable, NixlHandle, read_params
from calinix.errors import BadRequest
from calinix.sim.mock_generate import Generation, Unanswered
from calinix.sim.mock_requests import Body
from calinix.sim.pod_model import Job

if TYPE_CHECKING:
    from calinix.sim.mock_pod import MockPod

FailurePolicy = Literal["fail", "recompute"]
"""vLLM's kv_load_failure_policy: KV that is not to be had is a 500, or computed here."""
_MAX_PEERS = 256
_REDEEM_TIMEOUT_S = 5.0
_JSON_LINE = (b"content-type", b"application/json")


class Peers:
    """Connections to other pods, by URL; bounded."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, PodClient] = OrderedDict()

    def at(self, url: str) -> PodClient:
        """The client of one of them."""
        client = self._clients.get(url)
        if client is None:
            loop = asyncio.get_running_loop()
            client = PodClient(url, loop, connect_timeout_s=_REDEEM_TIMEOUT_S)
            self._clients[url] = client
            if len(self._clients) > _MAX_PEERS:
                self._clients.popitem(last=False)[1].close()
        return client

    def close(self) -> None:
        """Closes what is idle."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()


class Connector:
    """Moves nothing: pods that share storage, or none at all."""

    port = 0
    """Of its bootstrap server; 0 where it has none."""

    def __init__(self, pod: MockPod):
        self._pod = pod
        self._peers = Peers()
        self._loading: dict[Generation, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """The pod begins to serve: on its own port it does already."""

    async def stop(self) -> None:
        """The pod serves no more."""
        self._peers.close()

    def new_engine(self) -> None:
        """A new engine process: nothing is kept."""

    def serve(self, generation: Generation, body: Body) -> None:  # noqa: ARG002
        """Lets the pod serve a request in the way that its transfer fields ask for."""
        self._pod.submit(generation)

    def over(self, generation: Generation) -> None:
        """A request is over, whatever its end."""
        task = self._loading.pop(generation, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def pending(self) -> list[Generation]:
        """Requests that wait for another pod."""
        return list(self._loading)

    def control(self, request: Request, head: bytes) -> bool:  # noqa: ARG002
        """Answers a path under /mock/kv; whether there is such a one. Raises BadRequest."""
        return False

    def expire(self, now: float) -> list[str]:
        """Request ids whose kept blocks nobody has come for in time."""
        del now
        return []

    def next_expiry_s(self) -> float | None:
        """When `expire` has something to do next."""
        return None

    def _load_with(self, generation: Generation, load: asyncio.Task[None]) -> None:
        self._loading[generation] = load

    def _loaded(self, generation: Generation, error: HandleError | None) -> None:
        """The prompt's KV is there, or it is not to be had."""
        pod = self._pod
        self._loading.pop(generation, None)
        if generation.over:
            return
        if error is not None and pod.failure_policy == "fail":
            generation.fail(f"KV load failed: {error}")
            return
        for job in generation.jobs:
            job.external = error is None
        pod.submit(generation)


class NixlConnector(Connector):
    """vLLM's NIXL: the prefill pod answers with a handle, the decode pod redeems it."""

    def __init__(self, pod: MockPod):
        super().__init__(pod)
        self.new_engine()

    def new_engine(self) -> None:
        """No handle of an earlier process is good."""
        pod = self._pod
        self.handles = HandleTable(pod.engine_id, pod.address, pod.port, pod.lease_s)

    def serve(self, generation: Generation, body: Body) -> None:  # noqa: ARG002
        """Prefill for a handle, decode with one, or serve the request whole."""
        pod = self._pod
        ask, handle = read_params(generation.wanted.transfer)
        if ask is Ask.REMOTE_DECODE and pod.role == "prefill":
            generation.keep(self._issue)
        elif pod.role == "decode" and ask is Ask.INCOMPLETE:
            # A real engine waits for blocks that never come, and dies when the client leaves.
            generation.hang(Unanswered(pod.die_of_client))
            return
        elif pod.role == "decode" and handle is not None:
            task = pod.spawn(self._load(generation, handle))
            self._load_with(generation, task)
            return
        pod.submit(generation)

    def _issue(self, job: Job) -> dict[str, object]:
        """A handle for a finished prefill's pinned prompt blocks."""
        pod = self._pod
        prompt_blocks = -(-job.prompt_tokens // pod.figures.block_size)
        numbers = [block.number for block in job.blocks[:prompt_blocks]]
        now = pod.loop.time()
        handle = self.handles.issue(job.id, numbers, job.prompt_tokens, job.cached_tokens, now)
        issued: dict[str, object] = msgspec.to_builtins(handle)
        return issued

    async def _load(self, generation: Generation, handle: NixlHandle) -> None:
        error = None
        try:
            await self._redeem(handle, generation.jobs[0].prompt_tokens)
        except HandleError as found:
            error = found
        self._loaded(generation, error)

    async def _redeem(self, handle: NixlHandle, prompt_tokens: int) -> None:
        """Loads a prompt's KV from the pod that the handle names. Raises HandleError."""
        url = url_of(handle.remote_host, handle.remote_port)
        body = msgspec.json.encode(handle)
        try:
            head, answer = await fetch(
                self._peers.at(url),
                "POST",
                "/mock/kv/redeem",
                [_JSON_LINE],
                body,
                timeout_s=_REDEEM_TIMEOUT_S,
            )
        except FetchError as error:
            raise HandleError(f"no answer from {url}: {error}") from error
        said = msgspec.json.decode(answer)
        if head.status != 200:
            raise HandleError(str(said.get("detail")))
        check_tokens(said["tokens"], prompt_tokens)

    def control(self, request: Request, head: bytes) -> bool:
        """`POST /mock/kv/redeem`: another pod has loaded the blocks, which are free then."""
        if (request.method, request.path) != ("POST", "/mock/kv/redeem"):
            return False
        pod = self._pod
        now = pod.loop.time()
        try:
            handle = msgspec.json.decode(request.body, type=NixlHandle)
            tokens = self.handles.redeem(handle, now)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"not a handle: {error}") from error
        except HandleError as error:
            request.conn.respond(409, head, msgspec.json.encode({"detail": str(error)}))
            return True
        pod.release(handle.remote_request_id)
        request.conn.respond(200, head, msgspec.json.encode({"tokens": tokens}))
        return True

    def expire(self, now: float) -> list[str]:
        """Handles whose lease has ended."""
        return self.handles.expire(now)

    def next_expiry_s(self) -> float | None:
        """The next end of a lease."""
        return self.handles.next_expiry_s()


def check_tokens(loaded: int, prompt_tokens: int) -> None:
    """KV of another prompt is of no use. Raises HandleError."""
    if loaded != prompt_tokens:
        raise HandleError(f"the handle covers {loaded} tokens, the prompt has {prompt_tokens}")


def url_of(host: str, port: int) -> str:
    """The URL of a pod, or of its bootstrap server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
