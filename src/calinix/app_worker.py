"""One worker of several: the gateway's App with a shared port and a line to the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, cast

import structlog
import uvloop
from msgspec.structs import replace

from calinix.app import App
from calinix.app_process import allow_sockets, settle_memory
from calinix.config import Config, load_config
from calinix.core.events import PodDraining, ReplicaGone
from calinix.core.recorded import RecordedRouter
from calinix.core.router import Router
from calinix.edge.bus import BusError, Hello, Kind, Link, drained_of, packed, report_of
from calinix.edge.journal import Journal
from calinix.errors import ConfigError
from calinix.gateway.outbox import Outbox
from calinix.gateway.workers import worker_name
from calinix.telemetry import configure_logging

log = structlog.get_logger()

LOOK_S = 2.0
"""How long a worker at most waits for the first verdict on each pod before it takes clients."""
LOOK_AGAIN_S = 0.02
CONFIG_FILE = "config.yaml"
"""In the workers' folder: what they run by, as the supervisor found it good."""


def command(folder: Path, index: int, port: int, journal: Path | None) -> list[str]:
    """What starts the worker with this index."""
    program = "from calinix.app_worker import main; main()"
    line = [sys.executable, "-P", "-c", program, str(folder), str(index), str(port)]
    return line if journal is None else [*line, str(journal)]


class Worker(App):
    """An App that hears of the others what they route, and tells them what it does."""

    def __init__(self, config: Config, folder: Path, index: int, port: int, journal: Path | None):
        self.index = index
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()
        self._folder = folder
        self._shared_port = port
        self._has_complained = False
        self._link = Link(self._on_frame, self._on_lost)
        super().__init__(config, folder / CONFIG_FILE, journal)
        self._outbox.start(self.router)

    def _new_router(self, config: Config, journal: Path | None) -> Router:
        seed = config.gateway.seed
        if seed is not None:
            # Workers that draw alike would all pick the same pod of equal ones.
            seed += self.index
            config = replace(config, gateway=replace(config.gateway, seed=seed))
        opened = Journal.open(config, journal)
        rng = random.Random(seed)  # no secret depends on it
        if opened is not None:
            self._journal, rng = opened
        name = worker_name(self.index, os.getpid())
        self._outbox = Outbox(name, self._loop, self._send_report, self._journal)
        return RecordedRouter(config, rng, self._outbox)

    async def join(self) -> None:
        """Opens the line to the others. Raises OSError."""
        await self._loop.create_unix_connection(lambda: self._link, str(self._folder / "bus.sock"))
        self._link.send(Kind.HELLO, packed(Hello(self.index, os.getpid())))

    async def _open_ports(self) -> None:
        gateway = self.config.gateway
        if self.admin is not None:
            await self.admin.start_local(str(self._folder / f"admin-{self.index}.sock"))
        await self._look_first()
        await self.server.start(gateway.host, self._shared_port, self._tls, shared=True)

    async def _look_first(self) -> None:
        """Until a worker knows its pods, the others had better serve the clients."""
        began_s = self._loop.time()
        while not self.stopping.is_set():
            looked_s = self._loop.time() - began_s
            is_sure = all(pod.state != "starting" for pod in self.router.pods())
            if looked_s >= LOOK_S or (is_sure and self.router.ready()):
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    def _say_serving(self) -> None:
        self._link.send(Kind.READY)
        self._outbox.flush()

    async def stop(self, drain_s: float | None = None) -> None:
        """As App's; the others hear of what ends until all has ended."""
        await super().stop(drain_s)
        self._outbox.stop()
        self._link.close()

    def _send_report(self, payload: bytes) -> None:
        self._link.send(Kind.REPORT, payload)

    def _on_frame(self, link: Link, kind: Kind, payload: bytes) -> None:  # noqa: ARG002
        if kind is Kind.REPORT:
            self._on_report(payload)
        elif kind is Kind.GONE:
            self.gateway.observe(ReplicaGone(payload.decode()))
            self._offer_room()
        elif kind is Kind.ASK:
            self._outbox.flush()
        elif kind is Kind.STOP:
            (self.hurry if payload else self.stopping).set()
            self.stopping.set()
        elif kind is Kind.RELOAD:
            if payload:
                self.telemetry.reopen()
            else:
                self.reload()
        elif kind is Kind.DRAIN:
            drain = drained_of(payload)
            self.gateway.observe(PodDraining(drain.pod_id, drain.draining))
            self.gateway.wake_soon()

    def _on_report(self, payload: bytes) -> None:
        """A fault of one worker must not end the others: what cannot be read is left out."""
        try:
            for event in report_of(payload):
                self.gateway.observe(event)
        except (BusError, ValueError) as error:
            if not self._has_complained:  # the next one comes in some milliseconds
                log.error("report_unreadable", reason=str(error), hint="said once")
            self._has_complained = True
        self._offer_room()

    def _offer_room(self) -> None:
        """What others gave back may be room for those who wait here."""
        if len(self.gateway.waiting):
            self.gateway.wake_soon()

    def _on_lost(self, link: Link, why: str) -> None:  # noqa: ARG002
        if not self.stopping.is_set():
            log.error("supervisor_gone", reason=why)
            # It cannot do so itself any more, and a configuration may hold keys.
            shutil.rmtree(self._folder, ignore_errors=True)
            self.stopping.set()


async def _run(folder: Path, index: int, port: int, journal: Path | None) -> None:
    config = load_config(folder / CONFIG_FILE)
    worker = Worker(config, folder, index, port, journal)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, worker.stopping.set)
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal: the supervisor says what to do
        loop.add_signal_handler(number, lambda: None)
    try:
        await worker.join()
        await worker.start()
        settle_memory()
        await worker.stopping.wait()
    finally:
        drain = loop.create_task(worker.stop())
        hurry = loop.create_task(worker.hurry.wait())
        await asyncio.wait((drain, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not drain.done():
            drain.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await drain
            await worker.stop(0.0)


def main() -> None:
    """FOLDER INDEX PORT [JOURNAL]. Exit status 2: the configuration cannot be carried out."""
    folder, index, port, *journal = sys.argv[1:]
    configure_logging(load_config(Path(folder) / CONFIG_FILE).log)
    _sign_lines(int(index))
    allow_sockets()
    try:
        uvloop.run(_run(Path(folder), int(index), int(port), Path(journal[0]) if journal else None))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


def _sign_lines(index: int) -> None:
    """Each line of the log says which worker wrote it."""

    def sign(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("worker", index)
        return event

    processors = cast("list[Any]", structlog.get_config()["processors"])
    structlog.configure(processors=[sign, *processors])
