"""Prefill and decode mocks over real sockets, driven by the router's own exchanges."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

import kit
from calinix.core.prompt import Endpoint
from calinix.engines.base import Exchange, Leg, LegAnswer, Prefiller
from calinix.engines.protocols import exchange_for
from calinix.sim.mock_pod import MockPod
from calinix.sim.pod_model import PodFigures
from pdkit import BODIES, PATHS, texts


def exchange_of(protocol: Any, mode: Any, endpoint: Endpoint, body: bytes) -> Exchange:
    """The exchange of a request whose plan has a prefill pod."""
    return exchange_for(protocol, mode, endpoint, body, Prefiller("p", None))


@asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[tuple[MockPod, MockPod]]:
    """A prefill and a decode pod; `settings` are the decode pod's."""
    async with MockPod(role="prefill") as prefill, MockPod(role="decode", **settings) as decode:
        yield prefill, decode


async def prefilled(pod: MockPod, endpoint: Endpoint, body: dict[str, Any]) -> Leg:
    """Runs the prefill leg; the decode leg that follows."""
    exchange = exchange_of("nixl", "dispatch", endpoint, msgspec.json.encode(body))
    (leg,) = exchange.start()
    answer = await kit.http(pod.port, "POST", PATHS[endpoint], leg.body)
    (decode,) = exchange.after(leg, LegAnswer(answer.status, answer.body))
    return decode


@pytest.mark.parametrize("endpoint", PATHS)
@kit.on_loop
async def test_a_pair_answers_like_a_single_pod(endpoint: Endpoint) -> None:
    """The decode pod says what a single pod says, having loaded the whole prompt, once."""
    body, path = BODIES[endpoint], PATHS[endpoint]
    async with pair() as (prefill, decode), MockPod() as single:
        leg = await prefilled(prefill, endpoint, body)
        assert prefill.model.held == 1
        reply = await kit.http(decode.port, "POST", path, leg.body)
        alone = await kit.http(single.port, "POST", path, body)
        assert reply.status == 200
        assert texts(reply.json()) == texts(alone.json())
        assert prefill.model.held == prefill.model.blocks.used == 0
        assert prefill.connector.next_expiry_s() is None
        loaded = decode.model.counters
        assert loaded.external_tokens == loaded.prompt_tokens > 90
        assert loaded.computed_tokens == 0
        page = (await kit.http(decode.port, "GET", "/metrics")).body.decode()
        source = 'source="external_kv_transfer"'
        wanted = f'{{engine="0",model_name="mock",{source}}} {float(loaded.external_tokens)}'
        assert f"vllm:prompt_tokens_by_source_total{wanted}" in page


@kit.on_loop
async def test_a_streamed_answer_of_a_pair() -> None:
    """Streaming over a handle: head at once, then the tokens of the single answer."""
    body = BODIES[Endpoint.CHAT] | {"stream": True}
    async with pair() as (prefill, decode), MockPod() as single:
        leg = await prefilled(prefill, Endpoint.CHAT, body)
        reply = await kit.http(decode.port, "POST", PATHS[Endpoint.CHAT], leg.body)
        alone = await kit.http(single.port, "POST", PATHS[Endpoint.CHAT], body)
        deltas = [
            [json.loads(event)["choices"][0]["delta"] for event in one.events()[:-1]]
            for one in (reply, alone)
        ]
        assert deltas[0] == deltas[1]
        assert reply.events()[-1] == "[DONE]"


@kit.on_loop
async def test_a_prefill_that_is_repeated_hits_and_says_so() -> None:
    """The second prefill of a prompt reuses its blocks and tells how many tokens were cached."""
    async with pair() as (prefill, _):
        legs = [await prefilled(prefill, Endpoint.CHAT, BODIES[Endpoint.CHAT]) for _ in range(2)]
        first, second = (json.loads(leg.body)["kv_transfer_params"] for leg in legs)
        assert first["remote_prefill_cached_tokens"] == 0
        assert second["remote_prefill_cached_tokens"] == first["remote_num_tokens"] // 16 * 16
        assert first["remote_block_ids"][0][:-1] == second["remote_block_ids"][0][:-1]
        assert len(first["remote_block_ids"][0]) == -(-first["remote_num_tokens"] // 16)
        assert prefill.model.held == 2


CHANGES: dict[str, dict[str, Any]] = {
    "unknown request": {"remote_request_id": "cmpl-nobody"},
    "unknown engine": {"remote_engine_id": "00000000-0000-0000-0000-000000000000"},
    "other blocks": {"remote_block_ids": [[7]]},
    "nobody listens": {"remote_port": 1},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@kit.on_loop
async def test_a_handle_that_is_not_good(change: str, policy: str) -> None:
    """Under `fail` it is a 500, or in a stream an error event; under `recompute` it is served."""
    body = BODIES[Endpoint.COMPLETIONS]
    async with pair(failure_policy=policy) as (prefill, decode):
        leg = await prefilled(prefill, Endpoint.COMPLETIONS, body)
        broken = json.loads(leg.body)
        broken["kv_transfer_params"] |= CHANGES[change]
        path = PATHS[Endpoint.COMPLETIONS]
        reply = await kit.http(decode.port, "POST", path, broken)
        stream = await kit.http(decode.port, "POST", path, broken | {"stream": True})
        assert decode.model.counters.external_tokens == 0
        if policy == "recompute":
            assert (reply.status, decode.served) == (200, 2)
            assert stream.events()[-1] == "[DONE]"
            return
        assert (reply.status, reply.json()["error"]["type"]) == (500, "InternalServerError")
        assert stream.status == 200
        error, done = stream.events()
        assert (json.loads(error)["error"]["code"], done) == (500, "[DONE]")
        assert decode.model.running == decode.served == 0


@kit.on_loop
async def test_a_handle_works_once_and_until_its_lease_ends() -> None:
    """Used up, or expired: 500. At the lease's end the prefill pod frees the blocks by itself."""
    path, body = PATHS[Endpoint.CHAT], BODIES[Endpoint.CHAT]
    async with (
        MockPod(role="prefill", lease_s=0.2) as prefill,
        MockPod(role="decode") as decode,
    ):
        leg = await prefilled(prefill, Endpoint.CHAT, body)
        assert (await kit.http(decode.port, "POST", path, leg.body)).status == 200
        assert (await kit.http(decode.port, "POST", path, leg.body)).status == 500
        late = await prefilled(prefill, Endpoint.CHAT, body)
        await kit.until(lambda: prefill.model.held == 0, "the lease ends")
        assert prefill.model.blocks.used == 0
        assert (await kit.http(decode.port, "POST", path, late.body)).status == 500


@kit.on_loop
async def test_a_changed_prompt_does_not_fit_its_handle() -> None:
    """KV of another prompt would be nonsense: the token counts must agree."""
    async with pair() as (prefill, decode):
        leg = await prefilled(prefill, Endpoint.COMPLETIONS, BODIES[Endpoint.COMPLETIONS])
        changed = json.loads(leg.body) | {"prompt": "something else"}
        reply = await kit.http(decode.port, "POST", PATHS[Endpoint.COMPLETIONS], changed)
        assert reply.status == 500
        assert "the prompt has" in reply.json()["error"]["message"]


@kit.on_loop
async def test_wrong_types_and_no_handle() -> None:
    """A handle of another type is the captured 400; without one a decode pod serves as it is."""
    path, body = PATHS[Endpoint.COMPLETIONS], BODIES[Endpoint.COMPLETIONS]
    async with MockPod(role="decode") as decode:
        wrong = await kit.http(decode.port, "POST", path, body | {"kv_transfer_params": "x"})
        assert wrong.status == 400
        assert wrong.json()["error"]["message"] == (
            "1 validation error:\n  {'type': 'dict_type', 'loc': 'body.kv_transfer_params', "
            "'msg': 'Input should be a valid dictionary', 'input': 'x'}"
        )
        assert (await kit.http(decode.port, "POST", path, body)).status == 200


@pytest.mark.parametrize("role", ["single", "decode"])
@kit.on_loop
async def test_only_a_prefill_pod_issues_handles(role: Any) -> None:
    """Asked for `do_remote_decode`, any other pod answers without a handle and keeps nothing."""
    async with MockPod(role=role) as pod:
        exchange = exchange_of(
            "nixl", "dispatch", Endpoint.CHAT, msgspec.json.encode(BODIES[Endpoint.CHAT])
        )
        (leg,) = exchange.start()
        answer = (await kit.http(pod.port, "POST", PATHS[Endpoint.CHAT], leg.body)).json()
        assert answer["kv_transfer_params"] is None
        assert answer["usage"]["completion_tokens"] == 1
        assert (pod.model.held, pod.model.blocks.used) == (0, 0)


@kit.on_loop
async def test_half_a_handle_hangs_and_then_kills_the_engine() -> None:
    """As seen on real pods: no answer, and when the client leaves, all on the pod is lost."""
    path, body = PATHS[Endpoint.CHAT], BODIES[Endpoint.CHAT]
    half = body | {"kv_transfer_params": {"do_remote_prefill": True}}
    async with MockPod(role="decode", figures=PodFigures(token_delay_s=0.01)) as pod:
        bystander = body | {"max_tokens": 5000, "stream": True}
        victim = await kit.Exchange.send(pod.port, kit.request_bytes("POST", path, bystander))
        await victim.read_until(b"data:")
        poison = await kit.Exchange.send(pod.port, kit.request_bytes("POST", path, half))
        await kit.until(lambda: len(pod.received) == 2, "the half handle has arrived")
        assert (await kit.http(pod.port, "GET", "/health")).status == 200
        await poison.leave()
        await kit.until(lambda: pod.dead, "the engine died")
        assert not (await victim.reply()).complete
        assert (await kit.http(pod.port, "GET", "/health")).status == 503
        dead = await kit.http(pod.port, "POST", path, body)
        assert (dead.status, dead.json()["error"]["type"]) == (500, "InternalServerError")
        await kit.http(pod.port, "DELETE", "/mock/faults")
        assert (await kit.http(pod.port, "POST", path, body)).status == 200
