"""The P/D protocols through a gateway: mock pods of each kind, and what `auto` makes of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

import kit
from calinix.app import App
from calinix.sim.mock_bootstrap import MooncakeConnector
from calinix.sim.mock_faults import Fault
from calinix.sim.mock_generate import Generation
from calinix.sim.mock_pod import MockPod
from calinix.sim.pod_model import PodFigures
from fleets import gateway_of
from gatewaykit import (
    CHAT,
    RawPod,
    Served,
    admin,
    answer,
    body_of,
    chat_body,
    dispatch_of,
    fields_of,
    outcome,
    raw_pod,
    whole_answer,
)

LONG = "Explain cache aware routing in simple words. " * 12
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"connector": "none"},
    "nixl": {"connector": "nixl"},
    "mooncake": {"connector": "mooncake"},
    "sglang": {"dialect": "sglang"},
}


@contextlib.asynccontextmanager
async def pair_behind(
    kind: str, protocol: str | None = None, extra: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[App, MockPod, MockPod]]:
    """A gateway before one prefill and one decode pod of a kind; `settings` are both pods'."""
    made = KINDS[kind] | settings
    async with MockPod(role="prefill", **made) as prefill, MockPod(role="decode", **made) as decode:
        first: dict[str, Any] = {"url": prefill.url}
        if kind == "mooncake" or (kind == "sglang" and protocol == "sglang"):
            first["bootstrapPort"] = prefill.connector.port
        config = dispatch_of({"p": first}, {"d": decode.url}, extra)
        config["upstreams"]["dispatch"]["protocol"] = protocol or kind
        async with gateway_of(config) as app:
            yield app, prefill, decode


async def until_asked(pod: RawPod, times: int) -> None:
    """Waits until a pod was asked so often: its leg may still be on its way."""
    await kit.until(lambda: len(pod.requests) == times, "it is asked")


async def ask(app: App, **more: Any) -> kit.Reply:
    """One chat."""
    return await kit.http(app.server.port, "POST", CHAT, chat_body(LONG, max_tokens=5, **more))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@kit.on_loop
async def test_a_pair_serves_what_a_single_pod_would(kind: str, auto: bool, stream: bool) -> None:
    """By name or by `auto`: the answer of a single pod, the KV moved, nothing left behind."""
    async with (
        pair_behind(kind, "auto" if auto else kind) as (app, prefill, decode),
        MockPod(**KINDS[kind]) as single,
    ):
        alone = await kit.http(
            single.port, "POST", CHAT, chat_body(LONG, max_tokens=5, stream=stream)
        )
        for _ in range(3):
            reply = await ask(app, stream=stream)
            assert reply.status == 200
            assert reply.headers["x-calinix-prefill-pod-id"] == "p"
            if stream:
                said, expected = ([json.loads(e) for e in r.events()[:-1]] for r in (reply, alone))
                assert [e["choices"] for e in said] == [e["choices"] for e in expected]
            else:
                assert reply.json()["choices"] == alone.json()["choices"]
        await kit.until(lambda: prefill.model.held == prefill.model.blocks.used == 0, "all is free")
        assert prefill.served == decode.served == 3
        if kind != "plain":
            loaded = decode.model.counters
            # What the decode pod has cached itself is not moved a second time.
            assert loaded.external_tokens + loaded.cached_tokens == loaded.prompt_tokens


@kit.on_loop
async def test_what_auto_finds_is_shown() -> None:
    """/admin/pods names each pod's engine and version; a fixed protocol asks nobody."""
    async with pair_behind("sglang", "auto") as (app, prefill, decode):
        shown = {pod["id"]: pod for pod in (await admin(app, "/admin/pods"))["pods"]}
        assert [shown[pod]["engine"] for pod in "pd"] == ["sglang", "sglang"]
        assert shown["p"]["engineVersion"] == "0.5.23"
        assert prefill.paths["/server_info"] == decode.paths["/server_info"] == 1
    async with pair_behind("nixl", "nixl") as (app, prefill, _):
        shown = {pod["id"]: pod for pod in (await admin(app, "/admin/pods"))["pods"]}
        assert shown["p"]["engine"] is None
        assert not prefill.paths["/version"]


@kit.on_loop
async def test_a_pod_that_comes_back_as_another_engine() -> None:
    """A pod is asked again after a failed probe, and the protocol follows."""
    probes = {"health": {"intervalMs": 30, "unhealthyThreshold": 1, "healthyThreshold": 1}}
    async with pair_behind("nixl", "auto", probes) as (app, prefill, _):
        await prefill.stop()
        await kit.until(lambda: not app.router.ready(), "it is gone")
        async with MockPod(role="prefill", dialect="sglang", port=prefill.port):
            await kit.until(app.router.ready, "another is there")
            shown = (await admin(app, "/admin/pods"))["pods"]
            assert [pod["engine"] for pod in shown if pod["id"] == "p"] == ["sglang"]
        await prefill.start()


@kit.on_loop
async def test_pods_that_are_no_known_engine_are_served_plainly() -> None:
    """`auto` before pods that know none of the paths: prefill, then decode, no transfer fields."""

    async def unknown(served: Served) -> None:
        if served.request.startswith(b"GET "):
            await served.say(answer(b"no such path", b"404 Not Found"))
        else:
            await whole_answer(served)

    async with raw_pod(unknown) as prefill, raw_pod(unknown) as decode:
        config = dispatch_of({"p": prefill}, {"d": decode})
        config["upstreams"]["dispatch"]["protocol"] = "auto"
        async with gateway_of(config) as app:
            assert (await ask(app)).status == 200
            for pod in (prefill, decode):
                (sent,) = [r for r in pod.requests if r.startswith(b"POST ")]
                assert b"transfer" not in sent
                assert b"bootstrap" not in sent


@kit.on_loop
async def test_bootstrap_host_and_port_of_the_config() -> None:
    """Decode pods are told what `bootstrapHost` and `bootstrapPort` say, else the pod's host."""
    async with raw_pod() as prefill, raw_pod() as decode:
        for extra, host, port in (
            ({}, "127.0.0.1", None),
            ({"bootstrapPort": 7001}, "127.0.0.1", 7001),
            ({"bootstrapHost": "kv.example", "bootstrapPort": 7002}, "kv.example", 7002),
        ):
            config = dispatch_of({"p": {"url": prefill.url, **extra}}, {"d": decode})
            config["upstreams"]["dispatch"]["protocol"] = "sglang"
            async with gateway_of(config) as app:
                prefill.requests.clear()
                assert (await ask(app)).status == 200
                await until_asked(prefill, 1)
                sent = json.loads(body_of(prefill.requests[0]))
                assert (sent["bootstrap_host"], sent["bootstrap_port"]) == (host, port)
                assert body_of(decode.requests[-1]) == body_of(prefill.requests[0])


@kit.on_loop
async def test_mooncake_asks_the_bootstrap_server_once_and_anew_after_a_failure() -> None:
    """Engine ids are kept until something fails; after a restart the new one is found."""
    async with pair_behind("mooncake") as (app, prefill, decode):
        assert isinstance(prefill.connector, MooncakeConnector)
        for _ in range(4):
            assert (await ask(app)).status == 200
        # The decode pod asks as well, for each request.
        assert prefill.connector.queries == 4 + 1
        prefill.revive()  # another engine process, which nobody has noticed
        assert (await ask(app)).status == 500
        assert (await ask(app)).status == 200
        assert decode.served == 5


@kit.on_loop
async def test_prefill_threshold() -> None:
    """A prompt that is short, or cached on the decode pod, is served by the decode pod alone."""
    extra: dict[str, Any] = {"upstreams": {"dispatch": {"prefillThreshold": 20}}}
    extra |= {"gateway": {"strategy": "cacheAware"}}
    async with pair_behind("nixl", extra=extra) as (app, prefill, decode):
        short = await kit.http(app.server.port, "POST", CHAT, chat_body("Hi", max_tokens=2))
        assert short.status == 200
        assert "x-calinix-prefill-pod-id" not in short.headers
        assert (prefill.served, decode.served) == (0, 1)
        assert "x-calinix-prefill-pod-id" in (await ask(app)).headers
        assert prefill.served == 1
        cached = await ask(app)
        assert cached.status == 200
        assert "x-calinix-prefill-pod-id" not in cached.headers
        assert (prefill.served, decode.served) == (1, 3)
        assert json.loads(decode.received[-1].body) == chat_body(LONG, max_tokens=5)


@kit.on_loop
async def test_sglang_pods_are_never_without_a_prefill() -> None:
    """`auto` before SGLang pods: the threshold does not hold, since they would refuse."""
    extra = {"upstreams": {"dispatch": {"prefillThreshold": 1000}}}
    async with pair_behind("sglang", "auto", extra) as (app, prefill, _):
        for _ in range(2):
            reply = await ask(app)
            assert reply.status == 200
            assert reply.headers["x-calinix-prefill-pod-id"] == "p"
        assert prefill.served == 2


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"prompt_logprobs": 1}, {"use_beam_search": True}], ids=str
)
@kit.on_loop
async def test_what_cannot_be_split_has_no_prefill_pod(more: dict[str, Any]) -> None:
    """It is planned as one leg: no header, no load and no cache entry of a prefill pod."""
    async with pair_behind("nixl") as (app, prefill, decode):
        reply = await ask(app, **more)
        assert reply.status == 200
        assert reply.headers["x-calinix-target-pod-id"] == "d"
        assert "x-calinix-prefill-pod-id" not in reply.headers
        assert (prefill.served, decode.served) == (0, 1)
        shown = {pod["id"]: pod for pod in (await admin(app, "/admin/pods"))["pods"]}
        assert (shown["p"]["blocks"], shown["d"]["blocks"] > 0) == (0, True)


@kit.on_loop
async def test_several_answers_of_sglang_pods_are_refused() -> None:
    """A 400 that says what to do, instead of a request that its engine does not survive."""
    async with pair_behind("sglang") as (app, prefill, decode):
        reply = await ask(app, n=2)
        assert (reply.status, reply.json()["error"]["code"]) == (400, "one_answer_only")
        assert not prefill.received
        assert not decode.received


@pytest.mark.parametrize("kind", ["nixl", "plain"])
@kit.on_loop
async def test_prefill_usage_is_echoed_where_it_is_asked_for(kind: str) -> None:
    """`x-calinix-prefill-usage: true` shows what the prefill pod counted; it goes to no pod."""
    async with pair_behind(kind) as (app, prefill, decode):
        body = chat_body(LONG, max_tokens=5)
        for asked in (False, True):
            headers = {"x-calinix-prefill-usage": "true"} if asked else {}
            reply = await kit.http(app.server.port, "POST", CHAT, body, headers)
            prompt = reply.json()["usage"]["prompt_tokens"]
            shown = reply.headers.get("x-calinix-prefill-prompt-tokens")
            assert shown == (str(prompt) if asked else None)
        # The second time the prompt was cached on the prefill pod, in full blocks.
        cached = int(reply.headers["x-calinix-prefill-cached-tokens"])
        assert cached == (prompt - 1) // 16 * 16
        assert (await outcome(app, reply.headers["x-request-id"]))["cachedTokens"] == cached
        for pod in (prefill, decode):
            assert "x-calinix-prefill-usage" not in pod.received[-1].headers


@kit.on_loop
async def test_ranks_are_told_in_a_header() -> None:
    """With several data-parallel ranks the prefill leg says which; the decode leg does not."""
    ids = b",".join(b'"%d":{"engine_id":"e%d"}' % (rank, rank) for rank in range(3))

    async def bootstrap(served: Served) -> None:
        await served.say(answer(b"{%b}" % ids))

    async with raw_pod() as prefill, raw_pod() as decode, raw_pod(bootstrap) as server:
        first = {"url": prefill.url, "bootstrapPort": server.port}
        config = dispatch_of({"p": first}, {"d": decode})
        config["upstreams"]["dispatch"]["protocol"] = "mooncake"
        async with gateway_of(config) as app:
            ranks = set[str]()
            for number in range(24):
                headers = {"x-data-parallel-rank": "7"}
                reply = await kit.http(app.server.port, "POST", CHAT, chat_body(), headers)
                assert reply.status == 200
                await until_asked(prefill, number + 1)
                (rank,) = [v for k, v in fields_of(prefill.requests[-1]) if "rank" in k]
                params = json.loads(body_of(decode.requests[-1]))["kv_transfer_params"]
                assert params["remote_engine_id"] == f"e{rank}"
                assert not [k for k, _ in fields_of(decode.requests[-1]) if "rank" in k]
                ranks.add(rank)
            assert ranks == {"0", "1", "2"}
            assert len(server.requests) == 1
            (query,) = server.requests
            assert query.startswith(b"GET /query HTTP/1.1\r\n")
            assert b"calinix" not in query


@kit.on_loop
async def test_a_bootstrap_server_that_is_not_there() -> None:
    """Another prefill pod is taken; where there is none, the error says what is wrong."""
    async with (
        MockPod(role="prefill", connector="mooncake") as good,
        MockPod(role="decode", connector="mooncake") as decode,
        raw_pod() as bad,
    ):
        first = {"url": bad.url, "bootstrapPort": 1}
        second = {"url": good.url, "bootstrapPort": good.connector.port}
        config = dispatch_of({"a": first, "b": second}, {"d": decode.url})
        config["upstreams"]["dispatch"]["protocol"] = "mooncake"
        async with gateway_of(config) as app:
            for _ in range(4):
                reply = await ask(app)
                assert reply.status == 200
                assert reply.headers["x-calinix-prefill-pod-id"] == "b"
            assert not bad.requests
        config = dispatch_of({"a": first}, {"d": decode.url})
        config["upstreams"]["dispatch"]["protocol"] = "mooncake"
        async with gateway_of(config) as app:
            reply = await ask(app)
            assert reply.status == 502
            assert "bootstrap server" in reply.json()["error"]["message"]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("busy", ["prefill", "decode"])
@pytest.mark.parametrize("kind", ["mooncake", "sglang"])
@kit.on_loop
async def test_a_busy_pod_of_a_pair_is_left_for_another(kind: str, busy: str, status: int) -> None:
    """A refusal says that the pod has not begun: both legs go out anew, and the answer is whole."""
    made = KINDS[kind]
    async with (
        MockPod(role="prefill", **made) as p1,
        MockPod(role="prefill", **made) as p2,
        MockPod(role="decode", **made) as d1,
        MockPod(role="decode", **made) as d2,
    ):
        first: dict[str, str | RawPod | dict[str, Any]] = {
            name: {"url": pod.url, "bootstrapPort": pod.connector.port}
            for name, pod in (("p1", p1), ("p2", p2))
        }
        config = dispatch_of(first, {"d1": d1.url, "d2": d2.url})
        config["upstreams"]["dispatch"]["protocol"] = kind
        async with gateway_of(config) as app:
            (p1 if busy == "prefill" else d1).add_faults([Fault(kind="status", status=status)])
            for _ in range(3):
                reply = await ask(app, stream=True)
                assert (reply.status, reply.events()[-1]) == (200, "[DONE]")
            pods = (p1, p2, d1, d2)
            # Mooncake: a prefill that was over when its decode pod refused waits for its lease.
            await kit.until(lambda: not any(pod.connector.pending() for pod in pods), "none waits")
            assert sum(pod.served for pod in (d1, d2)) == 3


@pytest.mark.parametrize("busy", ["prefill", "decode"])
@kit.on_loop
async def test_where_there_is_no_other_pair_the_refusal_is_the_answer(busy: str) -> None:
    """A pod's own 503 is passed on, and the leg that waited for it is taken back."""
    async with pair_behind("sglang") as (app, prefill, decode):
        refusing, waiting = (prefill, decode) if busy == "prefill" else (decode, prefill)
        refusing.add_faults([Fault(kind="status", status=503)])
        reply = await ask(app, stream=True)
        assert reply.status == 503
        assert reply.json()["error"]["message"] == "injected fault"
        await kit.until(lambda: not waiting.connector.pending(), "it is taken back")
        assert waiting.served == 0


@kit.on_loop
async def test_an_error_in_the_prefills_stream_ends_the_request() -> None:
    """SGLang says 200 and then an error event: its status and words are the client's answer."""
    async with (
        MockPod(role="prefill", dialect="sglang", figures=PodFigures(delay_s=30)) as prefill,
        MockPod(role="decode", dialect="sglang") as decode,
    ):
        first = {"url": prefill.url, "bootstrapPort": prefill.connector.port}
        config = dispatch_of({"p": first}, {"d": decode.url})
        config["upstreams"]["dispatch"]["protocol"] = "sglang"
        async with gateway_of(config) as app:
            asking = asyncio.create_task(ask(app, stream=True))
            await kit.until(lambda: prefill.model.running == 1, "it computes")
            (generation,) = prefill._serving.values()
            assert isinstance(generation, Generation)
            generation.fail("KV transfer failed", 507, "InternalServerError")
            reply = await asking
            assert reply.status == 507
            assert reply.json()["error"]["message"] == "KV transfer failed"
            await kit.until(lambda: decode.cancelled == 1, "the decode pod is let go")
