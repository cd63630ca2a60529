"""What tests of routing are built from: routers with pods that are alive, requests, their ends."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from calinix.config import (
    CacheRegistry,
    Config,
    DispatchUpstream,
    Gateway,
    Health,
    PodConfig,
    PodGroup,
    Sessions,
    SingleUpstream,
    Upstreams,
)
from calinix.core.choice import Recipe
from calinix.core.events import Failed, Failure, Finished, FirstToken, ProbeSucceeded
from calinix.core.pods import Role
from calinix.core.requests import Refusal, RoutePlan, RouteRequest
from calinix.core.router import Router

BLOCK = 128


def pod_config(pod_id: str, **settings: Any) -> PodConfig:
    """A pod of this id."""
    return PodConfig(id=pod_id, url=settings.pop("url", f"http://{pod_id}:8000"), **settings)


def pods(prefix: str, count: int, **settings: Any) -> tuple[PodConfig, ...]:
    """`prefix-0`, `prefix-1`, ... with the same settings."""
    return tuple(pod_config(f"{prefix}-{number}", **settings) for number in range(count))


def make_config(
    single: int | tuple[PodConfig, ...] = 0,
    prefill: int | tuple[PodConfig, ...] = 0,
    decode: int | tuple[PodConfig, ...] = 0,
    *,
    health: Health | None = None,
    cache: CacheRegistry | None = None,
    sessions: Sessions | None = None,
    **gateway: Any,
) -> Config:
    """A configuration with so many pods per role, or with these pods."""
    groups = [
        pods(name, group) if isinstance(group, int) else group
        for name, group in (("single", single), ("prefill", prefill), ("decode", decode))
    ]
    return Config(
        upstreams=Upstreams(
            single=SingleUpstream(pods=groups[0]) if groups[0] else None,
            dispatch=DispatchUpstream(PodGroup(groups[1]), PodGroup(groups[2]))
            if groups[1]
            else None,
        ),
        gateway=Gateway(**gateway),
        health=health or Health(),
        cache_registry=cache or CacheRegistry(),
        sessions=sessions or Sessions(),
    )


def make_router(
    config: Config,
    seed: int = 1,
    now: float = 0.0,
    recipes: Mapping[Role, Recipe] | None = None,
) -> Router:
    """A router whose pods have all been heard of and are healthy."""
    router = Router(config, random.Random(seed), recipes)
    for pod in router.pods():
        router.observe(ProbeSucceeded(pod.id), now)
    return router


def request(prompt: bytes | int = b"", **settings: Any) -> RouteRequest:
    """A request with this prompt, or with so many blocks of one prompt and a byte."""
    octets = text(prompt) if isinstance(prompt, int) else prompt
    defaults: dict[str, Any] = {"request_id": "r", "streamed": True}
    return RouteRequest(prompt=octets, **(defaults | settings))


def text(blocks: int, kind: int = 0) -> bytes:
    """`blocks` full blocks, all different, and one byte more; other kinds share none of them."""
    return (
        b"".join(
            b"%d/%d." % (kind, n) + b"x" * (BLOCK - len(b"%d/%d." % (kind, n)))
            for n in range(blocks)
        )
        + b"!"
    )


def ask(router: Router, prompt: bytes | int = b"", now: float = 1.0, **settings: Any) -> RoutePlan:
    """Routes; it has to work."""
    plan = router.route(request(prompt, **settings), now)
    assert isinstance(plan, RoutePlan), plan
    return plan


def refused(
    router: Router, prompt: bytes | int = b"", now: float = 1.0, **settings: Any
) -> Refusal:
    """Routes; it has to be refused."""
    refusal = router.route(request(prompt, **settings), now)
    assert isinstance(refusal, Refusal), refusal
    return refusal


def finish(
    router: Router, plan: RoutePlan, now: float = 1.0, status: int = 200, **usage: Any
) -> None:
    """First token and end, at once."""
    if status == 200:
        router.observe(FirstToken(plan.lease_id), now)
    router.observe(Finished(plan.lease_id, status, **usage), now)


def fail(
    router: Router,
    plan: RoutePlan,
    failure: Failure = Failure.SERVER_ERROR,
    now: float = 1.0,
    leg: Any = "single",
) -> None:
    """The request fails."""
    router.observe(Failed(plan.lease_id, leg, failure), now)


def serve(router: Router, prompt: bytes | int = b"", now: float = 1.0, **settings: Any) -> str:
    """One request from its route to its end; the id of the pod that answered."""
    plan = ask(router, prompt, now, **settings)
    finish(router, plan, now)
    return plan.pod.id


def load_is_zero(router: Router) -> bool:
    """Whether nothing is held any more, in any column."""
    return router.open_leases() == 0 and all(
        pod.inflight == pod.prefill_tokens == pod.decode_tokens == 0 for pod in router.pods()
    )
