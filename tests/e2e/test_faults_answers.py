"""Faults that pods answer: what is retried, what is passed on, what counts against the pod."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import kit
from calinix.sim.mock_faults import Fault
from fleets import fleet_of, gateway_of, merged
from streams import ROUND_ROBIN, ask, chat, is_broken_openly, is_whole, timeouts

EAGER = {"health": {"intervalMs": 60_000, "passive": {"failures": 3, "ejectMs": 60_000}}}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("status", [429, 503])
@kit.on_loop
async def test_back_pressure_goes_elsewhere(status: int, stream: bool) -> None:
    """429 and 503 mean that the pod did not begin: the other pod answers, each asked once."""
    async with fleet_of(single=2) as fleet, gateway_of(fleet.config(ROUND_ROBIN)) as gateway:
        fleet.pods["single-1"].add_faults([Fault(kind="status", status=status)])
        for number in range(4):
            reply = await ask(gateway.server.port, chat(f"{number}", stream=stream))
            assert reply.status == 200
            assert reply.headers["x-calinix-target-pod-id"] == "single-2"
        assert fleet.posts("single-2") == 4
        assert fleet.posts("single-1") <= 4


@pytest.mark.parametrize("status", [429, 503])
@kit.on_loop
async def test_back_pressure_of_every_pod_is_passed_on(status: int) -> None:
    """Where every pod refuses, the client gets the pod's own refusal, after two pods at most."""
    async with fleet_of(single=3) as fleet, gateway_of(fleet.config(ROUND_ROBIN)) as gateway:
        for pod in fleet.pods.values():
            pod.add_faults([Fault(kind="status", status=status)])
        reply = await ask(gateway.server.port, chat())
        assert reply.status == status
        assert sum(fleet.posts(pod_id) for pod_id in fleet.pods) == 2


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@kit.on_loop
async def test_a_500_is_passed_on(stream: bool) -> None:
    """A pod that answers 500 had begun: nobody else is asked, and the client sees its answer."""
    async with fleet_of(single=2) as fleet, gateway_of(fleet.config(ROUND_ROBIN)) as gateway:
        for pod in fleet.pods.values():
            pod.add_faults([Fault(kind="status", status=500)])
        reply = await ask(gateway.server.port, chat(stream=stream))
        assert reply.status == 500
        assert reply.json()["error"]["message"]
        assert fleet.posts("single-1") + fleet.posts("single-2") == 1


@kit.on_loop
async def test_headers_are_not_a_first_token() -> None:
    """A pod that sends a stream's head and then nothing: a true 504, not a 200 that goes silent."""
    async with (
        fleet_of(single=1) as fleet,
        gateway_of(fleet.config(timeouts(firstTokenMs=300))) as gateway,
    ):
        fleet.pods["single-1"].add_faults([Fault(kind="hangAfterHeaders", count=1)])
        reply = await ask(gateway.server.port, chat())
        assert reply.status == 504
        assert "firstTokenMs" in reply.json()["error"]["message"]
        assert is_whole(await ask(gateway.server.port, chat()))


@kit.on_loop
async def test_an_answer_that_takes_too_long_is_a_504() -> None:
    """Not streamed and not done within totalMs: 504, and the pod is asked again the next time."""
    config = merged(timeouts(totalMs=300), EAGER)
    async with fleet_of(single=1) as fleet, gateway_of(fleet.config(config)) as gateway:
        fleet.pods["single-1"].add_faults([Fault(kind="hang", count=4)])
        for _ in range(4):  # by itself no reason to eject: more often than passive.failures
            reply = await ask(gateway.server.port, chat(stream=False))
            assert reply.status == 504
        assert (await ask(gateway.server.port, chat(stream=False))).status == 200


@kit.on_loop
async def test_a_reset_in_mid_stream_is_an_error_event() -> None:
    """The pod's connection is reset after three events: an error event, and one POST."""
    async with fleet_of(single=2) as fleet, gateway_of(fleet.config(ROUND_ROBIN)) as gateway:
        for pod in fleet.pods.values():
            pod.add_faults([Fault(kind="reset", chunks=3)])
        reply = await ask(gateway.server.port, chat(max_tokens=20))
        assert is_broken_openly(reply)
        assert fleet.posts("single-1") + fleet.posts("single-2") == 1


@kit.on_loop
async def test_a_pod_that_fails_in_a_row_is_ejected() -> None:
    """After passive.failures 5xx in a row a pod gets no more work, though its probes are good."""
    strategy: dict[str, Any] = {"gateway": {"strategy": "roundRobin"}}
    async with fleet_of(single=2) as fleet, gateway_of(fleet.config(strategy | EAGER)) as gateway:
        fleet.pods["single-1"].add_faults([Fault(kind="status", status=500)])
        statuses = [(await ask(gateway.server.port, chat(f"{n}"))).status for n in range(12)]
        assert statuses.count(500) == fleet.posts("single-1") == 3
        assert statuses[-4:] == [200] * 4


@kit.on_loop
async def test_clients_mistakes_do_not_eject() -> None:
    """4xx says nothing of a pod: any number of bad requests leaves it in."""
    async with (
        fleet_of(single=1) as fleet,
        gateway_of(fleet.config(merged(ROUND_ROBIN, EAGER))) as gateway,
    ):
        port = gateway.server.port
        bad = {"model": "mock", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}
        for _ in range(8):
            assert (await kit.http(port, "POST", "/v1/chat/completions", bad)).status == 400
        assert is_whole(await ask(port, chat()))


@pytest.mark.parametrize("status", [500, 503])
@kit.on_loop
async def test_a_failing_prefill_is_tried_elsewhere_once(status: int) -> None:
    """A prefill leg's 5xx goes to the other prefill pod; where that fails too, it is passed on."""
    async with (
        fleet_of(single=0, dispatch=2) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as gateway,
    ):
        fault = Fault(kind="status", status=status)
        fleet.pods["prefill-1"].add_faults([fault])
        replies = [await ask(gateway.server.port, chat(f"{n}")) for n in range(4)]
        assert all(is_whole(reply) for reply in replies)
        fleet.pods["prefill-2"].add_faults([fault])
        before = fleet.posts("decode-1") + fleet.posts("decode-2")
        reply = await ask(gateway.server.port, chat("both are ill"))
        assert reply.status in (status, 502, 503)
        assert reply.json()["error"]["message"]
        assert fleet.posts("decode-1") + fleet.posts("decode-2") == before


@kit.on_loop
async def test_a_client_that_does_not_read_stalls_only_itself() -> None:
    """One client stops reading a long stream: its pod is held back, others are served."""
    body = {"model": "mock", "prompt": "Long", "max_tokens": 30_000, "n": 2, "stream": True}
    async with fleet_of(single=1) as fleet, gateway_of(fleet.config(ROUND_ROBIN)) as gateway:
        port = gateway.server.port
        data = kit.request_bytes("POST", "/v1/completions", body)
        # asyncio reads into a buffer of 128 KB and then pauses, until somebody takes from it.
        lazy = await kit.Exchange.send(port, data, receive_bytes=65_536)
        await kit.until(
            lambda: any(flight.client_blocked for flight in gateway.gateway.flights), "held back"
        )
        link = next(link for link in fleet.proxies["single-1"].links if b"POST /v1/" in link.up)
        passed = -1
        while passed != len(link.down):
            passed = len(link.down)
            await asyncio.sleep(0.2)
        assert not link.down.endswith(b"0\r\n\r\n")
        assert is_whole(await ask(port, chat()))
        assert is_whole(await lazy.reply())
