"""Mock pods behind fault proxies, and a gateway before them, all in one loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import yaml

import kit
from calinix.app import App, running_gateway
from calinix.config import parse_config
from calinix.sim.mock_pod import MockPod, MockRole
from calinix.sim.pod_model import PodFigures
from faultproxy import FaultProxy


def merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """`base` with what `extra` says, section by section."""
    result = dict(base)
    for key, value in extra.items():
        both_maps = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both_maps else value
    return result


class Fleet:
    """Mock pods, each behind a fault proxy, and the config that names them.

    Ids are single-1, single-2, prefill-1, decode-1 ...
    """

    def __init__(self) -> None:
        self.pods: dict[str, MockPod] = {}
        self.proxies: dict[str, FaultProxy] = {}

    def config(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """A config (camelCase) for these pods, `extra` merged over it."""
        named = {
            role: [
                {"id": pod_id, "url": proxy.url}
                for pod_id, proxy in self.proxies.items()
                if pod_id.startswith(role)
            ]
            for role in ("single", "prefill", "decode")
        }
        upstreams: dict[str, Any] = {}
        if named["single"]:
            upstreams["single"] = {"pods": named["single"]}
        if named["prefill"]:
            groups = {role: {"pods": named[role]} for role in ("prefill", "decode")}
            upstreams["dispatch"] = {"protocol": "nixl", **groups}
        base = {
            "upstreams": upstreams,
            "log": {"level": "warning", "requests": False},
            "scrape": {"when": "never"},  # tests count the links of probes and requests
        }
        return merged(base, extra or {})

    def posts(self, pod_id: str) -> int:
        """How many POSTs went towards this pod."""
        return self.proxies[pod_id].count(b"POST /v1/")


@contextlib.asynccontextmanager
async def fleet_of(
    single: int = 2, dispatch: int = 0, figures: PodFigures | None = None
) -> AsyncIterator[Fleet]:
    """So many unified pods, and as many prefill and decode pods each as `dispatch` says."""
    result = Fleet()
    counts: dict[MockRole, int] = {"single": single, "prefill": dispatch, "decode": dispatch}
    async with contextlib.AsyncExitStack() as stack:
        for role, count in counts.items():
            for number in range(1, count + 1):
                pod = MockPod(role=role, figures=figures or PodFigures())
                await stack.enter_async_context(pod)
                proxy = await stack.enter_async_context(FaultProxy(pod.port))
                result.pods[f"{role}-{number}"] = pod
                result.proxies[f"{role}-{number}"] = proxy
        yield result


@contextlib.asynccontextmanager
async def gateway_of(config: dict[str, Any]) -> AsyncIterator[App]:
    """A gateway in this loop, ready; at the end every lease must have been given back."""
    ports = {"gateway": {"host": "127.0.0.1", "port": 0}, "admin": {"port": 0}}
    text = yaml.safe_dump(merged(config, ports))
    async with running_gateway(parse_config(text)) as app:

        async def ready() -> bool:
            return (await kit.http(app.server.port, "GET", "/ready")).status == 200

        await kit.until(ready, "the gateway is ready")
        yield app
        assert app.admin is not None
        await leases_given_back(app.admin.port)


async def leases_given_back(admin_port: int) -> None:
    """What was taken is given back: no lease is open, and no pod has any load left."""

    async def none_left() -> bool:
        state = (await kit.http(admin_port, "GET", "/admin/state")).json()
        return not (state["inflight"] or state["waiting"] or state["openLeases"])

    await kit.until(none_left, "every lease is given back")
    for pod in (await kit.http(admin_port, "GET", "/admin/pods")).json()["pods"]:
        left = {key: pod[key] for key in pod if "inflight" in key.lower() and pod[key]}
        assert not left, pod
