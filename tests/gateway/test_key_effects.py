"""Keys of the file whose effect no other test shows over sockets: each set, each seen."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter

import pytest
import yaml

import kit
from calinix.app import running_gateway
from calinix.config import parse_config
from calinix.core.events import ProbeSucceeded
from calinix.errors import ConfigError
from faultproxy import reserve_port
from fleets import gateway_of, merged
from gatewaykit import (
    CHAT,
    KEEP,
    Connection,
    Served,
    answer,
    body_of,
    chat_body,
    config_of,
    dispatch_of,
    never,
    raw_pod,
    whole_answer,
)


@kit.on_loop
async def test_seed() -> None:
    """The same seed draws the same pods in a running gateway, whatever its probes do meanwhile."""

    async def drawn(seed: int) -> list[str]:
        extra = {
            "gateway": {"strategy": "random", "seed": seed},
            "health": {"intervalMs": random.randrange(1, 9)},
        }
        async with gateway_of(config_of(extra, a=one, b=two, c=three)) as app:
            await kit.until(lambda: len(app.router.usable_pods()) == 3, "all are up")
            replies = []
            for _ in range(16):
                replies.append(await kit.http(app.server.port, "POST", CHAT, chat_body()))
                await asyncio.sleep(0.002)
            return [reply.headers["x-calinix-target-pod-id"] for reply in replies]

    async with raw_pod() as one, raw_pod() as two, raw_pod() as three:
        first = await drawn(7)
        assert await drawn(7) == first
        assert await drawn(8) != first


@kit.on_loop
async def test_addresses() -> None:
    """Each port is open on its configured address and on no other."""
    # Held on the other address, so that nobody else serves there meanwhile.
    with reserve_port() as one, reserve_port() as two:
        await addresses(one.getsockname()[1], two.getsockname()[1])


async def addresses(port: int, admin_port: int) -> None:
    """A gateway at these ports of addresses of its own."""
    async with raw_pod() as pod:
        ports = {
            "gateway": {"host": "127.0.0.2", "port": port},
            "admin": {"host": "127.0.0.3", "port": admin_port},
        }
        text = yaml.safe_dump(merged(config_of(p=pod), ports))
        async with running_gateway(parse_config(text)) as app:
            assert app.admin is not None
            assert app.base_url == f"http://127.0.0.2:{app.server.port}"
            assert app.admin_url == f"http://127.0.0.3:{app.admin.port}"
            for host, at in (("127.0.0.2", port), ("127.0.0.3", admin_port)):
                _, writer = await asyncio.open_connection(host, at)
                writer.close()
                await writer.wait_closed()
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection("127.0.0.1", at)


@pytest.mark.parametrize(("from_user", "targets"), [(True, 1), (False, 2)])
@kit.on_loop
async def test_session_from_user(from_user: bool, targets: int) -> None:
    """OpenAI's `user` is a session key if asked for, and never before the body's own."""
    strategy = {"name": "cacheAware", "single": {"sticky": 1.0}, "imbalance": {"enabled": False}}
    extra = {"gateway": {"strategy": strategy, "sessionFromUser": from_user}}
    async with (
        raw_pod() as one,
        raw_pod() as two,
        gateway_of(config_of(extra, a=one, b=two)) as app,
    ):
        await kit.until(lambda: len(app.router.usable_pods()) == 2, "both are up")

        async def seen(**body: str) -> int:
            found = Counter[str]()
            for number in range(24):
                data = chat_body(f"{number}", **body)
                reply = await kit.http(app.server.port, "POST", CHAT, data)
                found[reply.headers["x-calinix-target-pod-id"]] += 1
            return len(found)

        assert await seen(user="somebody") == targets
        assert await seen(prompt_cache_key="mine") == 1


@kit.on_loop
async def test_limits() -> None:
    """Head, body, connections and pipelined requests: each bound as configured."""
    opened = asyncio.Event()

    async def when_opened(served: Served) -> None:
        await opened.wait()
        await whole_answer(served)

    limits = {"headerBytes": 2_000, "bodyBytes": 3_000, "connections": 3, "pipelinedRequests": 2}
    extra = {"gateway": {"limits": limits}}
    async with raw_pod(when_opened) as pod, gateway_of(config_of(extra, p=pod)) as app:
        port = app.server.port
        long = {"x-long": "y" * 2_000}
        assert (await kit.http(port, "GET", "/health", None, long)).status == 431
        assert (await kit.http(port, "POST", CHAT, bytes(3_001))).status == 413
        data = kit.request_bytes("POST", CHAT, chat_body(), KEEP)
        busy = await Connection.send(port, data * 9)
        await kit.until(lambda: bool(pod.requests), "the first is sent")
        (connection,) = app.server.open
        await kit.until(lambda: connection._paused, "its reading pauses")
        assert 1 <= len(connection._reader.ready) <= 2
        others = [await Connection.send(port, b"") for _ in range(2)]
        await kit.until(lambda: app.server.connections == 3, "three are open")
        assert (await kit.http(port, "GET", "/health")).status == 503
        opened.set()
        assert [(await busy.next_reply()).status for _ in range(9)] == [200] * 9
        for client in (busy, *others):
            await client.leave()


@kit.on_loop
async def test_probe_time_out() -> None:
    """`health.timeoutMs`: a probe without an answer is a bad one after that time."""

    async def hang_on_probes(served: Served) -> None:
        await (never if b"GET /probe" in served.request else whole_answer)(served)

    health = {"endpoint": "/probe", "timeoutMs": 60, "intervalMs": 20, "unhealthyThreshold": 2}
    async with raw_pod(hang_on_probes) as pod:
        text = yaml.safe_dump(
            merged(
                config_of({"health": health}, p=pod), {"gateway": {"port": 0}, "admin": {"port": 0}}
            )
        )
        async with running_gateway(parse_config(text)) as app:
            app.gateway.observe(ProbeSucceeded("p"))
            loop = asyncio.get_running_loop()
            begin = loop.time()
            await kit.until(lambda: not app.router.ready(), "it is out", timeout_s=2.0)
            assert loop.time() - begin >= 0.05


@kit.on_loop
async def test_dispatch_protocols() -> None:
    """`protocol`: nixl asks the prefill pod for a handle in so many words, plain does not."""

    async def prefill(served: Served) -> None:
        await served.say(answer(b"{}"))

    for protocol, asks in (("plain", False), ("nixl", True)):
        async with raw_pod(prefill) as first, raw_pod() as second:
            extra = {"upstreams": {"dispatch": {"protocol": protocol}}}
            async with gateway_of(dispatch_of({"p": first}, {"d": second}, extra)) as app:
                assert (await kit.http(app.server.port, "POST", CHAT, chat_body())).status == 200
            assert (b'"do_remote_decode":true' in body_of(first.requests[0])) is asks


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("version",), 2),
        (("upstreams", "single", "mode"), "dispatch"),
        (("upstreams", "dispatch", "mode"), "single"),
    ],
)
def test_what_a_file_says_of_itself(key: tuple[str, ...], value: object) -> None:
    """A version or a mode that is not what stands there is refused."""
    config = dispatch_of({"p": "http://p:1"}, {"d": "http://d:1"})
    config["upstreams"]["single"] = {"pods": [{"id": "s", "url": "http://s:1"}]}
    parse_config(yaml.safe_dump(config))
    place = config
    for name in key[:-1]:
        place = place[name]
    place[key[-1]] = value
    with pytest.raises(ConfigError, match=re.escape(".".join(key))):
        parse_config(yaml.safe_dump(config))
