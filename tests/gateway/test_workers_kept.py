"""The supervisor's side: workers that cannot start, orders to those that start later."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import kit
from calinix.edge.bus import Drained, Hello, Kind, Link, drained_of, packed
from calinix.gateway.workers import HUNG_LOOKS, Workers

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]
NOBODY = ["/nowhere/calinix"]


class Played:
    """The line of a worker that is only played: its process just sleeps."""

    def __init__(self, workers: Workers):
        self.frames: list[tuple[Kind, bytes]] = []
        self._workers = workers
        self._link = Link(
            lambda _, kind, payload: self.frames.append((kind, payload)), lambda _, __: None
        )

    async def join(self) -> None:
        """Says who it is, and that its port is open."""
        seat = self._workers.seats[0]
        await kit.until(lambda: bool(seat.pid), "a process is there")
        path = str(self._workers.bus_socket)
        await asyncio.get_running_loop().create_unix_connection(lambda: self._link, path)
        self._link.send(Kind.HELLO, packed(Hello(0, seat.pid)))
        self._link.send(Kind.READY)
        await kit.until(lambda: seat.ready, "it is ready")

    def say(self, kind: Kind) -> None:
        """Sends a frame."""
        self._link.send(kind)

    def close(self) -> None:
        """Hangs up."""
        self._link.close()


@kit.on_loop
async def test_a_first_worker_that_cannot_start_ends_the_start(tmp_path: Path) -> None:
    """No process at all is a status, and not an error that nobody hears of."""
    workers = Workers(1, lambda _: NOBODY, tmp_path, 1.0)
    assert await workers.start() == 1
    await workers.kill()


@kit.on_loop
async def test_a_later_worker_that_cannot_start_is_tried_again(tmp_path: Path) -> None:
    """Without memory or room for a process for a while, its place does not stay empty."""
    commands = [SLEEPS, NOBODY, NOBODY, SLEEPS]
    workers = Workers(1, lambda _: commands.pop(0), tmp_path, 1.0)
    starting = asyncio.ensure_future(workers.start())
    seat, first = workers.seats[0], Played(workers)
    await first.join()
    assert await starting == 0
    assert seat.process is not None
    seat.process.kill()
    await kit.until(lambda: not commands and bool(seat.pid), "another process is there")
    assert (seat.restarts, seat.ready) == (3, False)
    again = Played(workers)
    await again.join()
    await workers.kill()
    first.close()
    again.close()


@kit.on_loop
async def test_a_worker_that_stands_still_is_replaced(tmp_path: Path) -> None:
    """One that says nothing at so many looks is killed and started anew; one word is enough."""
    workers = Workers(1, lambda _: SLEEPS, tmp_path, 1.0)
    starting = asyncio.ensure_future(workers.start())
    seat, played = workers.seats[0], Played(workers)
    await played.join()
    assert await starting == 0
    first = seat.process
    assert first is not None
    for _ in range(HUNG_LOOKS):
        workers.look()
    played.say(Kind.REPORT)
    await kit.until(lambda: not seat.silent_looks, "it is heard")
    for _ in range(HUNG_LOOKS):
        workers.look()
    assert not first.returncode
    workers.look()
    await kit.until(lambda: seat.process is not first and bool(seat.pid), "another takes its seat")
    assert (first.returncode, seat.restarts) == (-signal.SIGKILL, 1)
    await workers.kill()
    played.close()


@kit.on_loop
async def test_who_starts_later_hears_what_drains_now(tmp_path: Path) -> None:
    """Of the pods that drain; of one that has left the configuration meanwhile, nothing."""
    workers = Workers(1, lambda _: SLEEPS, tmp_path, 1.0)
    starting = asyncio.ensure_future(workers.start())
    for pod_id in ("kept", "left", "resumed"):
        workers.drain_pod(pod_id, draining=True)
    workers.drain_pod("resumed", draining=False)
    workers.reload({"kept", "resumed"})
    played = Played(workers)
    await played.join()
    assert await starting == 0
    await kit.until(lambda: bool(played.frames), "it is told")
    told = [drained_of(payload) for kind, payload in played.frames if kind is Kind.DRAIN]
    assert told == [Drained("kept", True)]
    await workers.kill()
    played.close()
