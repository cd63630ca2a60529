"""Prefill and decode mocks with a bootstrap server, driven by the router's own exchanges."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

import kit
from calinix.core.prompt import Endpoint
from calinix.edge.http_client import PodClient
from calinix.edge.identify import Identity, identify
from calinix.engines.base import LegAnswer, Prefiller
from calinix.engines.protocols import exchange_for
from calinix.sim.mock_pod import MockPod
from calinix.sim.pod_model import PodFigures
from pdkit import BODIES, PATHS, texts

KINDS: dict[str, dict[str, Any]] = {
    "mooncake": {"connector": "mooncake"},
    "sglang": {"dialect": "sglang"},
}
CHAT = "/v1/chat/completions"
ASKED = BODIES[Endpoint.CHAT]


@asynccontextmanager
async def pair(kind: str, **settings: Any) -> AsyncIterator[tuple[MockPod, MockPod]]:
    """A prefill and a decode pod that can exchange KV; `settings` are the decode pod's."""
    async with (
        MockPod(role="prefill", **KINDS[kind]) as prefill,
        MockPod(role="decode", **KINDS[kind], **settings) as decode,
    ):
        yield prefill, decode


def prefiller_of(pod: MockPod) -> Prefiller:
    """What a router knows of a prefill pod."""
    return Prefiller("127.0.0.1", pod.connector.port)


_numbers = itertools.count(1)


async def legs_of(
    kind: Any, prefill: MockPod, body: dict[str, Any], endpoint: Endpoint = Endpoint.CHAT
) -> tuple[bytes, bytes]:
    """The bodies of the prefill and the decode leg."""
    encoded = msgspec.json.encode(body)
    exchange = exchange_for(
        kind, "dispatch", endpoint, encoded, prefiller_of(prefill), lambda _: next(_numbers)
    )
    legs = exchange.start()
    if legs[0].bootstrap_path:
        reply = await kit.http(prefill.connector.port, "GET", legs[0].bootstrap_path)
        legs = exchange.after(legs[0], LegAnswer(reply.status, reply.body))
    first, second = legs
    assert (first.role, second.role) == ("prefill", "decode")
    return first.body, second.body


async def both(
    kind: Any, prefill: MockPod, decode: MockPod, endpoint: Endpoint, body: dict[str, Any]
) -> tuple[kit.Reply, kit.Reply]:
    """Sends both legs at once; their answers."""
    first, second = await legs_of(kind, prefill, body, endpoint)
    path = PATHS[endpoint]
    one, two = await asyncio.gather(
        kit.http(prefill.port, "POST", path, first), kit.http(decode.port, "POST", path, second)
    )
    return one, two


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
@pytest.mark.parametrize("kind", KINDS)
@kit.on_loop
async def test_a_pair_answers_like_a_single_pod(
    kind: str, endpoint: Endpoint, stream: bool
) -> None:
    """The decode pod says what a single pod says, the prompt is loaded, and nothing is kept."""
    body = BODIES[endpoint] | {"stream": stream, "stream_options": {"include_usage": True}}
    body = body if stream else BODIES[endpoint]
    async with pair(kind) as (prefill, decode), MockPod(**KINDS[kind]) as single:
        first, reply = await both(kind, prefill, decode, endpoint, body)
        alone = await kit.http(single.port, "POST", PATHS[endpoint], body)
        assert (first.status, reply.status, alone.status) == (200, 200, 200)
        if stream:
            said, expected = ([json.loads(e) for e in r.events()[:-1]] for r in (reply, alone))
            assert [e["choices"] for e in said] == [e["choices"] for e in expected]
            assert said[-1]["usage"]["completion_tokens"] == 9
        else:
            assert texts(reply.json()) == texts(alone.json())
        loaded = decode.model.counters
        assert loaded.external_tokens == loaded.prompt_tokens > 90
        assert prefill.model.counters.output_tokens == 1
        await kit.until(lambda: prefill.model.held == prefill.model.blocks.used == 0, "all is free")
        assert not prefill.connector.pending()
        assert not decode.connector.pending()


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("kind", KINDS)
@kit.on_loop
async def test_either_leg_may_come_first(kind: str, first: str) -> None:
    """Whichever pod hears of the request first waits for the other."""
    async with pair(kind) as (prefill, decode):
        bodies = await legs_of(kind, prefill, ASKED)
        pods = [(prefill, bodies[0]), (decode, bodies[1])]
        if first == "decode":
            pods.reverse()
        (early, body), (late, other) = pods
        waiting = asyncio.create_task(kit.http(early.port, "POST", CHAT, body))
        await kit.until(lambda: len(early.received) == 1, "the first leg is there")
        if (kind, first) == ("mooncake", "prefill"):
            await kit.until(lambda: prefill.model.held == 1, "its blocks wait to be pulled")
        reply = await kit.http(late.port, "POST", CHAT, other)
        assert reply.status == (await waiting).status == 200


@pytest.mark.parametrize("kind", KINDS)
@kit.on_loop
async def test_a_decode_pod_waits_for_a_prefill_that_never_comes(kind: str) -> None:
    """It hangs, as real ones do, until its client leaves; then nothing is left of it."""
    async with pair(kind) as (prefill, decode):
        _, body = await legs_of(kind, prefill, ASKED)
        exchange = await kit.Exchange.send(decode.port, kit.request_bytes("POST", CHAT, body))
        await kit.until(lambda: len(decode.connector.pending()) == 1, "it waits")
        await exchange.leave()
        await kit.until(lambda: not decode.connector.pending(), "it is given up")
        assert (decode.cancelled, decode.served, decode.dead) == (1, 0, False)


@pytest.mark.parametrize("kind", KINDS)
@kit.on_loop
async def test_a_decode_pod_gives_up_in_the_end(kind: str) -> None:
    """After its own time-out it answers 500, in a stream an error event."""
    async with pair(kind, transfer_timeout_s=0.1) as (prefill, decode):
        for stream in (False, True):
            _, body = await legs_of(kind, prefill, ASKED | {"stream": stream})
            reply = await kit.http(decode.port, "POST", CHAT, body)
            if stream:
                assert '"error"' in reply.events()[0]
            else:
                assert reply.status == 500
        assert decode.model.running == decode.served == 0


@pytest.mark.parametrize("kind", KINDS)
@kit.on_loop
async def test_an_aborted_prefill_fails_its_decode(kind: str) -> None:
    """The client of the prefill leg leaves while it computes: the decode pod gets no KV."""
    slow = PodFigures(delay_s=30.0)
    async with (
        MockPod(role="prefill", figures=slow, **KINDS[kind]) as prefill,
        MockPod(role="decode", **KINDS[kind]) as decode,
    ):
        first, second = await legs_of(kind, prefill, ASKED)
        leg = await kit.Exchange.send(prefill.port, kit.request_bytes("POST", CHAT, first))
        waiting = asyncio.create_task(kit.http(decode.port, "POST", CHAT, second))
        await kit.until(lambda: prefill.model.running == 1, "it computes")
        await kit.until(lambda: decode.connector.pending() != [], "the other waits")
        await leg.leave()
        reply = await waiting
        assert reply.status == 500
        assert b"abort" in reply.body
        assert prefill.model.blocks.used == 0


@kit.on_loop
async def test_mooncake_blocks_are_freed_when_nobody_pulls_them() -> None:
    """The prefill pod keeps them for its lease and no longer; what is not known is a 500."""
    async with (
        MockPod(role="prefill", connector="mooncake", lease_s=0.1) as prefill,
        MockPod(role="decode", connector="mooncake", transfer_timeout_s=0.1) as decode,
    ):
        first, second = await legs_of("mooncake", prefill, ASKED)
        reply = await kit.http(prefill.port, "POST", CHAT, first)
        assert reply.json()["kv_transfer_params"] is None
        assert prefill.model.held == 1
        await kit.until(lambda: prefill.model.held == 0, "the lease ends")
        assert (await kit.http(decode.port, "POST", CHAT, second)).status == 500
        other = second.replace(prefill.engine_id.encode(), b"another")
        reply = await kit.http(decode.port, "POST", CHAT, other)
        assert reply.status == 500
        assert b"no engine another" in reply.body


@pytest.mark.parametrize("role", ["prefill", "decode"])
@kit.on_loop
async def test_sglang_needs_a_room_and_does_not_survive_a_shared_one(role: Any) -> None:
    """Without a room: 400, in a stream an event. Twice the same, or samples in one: the end."""
    async with MockPod(role=role, dialect="sglang") as pod:
        reply = await kit.http(pod.port, "POST", CHAT, ASKED)
        assert (reply.status, reply.json()["object"]) == (400, "error")
        reply = await kit.http(pod.port, "POST", CHAT, ASKED | {"stream": True})
        assert reply.status == 200
        assert json.loads(reply.events()[0])["error"]["code"] == 400
        room = ASKED | {"bootstrap_room": 7, "bootstrap_host": "127.0.0.1", "bootstrap_port": 1}
        victim = await kit.Exchange.send(pod.port, kit.request_bytes("POST", CHAT, room))
        await kit.until(lambda: pod.connector.pending() != [], "it is in the room")
        assert (await kit.http(pod.port, "POST", CHAT, room)).status == 0
        assert pod.dead
        assert not (await victim.reply()).complete
        await kit.http(pod.port, "DELETE", "/mock/faults")
        samples = room | {"n": 2}
        assert (await kit.http(pod.port, "POST", CHAT, samples)).status == 0
        assert pod.dead


@kit.on_loop
async def test_a_batch_has_a_room_for_each_prompt() -> None:
    """Three prompts of one request pass through three rooms of one pair."""
    body = {"prompt": ["one two three", "four five", "six"], "max_tokens": 3}
    async with pair("sglang") as (prefill, decode):
        first, reply = await both("sglang", prefill, decode, Endpoint.COMPLETIONS, body)
        assert (first.status, reply.status) == (200, 200)
        assert len(reply.json()["choices"]) == 3
        assert decode.model.counters.external_tokens == decode.model.counters.prompt_tokens


@kit.on_loop
async def test_what_a_pod_says_that_it_is() -> None:
    """By /version it is vLLM, by /server_info SGLang with its bootstrap port."""
    loop = asyncio.get_running_loop()
    async with (
        MockPod() as vllm,
        MockPod(role="prefill", dialect="sglang", api_key="k") as sglang,
    ):
        found = []
        for pod in (vllm, sglang):
            client = PodClient(pod.url, loop, connect_timeout_s=1.0)
            found.append(await identify(client, pod.api_key, timeout_s=1.0))
            client.close()
        assert found == [
            Identity("vllm", "0.32.0"),
            Identity("sglang", "0.5.23", sglang.connector.port),
        ]
        page = (await kit.http(sglang.port, "GET", "/metrics")).body
        assert b'sglang:num_running_reqs{engine_type="prefill",model_name="mock"' in page
        models = await kit.http(
            sglang.port, "GET", "/v1/models", None, {"authorization": "Bearer k"}
        )
        assert models.json()["data"][0]["owned_by"] == "sglang"
        assert (await kit.http(sglang.port, "GET", "/version")).status == 404
        info = (await kit.http(sglang.port, "GET", "/model_info")).json()
        assert info["disaggregation_mode"] == "prefill"
