"""The mock pods' connectors with a bootstrap server of its own port: Mooncake's and SGLang's.

The decode pod asks the prefill pod for a prompt's KV by a key, a transfer id or a room, and waits
until it is computed (`POST /mock/kv/pull` at the bootstrap server): for as long as a real one
would, so a prefill that fails leaves its decode pod hanging.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from calinix.config import Limits, Timeouts
from calinix.edge.http_client import FetchError, fetch
from calinix.edge.http_server import HttpServer, Request, ServerConnection
from calinix.engines.base import LegAnswer
from calinix.engines.mooncake import (
    DEFAULT_BOOTSTRAP_PORT,
    QUERY_PATH,
    Pull,
    TransferTable,
    engine_ids,
    query_answer,
    worker_of,
)
from calinix.engines.sglang_rooms import DuplicateRoomError, Room, RoomTable, read_rooms
from calinix.engines.vllm import HandleError
from calinix.errors import CalinixError
from calinix.sim.mock_generate import Generation, Unanswered
from calinix.sim.mock_requests import Body
from calinix.sim.mock_transfer import Connector, check_tokens, url_of
from calinix.sim.pod_model import Job

if TYPE_CHECKING:
    from calinix.sim.mock_pod import MockPod

_JSON = b"content-type: application/json\r\n"
_JSON_LINE = (b"content-type", b"application/json")
_PULL_PATH = "/mock/kv/pull"
_DAY_MS = 86_400_000
_TIMEOUTS = Timeouts(keep_alive_ms=_DAY_MS, client_ms=_DAY_MS)
_RETRY_DELAY_S = 0.02


class _Wish(msgspec.Struct, frozen=True):
    """The body of a pull."""

    key: str


class Pulls:
    """Decode pods that wait at a prefill pod, by the key of what they wait for."""

    def __init__(self) -> None:
        self._waiting: dict[str, ServerConnection] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._waiting

    def wait(self, key: str, conn: ServerConnection) -> None:
        """Answered by `give` or `fail`; forgotten when it leaves."""
        self._waiting[key] = conn
        conn.stream = Unanswered(lambda: self._forget(key, conn))

    def give(self, key: str, tokens: int) -> bool:
        """The KV is there; whether anybody waits for it."""
        conn = self._waiting.pop(key, None)
        if conn is None:
            return False
        conn.respond(200, _JSON, msgspec.json.encode({"tokens": tokens}))
        return True

    def fail(self, key: str, why: str) -> None:
        """The KV will never be there."""
        conn = self._waiting.pop(key, None)
        if conn is not None:
            conn.respond(409, _JSON, msgspec.json.encode({"detail": why}))

    def _forget(self, key: str, conn: ServerConnection) -> None:
        if self._waiting.get(key) is conn:
            del self._waiting[key]


class BootstrapConnector(Connector):
    """What both have in common: the server, and the decode pod's way to it."""

    def __init__(self, pod: MockPod, port: int):
        super().__init__(pod)
        self.port = port
        """Of the bootstrap server; 0 until it has taken a free one."""
        self.queries = 0
        """How often it was asked for the engine's ids."""
        self.pulls = Pulls()
        self._server: HttpServer | None = None

    async def start(self) -> None:
        """The bootstrap server listens, on a prefill pod. Raises OSError."""
        if self._pod.role != "prefill" or self._server is not None:
            return
        server = HttpServer(self, self._pod.loop, Limits(), _TIMEOUTS)
        await server.start(self._pod.host, self.port)
        self._server, self.port = server, server.port

    async def stop(self) -> None:
        """Drops every connection."""
        await super().stop()
        server, self._server = self._server, None
        if server is not None:
            await server.drain(0)

    def new_engine(self) -> None:
        """Nobody waits for what an earlier process was to compute."""
        self.pulls = Pulls()

    def on_request(self, request: Request) -> None:
        """A request at the bootstrap server."""
        if (request.method, request.path) == ("POST", _PULL_PATH):
            self.pulled(msgspec.json.decode(request.body, type=_Wish).key, request.conn)
        elif (request.method, request.path) == ("GET", QUERY_PATH) and not self._pod.dead:
            self.queries += 1
            request.conn.respond(200, _JSON, self.query())
        else:
            request.conn.respond(404, _JSON, b'{"detail":"Not Found"}')

    def query(self) -> bytes:
        """What the bootstrap server says of the engine."""
        return b"{}"

    def pulled(self, key: str, conn: ServerConnection) -> None:
        """A decode pod asks for a prompt's KV."""
        self.pulls.wait(key, conn)

    def begin_load(
        self, generation: Generation, load: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Loads beside the requests; its end submits the request or fails it."""

        async def run() -> None:
            error = None
            try:
                await load()
            except (CalinixError, msgspec.MsgspecError, KeyError) as found:
                error = HandleError(str(found))
            self._loaded(generation, error)

        self._load_with(generation, self._pod.spawn(run()))

    async def pull(self, url: str, key: str, prompt_tokens: int) -> None:
        """Loads KV from the prefill pod at `url`, waiting for it. Raises HandleError."""
        body = msgspec.json.encode(_Wish(key))
        answer = await self.ask(url, "POST", _PULL_PATH, body)
        check_tokens(answer["tokens"], prompt_tokens)

    async def ask(self, url: str, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        """The JSON answer of a bootstrap server; asked again while it is not there.

        Raises HandleError when the transfer's time is over, or the prefill pod has given up.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._pod.transfer_timeout_s
        while True:
            left_s = max(0.0, until_s - loop.time())
            client = self._peers.at(url)
            try:
                head, answer = await fetch(
                    client, method, path, [_JSON_LINE], body, timeout_s=left_s
                )
            except FetchError as error:
                if loop.time() >= until_s:
                    raise HandleError(f"no answer from {url}: {error}") from error
                await asyncio.sleep(_RETRY_DELAY_S)
                continue
            if head.status != 200:
                raise HandleError(f"{url}{path} answered {head.status}: {answer[:200]!r}")
            said: dict[str, Any] = msgspec.json.decode(answer)
            return said


class MooncakeConnector(BootstrapConnector):
    """vLLM's Mooncake: blocks are kept under the router's transfer id until they are pulled."""

    def __init__(self, pod: MockPod, port: int):
        super().__init__(pod, port)
        self._computing: dict[Generation, str] = {}
        self.transfers = TransferTable(pod.lease_s)

    def new_engine(self) -> None:
        """No transfer of an earlier process can be pulled."""
        super().new_engine()
        self._computing.clear()
        self.transfers = TransferTable(self._pod.lease_s)

    def query(self) -> bytes:
        """The engine's one rank, and where its blocks are pulled: here."""
        pod = self._pod
        return query_answer({0: (pod.engine_id, url_of(pod.address, self.port))})

    def serve(self, generation: Generation, body: Body) -> None:  # noqa: ARG002
        """Prefill for a transfer, decode with one, or serve the request whole."""
        pod, params = self._pod, generation.wanted.transfer or {}
        if params.get("do_remote_decode") and pod.role == "prefill":
            transfer_id = params.get("transfer_id")
            if isinstance(transfer_id, str):
                self._computing[generation] = transfer_id
                generation.keep(lambda job: self._computed(generation, transfer_id, job))
        elif params.get("do_remote_prefill") and pod.role == "decode":
            try:
                pull = msgspec.convert(params, Pull)
            except msgspec.ValidationError:
                # The engine waits for blocks that never come.
                generation.hang(Unanswered(pod.die_of_client))
                return
            self.begin_load(generation, lambda: self._load(generation, pull))
            return
        pod.submit(generation)

    async def _load(self, generation: Generation, pull: Pull) -> None:
        answer = msgspec.json.encode(await self.ask(pull.remote_bootstrap_addr, "GET", QUERY_PATH))
        worker = worker_of(answer, pull.remote_engine_id)
        if worker is None:
            known = ", ".join(engine_ids(LegAnswer(200, answer)).values())
            raise HandleError(f"no engine {pull.remote_engine_id}: there is {known}")
        await self.pull(worker, pull.transfer_id, generation.jobs[0].prompt_tokens)

    def _computed(self, generation: Generation, transfer_id: str, job: Job) -> None:
        """The prompt's blocks are there: for who waits for them, or kept."""
        pod = self._pod
        self._computing.pop(generation, None)
        if self.pulls.give(transfer_id, job.prompt_tokens):
            pod.release(job.id)
        else:
            self.transfers.computed(transfer_id, job.id, job.prompt_tokens, pod.loop.time())

    def pulled(self, key: str, conn: ServerConnection) -> None:
        """Blocks that are computed are given and freed; others are waited for."""
        found = self.transfers.pull(key)
        if found is None:
            self.pulls.wait(key, conn)
            return
        request_id, tokens = found
        conn.respond(200, _JSON, msgspec.json.encode({"tokens": tokens}))
        self._pod.release(request_id)

    def over(self, generation: Generation) -> None:
        """A prefill that ended before its blocks were there leaves its decode pod without."""
        super().over(generation)
        transfer_id = self._computing.pop(generation, None)
        if transfer_id is not None:
            self.pulls.fail(transfer_id, "the prefill was aborted")

    def expire(self, now: float) -> list[str]:
        """Transfers that nobody has pulled in time."""
        return self.transfers.expire(now)

    def next_expiry_s(self) -> float | None:
        """The next end of a lease."""
        return self.transfers.next_expiry_s()


class SglangConnector(BootstrapConnector):
    """SGLang's rooms: a prefill begins when its decode pod is there, and ends with the transfer."""

    def __init__(self, pod: MockPod, port: int):
        # A decode pod takes its own default where a request names no port.
        super().__init__(pod, (port or DEFAULT_BOOTSTRAP_PORT) if pod.role == "decode" else port)
        self.rooms = RoomTable()
        self._rooms_of: dict[Generation, list[Room]] = {}
        self._not_met: dict[Generation, set[str]] = {}

    def new_engine(self) -> None:
        """Every room is empty."""
        super().new_engine()
        self.rooms = RoomTable()
        self._rooms_of.clear()
        self._not_met.clear()

    def serve(self, generation: Generation, body: Body) -> None:
        """Without a room it is refused; a room in use ends the engine."""
        pod, wanted = self._pod, generation.wanted
        if pod.role == "single":
            pod.submit(generation)
            return
        rooms = read_rooms(body, len(wanted.prompts), wanted.choices)
        if rooms is None:
            text = "Invalid request: Disaggregated request received without bootstrap room id."
            generation.fail(text, 400, "BAD_REQUEST")
            return
        try:
            self.rooms.enter(rooms)
        except DuplicateRoomError:
            pod.die()
            generation.die()
            return
        self._rooms_of[generation] = rooms
        if pod.role == "decode":
            self.begin_load(generation, lambda: self._load(generation, rooms))
            return
        self._not_met[generation] = {str(room.number) for room in rooms}
        generation.on_computed = lambda job: self._computed(generation, job)
        self._meet()

    async def _load(self, generation: Generation, rooms: list[Room]) -> None:
        # All at once: the prefill begins when its decode pod is in every room.
        try:
            async with asyncio.TaskGroup() as group:
                for room, job in zip(rooms, generation.jobs, strict=True):
                    url = url_of(room.host or "", room.port or self.port)
                    group.create_task(self.pull(url, str(room.number), job.prompt_tokens))
        except* HandleError as failed:
            raise HandleError(str(failed.exceptions[0])) from None

    def _computed(self, generation: Generation, job: Job) -> None:
        """A sequence's KV goes to the decode pod that waits in its room."""
        room = self._rooms_of[generation][generation.jobs.index(job)]
        self.pulls.give(str(room.number), job.prompt_tokens)

    def pulled(self, key: str, conn: ServerConnection) -> None:
        """A decode pod has come into a room."""
        self.pulls.wait(key, conn)
        self._meet()

    def _meet(self) -> None:
        """Prefills begin whose decode pods are all there."""
        for generation, missing in list(self._not_met.items()):
            missing -= {key for key in missing if key in self.pulls}
            if not missing:
                del self._not_met[generation]
                self._pod.submit(generation)

    def pending(self) -> list[Generation]:
        """Those that wait to be met, too."""
        return [*super().pending(), *self._not_met]

    def over(self, generation: Generation) -> None:
        """Its rooms are empty; who waits in one waits in vain."""
        super().over(generation)
        self._not_met.pop(generation, None)
        rooms = self._rooms_of.pop(generation, [])
        self.rooms.leave(rooms)
        if self._pod.role == "prefill":
            for room in rooms:
                self.pulls.fail(str(room.number), "the prefill was aborted")
