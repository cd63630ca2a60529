"""kill -9 of a pod and SIGTERM of the gateway, under load, with processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, SIGTERM

import kit
from calinix.sim.pod_model import PodFigures
from faultproxy import FaultProxy, reserve_port
from fleets import fleet_of, gateway_of, merged
from streams import ROUND_ROBIN, chat, is_broken_openly, is_whole


async def load(
    port: int, until_false: Callable[[], bool], clients: int = 12
) -> dict[str, kit.Reply]:
    """Closed loop: each client streams one answer after the other; a refused connect ends it.

    The replies by prompt, and no two prompts are equal.
    """
    replies: dict[str, kit.Reply] = {}

    async def client(number: int) -> None:
        turn = 0
        while until_false():
            turn += 1
            prompt = f"client {number}, turn {turn}."
            try:
                exchange = await kit.Exchange.send(port, chat(prompt, max_tokens=20))
            except OSError:
                return
            replies[prompt] = await exchange.reply()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return replies


@kit.on_loop
async def test_a_killed_pod_loses_only_what_had_begun_on_it(tmp_path: Path) -> None:
    """Kill -9 under load: 502 or an error event for what it had begun, all else is whole."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(reserve_port()).getsockname()[1] for _ in range(2)]
        arguments = [
            ("mock-pod", "--role", "single", "--port", str(port), "--token-delay", "0.01")
            for port in ports
        ]
        async with (
            kit.Process(tmp_path, *arguments[0]) as victim,
            kit.Process(tmp_path, *arguments[1]) as other,
            FaultProxy(ports[0]) as first,
            FaultProxy(ports[1]) as second,
        ):
            await victim.ready(ports[0], "/health")
            await other.ready(ports[1], "/health")
            pods = [{"id": "victim", "url": first.url}, {"id": "other", "url": second.url}]
            config = merged(ROUND_ROBIN, {"upstreams": {"single": {"pods": pods}}})
            async with gateway_of(config) as gateway:
                running = True
                work = asyncio.ensure_future(load(gateway.server.port, lambda: running))
                await kit.until(lambda: first.count(b"POST /v1/") >= 24, "load on the victim")
                victim.send(SIGKILL)
                first.refuse()
                at_death = second.count(b"POST /v1/")
                await kit.until(lambda: second.count(b"POST /v1/") >= at_death + 48, "work goes on")
                running = False
                replies = await work
    lost = {prompt: reply for prompt, reply in replies.items() if not is_whole(reply)}
    assert 1 <= len(lost) <= 12
    for prompt, reply in lost.items():
        assert reply.headers["x-calinix-target-pod-id"] == "victim"
        assert reply.status == 502 or is_broken_openly(reply)
        assert (first.count(prompt.encode()), second.count(prompt.encode())) == (1, 0)
    for prompt in replies.keys() - lost.keys():
        # One that met a closed kept connection was sent again; the other pod served it once.
        assert first.count(prompt.encode()) <= 1
        assert second.count(prompt.encode()) <= 1


@kit.on_loop
async def test_sigterm_under_load_loses_nothing(tmp_path: Path) -> None:
    """SIGTERM: whoever was connected gets a whole answer, later comers are refused, exit is 0."""
    async with (
        fleet_of(single=2, figures=PodFigures(token_delay_s=0.01)) as fleet,
        kit.Serve(tmp_path, fleet.config(ROUND_ROBIN)) as served,
    ):
        work = asyncio.ensure_future(load(served.port, lambda: True))
        await kit.until(lambda: fleet.posts("single-1") >= 24, "load on the pods")
        served.send(SIGTERM)
        replies = await work
        assert await served.ended() == 0, served.output()
    assert len(replies) > 24
    assert [reply for reply in replies.values() if not is_whole(reply)] == []
