"""The pods' own figures over real sockets: who is asked, what follows, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import kit
from calinix.app import App
from calinix.config import Scrape
from calinix.core.events import PodRestarted
from calinix.edge.scraper import Scraper
from calinix.sim.mock_pod import MockPod, PodDialect
from calinix.sim.pod_model import PodFigures
from fleets import gateway_of, merged
from gatewaykit import CHAT, Served, admin, answer, chat_body, chunk, config_of, metrics, raw_pod

PAGE = (
    (Path(__file__).parent.parent / "data" / "samples" / "metrics.http")
    .read_bytes()
    .partition(b"\r\n\r\n")[2]
)
OFTEN = {"scrape": {"when": "always", "intervalMs": 20}}
TOLD = b"vllm:num_requests_running %d\nprocess_start_time_seconds %d\n"


class Pages:
    """A script: pages, answered where `path` is asked; all else is a chat's answer."""

    def __init__(self, page: bytes, path: bytes = b"/metrics"):
        self.page = page
        self.path = path
        self.status = b"200 OK"
        self.looks = 0
        self.versions = 0
        self.hangs = False

    async def __call__(self, served: Served) -> None:
        """One request."""
        if served.request.startswith(b"GET /version "):
            self.versions += 1
            await served.say(answer(b'{"version":"0.32.0"}'))
        elif not served.request.startswith(b"GET %b " % self.path):
            await served.say(answer(b'{"choices":[],"usage":{"prompt_tokens":9}}'))
        else:
            self.looks += 1
            if self.hangs:
                await served.left()
            else:
                await served.say(answer(self.page, self.status, b"content-type: text/plain\r\n"))


def test_looks_are_spread() -> None:
    """Rests are of 90 to 110 % of the interval, by chance: many pods are not asked at one time."""
    drawn = iter((0.0, 0.5, 1.0))
    loop = asyncio.new_event_loop()
    scraper = Scraper(Scrape(), loop, lambda _: None, lambda _: 0, lambda: next(drawn))
    assert [scraper.jitter for _ in range(3)] == pytest.approx([0.9, 1.0, 1.1])
    loop.close()


async def stats_of(app: App) -> Any:
    """What is shown of the first pod."""
    return (await admin(app, "/admin/pods"))["pods"][0]["stats"]


async def told(app: App, **wanted: Any) -> Any:
    """Waits until the first pod's figures are these."""

    async def they_are() -> bool:
        shown = await stats_of(app)
        return shown is not None and all(shown.get(key) == wanted[key] for key in wanted)

    await kit.until(they_are, f"the pod tells {wanted}")
    return await stats_of(app)


@contextlib.asynccontextmanager
async def scraped(
    pages: Pages, extra: dict[str, Any] | None = None, **pod_keys: Any
) -> AsyncIterator[App]:
    """A gateway before one pod that has these pages."""
    async with raw_pod(pages) as pod:
        config = config_of(merged(OFTEN, extra or {}), a={"url": pod.url, **pod_keys})
        async with gateway_of(config) as app:
            yield app


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@kit.on_loop
async def test_both_engines_are_understood(dialect: PodDialect) -> None:
    """Load, use, sizes and version of a pod in either dialect, in the admin view and as metrics."""
    figures = PodFigures(kv_capacity_tokens=64_000)
    async with MockPod(dialect=dialect, figures=figures) as pod:
        config = config_of(OFTEN, a=pod.url)
        async with gateway_of(config) as app:
            shown = await told(app, engine=dialect, capacityTokens=64_000, stale=False)
            assert shown["blockSize"] == figures.block_size
            assert (shown["running"], shown["waiting"], shown["failures"]) == (0, 0, 0)
            assert 0.0 <= shown["ageSeconds"] < 5.0
            await kit.until(lambda: bool((app.scraper.view("a") or {}).get("version")), "a version")
            labels = frozenset({"pod_id": "a", "role": "single"}.items())
            samples = await metrics(app)
            assert samples["calinix_pod_engine_kv_capacity_tokens", labels] == 64_000
            assert samples["calinix_pod_engine_stats_age_seconds", labels] < 5.0
            assert samples["calinix_pod_engine_stats_failures_total", labels] == 0


@kit.on_loop
async def test_the_mirror_is_as_large_as_the_engine_says() -> None:
    """A pod without kvCapacityTokens is asked once, by itself; one that has some never is."""
    auto = {"scrape": {"when": "auto", "intervalMs": 20}, "gateway": {"blockSize": 4}}
    pages = Pages(PAGE)
    async with scraped(pages, auto) as app:
        await kit.until(lambda: app.router.pods()[0].capacity_blocks == 1280, "it is sized")
        looks = pages.looks
        await asyncio.sleep(0.1)
        assert pages.looks == looks
    pages = Pages(PAGE)
    async with scraped(pages, auto, kvCapacityTokens=77_000) as app:
        await asyncio.sleep(0.1)
        assert pages.looks == 0
        assert app.router.pods()[0].capacity_blocks == 77_000
        # Who looks gets figures; the file's own word on the size stands.
        await told(app, capacityTokens=1280)
        assert app.router.pods()[0].capacity_blocks == 77_000


@kit.on_loop
async def test_never() -> None:
    """`when: never`: nobody is asked, whoever looks."""
    pages = Pages(PAGE)
    async with scraped(pages, {"scrape": {"when": "never"}}) as app:
        assert await stats_of(app) is None
        await metrics(app)
        await asyncio.sleep(0.1)
        assert pages.looks == 0


@kit.on_loop
async def test_interval_ms() -> None:
    """`intervalMs`: so long a pod is left alone between two looks."""
    pages = Pages(PAGE)
    async with scraped(pages, {"scrape": {"intervalMs": 60_000}}) as app:
        await told(app, running=0)
        await asyncio.sleep(0.2)
        assert pages.looks == 1


@kit.on_loop
async def test_another_path() -> None:
    """`path`: where the page is."""
    pages = Pages(PAGE, b"/engine/stats")
    async with scraped(pages, {"scrape": {"path": "/engine/stats"}}) as app:
        await told(app, running=0)


@kit.on_loop
async def test_another_process_is_cold_at_once() -> None:
    """A later start time ends what was believed of the cache; an earlier one (a sibling) does not.

    The version is asked again: it may be another one.
    """
    pages = Pages(TOLD % (1, 1000))
    async with scraped(pages) as app:
        await told(app, running=1)
        epoch = app.router.epoch("a")
        for n, start, restarts in ((2, 1000, 0), (3, 900, 0), (4, 2000, 1), (5, 1000, 1)):
            pages.page = TOLD % (n, start)
            await told(app, running=n)
            assert app.router.epoch("a") == epoch + restarts
        await kit.until(lambda: pages.versions == 2, "the version is asked again")


@kit.on_loop
async def test_a_restart_that_is_known_is_not_told_twice() -> None:
    """Where the KV events or a refused connection have told it, what is new stays."""
    pages = Pages(TOLD % (1, 1000))
    async with scraped(pages) as app:
        await told(app, running=1)
        pages.hangs = True
        looks = pages.looks
        await kit.until(lambda: pages.looks > looks, "a look that hangs")
        app.gateway.observe(PodRestarted("a"))
        epoch = app.router.epoch("a")
        pages.page, pages.hangs = TOLD % (2, 2000), False
        await told(app, running=2)
        assert app.router.epoch("a") == epoch


@kit.on_loop
async def test_stale_figures_fail_soft() -> None:
    """Figures that come no more are shown with their age, requests are served as ever."""
    pages = Pages(TOLD % (1, 1000))
    async with scraped(pages, {"scrape": {"timeoutMs": 50}}) as app:
        await told(app, running=1, stale=False)
        pages.hangs = True
        shown = await told(app, stale=True)
        assert shown["running"] == 1
        assert shown["ageSeconds"] > 0.1
        assert (await kit.http(app.server.port, "POST", CHAT, chat_body())).status == 200
        pages.hangs, pages.page = False, TOLD % (2, 1000)
        assert (await told(app, running=2, stale=False))["failures"] > 0


@pytest.mark.parametrize("fault", ["404", "500", "html", "long", "closed"])
@kit.on_loop
async def test_pods_without_figures(fault: str) -> None:
    """No page, one of another kind or one over pageBytes: an infinite age, and nothing else."""
    pages = Pages(PAGE)
    extra: dict[str, Any] = {"scrape": {"pageBytes": 4096 if fault == "long" else 1 << 20}}
    if fault == "html":
        pages.page = b"<html>\n</html>\n"
    elif fault in ("404", "500"):
        pages.status = fault.encode() + b" No"

    async def closes(served: Served) -> None:
        if served.request.startswith(b"GET /metrics "):
            await served.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(PAGE))
            served.hang_up()
        else:
            await pages(served)

    async with raw_pod(closes if fault == "closed" else pages) as pod:
        config = config_of(merged(OFTEN, extra), a=pod)
        async with gateway_of(config) as app:
            await kit.until(
                lambda: app.scraper.figures().get("a", {}).get("failures", 0) > 1,
                "two looks in vain",
            )
            shown = await stats_of(app)
            assert (shown["stale"], shown["ageSeconds"]) == (True, None)
            labels = frozenset({"pod_id": "a", "role": "single"}.items())
            samples = await metrics(app)
            assert samples["calinix_pod_engine_stats_age_seconds", labels] == float("inf")
            assert ("calinix_pod_engine_running", labels) not in samples
            assert (await kit.http(app.server.port, "POST", CHAT, chat_body())).status == 200


@kit.on_loop
async def test_looks_in_vain_become_rare() -> None:
    """A pod without figures is not asked 50 times a second: rests double."""
    pages = Pages(PAGE)
    pages.status = b"404 Not Found"
    async with scraped(pages):
        await kit.until(lambda: pages.looks >= 3, "some looks")
        await asyncio.sleep(0.3)
        assert pages.looks <= 6


@kit.on_loop
async def test_the_pods_key_is_sent() -> None:
    """Engines that ask for a key get the pod's own."""
    seen: list[bytes] = []

    async def script(served: Served) -> None:
        seen.append(served.request)
        await served.say(answer(PAGE))

    async with raw_pod(script) as pod:
        config = config_of(OFTEN, a={"url": pod.url, "apiKey": "hush"})
        async with gateway_of(config) as app:
            await told(app, running=0)
    assert all(b"authorization: Bearer hush\r\n" in request for request in seen)
