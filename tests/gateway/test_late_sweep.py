"""Where the gateway itself was late, no pod is blamed for it."""

from __future__ import annotations

import asyncio
import time

import kit
from fleets import gateway_of
from gatewaykit import CHAT, Served, answer, chat_body, config_of, failures_of, raw_pod, times


@kit.on_loop
async def test_a_stalled_process_times_nobody_out() -> None:
    """The process stands still for longer than a time-out: answers that came meanwhile count."""
    stalled = asyncio.Event()

    async def script(served: Served) -> None:
        stalled.set()
        await served.say(answer(b'{"choices":[]}'))

    async with (
        raw_pod(script) as pod,
        gateway_of(config_of(times(totalMs=300), p=pod)) as app,
    ):
        asking = asyncio.create_task(kit.http(app.server.port, "POST", CHAT, chat_body()))
        await stalled.wait()
        time.sleep(0.6)  # noqa: ASYNC251  that is what is tested: nothing runs
        reply = await asking
        assert reply.status == 200
        assert await failures_of(app) == [0]


@kit.on_loop
async def test_a_pod_that_is_late_itself_is_timed_out_all_the_same() -> None:
    """What was forgiven is one look, not the time-out."""
    begun = asyncio.Event()

    async def script(served: Served) -> None:
        begun.set()
        await served.left()
        served.hang_up()

    async with (
        raw_pod(script) as pod,
        gateway_of(config_of(times(totalMs=300), p=pod)) as app,
    ):
        asking = asyncio.create_task(kit.http(app.server.port, "POST", CHAT, chat_body()))
        await begun.wait()
        time.sleep(0.6)  # noqa: ASYNC251
        began_s = asyncio.get_running_loop().time()
        assert (await asking).status == 504
        assert asyncio.get_running_loop().time() - began_s < 2.0
