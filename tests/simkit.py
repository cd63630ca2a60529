"""Small fleets to simulate: scenarios of a few seconds, and requests put into them by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calinix.sim.arrivals import Steady
from calinix.sim.pod_figures import PodFigures
from calinix.sim.prompts import Length, Level
from calinix.sim.scenarios import Group, Scenario
from calinix.sim.simulate import Stage, build
from calinix.sim.synthetic import SingleRequests
from calinix.sim.workload import SimRequest

FIGURES = PodFigures(
    prefill_tokens_per_s=10_000.0,
    token_delay_s=0.010,
    sequence_s=1e-4,
    kv_token_s=1e-7,
    chunk_tokens=256.0,
    attention_tokens=20_000.0,
    request_tokens=32.0,
    block_size=16,
    kv_capacity_tokens=20_000,
    offload_tokens=40_000,
    transfer_tokens_per_s=50_000.0,
    transfer_delay_s=0.002,
)
WORKLOAD = SingleRequests(
    rate=Steady(rate_per_s=20.0),
    requests=120,
    question=Length(mean=200.0),
    answer=Length(mean=20.0),
    tree=(Level(choices=3, tokens=160), Level(choices=4, tokens=320)),
    shared=0.8,
)
DISPATCH = (
    Group(role="prefill", count=2, figures=FIGURES, speeds=(1.0, 0.5)),
    Group(role="decode", count=2, figures=FIGURES),
)


def scenario(**changes: Any) -> Scenario:
    """Three single pods and 120 requests, unless told otherwise."""
    settings: dict[str, Any] = {
        "name": "small",
        "description": "Small.",
        "workload": WORKLOAD,
        "groups": (Group(count=3, figures=FIGURES),),
        "noise": 0.0,
    }
    return Scenario(**(settings | changes))


def stage(strategy: str = "roundRobin", **changes: Any) -> Stage:
    """Pods and gateways, to be given requests by `ask`."""
    return build(scenario(**changes), strategy, 1)


def asked(
    at_s: float, prompt: int = 320, output: int = 11, kind: int = 0, **more: Any
) -> SimRequest:
    """A request; those of one kind have the same prompt."""
    chain = [kind * 1_000_000 + block for block in range(1, prompt // 16 + 1)]
    return SimRequest(at_s, prompt, output, chain, **more)


def ask(found: Stage, requests: Sequence[SimRequest]) -> Stage:
    """Lets these requests come, and everything happen until they have ended."""
    found.cluster.feed(iter(requests))
    found.cluster.clock.run()
    return found


def is_idle(found: Stage) -> bool:
    """Whether nothing is held any more, on any pod and in any gateway."""
    return all(
        model.running == model.waiting == model.held == model.blocks.used == 0
        for model in found.cluster.pods
    ) and all(
        door.router.open_leases() == 0
        and all(
            pod.inflight == pod.prefill_tokens == pod.decode_tokens == 0
            for pod in door.router.pods()
        )
        for door in found.doors
    )
