"""Asks the pods' /metrics, and tells the router what follows: size of the cache, life, restarts.

Only where somebody needs it, see config/scrape.py. Whatever goes wrong here costs no request: what
was last heard stays to be seen, with its age.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from calinix.config import PodConfig, Scrape
from calinix.core.events import Event, PodCapacity, PodHeard, PodRestarted
from calinix.edge.http_client import FetchError, PodClient, ResponseHead, UpstreamFailure
from calinix.edge.http_wire import header_lines
from calinix.edge.identify import identify
from calinix.engines.stats import EngineStats, StatsReader

log = structlog.get_logger()

_NO_FAULT = (UpstreamFailure.REUSED_CLOSED, UpstreamFailure.NO_SOCKET)
"""A kept connection that the pod had closed in its own time; no socket left here."""
LOOKED_AT_S = 300.0
"""How long one look at the stats keeps them fresh."""
MAX_REST_S = 15.0
"""Longest rest after looks in vain."""
RESTART_S = 0.5
"""A process that started so much later than any before is another one."""


class PodStats:
    """What one pod has said."""

    __slots__ = ("failures", "heard_s", "stats", "tries", "version")

    def __init__(self) -> None:
        self.stats: EngineStats | None = None
        """The last that was heard; None: nothing yet."""
        self.heard_s = float("-inf")
        """When, on the loop's clock."""
        self.version: str | None = None
        """Of the engine."""
        self.tries = 0
        """Looks since the start, and"""
        self.failures = 0
        """those in vain."""


class Scraper:
    """One task per pod; `observe` takes events, `epoch` tells the epoch of a pod by its id."""

    def __init__(
        self,
        settings: Scrape,
        loop: asyncio.AbstractEventLoop,
        observe: Callable[[Event], None],
        epoch: Callable[[str], int],
        jitter: Callable[[], float],
        block_size: int | None = None,
    ):
        """`block_size`: what engines' KV blocks had better be; None: it does not matter."""
        self.settings = settings
        self._loop = loop
        self._observe = observe
        self.epoch = epoch
        self._jitter = jitter
        self._block_size = block_size
        self._pods: dict[str, PodStats] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wanted_until_s = float("-inf")

    def add(self, pod: PodConfig, client: PodClient) -> None:
        """Begins to look at a pod, where it is to be looked at at all."""
        self.remove(pod.id)
        if self.settings.when != "never":
            state = self._pods[pod.id] = PodStats()
            look = _Look(self, pod, client, state)
            self._tasks[pod.id] = self._loop.create_task(look.run())

    def remove(self, pod_id: str) -> None:
        """Looks no more, and forgets what was seen."""
        task = self._tasks.pop(pod_id, None)
        if task is not None:
            task.cancel()
        self._pods.pop(pod_id, None)

    def stop(self) -> None:
        """Ends all."""
        for pod_id in list(self._tasks):
            self.remove(pod_id)

    def want(self) -> None:
        """Somebody looks: what is shown should be fresh from now on, for LOOKED_AT_S."""
        self._wanted_until_s = self._loop.time() + LOOKED_AT_S

    def figures(self) -> dict[str, dict[str, float]]:
        """What each pod has said, for metrics, by its id; only pods that are asked, or were."""
        found: dict[str, dict[str, float]] = {}
        for pod_id, pod in self._pods.items():
            if pod.tries:
                said = {} if pod.stats is None else msgspec.structs.asdict(pod.stats)
                found[pod_id] = {
                    name: value for name, value in said.items() if isinstance(value, int | float)
                }
                found[pod_id]["age_s"] = self._loop.time() - pod.heard_s
                found[pod_id]["failures"] = pod.failures
        return found

    def view(self, pod_id: str) -> dict[str, Any] | None:
        """One pod for people: what it said, how long ago, and whether that is to be relied on."""
        pod = self._pods.get(pod_id)
        if pod is None or not pod.tries:
            return None
        age_s = self._loop.time() - pod.heard_s
        said = msgspec.to_builtins(pod.stats) if pod.stats is not None else {}
        return {
            **said,
            "version": pod.version,
            "ageSeconds": round(age_s, 3) if pod.stats is not None else None,
            "stale": age_s > self.stale_s,
            "failures": pod.failures,
        }

    @property
    def stale_s(self) -> float:
        """Older than this, three looks have been in vain."""
        return (3 * self.settings.interval_ms + self.settings.timeout_ms) / 1e3

    # --- for looks ---------------------------------------------------------------------------

    def is_wanted(self) -> bool:
        """Whether pods are to be looked at whatever is known of them."""
        return self.settings.when == "always" or self._loop.time() < self._wanted_until_s

    def heard(self, pod: PodConfig, known: _Known, stats: EngineStats) -> None:
        """Tells the router what a page means for it."""
        if known.is_another(stats.started_s) and self.epoch(pod.id) == known.epoch:
            # Elsewhere nobody has noticed it: what the process before had cached is gone.
            self._observe(PodRestarted(pod.id))
        else:
            self._observe(PodHeard(pod.id))
        tokens = stats.capacity_tokens
        if tokens is not None and tokens != known.capacity_tokens:
            self._observe(PodCapacity(pod.id, tokens))
            log.info("pod_capacity", pod=pod.id, tokens=tokens, block_size=stats.block_size)
        wanted = self._block_size
        if wanted and stats.block_size not in (None, wanted, known.block_size):
            log.warning(
                "block_sizes_differ",
                pod=pod.id,
                engine=stats.block_size,
                token_block_size=wanted,
                hint="set cacheRegistry.tokenBlockSize to the engine's",
            )
        known.take(stats, self.epoch(pod.id))

    @property
    def jitter(self) -> float:
        """Spreads the looks at many pods."""
        return 0.9 + 0.2 * self._jitter()


class _Known:
    """What a pod has said before, as far as the next page is compared with it."""

    __slots__ = ("block_size", "capacity_tokens", "epoch", "started_s")

    def __init__(self) -> None:
        self.started_s: float | None = None
        self.capacity_tokens: int | None = None
        self.block_size: int | None = None
        self.epoch = 0

    def is_another(self, started_s: float | None) -> bool:
        """Whether another process than all before has answered.

        Several behind one port started at different times: each of them is new only once.
        """
        before = self.started_s
        return before is not None and started_s is not None and started_s > before + RESTART_S

    def take(self, stats: EngineStats, epoch: int) -> None:
        """That was the last page, in this epoch."""
        if stats.started_s is not None:
            self.started_s = max(stats.started_s, self.started_s or 0.0)
        self.capacity_tokens = stats.capacity_tokens
        self.block_size = stats.block_size
        self.epoch = epoch


class _Look:
    """Looks at one pod until it is cancelled."""

    def __init__(self, scraper: Scraper, pod: PodConfig, client: PodClient, state: PodStats):
        self._scraper = scraper
        self._pod = pod
        self._client = client
        self._state = state
        self._known = _Known()
        self._failing: object = None
        self._streak = 0
        self._needs_version = True

    async def run(self) -> None:
        """One look after the other, as long as somebody wants it."""
        settings = self._scraper.settings
        interval_s = settings.interval_ms / 1e3
        while True:
            rest_s = interval_s
            if self._is_needed():
                await self._once(settings.timeout_ms / 1e3)
                rest_s = min(interval_s * 2 ** min(self._streak, 16), max(MAX_REST_S, interval_s))
            await asyncio.sleep(rest_s * self._scraper.jitter)

    def _is_needed(self) -> bool:
        if self._scraper.is_wanted():
            return True
        if self._pod.kv_capacity_tokens is not None:
            return False
        # A page of this epoch said how large the cache is, or that it does not tell.
        return self._known.epoch != self._scraper.epoch(self._pod.id)

    async def _once(self, timeout_s: float) -> None:
        state = self._state
        state.tries += 1
        try:
            stats = await self._page(timeout_s)
        except FetchError as error:
            if error.failure not in _NO_FAULT:
                self._fail(error.failure or "time-out", str(error))
            return
        if stats.engine is None:
            # Alive, and that is all: what it is may change with its next process.
            self._fail("no engine", "there are no engine's metrics on it")
            return
        self._failing, self._streak = None, 0
        if self._known.is_another(stats.started_s):
            self._needs_version = True
        state.stats, state.heard_s = stats, self._client.loop.time()
        self._scraper.heard(self._pod, self._known, stats)
        if self._needs_version:
            found = await identify(self._client, self._pod.api_key, timeout_s=timeout_s)
            if found is not None:
                self._needs_version = False
                state.version = found.version or None

    async def _page(self, timeout_s: float) -> EngineStats:
        """The pod's page. Raises FetchError."""
        settings, client, key = self._scraper.settings, self._client, self._pod.api_key
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        data = b"GET %b%b HTTP/1.1\r\nhost: %b\r\naccept: text/plain\r\n%b\r\n" % (
            client.prefix,
            settings.path.encode("ascii"),
            client.host,
            header_lines(headers),
        )
        page = _Page(client.loop, settings.page_bytes)
        call = client.send(data, page)
        try:
            async with asyncio.timeout(timeout_s):
                return await page.done
        except TimeoutError:
            raise FetchError(None, f"no answer within {timeout_s:g} s") from None
        finally:
            call.cancel()

    def _fail(self, kind: object, reason: str) -> None:
        """Counts, and says so once for all that fail alike in a row."""
        self._state.failures += 1
        # What has answered before is expected back soon.
        self._streak = self._streak + 1 if self._state.stats is None else min(self._streak + 1, 3)
        if kind != self._failing:
            self._failing = kind
            url = self._pod.url + self._scraper.settings.path
            log.info("no_engine_stats", pod=self._pod.id, url=url, reason=reason)


class _Page:
    """The listener of one look (ResponseListener)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, page_bytes: int):
        self.done: asyncio.Future[EngineStats] = loop.create_future()
        self._reader = StatsReader()
        self._left = page_bytes

    def on_head(self, head: ResponseHead) -> None:
        """Only a 200 is a page."""
        if head.status != 200:
            self._refuse(None, f"answered {head.status}")

    def on_body(self, body: bytes, wire: bytes | None, last: bool) -> None:  # noqa: ARG002
        """A piece of it."""
        if self.done.done():
            return
        self._left -= len(body)
        if self._left < 0:
            self._refuse(None, "the page is longer than scrape.pageBytes")
            return
        self._reader.feed(body)
        if last:
            self.done.set_result(self._reader.stats())

    def on_failure(self, failure: UpstreamFailure, detail: str) -> None:
        """No answer."""
        self._refuse(failure, detail)

    def _refuse(self, failure: UpstreamFailure | None, detail: str) -> None:
        if not self.done.done():
            self.done.set_exception(FetchError(failure, detail))
