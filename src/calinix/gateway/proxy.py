"""One client's request on its way: routed, sent, answered, its lease closed exactly once.

Everything here runs inside protocol callbacks: no coroutine, no task, no timer per request.
Time-outs are one deadline attribute that the gateway's sweep looks at.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from calinix import errors
from calinix.core.events import (
    Failed,
    Failure,
    Finished,
    FirstToken,
    PrefillDone,
    ResponseStored,
    Role,
)
from calinix.core.prompt import Endpoint, ParsedBody, read_body
from calinix.core.requests import Refusal, RefusalReason, RoutePlan, RouteRequest
from calinix.edge.fast import Relay, count_events, with_end
from calinix.edge.http_client import ResponseHead, UpstreamCall, UpstreamFailure
from calinix.edge.http_server import Request
from calinix.engines.base import Exchange, ExchangeError, Leg, LegAnswer
from calinix.engines.hidden_usage import UsageCut, ask_for_usage
from calinix.engines.json_edits import strip_transfer_fields
from calinix.engines.plain import OneLeg
from calinix.engines.usage import Usage, read_usage
from calinix.gateway.heads import (
    ClientHead,
    is_event_stream,
    plan_lines,
    prefill_usage_lines,
    request_head,
    response_lines,
)
from calinix.gateway.records import cached_tokens, record_of
from calinix.gateway.sides import CANNOT_HAVE_BEGUN, FAILURES, SideLeg, error_of, query_head
from calinix.gateway.upstreams import Upstream

if TYPE_CHECKING:
    from calinix.gateway.server import Gateway

_MAX_MODEL_CHARS: Final = 1024
_MAX_KEY_BYTES: Final = 128
"""Tables are bounded in entries, so what clients choose as keys has to be short."""

_REFUSALS: dict[RefusalReason, type[errors.HttpError]] = {
    RefusalReason.MODE_NOT_SERVED: errors.BadRequest,
    RefusalReason.MODEL_NOT_SERVED: errors.NotFound,
    RefusalReason.NO_POD: errors.NoPod,
    RefusalReason.FULL: errors.TooManyRequests,
}

# These APIs announce an answer before they have a token of it.
_TOKEN_MARK = {Endpoint.RESPONSES: b"delta", Endpoint.MESSAGES: b"delta"}

_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp[A-Za-z0-9_-]{1,128})"')

_CLIENT_LEFT_STATUS: Final = 499
NEVER: Final = float("inf")


def _short_key(key: bytes) -> bytes:
    """In the place of a long key: keys that differ stay different."""
    return b"sha256:" + hashlib.sha256(key).hexdigest().encode()


class Flight:
    """A request between its last byte in and its last byte out.

    Listens to the leg that answers the client (ResponseListener) and to the client itself
    (ResponseStream).
    """

    __slots__ = (
        "answer_due_s",
        "answer_leg",
        "body",
        "calinix_lines",
        "call",
        "chunks",
        "client",
        "client_blocked",
        "conn",
        "deadline_s",
        "decision_s",
        "done",
        "exchange",
        "first_token_s",
        "gateway",
        "head",
        "hides_usage",
        "last_token_s",
        "lease_open",
        "parsed",
        "plan",
        "prefill_upstream",
        "prefill_usage",
        "relay",
        "request",
        "retries",
        "retry_reason",
        "route_request",
        "sides",
        "started",
        "status",
        "streamed",
        "tail",
        "trace_line",
        "upstream",
        "usage_cut",
        "written_bytes",
    )  # fmt: skip

    def __init__(self, gateway: Gateway, request: Request, client: ClientHead):
        self.gateway = gateway
        self.request = request
        self.conn = request.conn
        self.client = client
        self.plan: RoutePlan | None = None
        self.lease_open = False
        self.exchange: Exchange | None = None
        self.call: UpstreamCall | None = None
        self.answer_leg: Leg | None = None
        self.sides: list[SideLeg] = []
        self.head: ResponseHead | None = None
        self.started = False
        self.client_blocked = False
        self.done = False
        self.status = 0
        self.retries = 0
        self.retry_reason = ""
        self.chunks = 0
        self.tail = (b"", b"")
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.decision_s = 0.0
        self.written_bytes = 0
        self.deadline_s = NEVER
        self.answer_due_s = NEVER
        self.prefill_upstream: Upstream | None = None
        self.prefill_usage: Usage | None = None
        self.hides_usage = False
        self.usage_cut: UsageCut | None = None
        self.relay: Relay | None = None

    # --- from the client's request to a plan -------------------------------------------------

    def start(self, now: float) -> None:
        """Reads the request, routes it and sends it. Raises HttpError for what is wrong in it."""
        request = self.request
        gateway = self.gateway
        client = self.client
        body = request.body
        parsed = self.parsed = read_body(client.endpoint, body)
        if len(parsed.model) > _MAX_MODEL_CHARS:
            raise errors.NotFound(
                "no model has so long a name", param="model", code="model_not_found"
            )
        self.body = strip_transfer_fields(body) if parsed.has_transfer_fields else body
        self.streamed = parsed.stream
        if gateway.inject_usage and parsed.stream and not parsed.include_usage:
            self._ask_for_usage()
        self.route_request = self._route_request(parsed)
        self.trace_line = b"" if client.traced else gateway.ids.traceparent_line()
        self.conn.stream = self
        tokens = gateway.tokens
        if tokens is None or not tokens.begin(self):
            self.go(now)

    def _ask_for_usage(self) -> None:
        """The pod is to tell what the client does not want to know."""
        if self.client.endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
            asked = ask_for_usage(self.body)
            if asked is not None:
                self.body = asked
                self.hides_usage = True

    def go(self, now: float) -> None:
        """Routes the request and sends it; or it waits for a pod with room, or is refused."""
        gateway = self.gateway
        outcome = gateway.router.route(self.route_request, now)
        self.decision_s = gateway.now() - now
        gateway.flights.add(self)
        if isinstance(outcome, RoutePlan):
            self._launch(outcome, now)
        elif outcome.reason is not RefusalReason.FULL or not gateway.waiting.add(self, now):
            self._refuse(outcome)

    def _route_request(self, parsed: ParsedBody) -> RouteRequest:
        gateway = self.gateway
        client = self.client
        session_key = client.session_key or parsed.session_key
        if session_key is None and gateway.session_from_user:
            session_key = parsed.user
        if session_key is not None and len(session_key) > _MAX_KEY_BYTES:
            session_key = _short_key(session_key.encode("utf-8", "surrogatepass")).decode()
        tenant = parsed.cache_salt
        if len(tenant) > _MAX_KEY_BYTES:
            tenant = _short_key(tenant)
        response_id = parsed.previous_response_id or client.response_id
        pinned_pod = None
        if response_id is not None:
            pinned_pod = gateway.router.response_owner(response_id, gateway.now())
        return RouteRequest(
            request_id=gateway.ids.request_id(client.request_id),
            mode=client.mode,
            work=client.endpoint.work,
            model=parsed.model,
            prompt=parsed.prompt,
            prompt_is_tokens=parsed.prompt_is_tokens,
            tenant=tenant,
            session_key=session_key,
            max_output_tokens=parsed.max_output_tokens,
            streamed=parsed.stream,
            other_bytes=parsed.other_bytes,
            pinned_pod=pinned_pod,
            split=gateway.dispatch.must_split,
        )

    @property
    def wait_key(self) -> object:
        """Those of one mode and model wait for the same pods, or for the one that can answer."""
        request = self.route_request
        return (request.mode, request.model, request.pinned_pod)

    def try_again(self, now: float) -> bool:
        """From the wait queue: routes once more; False when every pod is still full."""
        outcome = self.gateway.router.route(self.route_request, now)
        if isinstance(outcome, RoutePlan):
            self._launch(outcome, now)
        elif outcome.reason is RefusalReason.FULL:
            return False
        else:
            self._refuse(outcome)
        return True

    def give_up_waiting(self) -> None:
        """From the wait queue: the deadline has passed."""
        self._fail(errors.TooManyRequests("every pod is full; waited in vain", retry_after_s=1))

    def _refuse(self, refusal: Refusal) -> None:
        reason = refusal.reason
        busy = reason in (RefusalReason.NO_POD, RefusalReason.FULL)
        self._fail(
            _REFUSALS[reason](
                refusal.message,
                code=reason.value,
                param="model" if reason is RefusalReason.MODEL_NOT_SERVED else None,
                retry_after_s=1 if busy else None,
            )
        )

    # --- from a plan to its legs -------------------------------------------------------------

    def _launch(self, plan: RoutePlan, now: float, resend: Leg | None = None) -> None:
        gateway = self.gateway
        self.plan = plan
        self.lease_open = True
        self.deadline_s = self.answer_due_s = NEVER
        self.calinix_lines = plan_lines(plan)
        # Held for the whole plan: a reload may remove or replace a pod before its leg is sent.
        self.upstream = gateway.upstreams[plan.pod.id]
        if resend is not None:
            self._send(resend, now)
            return
        prefill = plan.prefill
        self.prefill_usage = None
        if prefill is None:
            self.prefill_upstream = self.exchange = None
            self._send(Leg(plan.pod.role, self.body, True), now)
            return
        self.prefill_upstream = gateway.upstreams[prefill.id]
        try:
            exchange = gateway.dispatch.exchange(
                plan, self.prefill_upstream, self.client.endpoint, self.body
            )
        except errors.HttpError as error:
            self._lose(plan.pod.role, Failure.CANCELLED, 0)
            self._fail(error)
            return
        if isinstance(exchange, OneLeg):
            self._launch_whole(plan, now)
            return
        self.exchange = exchange
        for leg in exchange.start():
            self._send(leg, now)

    def _launch_whole(self, plan: RoutePlan, now: float) -> None:
        """What cannot be split is planned anew: no prefill pod has a part in it."""
        gateway = self.gateway
        self.lease_open = False
        gateway.router.observe(Failed(plan.lease_id, "decode", Failure.CANCELLED), now)
        before = self.route_request
        self.route_request = before.once_more(before.avoid, None, whole=True)
        outcome = gateway.router.route(self.route_request, now)
        if isinstance(outcome, RoutePlan):
            self._launch(outcome, now)
        else:
            self._refuse(outcome)

    def _send(self, leg: Leg, now: float) -> None:
        timeouts = self.gateway.timeouts
        if leg.answers_client:
            self.answer_leg = leg
            due_s = now + (timeouts.first_token_s if self.streamed else timeouts.total_s)
            self.answer_due_s = due_s
            self.deadline_s = min(self.deadline_s, due_s)
            head_only = self.client.method == b"HEAD"
            request = self._request_to(self.upstream, leg)
            self.call = self.upstream.client.send(request, self, head_only=head_only)
            if self.client_blocked:
                self.on_client_blocked()
            return
        upstream = self.prefill_upstream
        assert upstream is not None
        if leg.bootstrap_path:
            client = upstream.bootstrap()
            side = SideLeg(self, leg, now + timeouts.connect_s)
            data: bytes | tuple[bytes, bytes] = query_head(client, leg.bootstrap_path)
        else:
            client = upstream.client
            side = SideLeg(self, leg, now + timeouts.prefill_s)
            data = self._request_to(upstream, leg)
        self.sides.append(side)
        self.deadline_s = min(self.deadline_s, side.due_s)
        side.call = client.send(data, side)

    def _request_to(self, upstream: Upstream, leg: Leg) -> tuple[bytes, bytes]:
        """Head and body of a leg."""
        body = leg.body
        lines = self.calinix_lines + leg.lines if leg.lines else self.calinix_lines
        head = request_head(self.client, upstream.address, self.trace_line, lines, len(body))
        return (head, body)

    # --- legs that do not answer the client --------------------------------------------------

    def on_side_answered(self, side: SideLeg, body: bytes) -> None:
        """A side leg's whole answer is here: on to the next legs, or to the client."""
        head, plan, exchange = side.head, self.plan, self.exchange
        assert head is not None
        assert plan is not None
        assert exchange is not None
        status = head.status
        if side.leg.bootstrap_path and status >= 300:
            self.on_side_failed(side, Failure.SERVER_ERROR, f"it answered {status}")
            return
        if status >= 300:
            self._side_refused(side, status, body)
            return
        self._drop(side)
        try:
            legs = exchange.after(side.leg, LegAnswer(status=status, body=body))
        except ExchangeError as error:
            self._side_said_nothing(status, error)
            return
        now = self.gateway.now()
        if not side.leg.bootstrap_path:
            self.prefill_usage = read_usage(body)
            self.gateway.router.observe(PrefillDone(plan.lease_id, side.leg.drained), now)
        for leg in legs:
            self._send(leg, now)

    def _side_said_nothing(self, status: int, error: ExchangeError) -> None:
        """What came is no answer: as good as none."""
        if self._is_settled():
            return
        failure = Failure.CLOSED
        if self.call is None and self._retry("prefill", failure, status, self.gateway.now()):
            return
        self._lose("prefill", failure, status)
        self._fail(errors.BadGateway(str(error)))

    def _side_refused(self, side: SideLeg, status: int, body: bytes) -> None:
        """The prefill pod will not do it: another may, else its own answer is the client's."""
        self._drop(side)
        if self._is_settled():
            return
        failure = None
        if status >= 500 or status == 429:
            failure = Failure.REFUSED if status in (429, 503) else Failure.SERVER_ERROR
            may_retry = self.call is None or failure is Failure.REFUSED
            if may_retry and self._retry("prefill", failure, status, self.gateway.now()):
                return
        head = side.head
        assert head is not None
        self._pass_on(status, self._client_lines(head), body, failure)

    def on_side_refused(self, side: SideLeg, status: int, body: bytes) -> None:
        """In the middle of a stream that began as a 200."""
        if side.call is not None:
            side.call.cancel()
        self._drop(side)
        if not self._is_settled():
            failure = Failure.SERVER_ERROR if status >= 500 else None
            lines = b"content-type: application/json\r\n" + self.calinix_lines
            self._pass_on(status, lines, body, failure)

    def on_side_failed(
        self,
        side: SideLeg,
        failure: Failure,
        detail: str,
        *,
        cannot_have_begun: bool = False,
        may_stay: bool = False,
        kind: Callable[[str], errors.HttpError] = errors.BadGateway,
    ) -> None:
        """A side leg is lost. While it is alone it answers nobody, so another pod may be tried.

        Once the answering leg is out as well, its pod waits for this one: then only where this
        one cannot have begun.
        """
        if side.call is not None:
            side.call.cancel()
        self._drop(side)
        if self._is_settled():
            return
        role = side.leg.role
        what = f"the {role} pod"
        if side.leg.bootstrap_path:
            what += "'s bootstrap server"
            if failure is Failure.CONNECT:
                # Another port than the engine's: no sign that its cache is gone.
                failure = Failure.CLOSED
        may_retry = self.call is None or cannot_have_begun
        if may_retry and self._retry(role, failure, 0, self.gateway.now(), may_stay=may_stay):
            return
        self._lose(role, failure, 0)
        self._fail(kind(f"{what} failed: {detail}"))

    def _drop(self, side: SideLeg) -> None:
        """The side leg is over; what is left has its own deadline."""
        self.sides.remove(side)
        if not self.first_token_s and not self.client_blocked:
            self._set_deadline()

    def _set_deadline(self) -> None:
        """The next of those before the first token."""
        due_s = self.answer_due_s
        for side in self.sides:
            due_s = min(due_s, side.due_s)
        self.deadline_s = due_s

    def _is_settled(self) -> bool:
        """The answer is being made: what becomes of the prefill leg matters no more.

        Some APIs announce an answer before there is a token of it.
        """
        return self.first_token_s > 0.0 if self.streamed else self.started

    def _pass_on(self, status: int, lines: bytes, body: bytes, failure: Failure | None) -> None:
        """The prefill pod's own refusal becomes the client's answer."""
        self._close_lease("prefill", failure, status, None)
        if self.started:
            self._fail(errors.BadGateway(f"the prefill pod answered {status}"))
            return
        self._cancel_calls()
        self.status = status
        self.started = True
        self.conn.respond(status, lines, body)
        self._end("" if failure is None else failure.value)

    # --- the leg that answers the client -----------------------------------------------------

    def on_head(self, head: ResponseHead) -> None:
        """The pod's status. It is held until the first body byte, so that it can still change."""
        self.head = head
        self.status = head.status
        if self.hides_usage:
            is_stream = head.status < 300 and is_event_stream(head)
            self.usage_cut = UsageCut() if is_stream else None
        if head.status in (429, 503) and self.answer_leg is not None:
            self._retry(self.answer_leg.role, Failure.REFUSED, head.status, self.gateway.now())

    def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:
        """Body bytes of one read, passed on in one write."""
        now = self.gateway.now()
        self._take_in()
        if self.streamed and body:
            self.chunks += count_events(body)
            if self.chunks:
                self.last_token_s = now
                if not self.first_token_s and self._token_mark() in body:
                    self._first_token(now)
                if not self.client_blocked:
                    next_s = now + self.gateway.timeouts.idle_s
                    if self.first_token_s:
                        self.deadline_s = next_s
                    else:
                        # An announcement is no token: it does not shorten the time for the first.
                        self.answer_due_s = max(self.answer_due_s, next_s)
                        self._set_deadline()
        self.tail = with_end(self.tail, body)
        if self.usage_cut is not None:
            passed = self.usage_cut.feed(body, last)
            if passed is not body:
                body, wire = passed, None
                if not (body or last or self.started):
                    return  # nothing of the answer is sure yet
        self.written_bytes += len(body)
        if last:
            # Before it is written: the client's next request may be served within that write.
            self._succeed()
        if self.started:
            self.conn.write(body, wire, last)
        else:
            self._begin(body, wire, last)
        if wire is not None and self.relay is None and self.first_token_s:
            self._begin_relay()

    def _begin_relay(self) -> None:
        """From here on nothing of the stream matters before its end but that it goes on."""
        outlet = self.conn.chunk_outlet()
        if outlet is not None and self.usage_cut is None and self.call is not None:
            self.relay = Relay(outlet, self.gateway.now)
            self.call.pass_through(self.relay)

    def _take_in(self) -> None:
        """What the relay, if there is one, has passed on since it was last asked."""
        relay = self.relay
        if relay is None:
            return
        last_s = relay.last_s
        if last_s:
            self.chunks += relay.events
            self.written_bytes += relay.body_bytes
            self.last_token_s = last_s
            self.tail = with_end(self.tail, relay.take())
            if not self.client_blocked:
                self.deadline_s = max(self.deadline_s, last_s + self.gateway.timeouts.idle_s)

    def _begin(self, body: bytes, wire: bytes | None, last: bool) -> None:
        head = self.head
        assert head is not None
        self.started = True
        if self.client.endpoint is Endpoint.RESPONSES:
            self._note_response_id(body)
        lines = self._client_lines(head)
        if last and self.client.method != b"HEAD":
            self.conn.respond(head.status, lines, body)
        else:
            length = head.content_length if self.usage_cut is None else None
            self.conn.begin(head.status, lines, length)
            self.conn.write(body, wire, last)

    def _token_mark(self) -> bytes:
        return _TOKEN_MARK.get(self.client.endpoint, b"data:")

    def _client_lines(self, head: ResponseHead) -> bytes:
        memo = head.memo
        lines = memo[0]
        if not isinstance(lines, bytes):
            memo[0] = lines = response_lines(head.headers)
        if self.client.prefill_usage and self.prefill_usage is not None:
            return lines + self.calinix_lines + prefill_usage_lines(self.prefill_usage)
        return lines + self.calinix_lines

    def _note_response_id(self, first_bytes: bytes) -> None:
        """A stored answer can be read again only where it is: on the pod that made it."""
        found = _RESPONSE_ID.search(first_bytes)
        if found is not None and self.plan is not None and self.status < 300:
            stored = ResponseStored(found.group(1).decode("ascii"), self.plan.pod.id)
            self.gateway.observe(stored)

    def _first_token(self, now: float) -> None:
        self.first_token_s = now
        if self.lease_open and self.plan is not None:
            self.gateway.router.observe(FirstToken(self.plan.lease_id), now)

    def on_failure(self, failure: UpstreamFailure, detail: str) -> None:
        """The answering pod is lost; whether another may be tried is design's retry rule."""
        self._take_in()
        leg = self.answer_leg
        assert leg is not None
        core_failure = FAILURES[failure]
        reused = failure is UpstreamFailure.REUSED_CLOSED
        if failure in CANNOT_HAVE_BEGUN and self._retry(
            leg.role, core_failure, 0, self.gateway.now(), may_stay=reused
        ):
            return
        self._lose(leg.role, core_failure, 0)
        self._fail(error_of(failure)(f"the pod failed: {detail}"))

    def _succeed(self) -> None:
        usage = read_usage(self.tail[0] + self.tail[1])
        assert self.answer_leg is not None
        status = self.status
        failure = None
        if status >= 500 or status == 429:
            failure = Failure.REFUSED if status in (429, 503) else Failure.SERVER_ERROR
        self._close_lease(self.answer_leg.role, failure, status, usage)
        self._cancel_calls(but_answer=True)
        self._end("" if failure is None else failure.value, usage)

    # --- what can go wrong -------------------------------------------------------------------

    def on_deadline(self, due_s: float) -> None:
        """From the sweep, by its time: the step under way has taken too long."""
        self._take_in()
        if self.deadline_s > due_s:
            return
        for side in self.sides:
            if side.due_s <= due_s:
                key = "connectMs" if side.leg.bootstrap_path else "prefillMs"
                detail = f"no answer within {key}"
                self.on_side_failed(side, Failure.TIMEOUT, detail, kind=errors.GatewayTimeout)
                return
        leg_role: Role = self.answer_leg.role if self.answer_leg is not None else "single"
        if not self.streamed:
            self._lose(leg_role, Failure.TOTAL_TIMEOUT, 0)
            self._fail(errors.GatewayTimeout("no answer within totalMs"))
        else:
            what = "next event within idleMs" if self.chunks else "first token within firstTokenMs"
            self._lose(leg_role, Failure.TIMEOUT, 0)
            self._fail(errors.GatewayTimeout(f"no {what}"))

    def _retry(
        self, role: Role, failure: Failure, status: int, now: float, *, may_stay: bool = False
    ) -> bool:
        """Tries another pod, once; False: there is no other, or it has been tried already.

        `may_stay`: a kept-alive connection that the pod had closed says nothing of the pod, so
        where there is no other pod the same one is asked again.
        """
        plan = self.plan
        if plan is None or self.started or self.retries >= self.gateway.max_retries:
            return False
        failed = plan.prefill if role == "prefill" else plan.pod
        assert failed is not None
        self._lose(role, failure, status)
        before = self.route_request
        # A prefill that is still under way is tied to the pod that was to take it.
        keeps_prefill = role == "decode" and plan.prefill is not None and not self.sides
        prefill_pod = plan.prefill.id if keeps_prefill and plan.prefill is not None else None
        request = before.once_more(before.avoid | 1 << failed.slot, prefill_pod)
        router = self.gateway.router
        outcome = router.route(request, now)
        if isinstance(outcome, Refusal) and may_stay:
            request = request.once_more(before.avoid, prefill_pod)
            outcome = router.route(request, now)
        if isinstance(outcome, Refusal):
            return False
        self.retries += 1
        self.retry_reason = Failure.CLOSED.value if may_stay else failure.value
        self.route_request = request
        self._cancel_calls()
        self.head = None
        self._launch(outcome, now, self.answer_leg if keeps_prefill else None)
        return True

    def _lose(self, role: Role, failure: Failure, status: int) -> None:
        self._close_lease(role, failure, status, None)

    def _close_lease(
        self, role: Role, failure: Failure | None, status: int, usage: Usage | None
    ) -> None:
        """Gives the lease back; the one place where that happens, and harmless the second time."""
        if not self.lease_open or self.plan is None:
            return
        self.lease_open = False
        lease_id = self.plan.lease_id
        now = self.gateway.now()
        if failure is not None:
            pod = self.plan.prefill if role == "prefill" and self.plan.prefill else self.plan.pod
            if self.prefill_upstream is not None and failure is not Failure.CANCELLED:
                self.prefill_upstream.forget()
            self.gateway.telemetry.counters.pod_failed(pod.id, failure.value)
            self.gateway.router.observe(Failed(lease_id, role, failure, status), now)
            return
        self.gateway.router.observe(
            Finished(
                lease_id,
                status,
                usage.prompt_tokens if usage else None,
                cached_tokens(self.prefill_usage, usage),
                usage.output_tokens if usage else (self.chunks or None),
            ),
            now,
        )

    def _cancel_calls(self, *, but_answer: bool = False) -> None:
        for side in self.sides:
            if side.call is not None:
                side.call.cancel()
        self.sides.clear()
        if self.call is not None and not but_answer:
            self.call.cancel()
        self.call = None

    def _fail(self, error: errors.HttpError) -> None:
        """Ends with an error: a true status before the first byte, an event and a close after."""
        self._cancel_calls()
        if not self.started:
            self.status = error.status
            self.gateway.answer_error(self.request, error, self._own_lines())
        else:
            if self._is_event_stream():
                self.conn.write(self._error_event(error))
            self.conn.break_off()
        self._end(error.code or error.type)

    def _own_lines(self) -> bytes:
        if self.plan is not None:
            return self.calinix_lines
        return f"x-request-id: {self.route_request.request_id}\r\n".encode("ascii")

    def _is_event_stream(self) -> bool:
        """Whether an event may be added to what the client has got so far."""
        head = self.head
        if head is None or head.content_length is not None or head.status >= 300:
            return False
        return is_event_stream(head)

    def _error_event(self, error: errors.HttpError) -> bytes:
        gap = b"" if self.tail[1].endswith(b"\n\n") else b"\n\n"
        if self.client.endpoint is Endpoint.MESSAGES:
            data = b'{"type":"error",' + error.body()[1:]
            return gap + b"event: error\ndata: " + data + b"\n\n"
        return gap + b"data: " + error.body() + b"\n\n"

    # --- the client (ResponseStream) ---------------------------------------------------------

    def on_client_blocked(self) -> None:
        """The client reads more slowly than the pod writes.

        The pod is not to blame, so its time stops; the server cuts a client that takes nothing.
        """
        self.client_blocked = True
        self.deadline_s = NEVER
        if self.call is not None:
            self.call.pause_reading()

    def on_client_ready(self) -> None:
        """The client has caught up."""
        self.client_blocked = False
        self.deadline_s = self.gateway.now() + (
            self.gateway.timeouts.idle_s if self.streamed else self.gateway.timeouts.total_s
        )
        if self.call is not None:
            self.call.resume_reading()

    def on_client_gone(self) -> None:
        """The client left: the pod must not go on for nobody."""
        if self.done:
            return
        self._take_in()
        self.gateway.waiting.remove(self)
        role: Role = "prefill" if self.sides else "single"
        if self.answer_leg is not None and not self.sides:
            role = self.answer_leg.role
        self._lose(role, Failure.CANCELLED, 0)
        self._cancel_calls()
        self.status = self.status if self.started else _CLIENT_LEFT_STATUS
        self._end("client_stalled" if self.client_blocked else "client_left")

    # --- the end -----------------------------------------------------------------------------

    def _end(self, error: str, usage: Usage | None = None) -> None:
        """Every path ends here, once: the record is written and a waiter may go ahead."""
        if self.done:
            return
        self.done = True
        gateway = self.gateway
        gateway.flights.discard(self)
        gateway.telemetry.finish(record_of(self, gateway.now(), error, usage))
        if len(gateway.waiting):
            gateway.wake_soon()
