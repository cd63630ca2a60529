"""Gateways of several workers with mock pods in this process, and streams through them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from calinix.sim.mock_pod import MockPod
from calinix.sim.pod_model import PodFigures
from harness.contenders import (
    Contender,
    Setup,
    calinix_contender,
    new_setup,
    started,
)
from harness.processes import BenchmarkError, Child, Children, get
from harness.tools import POD_COUNT


class Tools(msgspec.Struct, frozen=True):
    """What every part is given."""

    children: Children
    folder: Path
    calinix: str
    quick: bool
    measured: dict[str, Any]
    """Raw figures, for the JSON."""


def gateway_of(tools: Tools, workers: int, strategy: str = "cacheAware") -> Contender:
    """The gateway with so many workers."""
    base = calinix_contender(tools.calinix, strategy)

    def command(setup: Setup) -> list[str]:
        line = base.command(setup)
        path = setup.folder / "config.yaml"
        config: Any = yaml.safe_load(path.read_text())
        config["gateway"]["workers"] = workers
        path.write_text(yaml.safe_dump(config))
        return line

    return msgspec.structs.replace(base, command=command)


def settled(setup: Setup, workers: int) -> None:
    """Waits until all workers are there and know each other."""
    if workers == 1:
        return
    for _ in range(200):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            state = msgspec.json.decode(get(setup.admin_port, "/admin/state")[1])
            views = [
                msgspec.json.decode(get(setup.admin_port, f"/admin/controller?worker={n}")[1])
                for n in range(workers)
            ]
            ready = all(one["ready"] for one in state["workers"])
            if ready and all(view["replicas"] == workers - 1 for view in views):
                return
        time.sleep(0.05)
    raise BenchmarkError("the workers did not all start")


@contextlib.asynccontextmanager
async def fleet(
    tools: Tools, workers: int, figures: PodFigures, strategy: str = "cacheAware"
) -> AsyncIterator[tuple[Setup, Child, dict[str, MockPod]]]:
    """Mock pods in this process, and a gateway of so many workers before them."""
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(MockPod(figures=figures)) for _ in range(POD_COUNT)]
        folder = tools.folder / f"{len(list(tools.folder.iterdir()))}"
        setup = new_setup([pod.port for pod in pods], folder)
        starting = started(tools.children, gateway_of(tools, workers, strategy), setup, None)
        child = await loop.run_in_executor(None, starting.__enter__)
        try:
            await loop.run_in_executor(None, settled, setup, workers)
            yield setup, child, {f"pod-{n}": pod for n, pod in enumerate(pods)}
        finally:
            await loop.run_in_executor(None, starting.__exit__, None, None, None)


async def begin(port: int, text: str, tokens: int) -> tuple[asyncio.StreamReader, Any, bytes]:
    """A stream on a connection of its own, and its head."""
    body = msgspec.json.encode(
        {
            "model": "mock",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    return reader, writer, await reader.readuntil(b"\r\n\r\n")


class Answered(msgspec.Struct, frozen=True):
    """A stream that was read to its end."""

    pod: str
    ttft_s: float
    """From the connect to the first bytes of its body; to its end:"""
    e2e_s: float


async def answered(port: int, text: str, tokens: int = 12) -> Answered:
    """One stream on a connection of its own."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    reader, writer, head = await begin(port, text, tokens)
    first = await reader.read(65536)
    ttft_s = loop.time() - began_s
    rest = first + await reader.read(-1)
    writer.close()
    if b"[DONE]" not in rest:
        raise BenchmarkError(f"no whole answer: {head!r}")
    pod = head.lower().partition(b"x-calinix-target-pod-id: ")[2].split(b"\r\n")[0].decode()
    return Answered(pod, ttft_s, loop.time() - began_s)


async def is_whole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether the rest of the stream comes to its end."""
    data = b""
    with contextlib.suppress(ConnectionError):
        data = await reader.read(-1)
    writer.close()
    return b"[DONE]" in data
