"""A gateway of several workers: the supervisor. It owns the admin port and every signal."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import tempfile
from pathlib import Path
from typing import Any

import structlog
import uvloop

from calinix.app import admin_limits, listen, reloadable
from calinix.app_worker import CONFIG_FILE, command
from calinix.config import Config, parse_config
from calinix.edge.http_server import HttpServer
from calinix.errors import ConfigError
from calinix.gateway.upstreams import pods_by_role
from calinix.gateway.workers import Workers
from calinix.gateway.workers_admin import WorkersAdmin

log = structlog.get_logger()


class Supervisor:
    """Workers on one port, one admin port for all of them."""

    def __init__(self, config: Config, config_path: Path, journal: Path | None, folder: Path):
        self.config = config
        self._config_path = config_path
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._held = hold_port(config.gateway.host, config.gateway.port)
        self.port = int(self._held.getsockname()[1])
        name = config.log.journal_file if journal is None else str(journal)

        def command_of(index: int) -> list[str]:
            self._write_config(self._text)  # again: old temporary files may be cleaned away
            path = None if name is None else Path(f"{name}-{index}")
            return command(folder, index, self.port, path)

        timeouts = config.gateway.timeouts
        workers = config.gateway.workers
        self.workers = Workers(workers, command_of, folder, timeouts.drain_ms / 1e3)
        self._handler = WorkersAdmin(config, self.workers, self._loop)
        self.admin = HttpServer(self._handler, self._loop, admin_limits(config), timeouts)
        self._text = config_path.read_bytes()
        """What workers run by, those too that are started anew when the file is bad."""

    async def start(self) -> int:
        """0 when all is open, else the exit status of a worker that could not start.

        Raises ConfigError.
        """
        admin = self.config.admin
        if admin.enabled:
            await listen(self.admin, admin.host, admin.port, "admin.port", None)
        try:
            status = await self.workers.start()
        except OSError as error:
            raise ConfigError(
                [f"gateway.workers: cannot listen in {self._folder} ($TMPDIR): {error}"]
            ) from error
        if not status:
            log.info(
                "serving",
                host=self.config.gateway.host,
                port=self.port,
                admin_port=self.admin.port if admin.enabled else None,
                workers=len(self.workers.seats),
            )
        return status

    def reload(self) -> None:
        """Reads the file again; a bad one is reported, and changes nothing anywhere."""
        try:
            text = self._config_path.read_bytes()
            config, _ = reloadable(parse_config(text, str(self._config_path)), self.config)
            self._write_config(text)
        except (ConfigError, OSError, ssl.SSLError) as error:
            log.error("reload_refused", problems=str(error).splitlines())
            self.workers.reopen_logs()
            return
        self.config = self._handler.config = config
        self.workers.drain_s = config.gateway.timeouts.drain_ms / 1e3
        self._text = text
        self.workers.reload(pods_by_role(config))
        log.info("reloaded", workers=len(self.workers.seats))

    def _write_config(self, text: bytes) -> None:
        """For the workers to read. Raises OSError."""
        path = self._folder / f"{CONFIG_FILE}.new"
        path.write_bytes(text)
        path.replace(self._folder / CONFIG_FILE)

    async def stop(self) -> None:
        """Drains every worker, then closes the admin port."""
        log.info("draining", workers=len(self.workers.seats), limit_s=self.workers.drain_s)
        await self.workers.stop()
        await self.close()
        log.info("stopped")

    async def close(self) -> None:
        """Ends what is left, at once."""
        await self.workers.kill()
        self._handler.close()
        await self.admin.drain(1.0)
        self._held.close()


def hold_port(host: str, port: int) -> socket.socket:
    """The port for all workers: bound, so that it stays theirs; nothing listens on it here.

    Raises ConfigError: somebody else listens there.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, address = found[0][0], found[0][4]
        # Without SO_REUSEPORT, or another gateway's workers would not be noticed.
        with _bound(family, address, shared=False) as probe:
            probe.listen(1)
            address = (address[0], probe.getsockname()[1], *address[2:])
        return _bound(family, address, shared=True)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            [f"gateway.port: cannot listen on {host}:{port}: {reason}; choose another"]
        ) from error


def _bound(family: int, address: tuple[Any, ...], *, shared: bool) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:  # as asyncio does it: that port of IPv4 is another one
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except OSError:
        one.close()
        raise
    return one


def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """For the workers' sockets and their configuration; nobody else may look into it."""
    try:
        return tempfile.TemporaryDirectory(prefix="calinix-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            [f"gateway.workers: no folder for temporary files ($TMPDIR): {error}"]
        ) from error


async def _supervise(config: Config, config_path: Path, journal: Path | None) -> int:
    loop = asyncio.get_running_loop()
    with _own_folder() as name:
        supervisor = Supervisor(config, config_path, journal, Path(name))
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, supervisor.reload)
        starting = loop.create_task(supervisor.start())
        stopped = loop.create_task(stop.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done() and (starting.exception() is not None or starting.result()):
            stopped.cancel()
            await supervisor.close()
            return starting.result()
        await stopped
        starting.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, supervisor.workers.hurry)
        await supervisor.stop()
        return 0


def supervise(config: Config, config_path: Path, journal: Path | None) -> None:
    """Runs until SIGTERM or SIGINT. Raises ConfigError, SystemExit."""
    status = uvloop.run(_supervise(config, config_path, journal))
    if status:
        raise SystemExit(status)
