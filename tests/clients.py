"""The official `openai` client before `calinix serve` and two mock pods of every role."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import AsyncOpenAI

import kit
from calinix.sim.pod_model import PodFigures
from fleets import Fleet, fleet_of, leases_given_back

MODEL = "mock"
MODES = pytest.mark.parametrize("mode", ["single", "dispatch"])


@asynccontextmanager
async def client_of(
    port: int, mode: str = "single", key: str = "none"
) -> AsyncIterator[AsyncOpenAI]:
    """The official client, without retries of its own, its requests in this mode."""
    headers = {"x-calinix-mode": mode}
    url = f"http://127.0.0.1:{port}/v1"
    async with AsyncOpenAI(
        base_url=url, api_key=key, max_retries=0, timeout=30, default_headers=headers
    ) as client:
        yield client


class Stand(NamedTuple):
    """A client, the gateway that it speaks to, and the pods behind it."""

    client: AsyncOpenAI
    served: kit.Serve
    fleet: Fleet


@asynccontextmanager
async def serving(folder: Path, mode: str) -> AsyncIterator[Stand]:
    """Two pods of every role, `calinix serve` before them, and a client; leases end given back."""
    figures = PodFigures(token_delay_s=0.002)
    async with (
        fleet_of(single=2, dispatch=2, figures=figures) as fleet,
        kit.Serve(folder, fleet.config()) as served,
    ):
        async with client_of(served.port, mode) as client:
            yield Stand(client, served, fleet)
        await leases_given_back(served.admin_port)


def user(text: str) -> list[Any]:
    """One user message."""
    return [{"role": "user", "content": text}]
