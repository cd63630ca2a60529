"""A mock pod's own paths, which no engine has: state, faults, and handles between mock pods."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from calinix.edge.http_server import Request
from calinix.sim.mock_answers import Json
from calinix.sim.mock_faults import faults_from_json

if TYPE_CHECKING:
    from calinix.sim.mock_pod import MockPod


def control(pod: MockPod, request: Request, head: bytes) -> None:
    """Answers a request for /mock/...; `head` are its header lines. Raises BadRequest."""
    match request.method, request.path:
        case "GET", "/mock/state":
            answer = state_of(pod)
        case "GET", "/mock/faults":
            answer = _faults(pod)
        case "POST", "/mock/faults":
            pod.add_faults(faults_from_json(request.body))
            answer = _faults(pod)
        case "DELETE", "/mock/faults":
            pod.clear_faults()
            if pod.dead:
                pod.revive()
            answer = _faults(pod)
        case _:
            if not pod.connector.control(request, head):
                request.conn.respond(404, head, b'{"detail":"Not Found"}')
            return
    request.conn.respond(200, head, msgspec.json.encode(answer))


def _faults(pod: MockPod) -> Json:
    return {"faults": pod.faults.in_force(pod.loop.time())}


def state_of(pod: MockPod) -> Json:
    """What the pod is doing, what it did, and the last requests that it received."""
    model = pod.model
    counters = model.counters
    return {
        "role": pod.role,
        "engineId": pod.engine_id,
        "dead": pod.dead,
        "running": model.running,
        "waiting": model.waiting,
        "held": model.held,
        "served": pod.served,
        "cancelled": pod.cancelled,
        "promptTokens": counters.prompt_tokens,
        "cachedTokens": counters.cached_tokens,
        "externalTokens": counters.external_tokens,
        "outputTokens": counters.output_tokens,
        "kvUsage": model.kv_usage,
        "cachedBlocks": model.blocks.cached,
        "paths": dict(pod.paths),
        **_faults(pod),
        "requests": [
            {"path": one.path, "headers": one.headers, "body": one.body.decode("utf-8", "replace")}
            for one in pod.received
        ],
    }
