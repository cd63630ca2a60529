"""The admin port: metrics, what is known of the pods, decisions and what came of them."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from calinix import errors
from calinix.config import expanded
from calinix.core.events import PodDraining
from calinix.edge.http_server import Request
from calinix.gateway.server import Gateway

_JSON = b"content-type: application/json\r\ncache-control: no-store\r\n"
_METRICS = b"content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
_YAML = b"content-type: application/yaml\r\n"
_MAX_DECISIONS = 1000
_DECISION_PARAMETERS = ("last", "request_id")
_HISTORY = {"source": "history"}
"""Of a pod without KV events."""


class AdminHandler:
    """Serves the admin port (RequestHandler)."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._get = {
            "/metrics": self._metrics,
            "/health": self._health,
            "/admin/pods": self._pods,
            "/admin/decisions": self._decisions,
            "/admin/controller": self._controller,
            "/admin/config": self._config,
            "/admin/state": self._state,
        }

    def on_request(self, request: Request) -> None:
        """A whole request has arrived."""
        try:
            check_origin(request, self._gateway.config.admin.host)
            self._serve(request)
        except errors.HttpError as error:
            self._gateway.answer_error(request, error)

    def _serve(self, request: Request) -> None:
        view = self._get.get(request.path)
        if view is not None:
            if request.method in ("GET", "HEAD"):
                view(request)
            else:
                self._refuse_method(request, b"allow: GET, HEAD\r\n")
            return
        parts = request.path.split("/")
        if len(parts) == 5 and parts[1:3] == ["admin", "pods"] and parts[4] in ("drain", "resume"):
            self._drain(request, parts[3], draining=parts[4] == "drain")
            return
        paths = ", ".join([*self._get, "/admin/pods/{id}/drain", "/admin/pods/{id}/resume"])
        raise errors.NotFound(f"no such path; there are: {paths}", code="unknown_path")

    def _refuse_method(self, request: Request, allow: bytes) -> None:
        allowed = allow.decode().strip().removeprefix("allow: ")
        error = errors.MethodNotAllowed(f"{request.method} is not served here; use {allowed}")
        self._gateway.answer_error(request, error, allow)

    def _metrics(self, request: Request) -> None:
        telemetry = self._gateway.telemetry
        telemetry.flush()
        self._want_stats()
        request.conn.respond(200, _METRICS, telemetry.metrics.exposition())

    def _want_stats(self) -> None:
        """Who looks wants fresh figures: pods are asked for them from now on."""
        if self._gateway.scraper is not None:
            self._gateway.scraper.want()

    def _health(self, request: Request) -> None:
        request.conn.respond(200, _JSON, b'{"status":"ok"}')

    def _pods(self, request: Request) -> None:
        self._want_stats()
        scraper = self._gateway.scraper
        views = self._gateway.kv_views()
        pods = [
            {
                **self._aged(msgspec.to_builtins(pod), "lastHeardS", "heardAgeS"),
                **self._gateway.dispatch.engine_of(pod.id),
                "kv": views.get(pod.id, _HISTORY),
                "stats": None if scraper is None else scraper.view(pod.id),
            }
            for pod in self._gateway.router.pods()
        ]
        request.conn.respond(200, _JSON, msgspec.json.encode({"pods": pods}))

    def _aged(self, view: dict[str, Any], at: str, age: str) -> dict[str, Any]:
        """The view with the seconds since a time for the time, which is the process's own."""
        when = view.pop(at)
        view[age] = None if when is None else round(self._gateway.loop.time() - when, 3)
        return view

    def _decisions(self, request: Request) -> None:
        query = parse_qs(request.query.decode("latin-1"), keep_blank_values=True)
        for name in query:
            if name not in _DECISION_PARAMETERS:
                known = " and ".join(_DECISION_PARAMETERS)
                raise errors.BadRequest(
                    f"unknown parameter '{name[:64]}'; there are {known}", param=name[:64]
                )
        ring = self._gateway.router.decisions
        if "request_id" in query:
            found = ring.find(query["request_id"][0])
            if found is None:
                raise errors.NotFound("no such request among the decisions kept")
            plans = [found]
        else:
            try:
                count = int(query.get("last", ["50"])[0])
            except ValueError:
                raise errors.BadRequest("last must be a number", param="last") from None
            count = max(0, min(count, _MAX_DECISIONS))
            plans = ring.last(count)
        decisions = [self._aged(plan.to_dict(), "routedSeconds", "ageSeconds") for plan in plans]
        request.conn.respond(200, _JSON, msgspec.json.encode({"decisions": decisions}))

    def _controller(self, request: Request) -> None:
        """Weights, where they lead, and the estimates that they rest on."""
        view = self._gateway.router.steering(self._gateway.loop.time())
        request.conn.respond(200, _JSON, msgspec.json.encode(view))

    def _config(self, request: Request) -> None:
        request.conn.respond(200, _YAML, expanded(self._gateway.config).encode())

    def _state(self, request: Request) -> None:
        """What a test or an operator wants to see at a glance."""
        gateway = self._gateway
        state = {
            "inflight": len(gateway.flights),
            "waiting": len(gateway.waiting),
            "draining": gateway.draining,
            "openLeases": gateway.router.open_leases(),
            "maxTickLagSeconds": gateway.max_tick_lag_s,
        }
        request.conn.respond(200, _JSON, msgspec.json.encode(state))

    def _drain(self, request: Request, pod_id: str, *, draining: bool) -> None:
        if request.method != "POST":
            self._refuse_method(request, b"allow: POST\r\n")
            return
        if not any(upstream.pod.id == pod_id for upstream in self._gateway.upstreams):
            raise errors.NotFound(f"no pod has the id '{pod_id[:128]}'", param="id")
        self._gateway.observe(PodDraining(pod_id, draining))
        self._gateway.wake_soon()
        request.conn.respond(200, _JSON, msgspec.json.encode({"id": pod_id, "draining": draining}))


def check_origin(request: Request, listens_on: str) -> None:
    """Web pages of others are kept out: the operator's browser reaches loopback too.

    Browsers name the page in Origin whenever it sends a POST. A page whose own name was made to
    point here is of no other origin, but asks for that name. Raises Forbidden.
    """
    if not request.path.startswith("/admin/"):
        return
    host, origin = request.header(b"host"), request.header(b"origin")
    if host is not None and _is_loopback(listens_on):
        name = _name_of(host)
        if _is_name(name) and name != "localhost" and not name.endswith(".localhost"):
            raise errors.Forbidden(
                "the admin port listens on loopback: ask for localhost or 127.0.0.1",
                code="foreign_host",
            )
    if origin is not None and origin.partition(b"://")[2] != host:
        raise errors.Forbidden("asked by another site's page", code="foreign_origin")


def _name_of(host: bytes) -> str:
    """The Host header without its port."""
    try:
        return urlsplit("//" + host.decode("latin-1")).hostname or ""
    except ValueError:
        return host.decode("latin-1")


def _is_name(host: str) -> bool:
    """Whether it is no address: only names can be made to point elsewhere."""
    try:
        ip_address(host)
    except ValueError:
        return True
    return False


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (not _is_name(host) and ip_address(host).is_loopback)
