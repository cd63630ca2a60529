"""The scenarios that `simulate` knows: pods, what clients ask, what goes wrong."""

from __future__ import annotations

from typing import Any

import msgspec

from calinix.core.pods import Role
from calinix.sim.cluster import SimPod
from calinix.sim.faults import Fault
from calinix.sim.pod_figures import PodFigures
from calinix.sim.replay import TraceWorkload
from calinix.sim.workload import Workload

LARGE_POD = PodFigures(
    prefill_tokens_per_s=10_000.0,
    token_delay_s=0.012,
    sequence_s=0.02e-3,
    kv_token_s=25e-9,
    chunk_tokens=512.0,
    attention_tokens=53_000.0,
    request_tokens=64.0,
    block_size=512,
    kv_capacity_tokens=400_000,
    offload_tokens=2_600_000,
    transfer_tokens_per_s=80_000.0,
    transfer_delay_s=0.002,
)
"""A pod as one serves a model of the 70B class; chosen, not calibrated on an engine."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Pods of one role; of other numbers of pods, the pattern of speeds is repeated."""

    role: Role = "single"
    count: int = 8
    figures: PodFigures = LARGE_POD
    speeds: tuple[float, ...] = (1.0,)

    def pods(self, count: int) -> list[SimPod]:
        """So many pods of it."""
        return [
            SimPod(
                id=f"{self.role}-{number:03d}",
                role=self.role,
                figures=self.figures.scaled(self.speeds[number % len(self.speeds)]),
            )
            for number in range(count)
        ]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One rehearsal."""

    name: str
    description: str
    """What people see in it."""
    workload: Workload
    groups: tuple[Group, ...] = (Group(),)
    load: float = 1.0
    """Times the workload's own rate."""
    noise: float = 0.0
    """Coefficient of variation of the pods' service times."""
    streamed_share: float = 1.0
    """Share of the requests whose first token the gateway sees."""
    gateways: int = 1
    """Requests come to any of them."""
    sync_s: float = 1.0
    """How often they tell each other what they know."""
    late_s: float = 0.0
    """How old everything is that a gateway knows of load."""
    faults: tuple[Fault, ...] = ()
    settings: dict[str, Any] = {}
    """Keys of the gateways' configuration."""

    def pods(self, total: int | None = None) -> list[SimPod]:
        """The pods; `total` of them, in the groups' proportions."""
        own = sum(group.count for group in self.groups)
        total = own if total is None else max(total, len(self.groups))
        counts = [max(1, group.count * total // own) for group in self.groups]
        counts[0] += total - sum(counts)
        return [
            pod
            for group, count in zip(self.groups, counts, strict=True)
            for pod in group.pods(count)
        ]


_ALL = (
    Scenario(
        name="mooncake-conversation",
        description="An hour of a chat service: long prompts, a third of them shared.",
        workload=TraceWorkload(trace="conversation_trace.jsonl"),
    ),
)

SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _ALL}
