"""Faults in dispatch: a leg that hangs, breaks or is refused, a client that leaves between legs."""

from __future__ import annotations

import asyncio

import pytest

import kit
from calinix.sim.pod_model import PodFigures
from fleets import fleet_of, gateway_of, leases_given_back
from streams import ROUND_ROBIN, SLOW_TOKENS, ask, chat, is_broken_openly, is_whole, timeouts


@kit.on_loop
async def test_a_hung_prefill_is_tried_elsewhere_once() -> None:
    """A prefill leg that does not answer within prefillMs goes to the other prefill pod."""
    async with (
        fleet_of(single=0, dispatch=2) as fleet,
        gateway_of(fleet.config(timeouts(prefillMs=300))) as gateway,
    ):
        port = gateway.server.port
        hung = fleet.proxies["prefill-1"]
        hung.stall()
        replies = await asyncio.gather(*(ask(port, chat(f"{n}")) for n in range(4)))
        assert all(is_whole(reply) for reply in replies)
        assert fleet.posts("prefill-2") == 4
        assert fleet.posts("decode-1") + fleet.posts("decode-2") == 4
        hung.restore()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@kit.on_loop
async def test_a_hung_prefill_reaches_the_client(stream: bool) -> None:
    """Every prefill pod hangs: an error within twice prefillMs, and decode is never asked."""
    async with (
        fleet_of(single=0, dispatch=2) as fleet,
        gateway_of(fleet.config(timeouts(prefillMs=300))) as gateway,
    ):
        for number in (1, 2):
            fleet.proxies[f"prefill-{number}"].stall()
        loop = asyncio.get_running_loop()
        start = loop.time()
        reply = await ask(gateway.server.port, chat(stream=stream))
        assert loop.time() - start < 2.0
        assert reply.status in (502, 504)
        assert reply.json()["error"]["message"]
        assert fleet.posts("decode-1") + fleet.posts("decode-2") == 0
        for number in (1, 2):
            fleet.proxies[f"prefill-{number}"].restore()


@kit.on_loop
async def test_a_cut_prefill_is_tried_elsewhere_once() -> None:
    """A prefill leg answers nobody, so one whose connection breaks may be sent again."""
    async with (
        fleet_of(single=0, dispatch=2) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as gateway,
    ):
        fleet.proxies["prefill-1"].cut(after_bytes=40)
        replies = [await ask(gateway.server.port, chat(f"{n}")) for n in range(4)]
        assert all(is_whole(reply) for reply in replies)
        assert fleet.posts("decode-1") + fleet.posts("decode-2") == 4


@kit.on_loop
async def test_a_refusing_decode_pod_keeps_the_prefill() -> None:
    """The decode pod refuses connections: another one is picked, and prefill is done once."""
    async with (
        fleet_of(single=0, dispatch=2) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as gateway,
    ):
        dead = fleet.proxies["decode-1"]
        dead.refuse()
        dead.cut()
        replies = [await ask(gateway.server.port, chat(f"{n}")) for n in range(4)]
        assert all(is_whole(reply) for reply in replies)
        assert {r.headers["x-calinix-decode-pod-id"] for r in replies} == {"decode-2"}
        assert fleet.posts("prefill-1") + fleet.posts("prefill-2") == 4
        assert fleet.posts("decode-2") == 4


@kit.on_loop
async def test_a_client_that_leaves_between_the_legs_frees_both() -> None:
    """The client goes away while prefill works: its link is closed, decode is never asked."""
    slow = PodFigures(delay_s=5.0)
    async with (
        fleet_of(single=0, dispatch=1, figures=slow) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as gateway,
    ):
        proxy = fleet.proxies["prefill-1"]
        exchange = await kit.Exchange.send(gateway.server.port, chat())
        await kit.until(lambda: fleet.posts("prefill-1") == 1, "prefill is asked")
        busy = next(link for link in proxy.links if b"POST /v1/" in link.up)
        assert busy.task is not None
        await exchange.leave()
        await kit.until(busy.task.done, "the prefill link is closed", timeout_s=1.0)
        await leases_given_back(gateway.admin.port if gateway.admin else 0)
        assert fleet.posts("decode-1") == 0


@kit.on_loop
async def test_a_cut_decode_stream_ends_with_an_error() -> None:
    """Dispatch: a stream cut in mid-decode is broken openly; neither leg is sent again."""
    async with (
        fleet_of(single=0, dispatch=2, figures=SLOW_TOKENS) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as gateway,
    ):
        exchange = await kit.Exchange.send(gateway.server.port, chat(max_tokens=200))
        await exchange.read_until(b"data:", times=5)
        for number in (1, 2):
            fleet.proxies[f"decode-{number}"].cut()
        assert is_broken_openly(await exchange.reply())
        assert fleet.posts("prefill-1") + fleet.posts("prefill-2") == 1
        assert fleet.posts("decode-1") + fleet.posts("decode-2") == 1
