"""The gateway before real pods: started as users start it, asked over its two ports."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from harness.machine import free_port
from harness.processes import BenchmarkError, Children, wait_ready
from realpods.vllm_pods import BLOCK_TOKENS, Answer, Engine, PodSpec, call

WAIT_S = 60.0
DECISIONS_KEPT = 4096


class Front(msgspec.Struct, frozen=True):
    """A running gateway's ports."""

    port: int
    admin_port: int

    def decision(self, request_id: str) -> dict[str, Any]:
        """The routing decision of one request, as the admin port tells it."""
        answer = call(self.admin_port, "GET", f"/admin/decisions?request_id={request_id}")
        if answer.status != 200:
            raise BenchmarkError(f"no decision is kept of {request_id}: {answer.body[:200]!r}")
        decision: dict[str, Any] = answer.json()["decisions"][0]
        return decision

    def pods(self) -> dict[str, dict[str, Any]]:
        """What the gateway knows of each pod, by id."""
        found = call(self.admin_port, "GET", "/admin/pods").json()["pods"]
        return {str(pod["id"]): pod for pod in found}

    def complete(
        self, body: dict[str, object], request_id: str, headers: dict[str, str] | None = None
    ) -> Answer:
        """A request to /v1/chat/completions, or /v1/completions where the body has a prompt."""
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        return call(self.port, "POST", path, body, {"x-request-id": request_id} | (headers or {}))

    @contextlib.contextmanager
    def only(self, pod: str, others: list[str]) -> Iterator[None]:
        """All requests go to one pod for the time of a `with` block: the others drain."""
        for other in others:
            call(self.admin_port, "POST", f"/admin/pods/{other}/drain")
        try:
            if pod in others:
                raise ValueError("the pod cannot be among those that drain")
            yield
        finally:
            for other in others:
                call(self.admin_port, "POST", f"/admin/pods/{other}/resume")


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> float:
    """Waits until `holds()`, and returns for how many seconds; BenchmarkError after `timeout_s`."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > timeout_s:
            raise BenchmarkError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - began


def unified(specs: list[PodSpec], *, events: bool) -> dict[str, object]:
    """The upstreams of a gateway over unified pods, with or without their KV events."""
    pods: list[dict[str, object]] = []
    for spec in specs:
        pod: dict[str, object] = {
            "id": spec.name,
            "url": spec.url,
            # Of its blocks vLLM keeps one for itself.
            "kvCapacityTokens": (spec.blocks - 1) * BLOCK_TOKENS,
        }
        if events:
            pod["kvEvents"] = {
                "endpoint": f"tcp://127.0.0.1:{spec.events_port}",
                "replayEndpoint": f"tcp://127.0.0.1:{spec.replay_port}",
            }
        pods.append(pod)
    return {"single": {"pods": pods}}


def pair(protocol: str, prefill: PodSpec, decode: PodSpec) -> dict[str, object]:
    """The upstreams of a gateway over one prefill and one decode pod."""
    sides = {"prefill": prefill, "decode": decode}
    pods = {role: {"pods": [{"id": s.name, "url": s.url}]} for role, s in sides.items()}
    return {"dispatch": {"protocol": protocol, **pods}}


@contextlib.contextmanager
def gateway(
    children: Children, engine: Engine, name: str, upstreams: dict[str, object]
) -> Iterator[Front]:
    """A gateway, ready and its pods found healthy, for the time of a `with` block."""
    front = Front(free_port(), free_port())
    config = engine.folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(_config(front, engine, upstreams), sort_keys=False))
    calinix = str(Path(sys.executable).with_name("calinix"))
    log = engine.folder / f"{name}.log"
    with children.running([calinix, "serve", str(config)], log, None) as child:
        wait_ready(child, front.port, "/ready")
        wait_until(
            lambda: all(pod["state"] == "healthy" for pod in front.pods().values()),
            "all pods healthy",
        )
        yield front


def _config(front: Front, engine: Engine, upstreams: dict[str, object]) -> dict[str, object]:
    return {
        "version": 1,
        "gateway": {
            "host": "127.0.0.1",
            "port": front.port,
            "tokenizer": f"hf:{engine.model}",
            # A busy machine must not decide what is compared: late tokens are waited for.
            "tokenizing": {"waitMs": 5000},
            "decisionsKept": DECISIONS_KEPT,
        },
        "cacheRegistry": {"tokenBlockSize": BLOCK_TOKENS},
        "upstreams": upstreams,
        "health": {
            "intervalMs": 500,
            "timeoutMs": 10_000,
            "passive": {"slowFactor": 1_000_000.0},
        },
        "admin": {"port": front.admin_port},
        "log": {"requests": False},
    }
