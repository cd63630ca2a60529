"""What end-to-end tests are built from: loops that forgive nothing, pods, gateways, raw HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib.util
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import msgspec
import uvloop
import yaml

from faultproxy import reserve_port

CALINIX = Path(sys.executable).with_name("calinix")
T = TypeVar("T")
P = ParamSpec("P")


def run(main: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
    """Runs `main` on uvloop. An unhandled loop exception, or a task left running, is a failure."""
    unhandled: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: unhandled.append(context))

        async def body() -> T:
            async with asyncio.timeout(timeout_s):
                result = await main
            for _ in range(20):  # what was cancelled gets its turns to end
                await asyncio.sleep(0)
            return result

        result = runner.run(body())
        left = [repr(task) for task in asyncio.all_tasks(loop)]
        gc.collect()  # a task that died unheard speaks up when it is collected
        assert not unhandled, unhandled
        assert not left, left
    return result


def program(path: Path) -> Any:
    """A program that is no part of a package, as a module; beside it, it finds what it imports."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Lets pytest call a test that is a coroutine function; see `run`."""

    @functools.wraps(test)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return wrapper


async def until(
    holds: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str, timeout_s: float = 10.0
) -> None:
    """Waits until `holds()`; after `timeout_s` fails, naming `what`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        answer = holds()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert loop.time() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)


class Reply(msgspec.Struct):
    """One HTTP answer. `wire` is all that came, `body` is decoded; `complete`: it ended rightly."""

    status: int
    headers: dict[str, str]
    body: bytes
    wire: bytes
    complete: bool

    def json(self) -> Any:
        """The body as JSON."""
        return msgspec.json.decode(self.body)

    def events(self) -> list[str]:
        """The data of the server-sent events, in order."""
        return [e.removeprefix("data: ") for e in self.body.decode().split("\n\n") if e]


def parse_reply(wire: bytes) -> Reply:
    """One answer on a connection that ended after it."""
    head, found, rest = wire.partition(b"\r\n\r\n")
    if not found:
        return Reply(0, {}, b"", wire, complete=False)
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
    body, complete = rest, True
    if headers.get("transfer-encoding") == "chunked":
        body, complete = dechunk(rest)
    elif "content-length" in headers:
        complete = len(rest) == int(headers["content-length"])
    return Reply(int(first.split(" ", 2)[1]), headers, body, wire, complete)


CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]+)\r\n")


def dechunk(data: bytes) -> tuple[bytes, bool]:
    """(body, whether the last chunk was there) of a chunked body."""
    body, at = bytearray(), 0
    while match := CHUNK_SIZE.match(data, at):
        size, start = int(match[1], 16), match.end()
        piece = data[start : start + size]
        body += piece
        if size == 0 or len(piece) < size:
            return bytes(body), size == 0
        at = start + size + 2
    return bytes(body), False


def request_bytes(
    method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> bytes:
    """A whole request that asks for the connection to be closed; `body` as JSON unless bytes."""
    data = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
    lines = {"host": "localhost", "connection": "close", **(headers or {})}
    if data or method == "POST":
        lines = {"content-type": "application/json", "content-length": str(len(data)), **lines}
    head = "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data


class Exchange:
    """One request on a connection of its own, its answer read as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer
        self.wire = bytearray()

    @classmethod
    async def send(
        cls,
        port: int,
        data: bytes,
        *,
        receive_bytes: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        """Connects and writes the request; `receive_bytes` bounds the kernel's receive buffer."""
        sock = socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except OSError:
            sock.close()
            raise
        reader, writer = await asyncio.open_connection(
            sock=sock, ssl=tls, server_hostname="127.0.0.1" if tls else None
        )
        writer.write(data)
        return cls(reader, writer)

    async def read_until(self, mark: bytes, times: int = 1) -> None:
        """Reads on until `mark` has come `times` times; the answer's end before that fails."""
        while self.wire.count(mark) < times:
            data = await self.reader.read(65536)
            assert data, f"ended before {mark!r}: {bytes(self.wire)!r}"
            self.wire += data

    async def reply(self) -> Reply:
        """Reads to the end; a reset counts as an end."""
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(65536):
                self.wire += data
        await self.leave()
        return parse_reply(bytes(self.wire))

    async def leave(self) -> None:
        """Closes the connection at once, as a client does that goes away."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


async def http(
    port: int,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Reply:
    """One request, one answer."""
    exchange = await Exchange.send(port, request_bytes(method, path, body, headers), tls=tls)
    return await exchange.reply()


class Process:
    """A `calinix` command as a process of its own; killed, if it still lives, when the block ends.

    `output()` is what it has written to standard output and error.
    """

    def __init__(self, folder: Path, *arguments: str | Path):
        self.tls: ssl.SSLContext | None = None
        self.log = folder / f"{arguments[0]}-{id(self)}.log"
        with self.log.open("wb") as out:
            self.popen = subprocess.Popen(
                [CALINIX, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()

    def output(self) -> str:
        """What it said so far."""
        return self.log.read_text("utf-8", "replace")

    def send(self, number: signal.Signals) -> None:
        """SIGTERM, SIGHUP, SIGKILL ..."""
        self.popen.send_signal(number)

    async def ready(self, port: int, path: str = "/ready", timeout_s: float = 20.0) -> None:
        """Waits until `path` answers 200; fails early, with the output, when the process ends."""

        async def answers() -> bool:
            assert self.popen.poll() is None, self.output()
            with contextlib.suppress(OSError):
                return (await http(port, "GET", path, tls=self.tls)).status == 200
            return False

        await until(answers, f"{path} of {self.popen.args!r}", timeout_s)

    async def ended(self, timeout_s: float = 20.0) -> int:
        """Waits for its end; the exit code."""
        await until(lambda: self.popen.poll() is not None, "the end of the process", timeout_s)
        return int(self.popen.returncode)


class Serve(Process):
    """`calinix serve` with this config (camelCase, as in YAML), on ports that are surely free."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        *,
        gateway_port: int | None = None,
        admin_port: int | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.folder = folder
        self._holders = [reserve_port(), reserve_port()]
        free = [holder.getsockname()[1] for holder in self._holders]
        self.port = gateway_port or free[0]
        self.admin_port = admin_port or free[1]
        super().__init__(folder, "serve", self.write(config))
        self.tls = tls

    def write(self, config: dict[str, Any]) -> Path:
        """Writes the file that the process reads, at its start and on SIGHUP."""
        gateway = {"host": "127.0.0.1", **config.get("gateway", {}), "port": self.port}
        admin = {**config.get("admin", {}), "port": self.admin_port}
        path = self.folder / f"config-{self.port}.yaml"
        path.write_text(yaml.safe_dump({**config, "gateway": gateway, "admin": admin}))
        return path

    async def __aenter__(self) -> Self:
        await self.ready(self.port)
        return self

    async def ended(self, timeout_s: float = 20.0) -> int:
        """Waits for its end, then lets the ports go; the exit code."""
        code = await super().ended(timeout_s)
        self._release()
        return code

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self._release()

    def _release(self) -> None:
        for holder in self._holders:
            holder.close()
