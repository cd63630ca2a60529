"""A mock pod's port: the edge server, with a real pod's view of clients that send no more."""

from __future__ import annotations

import asyncio
import socket
import ssl as ssl_module

from calinix.config import Limits, Timeouts
from calinix.edge.http_server import (
    BACKLOG,
    SWEEP_S,
    HttpServer,
    RequestHandler,
    ServerConnection,
)

_LIMITS = Limits(connections=65_536)
_DAY_MS = 86_400_000
_TIMEOUTS = Timeouts(keep_alive_ms=_DAY_MS, client_ms=_DAY_MS)


class PodConnection(ServerConnection):
    """A connection whose client has left as soon as it sends no more, as engines see it.

    The gateway's own server waits for a client that closed only its half; on an engine's port
    that would let a prefill go on for nobody.
    """

    def eof_received(self) -> bool:
        """The client sends no more: the connection closes, what it is owed is cancelled."""
        return False


class PodServer(HttpServer):
    """The edge server with such connections. It never closes an idle one."""

    def __init__(self, handler: RequestHandler, loop: asyncio.AbstractEventLoop):
        super().__init__(handler, loop, _LIMITS, _TIMEOUTS)

    async def start(
        self,
        host: str,
        port: int,
        ssl: ssl_module.SSLContext | None = None,
        sock: socket.socket | None = None,
    ) -> None:
        """Listens on host and port (0: any). Raises OSError."""
        del sock
        self._server = await self.loop.create_server(
            lambda: PodConnection(self), host or None, port, ssl=ssl, backlog=BACKLOG
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep_again)
