"""Where the gateway itself was late, no pod is blamed for it."""

from __future__ import annotations

import asyncio
import socket
import time

import kit
from fleets import gateway_of
from gatewaykit import CHAT, Served, answer, chat_body, config_of, failures_of, raw_pod, times

STALL_S = 0.6
TIMES = times(totalMs=300)


async def ask_and_stand_still(said: bytes) -> tuple[kit.Reply, list[int]]:
    """The client's answer, and the pod's failures in a row.

    When the pod has the request it says `said`, and the process stands still: in the midst of
    reading sockets, as when one of many answers takes long to handle. What comes into others
    meanwhile is not seen before the timers have run.
    """
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[Served] = loop.create_future()

    async def script(served: Served) -> None:
        asked.set_result(served)
        await served.left()
        served.hang_up()

    near, far = socket.socketpair()
    with near, far:
        async with raw_pod(script) as pod, gateway_of(config_of(TIMES, p=pod)) as app:
            asking = asyncio.create_task(kit.http(app.server.port, "POST", CHAT, chat_body()))
            served = await asked

            def stand_still() -> None:
                loop.remove_reader(near)
                served.writer.write(said)
                time.sleep(STALL_S)

            loop.add_reader(near, stand_still)
            far.send(b"x")
            return await asking, await failures_of(app)


@kit.on_loop
async def test_a_stalled_process_times_nobody_out() -> None:
    """It stands still for longer than a time-out: answers that came meanwhile are read first."""
    reply, failures = await ask_and_stand_still(answer(b'{"choices":[]}'))
    assert reply.status == 200
    assert failures == [0]


@kit.on_loop
async def test_a_pod_that_is_late_itself_is_timed_out_all_the_same() -> None:
    """What is forgiven is one look, not the time-out."""
    reply, _ = await ask_and_stand_still(b"")
    assert reply.status == 504
