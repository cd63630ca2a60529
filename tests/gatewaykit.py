"""For tests of the gateway over real sockets: pods scripted by the byte, configs, its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import kit
from calinix.app import App
from fleets import merged
from streams import ROUND_ROBIN

CHAT = "/v1/chat/completions"
QUIET = {"log": {"level": "warning", "requests": False}, "scrape": {"when": "never"}}
EVENTS = b"content-type: text/event-stream\r\n"
JSON = b"content-type: application/json\r\n"


class RawPod:
    """A pod that answers probes and model lists itself, and all else by its script."""

    def __init__(self, script: Script):
        self.port = 0
        self.requests: list[bytes] = []
        """Every request but probes, head and body."""
        self.connections = 0
        self.probes: list[bytes] = []
        self.healthy = True
        self.models = b'{"object":"list","data":[{"id":"mock","object":"model","extra":[1]}]}'
        self._script = script
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: requests one after the other until it is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while not writer.is_closing():
                await self._serve_one(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # `close` cancels; asyncio would report a cancelled connection as a fault
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head)
        request = head + await reader.readexactly(int(found[1]) if found else 0)
        if head.startswith(b"GET /health "):
            self.probes.append(head)
            status = b"200 OK" if self.healthy else b"503 Service Unavailable"
            # Not kept, so that a test knows which connections carry its requests.
            writer.write(answer(b"", status=status, headers=b"connection: close\r\n"))
            writer.close()
            return
        self.requests.append(request)
        if head.startswith(b"GET /v1/models "):
            writer.write(answer(self.models))
            return
        await self._script(Served(self, request, reader, writer))

    async def close(self) -> None:
        """Ends every connection."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Served:
    """One request at a RawPod, for its script."""

    def __init__(
        self,
        pod: RawPod,
        request: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ):
        self.pod = pod
        self.request = request
        self.reader = reader
        self.writer = writer

    async def say(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        """Writes pieces, each in a packet of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(pause_s)

    async def left(self) -> None:
        """Waits until the gateway closes the connection."""
        while await self.reader.read(65536):
            pass

    def hang_up(self) -> None:
        """Closes the connection."""
        self.writer.close()


Script = Callable[[Served], Awaitable[None]]


def answer(body: bytes, status: bytes = b"200 OK", headers: bytes = JSON) -> bytes:
    """A whole answer with a length."""
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(body), body)


def chunk(body: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(body), body)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\n" + EVENTS + b"transfer-encoding: chunked\r\n\r\n"
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def event(number: int = 0) -> bytes:
    """A chunk with one data event."""
    return chunk(b'data: {"n":%d}\n\n' % number)


async def whole_answer(served: Served) -> None:
    """A script: a small JSON answer, with the usage of a chat."""
    await served.say(
        answer(
            b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}}'
        )
    )


async def never(served: Served) -> None:
    """A script: no answer, until the gateway leaves."""
    await served.left()
    served.hang_up()


@contextlib.asynccontextmanager
async def raw_pod(script: Script = whole_answer) -> AsyncIterator[RawPod]:
    """A listening RawPod."""
    pod = RawPod(script)
    server = await asyncio.start_server(pod.serve, "127.0.0.1", 0, limit=1 << 26)
    pod.port = server.sockets[0].getsockname()[1]
    try:
        yield pod
    finally:
        server.close()
        await pod.close()


PodKeys = str | RawPod | dict[str, Any]
"""A url, a pod, or the pod's keys."""


def config_of(extra: dict[str, Any] | None = None, /, **pods: PodKeys) -> dict[str, Any]:
    """Round robin over these single pods, rare probes."""
    base = {"upstreams": {"single": {"pods": _entries(pods)}}, **QUIET, **ROUND_ROBIN}
    return merged(base, extra or {})


def dispatch_of(
    prefill: dict[str, PodKeys], decode: dict[str, PodKeys], extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Round robin over these prefill and decode pods, protocol plain, rare probes."""
    groups = {"prefill": {"pods": _entries(prefill)}, "decode": {"pods": _entries(decode)}}
    base = {"upstreams": {"dispatch": {"protocol": "plain", **groups}}, **QUIET, **ROUND_ROBIN}
    return merged(base, extra or {})


def _entries(pods: dict[str, PodKeys]) -> list[dict[str, Any]]:
    entries = []
    for name, pod in pods.items():
        if isinstance(pod, dict):
            entries.append({"id": name, **pod})
        else:
            entries.append({"id": name, "url": pod.url if isinstance(pod, RawPod) else pod})
    return entries


def chat_body(text: str = "Say something.", **more: object) -> dict[str, Any]:
    """A chat request's body."""
    return {"model": "mock", "messages": [{"role": "user", "content": text}], **more}


def fields_of(request: bytes) -> list[tuple[str, str]]:
    """Names and values of a request's or answer's header lines, in order."""
    lines = request.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
    return [(name, value) for name, _, value in (line.partition(": ") for line in lines)]


def body_of(request: bytes) -> bytes:
    """What follows the head."""
    return request.partition(b"\r\n\r\n")[2]


class Connection(kit.Exchange):
    """A client's connection that is kept for several requests."""

    async def next_reply(self) -> kit.Reply:
        """The next answer; it has to state its length or come in chunks."""
        await self.read_until(b"\r\n\r\n")
        while True:
            head, _, rest = bytes(self.wire).partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if length is not None:
                size: int | None = len(head) + 4 + int(length[1])
                size = size if size is not None and len(self.wire) >= size else None
            else:
                end = rest.find(b"0\r\n\r\n")
                size = len(head) + 4 + end + 5 if end >= 0 else None
            if size is not None:
                reply = kit.parse_reply(bytes(self.wire[:size]))
                del self.wire[:size]
                return reply
            data = await self.reader.read(65536)
            assert data, f"ended in {bytes(self.wire)!r}"
            self.wire += data


KEEP = {"connection": "keep-alive"}


async def admin(app: App, path: str, method: str = "GET") -> Any:
    """What the admin port says, as JSON."""
    assert app.admin is not None
    reply = await kit.http(app.admin.port, method, path)
    assert reply.status == 200, reply
    return reply.json()


async def metrics(app: App) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(name, labels) -> value of every sample of Calinix, read as Prometheus does."""
    assert app.admin is not None
    reply = await kit.http(app.admin.port, "GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
        if sample.name.startswith("calinix_")
    }


def total(samples: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str,
          **labels: str) -> float:  # fmt: skip
    """The sum of a metric's samples that have these labels."""
    wanted = set(labels.items())
    return sum(value for (found, has), value in samples.items() if found == name and wanted <= has)


async def outcome(app: App, request_id: str) -> dict[str, Any]:
    """What the decision ring says that came of a request."""
    found = await admin(app, f"/admin/decisions?request_id={request_id}")
    result: dict[str, Any] = found["decisions"][0]["outcome"]
    return result


def times(failures: int = 50, **ms: int) -> dict[str, Any]:
    """These time-outs, and so many failures in a row that eject."""
    return {
        "gateway": {"timeouts": ms},
        "health": {"passive": {"enabled": True, "failures": failures}},
    }


async def failures_of(app: App) -> list[int]:
    """Of each pod, failures in a row."""
    return [pod["failuresInRow"] for pod in (await admin(app, "/admin/pods"))["pods"]]


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """The url of a port where connections neither open nor are refused."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):  # what the kernel accepts by itself, and some more
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield f"http://127.0.0.1:{port}"
