"""A mock pod's port: the edge server, with a real pod's view of clients that send no more."""

from __future__ import annotations

import asyncio

from calinix.config import Limits, Timeouts
from calinix.edge.http_server import HttpServer, RequestHandler

_LIMITS = Limits(connections=65_536)
_DAY_MS = 86_400_000
_TIMEOUTS = Timeouts(keep_alive_ms=_DAY_MS, client_ms=_DAY_MS)


def pod_server(handler: RequestHandler, loop: asyncio.AbstractEventLoop) -> HttpServer:
    """The edge server as engines are: idle connections stay, half-closed clients have left.

    The gateway's own server waits for a client that closed only its half; on an engine's port
    that would let a prefill go on for nobody.
    """
    return HttpServer(handler, loop, _LIMITS, _TIMEOUTS, serves_half_closed=False)
