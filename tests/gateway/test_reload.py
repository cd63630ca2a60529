"""SIGHUP on `calinix serve`: what is taken over at once, what is refused, and what runs on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from signal import SIGHUP
from typing import Any

import yaml

import kit
from fleets import merged
from gatewaykit import (
    CHAT,
    DONE,
    STREAM_HEAD,
    RawPod,
    Served,
    answer,
    chat_body,
    config_of,
    dispatch_of,
    event,
    fields_of,
    raw_pod,
)

LOGGED = {"log": {"level": "info", "format": "json", "requests": False}}


class Held:
    """A script: a stream whose end comes when the test lets it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def script(self, served: Served) -> None:
        """Streams are held, all else is answered."""
        if b'"stream":true' in served.request:
            await served.say(STREAM_HEAD + event(1))
            await self.open.wait()
            await served.say(event(2), DONE)
        else:
            await served.say(answer(b'{"kv_transfer_params":{"x":1}}'))


class Process(kit.Serve):
    """A gateway whose log the tests read as JSON."""

    def logged(self, said: str) -> list[dict[str, Any]]:
        """The log lines of this event."""
        lines = [json.loads(line) for line in self.output().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == said]

    async def reload(self, config: dict[str, Any], said: str = "reloaded") -> dict[str, Any]:
        """Writes the file, sends SIGHUP, waits for the line that says what came of it."""
        before = len(self.logged(said))
        self.write(config)
        self.send(SIGHUP)
        await kit.until(lambda: len(self.logged(said)) > before, f"the log says {said}")
        return self.logged(said)[-1]

    async def ask(self, body: dict[str, Any] | None = None, **headers: str) -> kit.Reply:
        """One chat."""
        return await kit.http(self.port, "POST", CHAT, body or chat_body(), headers)

    async def stream(self) -> kit.Exchange:
        """A stream that has begun and is held by its pod."""
        data = kit.request_bytes("POST", CHAT, chat_body(stream=True))
        exchange = await kit.Exchange.send(self.port, data)
        await exchange.read_until(b'{"n":1}')
        return exchange

    async def pods(self) -> dict[str, dict[str, Any]]:
        """The admin port's view, by id."""
        reply = await kit.http(self.admin_port, "GET", "/admin/pods")
        return {pod["id"]: pod for pod in reply.json()["pods"]}

    async def up(self, *pod_ids: str) -> None:
        """These pods, and no others, are there and healthy."""

        async def are_up() -> bool:
            pods = await self.pods()
            return set(pods) == set(pod_ids) and all(pod["healthy"] for pod in pods.values())

        await kit.until(are_up, f"{pod_ids} are up")


@contextlib.asynccontextmanager
async def serving(folder: Path, config: dict[str, Any]) -> AsyncIterator[Process]:
    """`calinix serve` with this config; whatever happened, its log has no traceback."""
    async with Process(folder, merged(config, LOGGED)) as served:
        yield served
    assert "Traceback" not in served.output()


def logged_config(*args: Any, **pods: Any) -> dict[str, Any]:
    """`config_of` with the log that these tests read."""
    return merged(config_of(*args, **pods), LOGGED)


async def whole(exchange: kit.Exchange) -> kit.Reply:
    """The stream came to its end, unharmed."""
    reply = await exchange.reply()
    assert reply.events() == ['{"n":1}', '{"n":2}', "[DONE]"]
    assert reply.complete
    return reply


@kit.on_loop
async def test_pods_come_go_and_move(tmp_path: Path) -> None:
    """Added, moved to another url, removed: new requests follow, running ones stay whole."""
    held = Held()
    async with (
        raw_pod(held.script) as a,
        raw_pod(held.script) as b,
        raw_pod(held.script) as c,
        serving(tmp_path, config_of(one=a)) as served,
    ):
        on_a = await served.stream()
        await served.reload(logged_config(one=a, two=b))
        await served.up("one", "two")
        replies = [await served.ask() for _ in range(4)]
        targets = {reply.headers["x-calinix-target-pod-id"] for reply in replies}
        assert targets == {"one", "two"}
        before = (await served.pods())["one"]
        await served.reload(logged_config(one=c, two=b))
        await served.up("one", "two")
        after = (await served.pods())["one"]
        assert after["url"] == c.url
        assert after["epoch"] != before["epoch"]
        on_b_or_c = [await served.stream() for _ in range(2)]
        asked = len(a.requests)
        await served.reload(logged_config(three=c))
        await served.up("three")
        replies = [await served.ask() for _ in range(3)]
        assert {reply.headers["x-calinix-target-pod-id"] for reply in replies} == {"three"}
        assert len(a.requests) == asked
        held.open.set()
        assert (await whole(on_a)).headers["x-calinix-target-pod-id"] == "one"
        for exchange in on_b_or_c:
            await whole(exchange)
        state = await kit.http(served.admin_port, "GET", "/admin/state")
        assert (state.json()["inflight"], state.json()["openLeases"]) == (0, 0)
        assert served.logged("reloaded")[-1]["pods"] == 1


@kit.on_loop
async def test_a_dispatch_between_its_legs(tmp_path: Path) -> None:
    """Its decode pod moves, then goes, while prefill works: the leg goes where it was planned."""
    gate = asyncio.Event()

    async def prefill(served: Served) -> None:
        await gate.wait()
        await served.say(answer(b'{"kv_transfer_params":{"x":1}}'))

    held = Held()
    held.open.set()
    async with (
        raw_pod(prefill) as p,
        raw_pod(held.script) as d,
        raw_pod(held.script) as other,
        serving(tmp_path, dispatch_of({"p": p}, {"d": d})) as served,
    ):
        data = kit.request_bytes("POST", CHAT, chat_body(stream=True))
        exchange = await kit.Exchange.send(served.port, data)
        await kit.until(lambda: bool(p.requests), "prefill is asked")
        await served.reload(merged(dispatch_of({"p": p}, {"d": other}), LOGGED))
        await served.reload(merged(dispatch_of({"q": other}, {"e": other}), LOGGED))
        await served.up("q", "e")
        gate.set()
        reply = await whole(exchange)
        assert reply.headers["x-calinix-decode-pod-id"] == "d"
        assert (len(d.requests), len(other.requests)) == (1, 0)


def without_stream(pod: RawPod) -> list[bytes]:
    """The requests that are no streams."""
    return [request for request in pod.requests if b'"stream":true' not in request]


@kit.on_loop
async def test_settings_of_a_pod(tmp_path: Path) -> None:
    """maxConns, models, labels and apiKey hold for the next request; the pod stays the same."""
    held = Held()
    async with raw_pod(held.script) as pod:

        def config(**keys: Any) -> dict[str, Any]:
            return logged_config(p={"url": pod.url, **keys})

        async with serving(tmp_path, config(maxConns=1)) as served:
            stream = await served.stream()
            before = (await served.pods())["p"]
            waiting = asyncio.ensure_future(served.ask())
            await asyncio.sleep(0.1)
            assert not waiting.done()
            # A second place: who waits goes ahead.
            await served.reload(config(maxConns=2))
            assert (await waiting).status == 200
            await served.reload(config(maxConns=2, apiKey="pods-key", labels={"zone": "z"}))
            assert (await served.ask()).status == 200
            last = without_stream(pod)[-1]
            assert ("authorization", "Bearer pods-key") in fields_of(last)
            await served.reload(config(maxConns=2, models=["only-this"]))
            assert (await served.ask()).status == 404
            assert (await served.ask(chat_body() | {"model": "only-this"})).status == 200
            after = (await served.pods())["p"]
            same = ("slot", "epoch", "url", "healthy")
            assert {key: before[key] for key in same} == {key: after[key] for key in same}
            assert after["maxConns"] == 2
            held.open.set()
            await whole(stream)


@kit.on_loop
async def test_settings_of_the_gateway(tmp_path: Path) -> None:
    """Strategy, keys, paths, limits and time-outs hold for the next request; streams run on."""
    held = Held()
    async with raw_pod(held.script) as pod, serving(tmp_path, config_of(p=pod)) as served:
        stream = await served.stream()

        async def change(gateway: dict[str, Any]) -> None:
            await served.reload(logged_config({"gateway": gateway}, p=pod))

        assert (await served.ask()).headers["x-calinix-route-policy"] == "roundRobin"
        await change({"strategy": "leastLoad"})
        assert (await served.ask()).headers["x-calinix-route-policy"] == "leastLoad"
        await change({"apiKeys": ["k"]})
        assert (await served.ask()).status == 401
        assert (await served.ask(authorization="Bearer k")).status == 200
        assert (await kit.http(served.port, "GET", "/custom")).status == 404
        await change({"passthroughPaths": ["/custom"], "limits": {"bodyBytes": 200}})
        assert (await kit.http(served.port, "GET", "/custom")).status == 200
        assert (await served.ask(chat_body("x" * 200))).status == 413
        await change({"timeouts": {"firstTokenMs": 60_000, "idleMs": 60_000}})
        assert (await served.ask(chat_body("x" * 200))).status == 200
        held.open.set()
        await whole(stream)


@kit.on_loop
async def test_the_request_log_is_rotated(tmp_path: Path) -> None:
    """After its file was renamed, SIGHUP begins another, even where the configuration is bad."""
    path = tmp_path / "requests.log"
    logged = {"log": {"level": "info", "requests": True, "requestsFile": str(path)}}
    async with raw_pod() as pod:
        config = merged(logged_config(p=pod), logged)
        async with Process(tmp_path, config) as served:
            assert (await served.ask()).status == 200
            path.rename(tmp_path / "requests.log.1")
            await served.reload(config | {"nonsense": 1}, "reload_refused")
            assert (await served.ask()).status == 200
            await kit.until(lambda: path.read_text().count("\n") == 1, "the line is written")
        assert len((tmp_path / "requests.log.1").read_text().splitlines()) == 1


@kit.on_loop
async def test_probes_change_at_once(tmp_path: Path) -> None:
    """Other health settings do not wait for the old interval, here a minute, to be over."""
    async with raw_pod() as pod:
        rare = {"health": {"intervalMs": 60_000}}
        async with serving(tmp_path, config_of(rare, p=pod)) as served:
            probes = len(pod.probes)
            often = {"health": {"intervalMs": 30, "unhealthyThreshold": 2}}
            await served.reload(logged_config(often, p=pod))
            await kit.until(lambda: len(pod.probes) >= probes + 4, "it is probed often")
            pod.healthy = False

            async def not_ready() -> bool:
                return (await kit.http(served.port, "GET", "/ready")).status == 503

            await kit.until(not_ready, "the pod is out")
            path = {"health": {"intervalMs": 30, "endpoint": "/v1/models", "healthyThreshold": 1}}
            await served.reload(logged_config(path, p=pod))
            await served.up("p")
            assert any(request.startswith(b"GET /v1/models") for request in pod.requests)


PODS = "upstreams: {single: {pods: [{id: p, url: 'http://127.0.0.1:9'}]}}\n"
THREE = yaml.safe_dump(
    config_of(
        {"cacheRegistry": {"maxPods": 9}},
        **{f"p-{number}": f"http://127.0.0.1:{number}" for number in (7, 8, 9)},
    )
)
BAD = {
    "unknown key": (f"gateway: {{stratgy: random}}\n{PODS}", ":1: gateway.stratgy"),
    "wrong type": (f"{PODS}gateway:\n  retries: many\n", ":3: gateway.retries"),
    "no yaml": ("gateway: {\n", ".yaml:"),
    "no pods": ("version: 1\n", "upstreams"),
    "no certificate": (f"upstreams: {{tls: {{caFile: /nowhere}}, {PODS[12:]}", "/nowhere"),
    # The registry's size cannot change, so there is no room for these.
    "more than maxPods": (THREE, "maxPods: 2"),
    "no file": ("", "config"),
}


@kit.on_loop
async def test_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    """The log says file, line and key; pods, streams and settings are as before, all of them."""
    held = Held()
    small = {"cacheRegistry": {"maxPods": 2}, **LOGGED}
    async with raw_pod(held.script) as pod, serving(tmp_path, config_of(small, p=pod)) as served:
        stream = await served.stream()
        path = tmp_path / f"config-{served.port}.yaml"
        good = path.read_text()
        for number, (name, (text, told)) in enumerate(BAD.items(), 1):
            path.write_text(text) if text else path.unlink()
            served.send(SIGHUP)
            await kit.until(
                lambda n=number: len(served.logged("reload_refused")) == n, f"{name} is refused"
            )
            (*_, last) = served.logged("reload_refused")
            assert any(told in line for line in last["problems"]), last
        assert set(await served.pods()) == {"p"}
        assert (await served.ask()).headers["x-calinix-route-policy"] == "roundRobin"
        assert not served.logged("reloaded")
        held.open.set()
        await whole(stream)
        path.write_text(good)
        served.send(SIGHUP)
        await kit.until(lambda: bool(served.logged("reloaded")), "the good file is taken")


@kit.on_loop
async def test_keys_that_need_a_restart_are_named(tmp_path: Path) -> None:
    """Each is told at every reload that would change it, and none is shown as if in force."""
    async with raw_pod() as pod, serving(tmp_path, config_of(p=pod)) as served:
        gateway = {
            "host": "0.0.0.0",
            "tokenizer": "words",
            "tokenizing": {"waitMs": 5},
            "blockSize": 7,
            "seed": 3,
            "deterministic": True,
            "decisionsKept": 5,
        }
        changed = {
            "gateway": gateway,
            "cacheRegistry": {"staleTtlMs": 1000},
            "sessions": {"maxSessions": 5},
            "admin": {"host": "127.0.0.2"},
            "log": {"level": "debug"},
        }
        names = {f"gateway.{key}" for key in gateway}
        names |= {"cacheRegistry", "sessions", "admin", "log"}
        for times in (1, 2):
            await served.reload(merged(logged_config(p=pod), changed))
            told = [line["key"] for line in served.logged("reload_ignores")]
            assert sorted(told) == sorted([*names] * times)
        reply = await kit.http(served.admin_port, "GET", "/admin/config")
        shown = yaml.safe_load(reply.body)
        assert shown["gateway"]["host"] == "127.0.0.1"
        assert shown["gateway"]["tokenizer"] == "bytes"
        assert shown["sessions"]["maxSessions"] == 65_536
        assert (await served.ask()).status == 200
        await served.reload(logged_config(p=pod))
        assert len(served.logged("reload_ignores")) == 2 * len(names)


@kit.on_loop
async def test_reloads_under_load(tmp_path: Path) -> None:
    """Twenty reloads that turn all but one pod round while requests come: not one of them fails."""
    async with raw_pod() as a, raw_pod() as b, raw_pod() as c:
        configs = [
            logged_config({"gateway": {"strategy": "random"}}, stays=a, one=b, two=c),
            logged_config({"gateway": {"timeouts": {"connectMs": 900}}}, stays=a, one=c, three=b),
            logged_config(stays={"url": a.url, "maxConns": 30}, two={"url": b.url, "maxConns": 3}),
        ]
        async with serving(tmp_path, configs[0]) as served:
            running = True
            statuses: list[int] = []

            async def client() -> None:
                while running:
                    statuses.append((await served.ask()).status)

            clients = [asyncio.ensure_future(client()) for _ in range(6)]
            for number in range(20):
                await served.reload(configs[number % 3])
                await served.up("stays", *(("one", "two"), ("one", "three"), ("two",))[number % 3])
            running = False
            await asyncio.gather(*clients)
        assert len(statuses) > 100
        assert set(statuses) == {200}
