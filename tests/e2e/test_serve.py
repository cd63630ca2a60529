"""`calinix serve` as a process: reload, drain, ports, TLS, logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from pathlib import Path
from signal import SIGHUP, SIGTERM
from typing import Any

import kit
from calinix.sim.pod_model import PodFigures
from fleets import Fleet, fleet_of, merged
from streams import ROUND_ROBIN, ask, chat, is_whole

SLOW = PodFigures(token_delay_s=0.02)
WITH_LOG = merged(ROUND_ROBIN, {"log": {"level": "info", "requests": True}})


def only(config: dict[str, Any], *pod_ids: str) -> dict[str, Any]:
    """The config with these single pods and no others."""
    pods = [pod for pod in config["upstreams"]["single"]["pods"] if pod["id"] in pod_ids]
    return config | {"upstreams": {"single": {"pods": pods}}}


async def reloaded(served: kit.Serve, config: dict[str, Any], said: str = "reloaded") -> None:
    """Writes the config, sends SIGHUP, and waits until the log says what came of it."""
    before = served.output().count(said)
    served.write(config)
    served.send(SIGHUP)
    await kit.until(lambda: served.output().count(said) > before, f"the log says {said}")


async def targets(port: int, count: int = 4) -> set[str]:
    """The pods that answer."""
    replies = [await ask(port, chat(f"{number}")) for number in range(count)]
    assert all(is_whole(reply) for reply in replies)
    return {reply.headers["x-calinix-target-pod-id"] for reply in replies}


@kit.on_loop
async def test_a_reload_never_fails_a_running_stream(tmp_path: Path) -> None:
    """Pods come and go by SIGHUP; the stream on a pod that went runs to its end."""
    async with fleet_of(single=2, figures=SLOW) as fleet:
        config = fleet.config(WITH_LOG)
        async with kit.Serve(tmp_path, only(config, "single-1")) as served:
            stream = await kit.Exchange.send(served.port, chat(max_tokens=60))
            await stream.read_until(b"data:", times=3)
            await reloaded(served, only(config, "single-2"))
            await kit.until(lambda: "single-2" in fleet.proxies, "is there")

            async def moved() -> bool:
                reply = await ask(served.port, chat("new", max_tokens=1))
                return reply.headers.get("x-calinix-target-pod-id") == "single-2"

            await kit.until(moved, "new requests go to the new pod")
            reply = await stream.reply()
            assert is_whole(reply)
            assert reply.headers["x-calinix-target-pod-id"] == "single-1"
            assert fleet.posts("single-1") == 1


@kit.on_loop
async def test_a_bad_reload_changes_nothing(tmp_path: Path) -> None:
    """A file with a fault is refused with file, line and key; the old config goes on serving."""
    async with fleet_of(single=2) as fleet:
        config = fleet.config(WITH_LOG)
        async with kit.Serve(tmp_path, config) as served:
            bad = merged(config, {"gateway": {"stratgy": "random"}})
            await reloaded(served, bad, said="reload_refused")
            assert "gateway.stratgy" in served.output()
            assert await targets(served.port) == {"single-1", "single-2"}
            good = merged(config, {"gateway": {"strategy": "leastLoad"}})
            await reloaded(served, good)
            reply = await ask(served.port, chat())
            assert reply.headers["x-calinix-route-policy"] == "leastLoad"


@kit.on_loop
async def test_more_sockets_than_the_soft_limit(tmp_path: Path) -> None:
    """Started where a process may have few files open, it takes what the hard limit allows."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with fleet_of(single=1) as fleet, contextlib.AsyncExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
        try:
            process = kit.Serve(tmp_path, fleet.config())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        served = await stack.enter_async_context(process)
        for _ in range(150):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            stack.callback(writer.close)
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"200"


@kit.on_loop
async def test_an_idle_gateway_stops_at_once(tmp_path: Path) -> None:
    """SIGTERM without work: idle connections are closed, exit 0, no drain time is spent."""
    async with (
        fleet_of(single=1) as fleet,
        kit.Serve(tmp_path, fleet.config()) as served,
    ):
        idle, writer = await asyncio.open_connection("127.0.0.1", served.port)
        served.send(SIGTERM)
        assert await idle.read() == b""
        writer.close()
        assert await served.ended(timeout_s=5.0) == 0, served.output()


@kit.on_loop
async def test_a_drain_ends_after_drain_ms(tmp_path: Path) -> None:
    """A stream that is longer than drainMs is broken off; the exit is still 0."""
    extra = {"gateway": {"timeouts": {"drainMs": 300}}}
    async with (
        fleet_of(single=1, figures=SLOW) as fleet,
        kit.Serve(tmp_path, fleet.config(extra)) as served,
    ):
        stream = await kit.Exchange.send(served.port, chat(max_tokens=1000))
        await stream.read_until(b"data:", times=3)
        served.send(SIGTERM)
        assert await served.ended(timeout_s=5.0) == 0, served.output()
        reply = await stream.reply()
        assert not is_whole(reply)
        assert "[DONE]" not in reply.events()


@kit.on_loop
async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    """Whoever sends SIGTERM twice wants it now."""
    async with (
        fleet_of(single=1, figures=SLOW) as fleet,
        kit.Serve(tmp_path, fleet.config({"log": {"level": "info"}})) as served,
    ):
        stream = await kit.Exchange.send(served.port, chat(max_tokens=1000))
        await stream.read_until(b"data:", times=3)
        served.send(SIGTERM)
        await kit.until(lambda: "draining" in served.output(), "the drain has begun")
        served.send(SIGTERM)
        await served.ended(timeout_s=5.0)
        assert not is_whole(await stream.reply())


@kit.on_loop
async def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    """A port in use: one line that names the key, exit 2, no traceback."""
    async with fleet_of(single=1) as fleet:
        for key in ("gateway", "admin"):
            with socket.create_server(("127.0.0.1", 0)) as other:
                taken = other.getsockname()[1]
                served = kit.Serve(tmp_path, fleet.config(), **{f"{key}_port": taken})
                assert await served.ended() == 2
                assert f"{key}.port" in served.output()
                assert str(taken) in served.output()
                assert "Traceback" not in served.output()


@kit.on_loop
async def test_one_line_for_each_request(tmp_path: Path) -> None:
    """The request log has one JSON line per request, with what a reader looks for."""
    async with (
        fleet_of(single=1) as fleet,
        kit.Serve(tmp_path, fleet.config(WITH_LOG)) as served,
    ):
        head = {"x-request-id": "find-me"}
        body = {"model": "mock", "messages": [{"role": "user", "content": "my secret"}]}
        path = "/v1/chat/completions"
        assert (await kit.http(served.port, "POST", path, body, head)).status == 200
        served.send(SIGTERM)
        assert await served.ended() == 0
        (line,) = [line for line in served.output().splitlines() if "find-me" in line]
        record = json.loads(line)
        assert record["status"] == 200
        assert record["podId"] == "single-1"
        assert record["endpoint"] == path
        assert record.get("ttftUs", 1) > 0
        assert "my secret" not in served.output()


async def drain(served: kit.Serve, pod_id: str, verb: str) -> None:
    """Asks the admin port to drain or resume a pod."""
    reply = await kit.http(served.admin_port, "POST", f"/admin/pods/{pod_id}/{verb}")
    assert reply.status == 200


@kit.on_loop
async def test_a_draining_pod_finishes_and_gets_nothing_new(tmp_path: Path) -> None:
    """A pod drained at the admin port keeps its stream and gets no request until it is resumed."""
    async with (
        fleet_of(single=2, figures=SLOW) as fleet,
        kit.Serve(tmp_path, fleet.config(ROUND_ROBIN)) as served,
    ):
        assert await targets(served.port) == {"single-1", "single-2"}
        streams = [await kit.Exchange.send(served.port, chat(max_tokens=40)) for _ in range(2)]
        for stream in streams:
            await stream.read_until(b"data:")
        await drain(served, "single-1", "drain")
        assert await targets(served.port) == {"single-2"}
        replies = [await stream.reply() for stream in streams]
        assert all(is_whole(reply) for reply in replies)
        assert {r.headers["x-calinix-target-pod-id"] for r in replies} == {
            "single-1",
            "single-2",
        }
        await drain(served, "single-1", "resume")
        assert await targets(served.port) == {"single-1", "single-2"}


def full(fleet: Fleet, *, max_requests: int, timeout_ms: int) -> dict[str, Any]:
    """One request at a time on the only pod, and this wait queue."""
    waiting = {"waiting": {"maxRequests": max_requests, "timeoutMs": timeout_ms}}
    config = fleet.config(merged(ROUND_ROBIN, {"gateway": waiting}))
    config["upstreams"]["single"]["pods"][0]["maxConns"] = 1
    return config


@kit.on_loop
async def test_requests_wait_for_a_full_pod(tmp_path: Path) -> None:
    """More requests than the pod may have: they wait their turn and are all answered."""
    async with (
        fleet_of(single=1, figures=SLOW) as fleet,
        kit.Serve(tmp_path, full(fleet, max_requests=8, timeout_ms=20_000)) as served,
    ):
        replies = await asyncio.gather(*(ask(served.port, chat(f"{n}")) for n in range(6)))
        assert all(is_whole(reply) for reply in replies)
        await kit.until(lambda: fleet.posts("single-1") == 6, "each was sent once")


@kit.on_loop
async def test_waiting_is_bounded(tmp_path: Path) -> None:
    """One waits until its deadline, the next finds the queue full: 429 with Retry-After, both."""
    async with (
        fleet_of(single=1, figures=SLOW) as fleet,
        kit.Serve(tmp_path, full(fleet, max_requests=1, timeout_ms=400)) as served,
    ):
        busy = await kit.Exchange.send(served.port, chat(max_tokens=100))
        await busy.read_until(b"data:")
        loop = asyncio.get_running_loop()
        start = loop.time()
        waiting = asyncio.ensure_future(ask(served.port, chat("waits")))

        async def one_waits() -> bool:
            state = await kit.http(served.admin_port, "GET", "/admin/state")
            return bool(state.json()["waiting"] == 1)

        await kit.until(one_waits, "one request waits")
        shed = await ask(served.port, chat("no room"))
        assert loop.time() - start < 0.4
        late = await waiting
        assert loop.time() - start >= 0.4
        for reply in (shed, late):
            assert reply.status == 429
            assert int(reply.headers["retry-after"]) >= 1
        assert is_whole(await busy.reply())
        assert fleet.posts("single-1") == 1
