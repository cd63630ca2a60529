"""For tests of the KV feed: engines that publish over sockets, and a feed that listens to them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from calinix.config import (
    CacheRegistry,
    Config,
    KvEvents,
    PodConfig,
    PodKvEvents,
    SingleUpstream,
    Upstreams,
)
from calinix.core.router import Router
from calinix.edge.http_client import PodClient
from calinix.edge.kv_feed import KvFeed
from calinix.edge.kv_sockets import Publisher, Sockets
from calinix.engines.kv_events import message as frames_of
from calinix.engines.kv_events import read_replay_request, replay_end, replayed
from kvkit import MODEL, Engine


def config_of(*pods: PodConfig, **events: Any) -> Config:
    """These pods; blocks count whatever the tokenizer."""
    return Config(
        upstreams=Upstreams(single=SingleUpstream(pods=pods)),
        kv_events=KvEvents(**{"apply": "blocks", "check_ms": 100, **events}),
        cache_registry=CacheRegistry(),
    )


def pod_of(name: str, **events: Any) -> PodConfig:
    """A pod of the tests' model."""
    return PodConfig(
        id=name, url="http://127.0.0.1:1", models=(MODEL,), kv_events=PodKvEvents(**events)
    )


class Clock:
    """A clock that a test may push."""

    def __init__(self) -> None:
        self.more_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.more_s


@contextlib.asynccontextmanager
async def feeding(
    config: Config, clock: Callable[[], float] | None = None
) -> AsyncIterator[tuple[KvFeed, Router]]:
    """A feed with the pods of the config before a router."""
    loop = asyncio.get_running_loop()
    router = Router(config, random.Random(1))
    feed = KvFeed(
        config,
        loop,
        lambda event: router.observe(event, 1.0),
        router.epoch,
        clock=clock or Clock(),
    )
    assert config.upstreams.single is not None
    try:
        for pod in config.upstreams.single.pods:
            feed.add(pod, PodClient(pod.url, loop, connect_timeout_s=1.0))
        feed.start()
        yield feed, router
    finally:
        feed.stop()


class Source:
    """An engine's publisher: a PUB socket and one that answers replays."""

    def __init__(self, sockets: Sockets, engine: Engine, port: int = 0, replay_port: int = 0):
        self.engine = engine
        self.deaf = False
        self.requests = 0
        self._sockets = sockets
        self._pub: Publisher = sockets.publish(f"tcp://127.0.0.1:{port or '*'}")
        self._router = sockets.answer(f"tcp://127.0.0.1:{replay_port or '*'}", self._asked)
        self.endpoint = self._pub.endpoint
        self.replay_endpoint = sockets.address(self._router)

    def run(self, *kinds: int) -> None:
        """Computes and publishes prompts, a batch each."""
        for kind in kinds:
            self.engine.run(prompt(kind))
            message = self.engine.flush()
            assert message is not None
            self._pub.send(frames_of(message.topic, message.sequence, message.payload))

    def close(self) -> None:
        """Ends."""
        self._pub.close()
        self._sockets.close(self._router)

    def _asked(self, frames: list[bytes]) -> None:
        asked = read_replay_request(frames)
        assert asked is not None
        self.requests += 1
        if self.deaf:
            return
        identity, first = asked
        for one in self.engine.replay(first):
            answer = replayed(b"", one.sequence, one.payload)
            self._sockets.send(self._router, [identity, *answer])
        self._sockets.send(self._router, [identity, *replay_end(with_topic=True)])


@contextlib.contextmanager
def sources(count: int, capacity: int = 1000) -> Iterator[list[Source]]:
    """Publishers of so many engines."""
    sockets = Sockets(asyncio.get_running_loop())
    found = [Source(sockets, Engine(capacity)) for _ in range(count)]
    try:
        yield found
    finally:
        for source in found:
            source.close()


def prompt(kind: int) -> list[int]:
    """Two blocks and a token."""
    return [kind * 100 + at for at in range(33)]


def listens(source: Source, name: str) -> PodConfig:
    """A pod at this publisher."""
    return pod_of(name, endpoint=source.endpoint, replay_endpoint=source.replay_endpoint)


def two_free_ports() -> int:
    """A free port whose next one is free too."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError):
                second.bind(("127.0.0.1", port + 1))
                return port
    raise AssertionError("no two ports are free")
