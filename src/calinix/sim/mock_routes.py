"""A mock pod's paths: what each request is, and what answers it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from email.utils import formatdate
from typing import TYPE_CHECKING

import msgspec

from calinix.edge.http_server import Request
from calinix.sim import mock_sglang
from calinix.sim.mock_agent_answers import MessageAnswer, ResponseAnswer
from calinix.sim.mock_answers import Answer, ChatAnswer, CompletionAnswer, Json
from calinix.sim.mock_control import control
from calinix.sim.mock_faults import Fault
from calinix.sim.mock_generate import Generation, Pooling, Unanswered
from calinix.sim.mock_pooling import (
    detokenize,
    model_list,
    pooling_answer,
    pooling_inputs,
    tokenize,
)
from calinix.sim.mock_requests import (
    EngineError,
    InvalidFieldError,
    parse_body,
    response_turns,
)
from calinix.sim.mock_sglang import SglangChatAnswer, SglangCompletionAnswer

if TYPE_CHECKING:
    from calinix.sim.mock_pod import MockPod

VERSION = "0.32.0"
GARBAGE = b"<html>no answer of an engine</html>"
CUT_DELAY_S = 0.01
"""What was written must leave the socket before the reset does."""
_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
_RESPONSE_PREFIX = "/v1/responses/"
_POOLING_PATHS = (
    "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score",
    "/classify", "/pooling",
)  # fmt: skip

Handler = Callable[[Request, Fault | None], None]


class Routes:
    """The handler of a mock pod's server."""

    def __init__(self, pod: MockPod):
        self._pod = pod
        posts: dict[str, Handler] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/responses": self._response,
            "/v1/messages": self._message,
            "/v1/messages/count_tokens": self._count_tokens,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/reset_prefix_cache": self._reset_prefix_cache,
        }
        posts |= dict.fromkeys(_POOLING_PATHS, self._pooling)
        gets: dict[str, Handler] = {
            "/health": self._health,
            "/ping": self._health,
            "/v1/models": self._models,
            "/load": self._load,
            "/metrics": self._metrics,
        }
        if pod.dialect == "sglang":
            gets |= dict.fromkeys(("/server_info", "/get_server_info"), self._server_info)
            gets["/model_info"] = self._model_info
        else:
            gets["/version"] = self._version
        self._table = {path: ("POST", handler) for path, handler in posts.items()}
        self._table |= {path: ("GET", handler) for path, handler in gets.items()}

    def on_request(self, request: Request) -> None:
        """Every request comes in here."""
        pod, path = self._pod, request.path
        if path.startswith("/mock/"):
            control(pod, request, self._head(request))
            return
        method, handler = self._table.get(path) or self._stored_response(request)
        pod.paths[path if path in self._table else "other"] += 1
        if request.method != method:
            status = 405 if method else 404
            detail = b'{"detail":"Method Not Allowed"}' if method else b'{"detail":"Not Found"}'
            allow = b"allow: %b\r\n" % method.encode() if method else b""
            request.conn.respond(status, allow + self._head(request), detail)
            return
        if path.startswith("/v1/") and not self._allowed(request):
            request.conn.respond(401, self._head(request), b'{"error":"Unauthorized"}')
            return
        inference = method == "POST"
        if inference:
            pod.keep(request)
        fault = pod.faults.strike(pod.loop.time(), inference=inference)
        if fault is not None and self._strikes_now(fault, request):
            return
        try:
            if pod.dead and inference:
                raise EngineError("EngineCore encountered an issue.", 500, "InternalServerError")
            handler(request, fault)
        except EngineError as error:
            # Validation answers in OpenAI's shape everywhere, what comes after it in the API's own.
            anthropic = path.startswith("/v1/messages") and not isinstance(error, InvalidFieldError)
            body = error.body(anthropic=anthropic)
            if pod.dialect == "sglang":
                body = mock_sglang.error_body(error)
            request.conn.respond(error.status, self._head(request), body)

    # --- heads -------------------------------------------------------------------------------

    def _head(self, request: Request, content_type: bytes = _JSON) -> bytes:
        """The header lines that vLLM's server sends with every answer."""
        request_id = request.header(b"x-request-id") or uuid.uuid4().hex.encode()
        kind = b"content-type: %b\r\n" % content_type if content_type else b""
        date = formatdate(time.time(), usegmt=True).encode()
        return b"date: %b\r\nserver: uvicorn\r\n%bvary: Origin\r\nx-request-id: %b\r\n" % (
            date,
            kind,
            request_id,
        )

    def _say(self, request: Request, answer: Json) -> None:
        request.conn.respond(200, self._head(request), msgspec.json.encode(answer))

    def _allowed(self, request: Request) -> bool:
        key = self._pod.api_key
        return key is None or request.header(b"authorization") == b"Bearer " + key.encode()

    # --- faults ------------------------------------------------------------------------------

    def _strikes_now(self, fault: Fault, request: Request) -> bool:
        """Carries out a fault that needs no knowledge of the request; whether it did."""
        pod, conn = self._pod, request.conn
        generates = request.path in (
            "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
        )  # fmt: skip
        if fault.kind == "status":
            busy = fault.status in (429, 503)
            retry = b"retry-after: 1\r\n" if busy else b""
            kind = "ServiceUnavailableError" if busy else "InternalServerError"
            error = EngineError("injected fault", fault.status, kind)
            conn.respond(fault.status, retry + self._head(request), error.body())
        elif fault.kind == "reset" and (fault.chunks == 0 or not generates):
            conn.abort()
        elif fault.kind == "cut":
            conn.begin(200, self._head(request), len(GARBAGE))
            conn.write(GARBAGE[:4])
            pod.loop.call_later(CUT_DELAY_S, conn.abort)
        elif fault.kind == "garbage":
            conn.respond(200, self._head(request), GARBAGE)
        elif fault.kind == "hang" or (fault.kind == "hangAfterHeaders" and not generates):
            conn.stream = Unanswered(self._client_left)
        else:
            return False
        return True

    def _client_left(self) -> None:
        self._pod.cancelled += 1

    # --- generation --------------------------------------------------------------------------

    def _chat(self, request: Request, fault: Fault | None) -> None:
        body = self._body(request)
        wanted = self._pod.reader.chat(body)
        kind = SglangChatAnswer if self._pod.dialect == "sglang" else ChatAnswer
        self._generate(request, fault, kind(self._id(request), _now(), wanted), body)

    def _completion(self, request: Request, fault: Fault | None) -> None:
        body = self._body(request)
        wanted = self._pod.reader.completion(body)
        kind = SglangCompletionAnswer if self._pod.dialect == "sglang" else CompletionAnswer
        self._generate(request, fault, kind(self._id(request), _now(), wanted), body)

    def _message(self, request: Request, fault: Fault | None) -> None:
        body = self._body(request)
        wanted = self._pod.reader.message(body)
        self._generate(request, fault, MessageAnswer(self._id(request), _now(), wanted), body)

    def _response(self, request: Request, fault: Fault | None) -> None:
        body = self._body(request)
        pod = self._pod
        earlier = []
        previous = body.get("previous_response_id")
        if previous is not None:
            earlier = self._stored(str(previous))[1]
        wanted = pod.reader.response(body, earlier)
        answer = ResponseAnswer(uuid.uuid4().hex, _now(), wanted, body)
        turns = earlier + response_turns(body)

        def keep(whole: bytes, text: str) -> None:
            pod.keep_response(answer.id, whole, [*turns, ("assistant", text)])

        on_answered = keep if body.get("store", True) else None
        self._generate(request, fault, answer, body, on_answered)

    def _generate(
        self,
        request: Request,
        fault: Fault | None,
        answer: Answer,
        body: Json,
        on_answered: Callable[[bytes, str], None] | None = None,
    ) -> None:
        pod, conn, wanted = self._pod, request.conn, answer.wanted
        head = self._head(request, _EVENTS if wanted.stream else _JSON)
        if fault is not None and fault.kind == "hangAfterHeaders":
            conn.begin(200, head, None if wanted.stream else 1)
            conn.write(b"")
            conn.stream = Unanswered(self._client_left)
            return
        if pod.dialect == "sglang" and pod.role == "prefill":
            wanted.max_tokens = 1
        generation = Generation(pod, conn, answer, head)
        generation.on_answered = on_answered
        if fault is not None and fault.kind == "reset":
            generation.reset_after = fault.chunks
        generation.announce()
        pod.connector.serve(generation, body)

    # --- what is not generated ---------------------------------------------------------------

    def _pooling(self, request: Request, fault: Fault | None) -> None:
        del fault
        body = self._body(request)
        pod, path = self._pod, request.path
        model = pod.reader.model_of(body)
        inputs = pooling_inputs(pod.reader, path, body)
        pod.reader.check_lengths(inputs)
        answer = pooling_answer(path, uuid.uuid4().hex, _now(), model, body, inputs)
        pod.submit(Pooling(pod, request.conn, self._head(request), answer, inputs))

    def _count_tokens(self, request: Request, fault: Fault | None) -> None:
        del fault
        body = self._body(request)
        body.setdefault("max_tokens", 1)
        count = len(self._pod.reader.message(body).prompts[0])
        context = {"original_input_tokens": count}
        self._say(request, {"input_tokens": count, "context_management": context})

    def _tokenize(self, request: Request, fault: Fault | None) -> None:
        del fault
        self._say(request, tokenize(self._pod.reader, self._body(request)))

    def _detokenize(self, request: Request, fault: Fault | None) -> None:
        del fault
        self._say(request, detokenize(self._pod.reader, self._body(request)))

    def _stored_response(self, request: Request) -> tuple[str, Handler]:
        """The routes with an id in their path; an empty method where there is none."""
        response_id = request.path.removeprefix(_RESPONSE_PREFIX)
        if not request.path.startswith(_RESPONSE_PREFIX) or not response_id:
            return "", self._health
        if response_id.endswith("/cancel"):
            return "POST", self._cancel_response
        return ("", self._health) if "/" in response_id else ("GET", self._read_response)

    def _read_response(self, request: Request, fault: Fault | None) -> None:
        del fault
        body, _ = self._stored(request.path.removeprefix(_RESPONSE_PREFIX))
        request.conn.respond(200, self._head(request), body)

    def _cancel_response(self, request: Request, fault: Fault | None) -> None:
        del fault
        response_id = request.path.removeprefix(_RESPONSE_PREFIX).removesuffix("/cancel")
        self._stored(response_id)
        raise EngineError(
            "Cannot cancel a synchronous response.", 400, "invalid_request_error", "response_id"
        )

    def _stored(self, response_id: str) -> tuple[bytes, list[tuple[str, str]]]:
        stored = self._pod.responses.get(response_id)
        if stored is None:
            raise EngineError(
                f"Response with id '{response_id}' not found.",
                404,
                "invalid_request_error",
                "response_id",
            )
        return stored

    def _health(self, request: Request, fault: Fault | None) -> None:
        del fault
        request.conn.respond(503 if self._pod.dead else 200, self._head(request, b""), b"")

    def _models(self, request: Request, fault: Fault | None) -> None:
        del fault
        pod = self._pod
        listed = mock_sglang.model_list if pod.dialect == "sglang" else model_list
        self._say(request, listed(pod.reader, int(pod.started_s)))

    def _version(self, request: Request, fault: Fault | None) -> None:
        del fault
        self._say(request, {"version": VERSION})

    def _server_info(self, request: Request, fault: Fault | None) -> None:
        del fault
        pod = self._pod
        port = pod.connector.port
        self._say(request, mock_sglang.server_info(pod.reader, pod.model, pod.role, port))

    def _model_info(self, request: Request, fault: Fault | None) -> None:
        del fault
        self._say(request, mock_sglang.model_info(self._pod.reader, self._pod.role))

    def _load(self, request: Request, fault: Fault | None) -> None:
        del fault
        model = self._pod.model
        self._say(request, {"server_load": model.running + model.waiting})

    def _metrics(self, request: Request, fault: Fault | None) -> None:
        del fault
        head = self._head(request, b"text/plain; version=1.0.0; charset=utf-8")
        pod = self._pod
        if pod.dialect == "sglang":
            name = pod.reader.models[0]
            page = mock_sglang.metrics_page(pod.model, name, pod.role, pod.started_s)
        else:
            page = pod.metrics.render(pod.model)
        request.conn.respond(200, head, page)

    def _reset_prefix_cache(self, request: Request, fault: Fault | None) -> None:
        del fault
        self._pod.model.blocks.clear()
        request.conn.respond(200, self._head(request, b""), b"")

    def _body(self, request: Request) -> Json:
        return parse_body(request.header(b"content-type"), request.body)

    def _id(self, request: Request) -> str:
        given = request.header(b"x-request-id")
        return given.decode("latin-1") if given else uuid.uuid4().hex[:16]


def _now() -> int:
    return int(time.time())
