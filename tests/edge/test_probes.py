"""The active probes of one pod: how often it is asked while it has never answered."""

from __future__ import annotations

import asyncio

import pytest

import kit
from calinix.config import Health, PodConfig
from calinix.core.events import Event, ProbeFailed, ProbeSucceeded
from calinix.edge.health import Prober
from calinix.edge.http_client import PodClient
from faultproxy import reserve_port
from gatewaykit import raw_pod


class Enough(Exception):
    """The test has seen as many pauses as it wants."""


async def pauses(pod: PodConfig, heard: list[Event], count: int) -> list[float]:
    """The first pauses between probes at an interval of ten seconds, without waiting for them."""
    client = PodClient(pod.url, asyncio.get_running_loop(), connect_timeout_s=1.0)
    found: list[float] = []

    async def sleep(delay_s: float) -> None:
        found.append(round(delay_s, 6))
        if len(found) == count:
            raise Enough

    settings = Health(interval_ms=10_000)
    prober = Prober(pod, client, settings, heard.append, lambda: 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calinix.edge.health.asyncio.sleep", sleep)
        with pytest.raises(Enough):
            await prober.run()
    client.close()
    return found


@kit.on_loop
async def test_a_pod_that_never_answers_is_asked_ever_less() -> None:
    """Five seconds of quick probes, then pauses that double up to the interval, and no longer."""
    heard: list[Event] = []
    with reserve_port() as nobody:
        pod = PodConfig(id="p", url=f"http://127.0.0.1:{nobody.getsockname()[1]}")
        found = await pauses(pod, heard, 34)
    assert found == [0.2] * 25 + [0.4, 0.8, 1.6, 3.2, 6.4] + [10.0] * 4
    assert all(isinstance(event, ProbeFailed) and event.refused for event in heard)


@kit.on_loop
async def test_a_pod_that_answers_is_asked_at_its_interval() -> None:
    """From its first good answer on the configured interval holds."""
    heard: list[Event] = []
    async with raw_pod() as served:
        found = await pauses(PodConfig(id="p", url=served.url), heard, 3)
    assert found == [10.0] * 3
    assert heard == [ProbeSucceeded("p")] * 3
