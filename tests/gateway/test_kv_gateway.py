"""A gateway that listens to its pods' KV events over real sockets: it knows what they cache."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import yaml
from structlog.testing import capture_logs

import kit
from calinix.app import App, running_gateway
from calinix.config import parse_config
from calinix.core.events import PodAdded, PodRemoved
from calinix.sim.mock_kv_events import KvEventsOptions
from calinix.sim.mock_pod import MockPod
from calinix.sim.pod_model import PodFigures
from fleets import gateway_of, merged
from gatewaykit import QUIET, admin, metrics, total

SIZE = 16
ANY = "tcp://127.0.0.1:*"
IDS = itertools.count()
HEALTH = {"health": {"intervalMs": 100, "timeoutMs": 500}}


def tokens(kind: int, count: int = 4 * SIZE + 3) -> list[int]:
    """Token ids of a prompt; other kinds share no block."""
    return [kind * 1000 + at for at in range(count)]


@contextlib.asynccontextmanager
async def publishing(capacity_tokens: int = 4096, **options: Any) -> AsyncIterator[MockPod]:
    """A mock pod that publishes at an endpoint of its own, with replays, unless told otherwise."""
    wanted = {"endpoint": ANY, "replay_endpoint": ANY, **options}
    figures = PodFigures(block_size=SIZE, kv_capacity_tokens=capacity_tokens)
    async with MockPod(
        figures=figures, loras=("poet",), kv_events=KvEventsOptions(**wanted)
    ) as pod:
        yield pod


def entry(pod_id: str, pod: MockPod, *, replay: bool = True, **keys: Any) -> dict[str, Any]:
    """A pod of the config, listened to at its own endpoint."""
    assert pod.kv_events is not None
    events: dict[str, Any] = {"endpoint": pod.kv_events.endpoint}
    if replay:
        events["replayEndpoint"] = pod.kv_events.replay_endpoint
    return {"id": pod_id, "url": pod.url, "kvEvents": {**events, **keys}}


def config(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    """These pods; their events say all."""
    base = {
        "upstreams": {"single": {"pods": list(entries)}},
        "kvEvents": {"apply": "blocks", "checkMs": 100},
        "gateway": {"strategy": "cacheOnly"},
        **QUIET,
    }
    return merged(base, more)


async def complete(port: int, prompt: list[int], **more: Any) -> kit.Reply:
    """A completion of token ids, at a gateway or at a pod."""
    name = f"r{next(IDS)}"
    body = {"model": "mock", "prompt": prompt, "max_tokens": 1, **more}
    reply = await kit.http(port, "POST", "/v1/completions", body, {"x-request-id": name})
    assert reply.status == 200, reply
    reply.headers["name"] = name
    return reply


async def view(app: App, pod_id: str) -> dict[str, Any]:
    """What the admin port says of a pod's KV events."""
    pods = (await admin(app, "/admin/pods"))["pods"]
    found: dict[str, Any] = next(pod["kv"] for pod in pods if pod["id"] == pod_id)
    return found


async def published(app: App, pod_id: str, pod: MockPod) -> None:
    """Waits until the gateway has heard all that the pod has published."""
    assert pod.kv_events is not None
    sequence = pod.kv_events.next_sequence

    async def heard() -> bool:
        return (await view(app, pod_id)).get("batches") == [sequence]

    await kit.until(heard, f"{pod_id} is heard to the end")


def predicted(app: App, reply: kit.Reply) -> float:
    """Tokens believed cached when the request was routed."""
    plan = app.router.decisions.find(reply.headers["name"])
    assert plan is not None
    return plan.predicted_cached_tokens


def cached(reply: kit.Reply) -> int:
    """Tokens that were."""
    details = reply.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


@pytest.mark.parametrize("dialect", ["maps", "arrays"])
@kit.on_loop
async def test_what_others_sent_to_a_pod_is_known(dialect: str) -> None:
    """Prompts that never passed the gateway, before its start and after it, are found again."""
    async with publishing(dialect=dialect) as one, publishing(dialect=dialect) as two:
        await complete(one.port, tokens(1))
        await complete(two.port, tokens(2))
        async with gateway_of(config(entry("one", one), entry("two", two))) as app:
            await complete(two.port, tokens(3))
            await published(app, "one", one)
            await published(app, "two", two)
            for kind, pod_id in ((1, "one"), (2, "two"), (3, "two")):
                reply = await complete(app.server.port, [*tokens(kind, 4 * SIZE), 7, 8])
                assert reply.headers["x-calinix-target-pod-id"] == pod_id
                assert predicted(app, reply) == cached(reply) == 4 * SIZE
            assert (await view(app, "one"))["source"] == "events"


@kit.on_loop
async def test_predictions_are_true_while_pods_evict() -> None:
    """Shared prefixes, tenants, adapters and evictions: each prediction is what was cached."""
    rng = random.Random(1)
    async with (
        publishing(capacity_tokens=512) as pod,
        gateway_of(config(entry("one", pod))) as app,
    ):
        await published(app, "one", pod)
        hits = 0
        for _ in range(120):
            prompt = tokens(rng.randrange(5), SIZE * rng.randrange(1, 6)) + tokens(
                50 + rng.randrange(9), rng.randrange(1, 40)
            )
            more: dict[str, Any] = {}
            if rng.random() < 0.3:
                more["cache_salt"] = rng.choice(["blue", "x" * 40])
            if rng.random() < 0.3:
                more["model"] = "poet"
            port = app.server.port if rng.random() < 0.8 else pod.port
            reply = await complete(port, prompt, **more)
            if port == app.server.port:
                assert predicted(app, reply) == cached(reply)
                hits += cached(reply) > 0
            await published(app, "one", pod)
        found = await view(app, "one")
        assert hits > 20
        assert found["removed"] > 50
        assert found["orphans"] == found["malformed"] == found["lostBatches"] == 0


@kit.on_loop
async def test_a_bound_endpoint_for_many_pods() -> None:
    """Pods that connect to the gateway are told apart, and their model known, by topic."""
    bare: list[dict[str, Any]] = [
        {"id": f"p{n}", "url": f"http://127.0.0.1:{n + 1}"} for n in range(4)
    ]
    bare[3]["kvEvents"] = {"topic": "east/", "baseModel": "mock"}
    whole = config(*bare, kvEvents={"bind": "tcp://127.0.0.1:0"}, admin={"port": 0})
    whole["gateway"] = {"port": 0}
    topics = {"p0": "kv@p0@mock", "p1": "kv@p1@mock", "p3": "east/3", "nobody": "kv@p9@mock"}
    kinds = itertools.count()
    async with contextlib.AsyncExitStack() as stack:
        app = await stack.enter_async_context(running_gateway(parse_config(yaml.safe_dump(whole))))
        (endpoint,) = app.kv_feed.bound
        pods = [
            await stack.enter_async_context(
                publishing(endpoint=endpoint, replay_endpoint=None, topic=topic)
            )
            for topic in topics.values()
        ]

        async def all_heard() -> bool:
            # What is published before the subscription has arrived is lost.
            for pod in pods:
                await complete(pod.port, tokens(next(kinds)))
            return {
                pod_id for pod_id, view in app.kv_feed.views().items() if view.stored
            } == topics.keys() - {"nobody"}

        await kit.until(all_heard, "all of them are heard")
        blocks = {pod.id: pod.blocks for pod in app.router.pods()}
        assert all(blocks[pod_id] > 0 for pod_id in ("p0", "p1", "p3"))
        assert blocks["p2"] == 0
        assert (await view(app, "p2"))["source"] == "history"


@kit.on_loop
async def test_a_restarted_pod_is_cold_at_once() -> None:
    """Same port, other process: at its first batch, or the first check, nothing is believed."""
    async with publishing() as pod:
        assert pod.kv_events is not None
        async with gateway_of(config(entry("one", pod))) as app:
            await complete(pod.port, tokens(1))
            await published(app, "one", pod)
            assert app.router.pods()[0].blocks == 4
            pod.revive()

            async def cold() -> bool:
                return app.router.pods()[0].blocks == 0

            await kit.until(cold, "the silent new process is found out")
            assert (await view(app, "one"))["restarts"] == 1
            await complete(pod.port, tokens(2))
            await published(app, "one", pod)
            reply = await complete(app.server.port, tokens(2))
            assert predicted(app, reply) == cached(reply) == 4 * SIZE


@kit.on_loop
async def test_a_reset_cache_is_empty_as_soon_as_the_engine_says_so() -> None:
    """/reset_prefix_cache is told with the next blocks; from then on the old ones are gone."""
    async with publishing() as pod, gateway_of(config(entry("one", pod))) as app:
        await complete(pod.port, tokens(1))
        await published(app, "one", pod)
        reply = await kit.http(pod.port, "POST", "/reset_prefix_cache")
        assert reply.status == 200
        await complete(pod.port, tokens(2))
        await published(app, "one", pod)
        first = await complete(app.server.port, tokens(1))
        assert predicted(app, first) == cached(first) == 0


@kit.on_loop
async def test_lost_events_are_asked_for_again() -> None:
    """Batches that were not sent are found missing, and a replay brings them."""
    async with publishing() as pod:
        assert pod.kv_events is not None
        async with gateway_of(config(entry("one", pod))) as app:
            await complete(pod.port, tokens(1))
            await published(app, "one", pod)
            pod.kv_events.silent = True
            await complete(pod.port, tokens(2))
            pod.kv_events.silent = False
            await complete(pod.port, tokens(3))
            await published(app, "one", pod)
            found = await view(app, "one")
            assert (found["source"], found["lostBatches"], found["stored"]) == ("events", 0, 12)


@kit.on_loop
async def test_without_replays_lost_events_leave_a_mark() -> None:
    """The pod is marked in admin and metrics, with one warning; requests go on."""
    async with publishing() as pod:
        assert pod.kv_events is not None
        with capture_logs() as said:
            async with gateway_of(config(entry("one", pod, replay=False))) as app:
                kind = itertools.count()

                async def heard() -> bool:
                    await complete(pod.port, tokens(next(kind)))
                    return int((await view(app, "one")).get("stored", 0)) > 0

                await kit.until(heard, "the subscription has arrived")
                for _ in range(3):
                    pod.kv_events.silent = True
                    await complete(pod.port, tokens(100 + next(kind)))
                    pod.kv_events.silent = False
                    await complete(pod.port, tokens(100 + next(kind)))
                await published(app, "one", pod)
                found = await view(app, "one")
                assert found["source"] == "gapped"
                assert found["lostBatches"] >= 3
                samples = await metrics(app)
                assert total(samples, "calinix_pod_kv_source", source="gapped") == 1
                assert total(samples, "calinix_pod_kv_source", source="events") == 0
                assert total(samples, "calinix_kv_lost_batches_total") == found["lostBatches"]
                assert total(samples, "calinix_kv_blocks_total", kind="stored") == found["stored"]
                assert (await complete(app.server.port, tokens(5))).status == 200
                await kit.until(
                    lambda: any(line["event"] == "kv_events_lost" for line in said), "a warning"
                )
        assert [line["event"] for line in said].count("kv_events_lost") == 1


@kit.on_loop
async def test_with_a_text_tokenizer_events_can_only_clear() -> None:
    """Nothing is entered, the log says why, and a cleared cache still empties what was guessed."""
    async with publishing() as pod:
        with capture_logs() as said:
            settings = {"kvEvents": {"apply": "auto"}}
            async with gateway_of(config(entry("one", pod), **settings)) as app:
                await complete(pod.port, tokens(1))
                await published(app, "one", pod)
                assert app.router.pods()[0].blocks == 0
                await complete(app.server.port, tokens(2))
                assert app.router.pods()[0].blocks == 4
                await kit.http(pod.port, "POST", "/reset_prefix_cache")
                await complete(pod.port, tokens(3))
                await published(app, "one", pod)
                assert app.router.pods()[0].blocks == 0
                assert (await view(app, "one"))["source"] == "history"
        assert [line["event"] for line in said].count("kv_events_only_clear") == 1


@kit.on_loop
async def test_the_base_model_is_asked_for_or_configured() -> None:
    """A pod's baseModel names the model whose prompts the events are of; else the pod is asked."""
    async with publishing() as pod:
        asked, named = entry("asked", pod), entry("named", pod, baseModel="alias")
        named["url"] = pod.url.replace("127.0.0.1", "localhost")
        async with gateway_of(config(asked, named)) as app:
            await complete(pod.port, tokens(1))
            await published(app, "asked", pod)
            await published(app, "named", pod)
            reply = await complete(app.server.port, tokens(1))
            assert reply.headers["x-calinix-target-pod-id"] == "asked"
            plan = app.router.decisions.find(reply.headers["name"])
            assert plan is not None
            candidates = plan.to_dict()["choices"][0]["candidates"]
            assert {one["podId"]: one["cachedBlocks"] for one in candidates} == {
                "asked": 4, "named": 0,
            }  # fmt: skip


@kit.on_loop
async def test_pods_come_and_go() -> None:
    """A removed pod is not listened to any more; one that is added is, from its beginning."""
    async with publishing() as one, publishing() as two:
        await complete(two.port, tokens(2))
        async with gateway_of(config(entry("one", one))) as app:
            upstreams = app.gateway.upstreams
            fed = app.kv_feed._fed["one"]
            settings = fed.config
            assert two.kv_events is not None
            other = msgspec.structs.replace(
                settings,
                id="two",
                url=two.url,
                kv_events=msgspec.structs.replace(
                    settings.kv_events,
                    endpoint=two.kv_events.endpoint,
                    replay_endpoint=two.kv_events.replay_endpoint,
                ),
            )
            app.gateway.observe(PodAdded(other, "single"))
            upstreams.add(other)
            app.gateway.observe(PodRemoved("one"))
            upstreams.remove("one")
            await published(app, "two", two)
            assert {pod.id: pod.blocks for pod in app.router.pods()} == {"two": 4}
            assert app.kv_feed.views().keys() == {"two"}
