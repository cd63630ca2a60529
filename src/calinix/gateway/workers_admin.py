"""The admin port of a gateway of several workers: asks each of them, and answers for all.

Every worker has the admin of a single gateway on a local socket. Numbers are added up, decisions
are put in order; what only one worker needs to say is asked of the first. With `?worker=INDEX`
every page is that worker's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final
from urllib.parse import parse_qs, parse_qsl, urlencode

import msgspec
import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from calinix import errors
from calinix.config import Config, expanded
from calinix.edge.http_server import Request
from calinix.gateway.admin import check_origin
from calinix.gateway.workers import Seat, Workers
from calinix.gateway.workers_views import decisions_of, pods_of, state_of
from calinix.telemetry.merge import MergedMetrics

log = structlog.get_logger()

ASK_S: Final = 3.0
MAX_ANSWER_BYTES: Final = 64 << 20
"""Of one worker; a longer answer counts as none."""
MAX_ASKING: Final = 64
"""Requests that may be worked on at the same time."""
_JSON = b"content-type: application/json\r\ncache-control: no-store\r\n"
_METRICS = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
_YAML = b"content-type: application/yaml\r\n"


class Answer(msgspec.Struct, frozen=True):
    """What a worker's admin answered."""

    status: int
    lines: bytes
    """Header lines that are passed on."""
    body: bytes


class WorkersAdmin:
    """Serves the admin port (RequestHandler)."""

    def __init__(self, config: Config, workers: Workers, loop: asyncio.AbstractEventLoop):
        self.config = config
        self._workers = workers
        self._loop = loop
        self._merged = MergedMetrics()
        self._tasks: set[asyncio.Task[None]] = set()
        workers.on_ended = self._merged.forget
        self._views: dict[str, Callable[[Request], Awaitable[None]]] = {
            "/metrics": self._metrics,
            "/admin/pods": self._pods,
            "/admin/decisions": self._decisions,
            "/admin/state": self._state,
        }

    def on_request(self, request: Request) -> None:
        """A whole request has arrived."""
        try:
            check_origin(request, self.config.admin.host)
            self._serve(request)
        except errors.HttpError as error:
            _refuse(request, error)

    def _serve(self, request: Request) -> None:
        path = request.path
        parts = path.split("/")
        if path == "/health":
            request.conn.respond(200, _JSON, b'{"status":"ok"}')
        elif path == "/admin/config":
            request.conn.respond(200, _YAML, expanded(self.config).encode())
        elif len(parts) == 5 and parts[1:3] == ["admin", "pods"] and request.method == "POST":
            self._begin(request, self._drain(request, parts[3], parts[4] == "drain"))
        elif path in self._views and request.method in ("GET", "HEAD") and not _wanted(request):
            self._begin(request, self._views[path](request))
        else:
            self._begin(request, self._pass_on(request))

    def _begin(self, request: Request, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except errors.HttpError as error:
                _refuse(request, error)

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if len(self._tasks) > MAX_ASKING:
            task.cancel()
            _refuse(request, errors.NoPod("too many at once", code="busy", retry_after_s=1))

    def close(self) -> None:
        """Answers no more."""
        for task in tuple(self._tasks):
            task.cancel()

    # --- views -------------------------------------------------------------------------------

    async def _metrics(self, request: Request) -> None:
        names = [seat.name for seat in self._workers.seats]
        for seat, answer in await self._ask_all("/metrics"):
            # It may have ended meanwhile, and its counts have been put aside for good.
            if seat.ready and seat.name == names[seat.index] and answer.status == 200:
                self._merged.take(seat.name, answer.body.decode())
        request.conn.respond(200, _METRICS, self._merged.exposition(self._families()))

    def _families(self) -> Sequence[Metric]:
        """Of the workers themselves."""
        text = "1: the worker's ports are open"
        ready = GaugeMetricFamily("calinix_worker_ready", text, labels=("worker",))
        text = "Workers that were started again after they died"
        restarts = CounterMetricFamily("calinix_worker_restarts", text, labels=("worker",))
        text = "Reports of others that were dropped since the worker is behind"
        dropped = GaugeMetricFamily("calinix_worker_reports_dropped", text, labels=("worker",))
        for seat in self._workers.seats:
            labels = (str(seat.index),)
            ready.add_metric(labels, float(seat.ready))
            restarts.add_metric(labels, seat.restarts)
            dropped.add_metric(labels, 0 if seat.link is None else seat.link.dropped)
        return ready, restarts, dropped

    async def _pods(self, request: Request) -> None:
        answers = await self._json_of_all("/admin/pods")
        _respond(request, pods_of(answers))

    async def _decisions(self, request: Request) -> None:
        query = request.query.decode("latin-1")
        answers = await self._ask_all(f"/admin/decisions?{query}")
        bad = next((a for _, a in answers if a.status not in (200, 404)), None)
        if bad is not None:
            request.conn.respond(bad.status, bad.lines, bad.body)
            return
        known = [(s.index, msgspec.json.decode(a.body)) for s, a in answers if a.status == 200]
        if not known:
            raise errors.NotFound("no such request among the decisions kept")
        try:
            count = int(parse_qs(query).get("last", ["50"])[0])
        except ValueError:
            count = 50
        _respond(request, decisions_of(known, count))

    async def _state(self, request: Request) -> None:
        answers = await self._json_of_all("/admin/state")
        found = state_of(answers)
        found["workers"] = [
            {
                "worker": seat.index,
                "pid": seat.pid,
                "ready": seat.ready,
                "restarts": seat.restarts,
                "inflight": next((a["inflight"] for i, a in answers if i == seat.index), None),
            }
            for seat in self._workers.seats
        ]
        _respond(request, found)

    async def _drain(self, request: Request, pod_id: str, draining: bool) -> None:
        """One worker says whether there is such a pod; then all are told."""
        answer = await self._ask(self._one_of(request), request.path, "POST")
        if answer.status == 200:
            self._workers.drain_pod(pod_id, draining=draining)
        request.conn.respond(answer.status, answer.lines, answer.body)

    async def _pass_on(self, request: Request) -> None:
        asked = parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)
        query = urlencode([(name, value) for name, value in asked if name != "worker"])
        path = f"{request.path}?{query}" if query else request.path
        answer = await self._ask(self._one_of(request), path, request.method)
        request.conn.respond(answer.status, answer.lines, answer.body)

    # --- asking ------------------------------------------------------------------------------

    def _one_of(self, request: Request) -> Seat:
        wanted = _wanted(request)
        for seat in self._workers.running():
            if wanted in ("", str(seat.index)):
                return seat
        raise errors.NoPod("that worker is not running", code="no_worker", retry_after_s=1)

    async def _ask_all(self, path: str) -> list[tuple[Seat, Answer]]:
        """The answers of those that gave one in time."""
        seats = list(self._workers.running())
        answers = await asyncio.gather(
            *(self._ask(seat, path) for seat in seats), return_exceptions=True
        )
        found = []
        for seat, answer in zip(seats, answers, strict=True):
            if isinstance(answer, Answer):
                found.append((seat, answer))
            elif not isinstance(answer, errors.HttpError):
                raise answer
        if not found:
            raise errors.NoPod("no worker answers", code="no_worker", retry_after_s=1)
        return found

    async def _json_of_all(self, path: str) -> list[tuple[int, Any]]:
        answers = await self._ask_all(path)
        return [
            (seat.index, msgspec.json.decode(answer.body))
            for seat, answer in answers
            if answer.status == 200
        ]

    async def _ask(self, seat: Seat, path: str, method: str = "GET") -> Answer:
        """One request at a worker's own admin. Raises HttpError."""
        if not path.isascii() or not path.isprintable() or " " in path:
            raise errors.NotFound("no such path", code="unknown_path")
        text = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        text += "content-length: 0\r\n\r\n" if method == "POST" else "\r\n"
        socket = str(self._workers.admin_socket(seat))
        try:
            async with asyncio.timeout(ASK_S):
                reader, writer = await asyncio.open_unix_connection(socket)
                try:
                    writer.write(text.encode("ascii"))
                    return _answer(await _read_all(reader))
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            log.warning("worker_silent", worker=seat.index, path=path, reason=str(error))
            raise errors.BadGateway(f"worker {seat.index} does not answer") from error


def _wanted(request: Request) -> str:
    """The worker that is asked for by name; empty: none."""
    return parse_qs(request.query.decode("latin-1")).get("worker", [""])[0]


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Raises ValueError: it is too much."""
    wire = bytearray()
    while piece := await reader.read(1 << 20):
        wire += piece
        if len(wire) > MAX_ANSWER_BYTES:
            raise ValueError("too long an answer")
    return bytes(wire)


def _answer(wire: bytes) -> Answer:
    """Raises ValueError: the answer was cut off."""
    head, end, body = wire.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    if not end:
        raise ValueError("no whole answer")
    dropped = (b"content-length:", b"connection:", b"date:")
    kept = [line + b"\r\n" for line in lines if not line.lower().startswith(dropped)]
    return Answer(int(first.split(b" ", 2)[1]), b"".join(kept), body)


def _respond(request: Request, body: object) -> None:
    request.conn.respond(200, _JSON, msgspec.json.encode(body))


def _refuse(request: Request, error: errors.HttpError) -> None:
    lines = _JSON
    if error.retry_after_s is not None:
        lines += b"retry-after: %d\r\n" % error.retry_after_s
    request.conn.respond(error.status, lines, error.body())
