"""The pods' KV events, from their sockets to the router.

Each pod is listened to at its own endpoint, or at the one that the gateway binds, where topics
tell the pods apart. What the messages mean is worked out in engines (kv_pod, kv_stream,
kv_mirror); here are sockets, time, and words for people. Nothing that a publisher sends raises.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from typing import Literal

import structlog

from calinix.config import Config, PodConfig
from calinix.core.events import Event
from calinix.edge.http_client import FetchError, PodClient, fetch
from calinix.edge.kv_lines import Places, ReplayLine
from calinix.edge.kv_settings import are_configured, at_rank, base_model, clears_only, model_in
from calinix.edge.kv_sockets import Backlog, Inlet, Sockets, require
from calinix.engines.kv_events import Message, read_message
from calinix.engines.kv_names import Namespaces
from calinix.engines.kv_pod import KvPod, KvPodSettings, KvView
from calinix.engines.kv_stream import Source
from calinix.errors import ConfigError

log = structlog.get_logger()

TICK_S = 0.02
_TICKS_PER_ROUND = 5
"""Each pod is looked at in one tick of so many."""
SILENT_S = 30.0
"""Where events are configured and none came for so long, people are told, once."""
_MODELS_TIMEOUT_S = 2.0
_MODELS_RETRY_S = 2.0
_MAX_TOPICS = 4096


class _Fed:
    """One pod whose events are wanted."""

    __slots__ = (
        "backlog", "client", "config", "inlets", "lines", "pod", "said", "since_s", "task",
        "warned",
    )  # fmt: skip

    def __init__(self, config: PodConfig, client: PodClient, since_s: float):
        self.config = config
        self.client = client
        self.since_s = since_s
        self.pod: KvPod | None = None
        """None: its base model is not known yet."""
        self.backlog: Backlog | None = None
        self.inlets: list[Inlet] = []
        self.lines: list[ReplayLine] = []
        self.task: asyncio.Task[None] | None = None
        self.said: Source = "history"
        self.warned: set[str] = set()

    @property
    def prefix(self) -> bytes:
        """How the topics of its messages begin at the bound endpoint."""
        topic = self.config.kv_events.topic
        return f"kv@{self.config.id}@".encode() if topic is None else topic.encode()


class KvFeed:
    """All pods' events. `add` and `remove` follow the configured pods."""

    def __init__(
        self,
        config: Config,
        loop: asyncio.AbstractEventLoop,
        observe: Callable[[Event], None],
        epoch_of: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Raises ConfigError where events are configured and pyzmq is not installed."""
        if config.cache_registry.enabled and are_configured(config):
            require()
        self._config = config
        self._loop = loop
        self._observe = observe
        self._epoch_of = epoch_of
        self._now = clock
        self._namespaces = Namespaces(config.cache_registry.token_block_size)
        self._clears_only = clears_only(config)
        self._sockets: Sockets | None = None
        self._places = Places()
        self._bound: list[Inlet] = []
        self._fed: dict[str, _Fed] = {}
        self._topics: dict[bytes, _Fed | None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0
        self.strangers = 0
        """Messages at the bound endpoint that are no configured pod's."""

    def start(self) -> None:
        """Binds what is to be bound. Raises ConfigError."""
        settings = self._config.kv_events
        if settings.bind is None or not self._config.cache_registry.enabled:
            return
        self._bind(settings.bind)

    def _bind(self, endpoint: str) -> None:
        """Binds for each rank that some pod has and that none is bound for. Raises ConfigError."""
        here = [fed for fed in self._fed.values() if fed.config.kv_events.endpoint is None]
        ranks = max((fed.config.kv_events.ranks for fed in here), default=1)
        topics = tuple(fed.prefix for fed in here)
        sockets = self._need_sockets()
        for rank in range(len(self._bound), ranks):
            deliver = functools.partial(self._bound_message, rank)
            inlet = sockets.subscribe(at_rank(endpoint, rank), topics, deliver, bind=True)
            self._bound.append(inlet)

    def _listen_for(self, fed: _Fed) -> None:
        """Subscribes to a further pod that publishes at the bound endpoint, once that is bound."""
        endpoint = self._config.kv_events.bind
        if fed.config.kv_events.endpoint is not None or not self._bound or endpoint is None:
            return
        for inlet in self._bound:
            inlet.socket.subscribe(fed.prefix)
        try:
            self._bind(endpoint)
        except ConfigError as error:
            log.error("kv_events_off", pod=fed.config.id, reason=str(error))

    def add(self, config: PodConfig, client: PodClient) -> None:
        """A pod is configured. Where it cannot be listened to, that is logged."""
        events = config.kv_events
        if not self._config.cache_registry.enabled or (
            events.endpoint is None and self._config.kv_events.bind is None
        ):
            return
        fed = self._fed[config.id] = _Fed(config, client, self._now())
        self._topics.clear()
        self._listen_for(fed)
        if self._clears_only and len(self._fed) == 1:
            log.warning(
                "kv_events_only_clear",
                tokenizer=self._config.gateway.tokenizer,
                hint="blocks of text cannot be compared with an engine's; hf can",
            )
        model = events.base_model or next(iter(config.models), None)
        if model is not None or self._clears_only:
            self._begin(fed, model or "")
        else:
            fed.task = self._loop.create_task(self._find_model(fed))

    def remove(self, pod_id: str) -> None:
        """A pod is not configured any more."""
        fed = self._fed.pop(pod_id, None)
        if fed is None:
            return
        self._topics.clear()
        fed.pod = None
        if fed.task is not None:
            fed.task.cancel()
        for line in fed.lines:
            line.hang_up()
        if self._sockets is not None:
            for inlet in fed.inlets:
                self._sockets.close(inlet)
        if fed.config.kv_events.endpoint is None:
            for inlet in self._bound:
                inlet.socket.unsubscribe(fed.prefix)

    def stop(self) -> None:
        """Closes every socket."""
        for pod_id in list(self._fed):
            self.remove(pod_id)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sockets is not None:
            for inlet in self._bound:
                self._sockets.close(inlet)
            self._bound.clear()
            self._sockets = None

    @property
    def bound(self) -> list[str]:
        """Where pods may publish, by rank, with real ports."""
        sockets = self._sockets
        return [] if sockets is None else [sockets.address(inlet) for inlet in self._bound]

    def views(self) -> dict[str, KvView]:
        """What the events of each pod have brought, by pod id."""
        return {pod_id: fed.pod.view() for pod_id, fed in self._fed.items() if fed.pod is not None}

    # --- one pod -----------------------------------------------------------------------------

    def _begin(self, fed: _Fed, model: str) -> None:
        """Its base model is known: listens."""
        config, events = fed.config, fed.config.kv_events
        capacity = config.kv_capacity_tokens or self._config.cache_registry.kv_capacity_tokens
        settings = KvPodSettings(
            pod_id=config.id,
            model=model,
            ranks=events.ranks,
            capacity_tokens=capacity,
            check_s=self._config.kv_events.check_ms / 1e3,
            clears_only=self._clears_only,
        )
        try:
            sockets = self._need_sockets()
            fed.backlog = Backlog(functools.partial(self._drain, fed))
            fed.pod = KvPod(
                settings,
                self._namespaces,
                self._observe,
                functools.partial(self._epoch_of, config.id),
                functools.partial(self._line, fed, sockets),
            )
            if events.endpoint is not None:
                for rank in range(events.ranks):
                    deliver = functools.partial(self._message, fed, rank)
                    endpoint = at_rank(events.endpoint, rank)
                    fed.inlets.append(sockets.subscribe(endpoint, (b"",), deliver))
            fed.pod.tick(self._now())
        except ConfigError as error:
            log.error("kv_events_off", pod=config.id, reason=str(error))
            fed.pod = None

    def _line(self, fed: _Fed, sockets: Sockets, rank: int) -> ReplayLine:
        endpoint = fed.config.kv_events.replay_endpoint
        line = ReplayLine(
            sockets,
            self._places,
            None if endpoint is None else at_rank(endpoint, rank),
            functools.partial(self._replayed, fed, rank),
        )
        fed.lines.append(line)
        return line

    async def _find_model(self, fed: _Fed) -> None:
        """Asks the pod for its base model until it says it."""
        key = fed.config.api_key
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        while fed.pod is None:
            try:
                head, body = await fetch(
                    fed.client, "GET", "/v1/models", headers, timeout_s=_MODELS_TIMEOUT_S
                )
                model = base_model(body) if head.status == 200 else None
            except FetchError:
                model = None
            if model is not None and fed.pod is None:
                self._begin(fed, model)
                return
            await asyncio.sleep(_MODELS_RETRY_S)

    # --- messages ----------------------------------------------------------------------------

    def _message(self, fed: _Fed, rank: int, frames: list[bytes]) -> None:
        """From the pod's own endpoint, whatever the topic."""
        pod = fed.pod
        if pod is None:
            return
        message = read_message(frames)
        if message is None:
            pod.unreadable += 1
            return
        pod.live(rank, message, self._now())

    def _bound_message(self, rank: int, frames: list[bytes]) -> None:
        """At the bound endpoint: the topic says whose it is."""
        message = read_message(frames)
        fed = None if message is None else self._whose(message.topic)
        if message is None or fed is None:
            self.strangers += 1
            return
        if fed.pod is None:
            model = model_in(message.topic)
            if model:
                self._begin(fed, model)
        if fed.pod is not None:
            fed.pod.live(min(rank, fed.config.kv_events.ranks - 1), message, self._now())

    def _replayed(self, fed: _Fed, rank: int, answer: Message | Literal["end"]) -> None:
        if fed.pod is not None:
            fed.pod.replayed(rank, answer, self._now())
            if answer == "end":
                self._catch_up(fed)

    def _catch_up(self, fed: _Fed) -> None:
        """What has waited for a replay stands in line now."""
        if self._sockets is not None and fed.backlog is not None:
            self._sockets.wake(fed.backlog)

    def _drain(self, fed: _Fed) -> bool:
        return fed.pod is not None and fed.pod.drain(self._now())

    def _whose(self, topic: bytes) -> _Fed | None:
        if topic in self._topics:
            return self._topics[topic]
        if len(self._topics) >= _MAX_TOPICS:
            self._topics.clear()
        fits = (
            fed
            for fed in self._fed.values()
            if fed.config.kv_events.endpoint is None and topic.startswith(fed.prefix)
        )
        found = self._topics[topic] = max(fits, key=lambda fed: len(fed.prefix), default=None)
        return found

    # --- time --------------------------------------------------------------------------------

    def _need_sockets(self) -> Sockets:
        if self._sockets is None:
            self._sockets = Sockets(self._loop)
            self._timer = self._loop.call_later(TICK_S, self._tick)
        return self._sockets

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._ticks += 1
        now = self._now()
        for fed in self._due():
            for line in fed.lines:
                line.send()
            if fed.pod is not None:
                fed.pod.tick(now)
                if fed.pod.behind:
                    self._catch_up(fed)
            self._say(fed, now)

    def _due(self) -> Iterator[_Fed]:
        turn = self._ticks % _TICKS_PER_ROUND
        return (
            fed for at, fed in enumerate(list(self._fed.values())) if at % _TICKS_PER_ROUND == turn
        )

    def _say(self, fed: _Fed, now: float) -> None:
        """Tells people once what is amiss with a pod's events, and when it is over."""
        pod = fed.pod
        source: Source = "history" if pod is None else pod.source
        if (
            source == fed.said == "history"
            and not (self._clears_only or "kv_events_silent" in fed.warned)
            and now - fed.since_s > SILENT_S
        ):
            self._warn(fed, "kv_events_missing", hint="is the endpoint right, does it publish?")
        if source == fed.said:
            return
        before, fed.said = fed.said, source
        if source == "gapped" and pod is not None:
            self._warn(
                fed,
                "kv_events_lost",
                lost_batches=pod.view().lost_batches,
                hint="what it caches is known in part only, until its cache has turned over",
            )
        elif source == "history":
            self._warn(fed, "kv_events_silent", hint="its cache is guessed from requests again")
        elif before == "gapped":
            log.info("kv_events_whole_again", pod=fed.config.id)

    def _warn(self, fed: _Fed, what: str, **more: object) -> None:
        if what not in fed.warned:
            fed.warned.add(what)
            log.warning(what, pod=fed.config.id, **more)
