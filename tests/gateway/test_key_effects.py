"""Keys of the file whose effect no other test shows on its way from YAML: each set, each seen."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import yaml

import kit
from calinix.app import running_gateway
from calinix.config import parse_config
from calinix.core.events import PodDraining, PodHeard, PodRemoved, ProbeFailed, ProbeSucceeded
from calinix.core.kv import COMPILED
from calinix.core.router import Router
from calinix.errors import ConfigError
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
from routing import ask, fail, finish, make_router, serve

ROLES = ("single", "prefill", "decode")


def router_of(extra: dict[str, Any] | None = None, **pods: dict[str, Any]) -> Router:
    """Three pods of every role (`pods` adds keys by id), all healthy, ties by id."""
    entries = {
        role: [
            {"id": f"{role}-{n}", "url": f"http://{role}-{n}:1", **pods.get(f"{role}_{n}", {})}
            for n in range(3)
        ]
        for role in ROLES
    }
    base = {
        "gateway": {"deterministic": True},
        "upstreams": {
            "single": {"pods": entries["single"]},
            "dispatch": {role: {"pods": entries[role]} for role in ("prefill", "decode")},
        },
    }
    return make_router(parse_config(yaml.safe_dump(merged(base, extra or {}))))


def only(router: Router, number: int, does: Callable[[], object]) -> None:
    """`does`, with the pods of this number alone in every role."""
    others = [f"{role}-{n}" for role in ROLES for n in range(3) if n != number]
    for draining in (True, False):
        for pod_id in others:
            router.observe(PodDraining(pod_id, draining), 1.0)
        if draining:
            does()


def picked(router: Router, role: str, **request: Any) -> str:
    """The pod of this role that a request of twenty blocks goes to."""
    mode = "single" if role == "single" else "dispatch"
    plan = ask(router, 20, mode=mode, **request)
    pod = plan.prefill if role == "prefill" else plan.pod
    assert pod is not None
    finish(router, plan)
    return pod.id


def weights(role: str, **of: float) -> dict[str, Any]:
    """A file with these weights for the role."""
    return {"gateway": {"strategy": {"name": "cacheAware", role: of}}}


@pytest.mark.parametrize("role", ROLES)
def test_weight_of_the_cache(role: str) -> None:
    """With it the pod that holds the prompt is picked, without it the first of equals."""
    for weight, number in ((0.0, 0), (0.5, 2)):
        router = router_of(weights(role, cache=weight))
        mode = "single" if role == "single" else "dispatch"
        only(router, 2, partial(serve, router, 20, mode=mode))
        assert picked(router, role) == f"{role}-{number}"


@pytest.mark.parametrize("role", ROLES)
def test_weight_of_the_load(role: str) -> None:
    """With it an idle pod is picked rather than the busy one that holds the prompt."""
    mode = "single" if role == "single" else "dispatch"
    for weight, number in ((0.0, 0), (1.0, 1)):
        router = router_of(weights(role, cache=0.1, load=weight))
        for _ in range(3):
            only(router, 0, partial(ask, router, 20, mode=mode))
        assert picked(router, role) == f"{role}-{number}"


@pytest.mark.parametrize("role", ROLES)
def test_weight_of_the_session(role: str) -> None:
    """With it a session goes where it went, without it to the first of equals."""
    mode = "single" if role == "single" else "dispatch"
    for weight, number in ((0.0, 0), (0.5, 2)):
        router = router_of(weights(role, sticky=weight))
        only(router, 2, partial(serve, router, 1, mode=mode, session_key="s"))
        assert picked(router, role, session_key="s") == f"{role}-{number}"
        assert picked(router, role, session_key="t") == f"{role}-0"


@pytest.mark.parametrize("label", ["zone", "host"])
def test_weight_of_locality_and_the_labels(label: str) -> None:
    """With it decode goes near the prefill pod: the same zone or host, as labelled."""
    near = {"labels": {label: "here"}}
    pods = {"prefill_0": near, "decode_2": near, "decode_1": {"labels": {label: "there"}}}
    for weight, number in ((0.0, 0), (0.5, 2)):
        router = router_of(weights("decode", locality=weight), **pods)
        assert picked(router, "decode") == f"decode-{number}"


@pytest.mark.parametrize("role", ["single", "prefill"])
def test_locality_is_for_decode_alone(role: str) -> None:
    """For the others it is no score, as the documentation says: nothing to be near to."""
    router = router_of(weights(role, locality=1.0))
    picked(router, role)
    choices = router.decisions.last(1)[0].to_dict()["choices"]
    (choice,) = (choice for choice in choices if choice["role"] == role)
    assert "locality" not in choice["weights"]


@pytest.mark.parametrize(
    ("rule", "number"),
    [
        ({}, 0),
        ({"factor": 0.5}, 1),
        ({"offset": 0.5}, 1),
        ({"factor": 0.5, "offset": 0.5, "enabled": False}, 0),
    ],
)
def test_imbalance(rule: dict[str, Any], number: int) -> None:
    """Inflight 6, 0, 0 and the prompt on the first: dropped by factor x 2 + offset, or not."""
    extra = merged(weights("single", cache=1.0), {"gateway": {"strategy": {"imbalance": rule}}})
    router = router_of(extra)
    only(router, 0, lambda: [ask(router, 20, mode="single") for _ in range(6)])
    assert picked(router, "single") == f"single-{number}"


@pytest.mark.parametrize(
    ("gateway", "blocks"),
    [({}, 3), ({"blockSize": 100}, 4), ({"tokenizer": "words", "blockSize": 10}, 9)],
)
def test_tokenizer_and_block_size(gateway: dict[str, Any], blocks: int) -> None:
    """A hundred short words are so many blocks of bytes, or of words."""
    router = router_of({"gateway": gateway})
    prompt = b" ".join(b"abc" for _ in range(99)) + b" "
    assert ask(router, prompt + b"tail", mode="single").prompt_blocks in (blocks, blocks + 1)


def test_probe_thresholds() -> None:
    """`healthyThreshold` and `unhealthyThreshold`: so many in a row, and not one fewer."""
    router = router_of({"health": {"healthyThreshold": 4, "unhealthyThreshold": 2}})
    for event, count in ((ProbeFailed("single-0"), 2), (ProbeSucceeded("single-0"), 4)):
        before = router.pods()[0].healthy
        for number in range(1, count + 1):
            assert router.pods()[0].healthy is before
            router.observe(event, float(number))
        assert router.pods()[0].healthy is not before


def test_passive_rules() -> None:
    """`failures` ejects, `ejectMs` is the first rest, `maxEjectMs` the longest; or none at all."""
    for enabled in (True, False):
        passive = {"enabled": enabled, "failures": 2, "ejectMs": 3_000, "maxEjectMs": 4_000}
        router = router_of({"health": {"passive": passive}})
        now = 0.0
        for rest_s in (3.0, 4.0, 4.0):
            for _ in range(1 if now else 2):
                assert not router.pods()[0].ejected
                fail(router, ask(router, now=now, pinned_pod="single-0"), now=now)
            assert router.pods()[0].ejected is enabled
            router.tick(now + rest_s - 0.1)
            assert router.pods()[0].ejected is enabled
            now += rest_s
            router.tick(now)


@pytest.mark.parametrize(("factor", "ejected"), [(3.0, True), (30.0, False)])
def test_slow_factor(factor: float, ejected: bool) -> None:
    """A pod ten times as slow as its peers rests, or is still slow enough to stay."""
    router = router_of(
        {"health": {"passive": {"slowFactor": factor}}, "cacheRegistry": {"enabled": False}}
    )
    now = 1.0
    for _ in range(10):
        for number in range(3):
            if f"single-{number}" in router.usable_pods():
                plan = ask(router, b"x" * 4000, now=now, pinned_pod=f"single-{number}")
                finish(router, plan, now + (10.0 if number == 0 else 1.0))
        now += 30.0
        for view in router.pods():
            router.observe(PodHeard(view.id), now)
        router.tick(now)
    assert router.pods()[0].ejected is ejected


@pytest.mark.parametrize(("enabled", "hit"), [(True, 20), (False, 0)])
def test_registry_enabled(enabled: bool, hit: int) -> None:
    """Without the registry a repeated prompt is not believed to be anywhere."""
    router = router_of({"cacheRegistry": {"enabled": enabled}})
    serve(router, 20, mode="single")
    assert ask(router, 20, mode="single").cached_blocks == hit


@pytest.mark.parametrize("shards", [1, 64])
def test_shards_count(shards: int) -> None:
    """What a removed pod leaves is freed a shard at a time: as many steps as there are shards."""
    router = router_of({"cacheRegistry": {"shardsCount": shards}})
    for number in range(100):
        only(router, 0, partial(serve, router, b"%d" % number * 2_000, mode="single"))
    router.observe(PodRemoved("single-0"), 2.0)
    router._roster.free_retired()
    steps = 1
    while router._state.registry.sweep():
        steps += 1
    assert steps == (shards if COMPILED else 1)


@pytest.mark.parametrize(("ttl_ms", "cached"), [(5_000, 0), (60_000, 20)])
def test_stale_ttl(ttl_ms: int, cached: int) -> None:
    """A pod heard of again after ten seconds is trusted to be the same, or is not."""
    router = router_of({"cacheRegistry": {"staleTtlMs": ttl_ms}})
    only(router, 0, lambda: serve(router, 20, mode="single"))
    router.observe(ProbeSucceeded("single-0"), 11.0)
    plan = ask(router, 20, now=11.0, pinned_pod="single-0")
    assert plan.cached_blocks == cached


@pytest.mark.parametrize(("sessions", "stays"), [
    ({}, True), ({"ttlMs": 1_000}, False), ({"maxSessions": 0}, False), ({"maxSessions": 1}, False)
])  # fmt: skip
def test_sessions(sessions: dict[str, Any], stays: bool) -> None:
    """A session is remembered for its time, among as many as there is room for."""
    router = router_of(merged(weights("single", sticky=1.0), {"sessions": sessions}))
    only(router, 2, lambda: serve(router, 1, mode="single", session_key="s"))
    serve(router, 1, mode="single", session_key="another")
    plan = ask(router, 1, now=3.0, mode="single", session_key="s")
    assert plan.pod.id == ("single-2" if stays else "single-0")


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
    async with raw_pod() as pod:
        ports = {
            "gateway": {"host": "127.0.0.2", "port": 0},
            "admin": {"host": "127.0.0.3", "port": 0},
        }
        text = yaml.safe_dump(merged(config_of(p=pod), ports))
        async with running_gateway(parse_config(text)) as app:
            assert app.admin is not None
            assert app.base_url == f"http://127.0.0.2:{app.server.port}"
            assert app.admin_url == f"http://127.0.0.3:{app.admin.port}"
            for host, port in (("127.0.0.2", app.server.port), ("127.0.0.3", app.admin.port)):
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
                await writer.wait_closed()
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection("127.0.0.1", port)


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
