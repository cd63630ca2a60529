"""Faults over real sockets: what a hung, cut, dead, slow or leaving party does to everyone else.

Each pod stands behind a fault proxy that also counts the POSTs it carries. `kit.gateway` checks at
the end of every test that all leases were given back, `kit.run` that nothing was left running.
"""

from __future__ import annotations

import asyncio

import pytest

import kit
from fleets import fleet_of, gateway_of
from streams import ROUND_ROBIN, SLOW_TOKENS, ask, chat, is_broken_openly, is_whole, timeouts


@kit.on_loop
async def test_a_hung_pod_does_not_slow_the_other() -> None:
    """One of two pods hangs: what goes to the other is answered at once, the rest gets a 504."""
    async with (
        fleet_of(single=2) as fleet,
        gateway_of(fleet.config(timeouts(firstTokenMs=1500))) as gateway,
    ):
        port = gateway.server.port
        assert is_whole(await ask(port, chat()))
        assert is_whole(await ask(port, chat()))
        fleet.proxies["single-1"].stall()
        loop = asyncio.get_running_loop()
        start = loop.time()
        ended: list[tuple[float, kit.Reply]] = []

        async def one(number: int) -> None:
            reply = await ask(port, chat(f"{number} bottles"))
            ended.append((loop.time() - start, reply))

        await asyncio.gather(*(one(number) for number in range(20)))
        good = [seconds for seconds, reply in ended if is_whole(reply)]
        bad = [(seconds, reply) for seconds, reply in ended if not is_whole(reply)]
        assert len(good) == len(bad) == 10
        assert max(good) < 1.0
        for seconds, reply in bad:
            assert reply.status == 504
            assert 1.4 < seconds < 4.0
        fleet.proxies["single-1"].restore()


@pytest.mark.parametrize("reset", [True, False], ids=["rst", "fin"])
@kit.on_loop
async def test_a_cut_stream_ends_with_an_error_and_one_post(reset: bool) -> None:
    """A stream cut half-way: the tokens so far, an explicit error, and the pod was asked once."""
    async with (
        fleet_of(single=2, figures=SLOW_TOKENS) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as gateway,
    ):
        exchange = await kit.Exchange.send(gateway.server.port, chat(max_tokens=200))
        await exchange.read_until(b"data:", times=5)
        for proxy in fleet.proxies.values():
            proxy.cut(reset=reset)
        reply = await exchange.reply()
        assert reply.status == 200
        assert is_broken_openly(reply)
        assert not reply.complete
        assert fleet.posts("single-1") + fleet.posts("single-2") == 1


@kit.on_loop
async def test_a_cut_answer_that_is_not_streamed_is_a_502() -> None:
    """Cut inside a body with a length, before any of it was passed on: one POST and a true 502."""
    async with (
        fleet_of(single=2) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as gateway,
    ):
        for proxy in fleet.proxies.values():
            proxy.cut(after_bytes=60)
        reply = await ask(gateway.server.port, chat(stream=False))
        assert reply.status == 502
        assert reply.json()["error"]["type"] == "upstream_error"
        assert fleet.posts("single-1") + fleet.posts("single-2") == 1


@kit.on_loop
async def test_refused_connections_are_retried_elsewhere() -> None:
    """One pod refuses connections: every request is answered once, by the other."""
    async with (
        fleet_of(single=2) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as gateway,
    ):
        dead = fleet.proxies["single-1"]
        dead.refuse()
        dead.cut()
        replies = [await ask(gateway.server.port, chat(f"{n}")) for n in range(8)]
        assert all(is_whole(reply) for reply in replies)
        assert {r.headers["x-calinix-target-pod-id"] for r in replies} == {"single-2"}
        assert (fleet.posts("single-1"), fleet.posts("single-2")) == (0, 8)


@kit.on_loop
async def test_every_pod_refusing_is_an_error() -> None:
    """No pod listens: the client hears of it at once, with Retry-After or as a 502."""
    async with (
        fleet_of(single=2) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as gateway,
    ):
        for proxy in fleet.proxies.values():
            proxy.refuse()
            proxy.cut()
        reply = await ask(gateway.server.port, chat())
        assert reply.status in (502, 503)
        assert reply.complete
        assert reply.json()["error"]["message"]


@kit.on_loop
async def test_an_idle_connection_closed_by_the_pod_costs_nothing() -> None:
    """The pod closes a kept connection between two requests: the next one is answered, once."""
    async with (
        fleet_of(single=1) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as gateway,
    ):
        for reset in (False, True):
            assert is_whole(await ask(gateway.server.port, chat()))
            fleet.proxies["single-1"].cut(reset=reset)
        assert is_whole(await ask(gateway.server.port, chat()))
        assert fleet.posts("single-1") == 3


@kit.on_loop
async def test_a_stream_that_stalls_ends_after_idle_ms() -> None:
    """No event within idleMs: an error event and the end, though the connection still stands."""
    async with (
        fleet_of(single=1, figures=SLOW_TOKENS) as fleet,
        gateway_of(fleet.config(timeouts(idleMs=300))) as gateway,
    ):
        exchange = await kit.Exchange.send(gateway.server.port, chat(max_tokens=200))
        await exchange.read_until(b"data:", times=3)
        fleet.proxies["single-1"].stall()
        reply = await exchange.reply()
        assert is_broken_openly(reply)
        assert "idleMs" in reply.events()[-1]
        await kit.until(
            lambda: fleet.proxies["single-1"].open_links <= 1, "the pod's link is closed"
        )


@kit.on_loop
async def test_a_slow_network_loses_nothing() -> None:
    """A pod behind a slow line: the stream is whole, byte for byte, and counts as healthy."""
    async with (
        fleet_of(single=1) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as gateway,
    ):
        fleet.proxies["single-1"].slow(bytes_per_s=8_000)
        reply = await ask(gateway.server.port, chat(max_tokens=10))
        assert is_whole(reply)


@kit.on_loop
async def test_a_client_that_leaves_frees_its_pod() -> None:
    """The client goes away in mid-stream: within 1 s the pod's connection is closed."""
    async with (
        fleet_of(single=1, figures=SLOW_TOKENS) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as gateway,
    ):
        proxy = fleet.proxies["single-1"]
        await kit.until(lambda: proxy.open_links <= 1, "only the probe's link")
        exchange = await kit.Exchange.send(gateway.server.port, chat(max_tokens=2000))
        await exchange.read_until(b"data:", times=3)
        busy = next(link for link in proxy.links if b"POST /v1/" in link.up)
        assert busy.task is not None
        await exchange.leave()
        await kit.until(busy.task.done, "the pod's link is closed", timeout_s=1.0)


@kit.on_loop
async def test_a_pod_that_comes_back_gets_work_again() -> None:
    """A pod taken out by failed probes is brought back by good ones."""
    quick = {"intervalMs": 50, "timeoutMs": 500, "healthyThreshold": 2, "unhealthyThreshold": 2}
    async with fleet_of(single=2) as fleet:
        config = fleet.config({"gateway": {"strategy": "roundRobin"}, "health": quick})
        async with gateway_of(config) as gateway:
            gone = fleet.proxies["single-1"]

            async def targets() -> set[str]:
                replies = [await ask(gateway.server.port, chat(f"{n}")) for n in range(4)]
                assert all(is_whole(reply) for reply in replies)
                return {reply.headers["x-calinix-target-pod-id"] for reply in replies}

            async def both() -> bool:
                return await targets() == {"single-1", "single-2"}

            async def only_the_other() -> bool:
                return await targets() == {"single-2"}

            await kit.until(both, "both pods get work")
            gone.refuse()
            gone.cut()
            await kit.until(only_the_other, "the dead pod gets none")
            gone.restore()
            await kit.until(both, "the pod that came back gets work")
