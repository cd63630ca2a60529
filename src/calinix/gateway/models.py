"""/v1/models: the pods' own lists merged, with every field they state."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from calinix import errors
from calinix.edge.http_client import FetchError, fetch
from calinix.edge.http_server import Request

if TYPE_CHECKING:
    from calinix.gateway.server import Gateway
    from calinix.gateway.upstreams import Upstream

_FRESH_S = 5.0
_NOTHING_FRESH_S = 0.5
"""Where no pod has told anything: pods that start should not be hidden for long."""
_FETCH_TIMEOUT_S = 3.0
_MAX_ASKED_AT_ONCE = 32
_JSON = b"content-type: application/json\r\n"


class _Model(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


class ModelList:
    """Asks every pod at most once every few seconds, however many clients ask."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._models: dict[str, msgspec.Raw] = {}
        self._stale_s = float("-inf")
        self._refresh: asyncio.Task[None] | None = None
        self._asking: list[tuple[Request, str | None]] = []

    def answer(self, request: Request, model: str | None) -> None:
        """The whole list, or one model, now or when the pods have answered."""
        if self._gateway.now() < self._stale_s:
            self._respond(request, model)
            return
        self._asking.append((request, model))
        if self._refresh is None:
            self._refresh = self._gateway.loop.create_task(self._fetch_all())
            self._refresh.add_done_callback(self._answer_asking)

    def forget(self) -> None:
        """Other pods are configured: the next client's question is passed on to them."""
        self._stale_s = float("-inf")

    def close(self) -> None:
        """Asks no more; whoever still waits for an answer gets what is known."""
        if self._refresh is not None:
            self._refresh.cancel()

    def _answer_asking(self, task: asyncio.Task[None]) -> None:
        self._refresh = None
        asking, self._asking = self._asking, []
        if not task.cancelled() and (error := task.exception()) is not None:
            self._gateway.loop.call_exception_handler(
                {"message": "the pods' model lists could not be merged", "exception": error}
            )
        for request, model in asking:
            self._respond(request, model)

    def _respond(self, request: Request, model: str | None) -> None:
        if model is not None:
            found = self._models.get(model)
            if found is None:
                message = f"the model '{model[:200]}' is not served here"
                unknown = errors.NotFound(message, param="model", code="model_not_found")
                self._gateway.answer_error(request, unknown)
                return
            request.conn.respond(200, _JSON, bytes(found))
            return
        if not self._models:
            error = errors.NoPod("no pod has told its models yet", code="no_pod", retry_after_s=1)
            self._gateway.answer_error(request, error)
            return
        merged = {"object": "list", "data": list(self._models.values())}
        request.conn.respond(200, _JSON, msgspec.json.encode(merged))

    async def _fetch_all(self) -> None:
        gate = asyncio.Semaphore(_MAX_ASKED_AT_ONCE)
        usable = set(self._gateway.router.usable_pods())
        asked = [upstream for upstream in self._gateway.upstreams if upstream.pod.id in usable]
        answers = await asyncio.gather(*(_fetch_one(upstream, gate) for upstream in asked))
        models: dict[str, msgspec.Raw] = {}
        for answer in answers:
            for raw in answer:
                models.setdefault(msgspec.json.decode(raw, type=_Model).id, raw)
        self._models = models
        self._stale_s = self._gateway.now() + (_FRESH_S if models else _NOTHING_FRESH_S)


async def _fetch_one(upstream: Upstream, gate: asyncio.Semaphore) -> list[msgspec.Raw]:
    """One pod's models; a pod that fails or answers nonsense has none."""
    key = upstream.pod.api_key
    headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
    async with gate:
        try:
            head, body = await fetch(
                upstream.client, "GET", "/v1/models", headers, timeout_s=_FETCH_TIMEOUT_S
            )
            if head.status != 200:
                return []
            body.decode()  # the decoder passes over fields that it does not read
            models = msgspec.json.decode(body, type=_List).data
            for raw in models:
                msgspec.json.decode(raw, type=_Model)
        except (FetchError, msgspec.MsgspecError, ValueError, RecursionError):
            return []
    # The body is shared by all of its Raw pieces; copies let it go.
    return [msgspec.Raw(bytes(raw)) for raw in models]
