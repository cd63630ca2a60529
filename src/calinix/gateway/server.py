"""The gateway: the host that turns HTTP requests into calls of the Router, and plans into bytes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import unquote

import structlog

from calinix import errors
from calinix import headers as h
from calinix.config import Config, Strategy, Timeouts
from calinix.core.events import Event, PodAdded, PodRemoved, RulesChanged, StrategyChanged
from calinix.core.router import Router
from calinix.edge.http_server import Request
from calinix.edge.scraper import Scraper
from calinix.engines.kv_pod import KvView
from calinix.gateway.dispatch import Dispatch
from calinix.gateway.heads import ClientHead, RequestIds
from calinix.gateway.models import ModelList
from calinix.gateway.pod_log import PodLog
from calinix.gateway.proxy import Flight
from calinix.gateway.routes import RouteTable
from calinix.gateway.tokens import ExactTokens
from calinix.gateway.upstreams import Upstreams, pods_by_role
from calinix.gateway.waiting import WaitQueue
from calinix.telemetry import RequestRecord, Telemetry

log = structlog.get_logger()

_JSON: Final = b"content-type: application/json\r\n"
_SWEEP_S: Final = 0.05
_FLUSH_S: Final = 0.5
_LOOK_S: Final = 1.0


class TimeoutSeconds:
    """The time-outs that the request path compares with the loop's clock, in seconds."""

    __slots__ = ("connect_s", "first_token_s", "idle_s", "prefill_s", "total_s")

    def __init__(
        self,
        connect_s: float,
        first_token_s: float,
        idle_s: float,
        total_s: float,
        prefill_s: float,
    ):
        self.connect_s = connect_s
        self.first_token_s = first_token_s
        self.idle_s = idle_s
        self.total_s = total_s
        self.prefill_s = prefill_s

    @classmethod
    def of(cls, timeouts: Timeouts) -> TimeoutSeconds:
        """From the configuration's milliseconds."""
        return cls(
            connect_s=timeouts.connect_ms / 1e3,
            first_token_s=timeouts.first_token_ms / 1e3,
            idle_s=timeouts.idle_ms / 1e3,
            total_s=timeouts.total_ms / 1e3,
            prefill_s=timeouts.prefill_ms / 1e3,
        )


class ApiKeys:
    """The gateway's own keys, compared by digest so that time tells nothing of them."""

    def __init__(self, keys: tuple[str, ...]):
        self._digests = frozenset(hashlib.sha256(key.encode()).digest() for key in keys)

    def admit(self, request: Request) -> bool:
        """True where no key is asked for, or the client gave one of them."""
        if not self._digests:
            return True
        given = request.header(h.AUTHORIZATION)
        if given is not None and given[:7].lower() == b"bearer ":
            key: bytes | None = given[7:].strip()
        else:
            key = request.header(b"x-api-key")
        return key is not None and hashlib.sha256(key).digest() in self._digests


class Gateway:
    """Owns the flights, the pods' connections and the wait queue; decides nothing about routing."""

    def __init__(
        self,
        config: Config,
        router: Router,
        telemetry: Telemetry,
        upstreams: Upstreams,
        loop: asyncio.AbstractEventLoop,
    ):
        self.router = router
        self.telemetry = telemetry
        self.upstreams = upstreams
        self.loop = loop
        self.now: Callable[[], float] = time.monotonic
        self.ids = RequestIds()
        self.flights: set[Flight] = set()
        self.draining = False
        self.max_tick_lag_s = 0.0
        self.waiting = WaitQueue(0, 1.0)
        self.models = ModelList(self)
        self.kv_views: Callable[[], Mapping[str, KvView]] = dict
        """What the pods' KV events have brought, by pod id."""
        self.scraper: Scraper | None = None
        """Who knows what pods say of themselves."""
        self.tokens: ExactTokens | None = None
        """Where prompts go by the engine's own tokens."""
        self.dispatch = Dispatch(upstreams)
        self._wake_asked = False
        self._next_flush_s = 0.0
        self._pod_log = PodLog()
        self._next_look_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        telemetry.metrics.inflight = lambda: len(self.flights)
        telemetry.metrics.waiting = lambda: len(self.waiting)
        self._adopt(config)

    def _adopt(self, config: Config) -> None:
        gateway = config.gateway
        self.config = config
        # What was made of clients' heads, their keys' verdicts too, holds for this long.
        self._era = object()
        self.routes = RouteTable(gateway.passthrough_paths)
        self.keys = ApiKeys(gateway.api_keys)
        self.timeouts = TimeoutSeconds.of(gateway.timeouts)
        self.max_retries = gateway.retries
        self.forward_authorization = gateway.forward_authorization
        self.session_from_user = gateway.session_from_user
        self.inject_usage = gateway.inject_usage
        self.waiting.max_requests = gateway.waiting.max_requests
        self.waiting.timeout_s = gateway.waiting.timeout_ms / 1e3
        self.dispatch.adopt(config.upstreams.dispatch)

    def reload(self, config: Config) -> None:
        """Goes over to a new configuration; what is under way ends under the old one."""
        now = self.now()
        new = pods_by_role(config)
        old = pods_by_role(self.config)
        for pod_id in old.keys() - new.keys():
            self.observe(PodRemoved(pod_id))
            self.upstreams.remove(pod_id)
        for pod_id, (role, pod) in new.items():
            if old.get(pod_id) == (role, pod) and pod_id in self.upstreams:
                continue
            self.upstreams.remove(pod_id)
            try:
                self.router.observe(PodAdded(pod, role), now)
            except errors.ConfigError as error:
                # Its slot is still in use by what a removed pod has under way.
                log.error("pod_not_added", pod=pod_id, reason=str(error), hint="reload again later")
            else:
                self.upstreams.add(pod)
        strategy = config.gateway.strategy
        self.observe(
            StrategyChanged(strategy if isinstance(strategy, Strategy) else Strategy(name=strategy))
        )
        dispatch = config.upstreams.dispatch
        threshold = 0 if dispatch is None else dispatch.prefill_threshold
        self.observe(RulesChanged(config.health, config.gateway.default_mode, threshold))
        self._adopt(config)
        self.models.forget()
        self.wake_soon()

    # --- requests ----------------------------------------------------------------------------

    def on_request(self, request: Request) -> None:
        """A whole request has arrived (RequestHandler)."""
        try:
            self._serve(request)
        except errors.HttpError as error:
            self._refuse(request, error)

    def _serve(self, request: Request) -> None:
        client = request.head.memo
        if isinstance(client, ClientHead) and client.era is self._era:
            Flight(self, request, client).start(self.now())
            return
        path = request.path
        route = self.routes.find(path)
        if route is None:
            self._serve_here(request, path)
            return
        if not self.keys.admit(request):
            raise errors.Unauthorized("no valid gateway API key", code="invalid_api_key")
        endpoint = route.endpoints.get(request.method)
        if endpoint is None:
            self._refuse_method(request, route.allow)
            return
        head = request.head
        client = head.memo = ClientHead(
            head, endpoint, route.label, self._era, self.forward_authorization
        )
        Flight(self, request, client).start(self.now())

    def _serve_here(self, request: Request, path: str) -> None:
        """The paths that the gateway answers itself."""
        is_models = path == "/v1/models" or path.startswith("/v1/models/")
        if not is_models and path not in ("/health", "/ready", "/ping"):
            where = "; metrics are at the admin port" if path == "/metrics" else ""
            raise errors.NotFound(f"no such path: {path[:200]}{where}", code="unknown_path")
        if request.method not in ("GET", "HEAD"):
            self._refuse_method(request, b"allow: GET, HEAD\r\n")
        elif is_models:
            if not self.keys.admit(request):
                raise errors.Unauthorized("no valid gateway API key", code="invalid_api_key")
            # Clients write the slashes of a model's name as %2F.
            name = unquote(path.removeprefix("/v1/models").removeprefix("/"))
            self.models.answer(request, name or None)
        elif path == "/ready" and (self.draining or not self.router.ready()):
            reason = "draining" if self.draining else "no pod is ready"
            # Somebody's probe, as often as it likes: no line in the request log.
            error = errors.NoPod(reason, code="not_ready", retry_after_s=1)
            self.answer_error(request, error)
        else:
            request.conn.respond(200, _JSON, b'{"status":"ok"}')

    def _refuse_method(self, request: Request, allow: bytes) -> None:
        error = errors.MethodNotAllowed(
            f"{request.method} is not served here", code="method_not_allowed"
        )
        self._refuse(request, error, allow)

    def _refuse(self, request: Request, error: errors.HttpError, lines: bytes = b"") -> None:
        """Answers what was never routed: no flight writes its record.

        The record has no endpoint: the path is the client's own words.
        """
        request_id = self.ids.request_id(request.header(h.REQUEST_ID))
        self.answer_error(request, error, lines + b"x-request-id: %b\r\n" % request_id.encode())
        self.telemetry.finish(
            RequestRecord(
                request_id=request_id,
                status=error.status,
                error=error.code or error.type,
                e2e_us=int((self.now() - request.received_at) * 1e6),
            )
        )

    def answer_error(self, request: Request, error: errors.HttpError, lines: bytes = b"") -> None:
        """The error in OpenAI's shape, with a true status."""
        if error.retry_after_s is not None:
            lines += b"retry-after: %d\r\n" % error.retry_after_s
        if error.status == 401:
            lines += b"www-authenticate: Bearer\r\n"
        request.conn.respond(error.status, _JSON + lines, error.body())

    # --- time --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins sweeping."""
        self._due_s = self.now() + _SWEEP_S
        self._timer = self.loop.call_later(_SWEEP_S, self._sweep)

    def stop(self) -> None:
        """Ends sweeping and writes what is left of the request log."""
        self.models.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.telemetry.flush()

    def _sweep(self) -> None:
        now, due_s = self.now(), self._due_s
        self.max_tick_lag_s = max(self.max_tick_lag_s, now - due_s)
        # First: whatever fails below, time-outs go on.
        self.start()
        # By the time at which this was to run: where this process was late, answers that came in
        # the meantime lie unread in their sockets, and no pod is to blame.
        for flight in [flight for flight in self.flights if flight.deadline_s <= due_s]:
            flight.on_deadline(due_s)
        self.waiting.sweep(now)
        if len(self.waiting):
            self.wake_soon()
        self.router.tick(now)
        if now >= self._next_flush_s:
            self._next_flush_s = now + _FLUSH_S
            self.telemetry.flush()
        if now >= self._next_look_s:
            self._next_look_s = now + _LOOK_S
            self._pod_log.look(self.router.pods())

    def observe(self, event: Event) -> None:
        """A fact from the probes or the admin port."""
        self.router.observe(event, self.now())

    def wake_soon(self) -> None:
        """A place is free: offers it to the waiting, after the callback under way."""
        if not self._wake_asked:
            self._wake_asked = True
            self.loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._wake_asked = False
        if self.waiting.wake(self.now()):
            self.wake_soon()
