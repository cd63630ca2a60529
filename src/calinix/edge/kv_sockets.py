"""ZeroMQ sockets on the loop, without threads of ours: who has something to read, in turns.

A ZeroMQ socket's descriptor only says that something has changed, and says it once: after that
it has to be read until it is empty. An Inlet that is not empty yet stands in line, and a turn of
the loop serves the line for a bounded time, so that requests are never long behind events.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from calinix.errors import ConfigError

try:
    import zmq
except ImportError:
    zmq = None  # type: ignore[assignment]

log = structlog.get_logger()

SHARE_S = 0.0001
"""How long one turn of the loop may be about events; a message that has begun is finished."""
BURST = 16
"""Messages of one socket before the next one's turn."""
MAX_MESSAGE_BYTES = 8 << 20
LIVE_MESSAGES = 1000
"""That wait here, per publisher; more wait at the publisher."""
MAX_SOCKETS = 8192
PUBLISHED_MESSAGES = 100_000
REPLAYED_MESSAGES = 12_000
"""That may wait here: publishers keep 10,000, and drop what finds no room."""
_RECONNECT_MS, _MAX_RECONNECT_MS = 100, 5_000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5_000, 15_000


def require() -> None:
    """Raises ConfigError where pyzmq is not installed."""
    if zmq is None:
        raise ConfigError(["kvEvents needs pyzmq: pip install 'calinix[events]'"])


class Backlog:
    """Work that stands in line with the sockets: `step` does one piece, and says if there is more.

    A piece takes no longer than a message does.
    """

    __slots__ = ("queued", "step")

    def __init__(self, step: Callable[[], bool]):
        self.step = step
        self.queued = False


class Inlet:
    """One socket; `deliver` takes the frames of each message that it receives."""

    __slots__ = ("deliver", "queued", "socket")

    def __init__(self, socket: zmq.Socket[bytes], deliver: Callable[[list[bytes]], None]):
        self.socket = socket
        self.deliver = deliver
        self.queued = False

    def step(self) -> bool:
        """Delivers the next message; False: there is none."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:  # also when it was closed meanwhile
            return False
        self.deliver(frames)
        return True


class Publisher:
    """A PUB socket."""

    __slots__ = ("_socket", "endpoint")

    def __init__(self, socket: zmq.Socket[bytes]):
        self._socket = socket
        self.endpoint = reachable(socket)

    def send(self, frames: list[bytes]) -> None:
        """To whoever subscribes; who is behind by too much misses it."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """What was not sent yet is lost."""
        self._socket.close(linger=0)


class Sockets:
    """Opens them, reads them, closes them. All of one feed; bounded by who opens them."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.perf_counter
    ):
        """Raises ConfigError where pyzmq is not installed."""
        require()
        self._loop = loop
        self._clock = clock
        self._context = _shared_context()
        self._ready: deque[Inlet | Backlog] = deque()
        self._turn_asked = False

    def subscribe(
        self,
        endpoint: str,
        topics: Sequence[bytes],
        deliver: Callable[[list[bytes]], None],
        *,
        bind: bool = False,
    ) -> Inlet:
        """A SUB socket. Raises ConfigError where the endpoint cannot be bound or is none."""
        socket = self._context.socket(zmq.SUB)
        socket.set(zmq.RCVHWM, LIVE_MESSAGES)
        for topic in topics:
            socket.subscribe(topic)
        return self._open(socket, endpoint, deliver, bind=bind)

    def dial(self, endpoint: str, deliver: Callable[[list[bytes]], None]) -> Inlet:
        """A DEALER socket; what is sent goes out only while it is connected."""
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.RCVHWM, REPLAYED_MESSAGES)
        socket.set(zmq.IMMEDIATE, 1)
        return self._open(socket, endpoint, deliver, bind=False)

    def publish(self, endpoint: str) -> Publisher:
        """A PUB socket, bound where vLLM's would be. Raises ConfigError."""
        socket = self._context.socket(zmq.PUB)
        socket.set(zmq.SNDHWM, PUBLISHED_MESSAGES)
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
        self._attach(socket, endpoint, bind=binds)
        return Publisher(socket)

    def answer(self, endpoint: str, deliver: Callable[[list[bytes]], None]) -> Inlet:
        """A bound ROUTER socket. Raises ConfigError."""
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.SNDHWM, REPLAYED_MESSAGES)
        return self._open(socket, endpoint, deliver, bind=True)

    def address(self, inlet: Inlet) -> str:
        """Where a bound socket can be reached, with its real port."""
        return reachable(inlet.socket)

    def send(self, inlet: Inlet, frames: list[bytes]) -> bool:
        """Sends at once, or not at all: then nobody is connected, or too much waits."""
        try:
            inlet.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        finally:
            # Sending may have taken notice of what the descriptor had to say.
            self.wake(inlet)
        return True

    def can_send(self, inlet: Inlet) -> bool:
        """Whether somebody is connected who takes what is sent."""
        # Asking takes notice of what the descriptor had to say.
        self.wake(inlet)
        return bool(inlet.socket.poll(0, zmq.POLLOUT))

    def close(self, inlet: Inlet) -> None:
        """Closes one; what it had not delivered yet is lost."""
        self._loop.remove_reader(inlet.socket.fileno())
        inlet.socket.close(linger=0)
        inlet.deliver = _drop

    def _stirred(self, inlet: Inlet) -> None:
        """The descriptor has something to say: asking what makes it silent until there is more."""
        inlet.socket.get(zmq.EVENTS)
        self.wake(inlet)

    def wake(self, item: Inlet | Backlog) -> None:
        """There may be something to do: it stands in line."""
        if not item.queued:
            item.queued = True
            self._ready.append(item)
        if not self._turn_asked:
            self._turn_asked = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Serves the line for a while; what is left has its turn after the loop's other work."""
        clock, ready = self._clock, self._ready
        until_s = clock() + SHARE_S
        try:
            while ready and clock() < until_s:
                item = ready.popleft()
                item.queued = False
                more = True
                try:
                    more = self._serve(item, until_s)
                finally:
                    if more and not item.queued:
                        item.queued = True
                        ready.append(item)
        finally:
            self._turn_asked = bool(ready)
            if ready:
                self._loop.call_soon(self._turn)

    def _serve(self, item: Inlet | Backlog, until_s: float) -> bool:
        """Does what is there, up to a bound; True: there may be more."""
        for _ in range(BURST):
            if not item.step():
                return False
            if self._clock() >= until_s:
                break
        return True

    def _open(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        deliver: Callable[[list[bytes]], None],
        *,
        bind: bool,
    ) -> Inlet:
        self._attach(socket, endpoint, bind=bind)
        inlet = Inlet(socket, deliver)
        self._loop.add_reader(socket.fileno(), self._stirred, inlet)
        self.wake(inlet)
        return inlet

    def _attach(self, socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> None:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        # A socket bound with it names even IPv4 addresses as if they were of the sixth version.
        socket.set(zmq.IPV6, int(not bind or "[" in endpoint))
        try:
            if bind:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            verb = "bind" if bind else "connect to"
            raise ConfigError([f"kvEvents: cannot {verb} {endpoint}: {error}"]) from error


def _shared_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The process's one context. It is never ended: that would wait for whoever forgot a socket."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def reachable(socket: zmq.Socket[bytes]) -> str:
    """The endpoint of a socket; of one bound to any address, that of this machine."""
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//127.0.0.1:")


def _drop(frames: list[bytes]) -> None:
    """Of a closed socket."""
