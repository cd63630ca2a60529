"""A light load generator on the edge client: a closed loop, or Poisson arrivals."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from calinix import headers as h
from calinix.config import ClientTls
from calinix.edge.http_client import (
    FetchError,
    PodClient,
    ResponseHead,
    UpstreamCall,
    UpstreamFailure,
    fetch,
)
from calinix.edge.tls import client_ssl_context
from calinix.engines.sse import EventCounter
from calinix.engines.usage import TAIL_BYTES, read_usage
from calinix.errors import CalinixError
from calinix.sim.load_report import Outcome, Summary, summarise
from calinix.sim.load_traffic import Session, Shape, Traffic

PATH = b"/v1/chat/completions"
MAX_UNDER_WAY = 10_000
MAX_GAPS = 4_000_000
_SWEEP_S = 0.5


class LoadError(CalinixError):
    """The target cannot be put under load."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how hard."""

    requests: int | None = 200
    seconds: float | None = None
    """The run ends with whichever comes first; what is under way then is still awaited."""
    concurrency: int = 16
    """Sessions at the same time (closed loop)."""
    rate_per_s: float | None = None
    """New sessions per second (open loop); replaces `concurrency`."""
    timeout_s: float = 120.0
    """A request that takes longer has failed."""
    mode: str | None = None
    api_key: str | None = None


class Shot:
    """One request and what comes back (ResponseListener)."""

    __slots__ = (
        "_counter", "_head", "_last_s", "_load", "_pieces", "_tail", "call", "first_s",
        "session", "started_s",
    )  # fmt: skip

    def __init__(self, load: Load, session: Session, now: float):
        self._load = load
        self.session = session
        self.started_s = now
        self.first_s: float | None = None
        self.call: UpstreamCall | None = None
        self._last_s = now
        self._head: ResponseHead | None = None
        self._counter = EventCounter()
        self._tail = b""
        self._pieces: list[bytes] | None = [] if load.traffic.shape.turns > 1 else None

    def on_head(self, head: ResponseHead) -> None:
        """The status and who answered."""
        self._head = head

    def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:  # noqa: ARG002
        """A part of the answer."""
        load = self._load
        if load.traffic.shape.stream and body:
            self._count(body)
        self._tail = (self._tail + body)[-TAIL_BYTES:]
        if self._pieces is not None:
            self._pieces.append(body)
        if last:
            load.ended(self, self._error())

    def _count(self, body: bytes) -> None:
        counter = self._counter
        before = counter.events
        new = counter.feed(body) - before
        if not new:
            return
        now = time.perf_counter()
        gaps_s = self._load.gaps_s
        if self.first_s is None:
            self.first_s = now
        elif len(gaps_s) < MAX_GAPS:
            # Tokens that come together have no gap; the usage at the end is no token.
            tokens = new - counter.done
            gaps_s.extend([now - self._last_s] + [0.0] * (tokens - 1) if tokens else ())
        self._last_s = now

    def on_failure(self, failure: UpstreamFailure, detail: str) -> None:  # noqa: ARG002
        """No whole answer."""
        self._load.ended(self, f"connection {failure.value}")

    def _error(self) -> str | None:
        assert self._head is not None
        if self._head.status != 200:
            return f"status {self._head.status}{_code_of(self._tail)}"
        if not self._load.traffic.shape.stream:
            return None
        if b'data: {"error"' in self._tail:
            return "error inside a stream"
        return None if self._counter.done else "stream without an end"

    def outcome(self, error: str | None, now: float) -> Outcome:
        """What became of it."""
        usage = read_usage(self._tail)
        named = dict(self._head.headers) if self._head is not None else {}
        pod, hit = named.get(h.TARGET_POD_ID), named.get(h.CACHE_HIT)
        output = usage.output_tokens if usage is not None else None
        return Outcome(
            started_s=self.started_s,
            first_token_s=self.first_s,
            ended_s=now,
            status=self._head.status if self._head is not None else 0,
            error=error,
            prompt_tokens=(usage.prompt_tokens or 0) if usage is not None else 0,
            output_tokens=self._counter.events if output is None else output,
            cached_tokens=usage.cached_tokens if usage is not None else None,
            pod=pod.decode("latin-1") if pod is not None else None,
            cache_hit=hit == b"true" if hit is not None else None,
        )

    def text(self) -> str:
        """The answer's text, for the session's next turn."""
        body = b"".join(self._pieces or ())
        if not self._load.traffic.shape.stream:
            return _text_of(body, "message")
        events = body.split(b"\n\n")
        return "".join(
            _text_of(event[6:], "delta") for event in events if event.startswith(b"data: {")
        )


def _code_of(body: bytes) -> str:
    """The code that an error's body names, in brackets, if it is a short word; else nothing."""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""
    return f" ({code})" if isinstance(code, str) and code.isidentifier() and len(code) < 40 else ""


def _text_of(body: bytes, field: str) -> str:
    try:
        choices = msgspec.json.decode(body)["choices"]
        return choices[0][field].get("content") or "" if choices else ""
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""


class Load:
    """One run against one URL. `await run()` gives the summary."""

    def __init__(self, client: PodClient, traffic: Traffic, plan: Plan):
        self.loop = client.loop
        self.traffic = traffic
        self.plan = plan
        self.outcomes: list[Outcome] = []
        self.gaps_s = array("d")
        self.sent = 0
        self.not_sent = 0
        self._client = client
        self._under_way: set[Shot] = set()
        self._finished = self.loop.create_future()
        self._closed = False
        self._start_s = 0.0
        self._next_arrival_s = 0.0  # since the start
        self._timer: asyncio.TimerHandle | None = None
        lines = [b"content-type: application/json", b"host: " + client.host]
        if plan.mode is not None:
            lines.append(h.MODE + b": " + plan.mode.encode("ascii"))
        if plan.api_key is not None:
            lines.append(h.AUTHORIZATION + b": Bearer " + plan.api_key.encode("ascii"))
        self._lines = b"".join(line + b"\r\n" for line in lines)

    @property
    def done(self) -> int:
        """Requests answered or lost so far."""
        return len(self.outcomes)

    @property
    def elapsed_s(self) -> float:
        """Time since the run began."""
        return time.perf_counter() - self._start_s

    async def run(self, on_progress: Callable[[Load], None] | None = None) -> Summary:
        """Sends everything, waits for every answer; calls `on_progress` twice a second."""
        plan = self.plan
        self._start_s = time.perf_counter()
        if plan.rate_per_s is None:
            for _ in range(plan.concurrency):
                self._next_session()
        else:
            self._arrive()
        while not self._finished.done():
            self._end_if_idle()
            await asyncio.wait((self._finished,), timeout=_SWEEP_S)
            self._drop_late()
            if on_progress is not None:
                on_progress(self)
        if self._timer is not None:
            self._timer.cancel()
        seconds = max((one.ended_s for one in self.outcomes), default=self._start_s) - self._start_s
        return summarise(self.outcomes, self.gaps_s, seconds, self.not_sent)

    def stop(self) -> None:
        """Sends nothing more; the run ends when what is under way is answered."""
        self._closed = True

    def _may_send(self, at_s: float) -> bool:
        """Whether a request that was to go out at `at_s` since the start still belongs to it."""
        plan = self.plan
        enough = plan.requests is not None and self.sent >= plan.requests
        late = plan.seconds is not None and at_s >= plan.seconds
        self._closed = self._closed or enough or late
        return not self._closed

    def _next_session(self) -> None:
        if self._may_send(self.elapsed_s):
            self._send(self.traffic.session())

    def _arrive(self) -> None:
        """The arrivals of the open loop that are due, and the timer for the next.

        Times add up from the start: a busy machine delays arrivals but loses none.
        """
        assert self.plan.rate_per_s is not None
        while self._next_arrival_s <= self.elapsed_s:
            if not self._may_send(self._next_arrival_s):
                self._end_if_idle()
                return
            if len(self._under_way) < MAX_UNDER_WAY:
                self._send(self.traffic.session())
            else:
                self.not_sent += 1
            self._next_arrival_s += self.traffic.gap_s(self.plan.rate_per_s)
        delay_s = self._next_arrival_s - self.elapsed_s
        self._timer = self.loop.call_later(delay_s, self._arrive)

    def _send(self, session: Session) -> None:
        self.sent += 1
        body = session.body()
        client = self._client
        head = b"POST %b%b HTTP/1.1\r\n%b%b: %b\r\ncontent-length: %d\r\n\r\n" % (
            client.prefix,
            PATH,
            self._lines,
            h.SESSION_KEY,
            session.key.encode("ascii"),
            len(body),
        )
        shot = Shot(self, session, time.perf_counter())
        self._under_way.add(shot)
        shot.call = client.send((head, body), shot)

    def ended(self, shot: Shot, error: str | None) -> None:
        """A request is answered or lost; its session goes on, or another begins."""
        self._under_way.discard(shot)
        self.outcomes.append(shot.outcome(error, time.perf_counter()))
        session = shot.session
        if error is None and session.turn + 1 < self.traffic.shape.turns:
            session.answered(shot.text())
            if self._may_send(self.elapsed_s):
                self._send(session)
        elif self.plan.rate_per_s is None:
            # A target that refuses at once must not turn this into a loop without a pause.
            if error is None:
                self._next_session()
            else:
                self.loop.call_later(0.01, self._resume)
        self._end_if_idle()

    def _resume(self) -> None:
        self._next_session()
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.plan.rate_per_s is None:
            self._may_send(self.elapsed_s)
        if self._closed and not self._under_way and not self._finished.done():
            self._finished.set_result(None)

    def _drop_late(self) -> None:
        limit_s = time.perf_counter() - self.plan.timeout_s
        for shot in [shot for shot in self._under_way if shot.started_s < limit_s]:
            if shot.call is not None:
                shot.call.cancel()
            self.ended(shot, "timeout")


async def run_load(
    url: str,
    shape: Shape,
    plan: Plan,
    *,
    seed: int = 1,
    ca_file: str | None = None,
    on_progress: Callable[[Load], None] | None = None,
) -> Summary:
    """A run against the gateway or pod at `url`; an empty `shape.model` is asked for there.

    `ca_file` holds the authorities (PEM) that an https one is verified against instead of the
    system's. Raises LoadError when nothing usable answers at `url`, ConfigError of a bad file.
    """
    loop = asyncio.get_running_loop()
    is_https = urlsplit(url).scheme == "https"
    secure = client_ssl_context(ClientTls(ca_file=ca_file)) if is_https else None
    base = url.rstrip("/").removesuffix("/v1")
    idle = max(256, plan.concurrency)
    client = PodClient(base, loop, connect_timeout_s=5.0, max_idle=idle, ssl=secure)
    try:
        if not shape.model:
            shape = msgspec.structs.replace(shape, model=await first_model(client, plan.api_key))
        return await Load(client, Traffic(shape, seed), plan).run(on_progress)
    finally:
        client.close()


async def first_model(client: PodClient, api_key: str | None) -> str:
    """The first model that is served there. Raises LoadError."""
    lines = [] if api_key is None else [(h.AUTHORIZATION, b"Bearer " + api_key.encode("ascii"))]
    try:
        head, body = await fetch(client, "GET", "/v1/models", lines)
        if head.status != 200:
            hint = "; name a key with --api-key" if head.status == 401 and not api_key else ""
            raise LoadError(f"/v1/models answered {head.status}{_code_of(body)}{hint}")
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except FetchError as error:
        raise LoadError(f"/v1/models: {error}") from error
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        raise LoadError("/v1/models lists no model; name one with --model") from None
