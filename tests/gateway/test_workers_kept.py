"""The supervisor's side: workers that cannot start, orders to those that start later."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

import kit
from calinix.edge.bus import Drained, Hello, Kind, Link, drained_of, packed
from calinix.gateway.workers import HUNG_LOOKS, SILENT_LOOKS, Workers
from calinix.gateway.workers_admin import WorkersAdmin
from routing import make_config

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


@contextlib.asynccontextmanager
async def one_worker(folder: Path, drain_s: float = 1.0) -> AsyncIterator[tuple[Workers, Played]]:
    """A supervisor with one worker, which is ready and is played."""
    workers = Workers(1, lambda _: SLEEPS, folder, drain_s)
    starting = asyncio.ensure_future(workers.start())
    played = Played(workers)
    await played.join()
    assert await starting == 0
    try:
        yield workers, played
    finally:
        await workers.kill()
        played.close()


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
    async with one_worker(tmp_path) as (workers, played):
        seat = workers.seats[0]
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
        await kit.until(
            lambda: seat.process is not first and bool(seat.pid), "another takes its seat"
        )
        assert (first.returncode, seat.restarts) == (-signal.SIGKILL, 1)


@kit.on_loop
async def test_nobody_asks_a_worker_that_is_silent(tmp_path: Path) -> None:
    """Two looks without a word are usual; after more, another one answers for all."""
    async with one_worker(tmp_path) as (workers, _):
        seat = workers.seats[0]
        seat.silent_looks = SILENT_LOOKS
        assert list(workers.running()) == [seat]
        workers.look()
        assert not list(workers.running())


@kit.on_loop
async def test_who_is_to_hurry_and_does_not_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stands still does not hold up a second SIGTERM until the drain's time is up."""
    monkeypatch.setattr("calinix.gateway.workers.HURRY_S", 0.05)
    async with one_worker(tmp_path, drain_s=600.0) as (workers, _):
        stopping = asyncio.ensure_future(workers.stop())
        workers.hurry()
        await asyncio.wait_for(stopping, 30.0)


@kit.on_loop
async def test_who_dies_under_a_scrape_is_counted_once(tmp_path: Path) -> None:
    """Its last counts were put aside when it ended; an answer that it gave before adds nothing."""
    async with one_worker(tmp_path) as (workers, _):
        admin = WorkersAdmin(make_config(single=1), workers, asyncio.get_running_loop())
        seat = workers.seats[0]
        asked, may_answer = asyncio.Event(), asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await may_answer.wait()
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n# TYPE served_total counter\nserved_total 5\n")
            writer.close()

        server = await asyncio.start_unix_server(answer, str(workers.admin_socket(seat)))
        request = Asked()
        may_answer.set()
        await admin._metrics(cast("Any", request))
        assert b"served_total 5.0" in request.body
        asked.clear()
        may_answer.clear()
        scrape = asyncio.ensure_future(admin._metrics(cast("Any", request)))
        await asked.wait()
        assert seat.process is not None
        seat.process.kill()
        await kit.until(lambda: not seat.ready, "its end is known")
        may_answer.set()
        await scrape
        assert b"served_total 5.0" in request.body
        server.close()


class Asked:
    """A request at the admin port that keeps its answer."""

    def __init__(self) -> None:
        self.conn = self
        self.body = b""

    def respond(self, status: int, lines: bytes, body: bytes) -> None:
        """The answer."""
        assert (status, b"text/plain" in lines) == (200, True)
        self.body = body


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
