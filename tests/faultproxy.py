"""A TCP proxy that misbehaves on demand, to stand between the gateway and a real pod.

Faults act on the connections that are open and on those to come, until `restore`. Everything that
passes is counted and recorded, so that a test can compare raw bytes and count requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Self

READ_BYTES = 65536
RECORD_BYTES = 16 * 1024 * 1024


def reserve_port() -> socket.socket:
    """A socket that is bound to a free port of 127.0.0.1 and does not listen.

    While it is open nobody is given its port by the system, connects are refused, and a server
    that sets SO_REUSEADDR (asyncio's and uvloop's do) can still listen there.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


class Link:
    """One client connection and its connection to the target; `up` is towards the target."""

    def __init__(self, client: socket.socket):
        self.client = client
        self.target: socket.socket | None = None
        self.up = bytearray()
        self.down = bytearray()
        self.cut_at: int | None = None
        """Total of bytes down at which the link is cut."""
        self.task: asyncio.Task[None] | None = None


class FaultProxy:
    """127.0.0.1:`port` in front of 127.0.0.1:`target_port`; use with `async with`."""

    def __init__(self, target_port: int):
        self.target_port = target_port
        self.links: list[Link] = []
        self.connections = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self._holder = reserve_port()
        self.port: int = self._holder.getsockname()[1]
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._flowing = asyncio.Event()
        self._bytes_per_s: int | None = None
        self._cut_after: int | None = None
        self._reset = True

    @property
    def url(self) -> str:
        """Where the pod seems to be."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def open_links(self) -> int:
        """Connections that are open now."""
        return sum(link.task is not None and not link.task.done() for link in self.links)

    def count(self, start: bytes) -> int:
        """How many requests that begin with `start` (b"POST /v1/") went towards the target."""
        return sum(bytes(link.up).count(start) for link in self.links)

    async def __aenter__(self) -> Self:
        self.restore()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.refuse()
        tasks = [link.task for link in self.links if link.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._holder.close()

    def refuse(self) -> None:
        """Nobody listens any more; open connections live on (`cut` them too for a dead pod)."""
        if self._accepting:
            self._accepting.cancel()
            self._accepting = None
        if self._listener:
            self._listener.close()
            self._listener = None

    def stall(self) -> None:
        """Connections stay open, new ones are accepted, and no byte passes either way."""
        self._flowing.clear()

    def slow(self, bytes_per_s: int) -> None:
        """Bytes towards the client come at this pace."""
        self._bytes_per_s = bytes_per_s

    def cut(self, *, after_bytes: int = 0, reset: bool = True) -> None:
        """Ends every open connection once `after_bytes` more have come down; 0: at once.

        With bytes, connections to come are cut after as many as well. `reset`: with RST on both
        sides, else the client sees a FIN.
        """
        self._reset = reset
        self._cut_after = after_bytes or None
        for link in self.links:
            if link.task is None or link.task.done():
                continue
            link.cut_at = len(link.down) + after_bytes
            if not after_bytes:
                self._end(link)

    def restore(self) -> None:
        """No faults; listens again where it did."""
        self._bytes_per_s = self._cut_after = None
        for link in self.links:
            link.cut_at = None
        self._flowing.set()
        if self._listener is None:
            self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(("127.0.0.1", self.port))
            self._listener.listen(1024)
            self._listener.setblocking(False)
            self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listener))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            link = Link(client)
            link.cut_at = self._cut_after
            self.connections += 1
            self.links.append(link)
            link.task = loop.create_task(self._carry(link))

    async def _carry(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        link.target = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        for end in (link.client, link.target):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await loop.sock_connect(link.target, ("127.0.0.1", self.target_port))
            async with asyncio.TaskGroup() as group:
                up = group.create_task(self._pump_up(link, link.client, link.target))
                await self._pump_down(link, link.target, link.client)
                up.cancel()
        except* OSError:
            arm_reset(link.client)  # what one end does, the other sees
            arm_reset(link.target)
        finally:
            link.client.close()
            link.target.close()

    async def _pump_up(self, link: Link, client: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(client, READ_BYTES):
            await self._flowing.wait()
            record(link.up, data)
            self.bytes_up += len(data)
            await loop.sock_sendall(target, data)
        await self._flowing.wait()
        target.shutdown(socket.SHUT_WR)
        # Half closed, or closed? The first byte down tells, by a reset that only this shows.
        while not client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        raise ConnectionResetError

    async def _pump_down(self, link: Link, target: socket.socket, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            pace = self._bytes_per_s
            data = await loop.sock_recv(target, max(1, pace // 20) if pace else READ_BYTES)
            await self._flowing.wait()
            left = None if link.cut_at is None else max(link.cut_at - len(link.down), 0)
            data = data[:left]
            record(link.down, data)
            self.bytes_down += len(data)
            await loop.sock_sendall(client, data)
            if left is not None and len(data) == left:
                self._end(link)
            if not data:
                client.shutdown(socket.SHUT_WR)
                return
            if pace:
                await asyncio.sleep(len(data) / pace)

    def _end(self, link: Link) -> None:
        if self._reset:
            for end in (link.client, link.target):
                if end:
                    arm_reset(end)
        else:
            with contextlib.suppress(OSError):
                link.client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                link.client.shutdown(socket.SHUT_RD)
        if link.task:
            link.task.cancel()


def arm_reset(end: socket.socket) -> None:
    """Makes the close of this socket an RST."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def record(into: bytearray, data: bytes) -> None:
    """Appends, up to the bound."""
    if len(into) < RECORD_BYTES:
        into += data
