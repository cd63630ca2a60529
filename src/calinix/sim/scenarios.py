"""The scenarios that `simulate` knows: pods, what clients ask, what goes wrong."""

from __future__ import annotations

from typing import Any

import msgspec

from calinix.core.pods import Role
from calinix.sim.arrivals import Bursts, Diurnal, Ramp, Steady
from calinix.sim.cluster import SimPod
from calinix.sim.faults import DeadPod, Fault, Flush, SlowPod
from calinix.sim.pod_figures import PodFigures
from calinix.sim.prompts import Length, Level
from calinix.sim.replay import TraceWorkload
from calinix.sim.synthetic import Agents, Sessions, SingleRequests
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

PREFILL_POD = msgspec.structs.replace(LARGE_POD, token_delay_s=0.0)
"""Only prefills: reading the weights is hidden behind computing."""

_SMALL_POD = PodFigures(block_size=512, kv_capacity_tokens=8_000_000)
"""KV room for whatever comes: the scenario is about speed alone."""

UNEQUAL = (1.5, 1.25, 0.75, 0.5)
"""Speeds of unequal pods; their mean is 1."""


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
    """Single pods, or prefill and then decode pods."""
    load: float = 1.0
    """Times the workload's own rate; a trace's time is compressed by it."""
    noise: float = 0.2
    """Coefficient of variation of the pods' service times, which no gateway knows."""
    streamed_share: float = 1.0
    """Share of the requests whose first token the gateway sees."""
    gateways: int = 1
    """Requests come to any of them."""
    sync_s: float = 1.0
    """How often they tell each other what they know; 0: never."""
    late_s: float = 0.0
    """How old everything is that a gateway knows of load."""
    faults: tuple[Fault, ...] = ()
    settings: dict[str, Any] = {}
    """Keys of the gateways' configuration, as in the YAML file."""

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


_CONVERSATION = TraceWorkload(trace="conversation_trace.jsonl")
_FINE = Group(figures=msgspec.structs.replace(LARGE_POD, block_size=128))
"""Blocks small enough for prompts of some hundred tokens."""
_AZURE = TraceWorkload(trace="AzureLLMInferenceTrace_conv.csv")

_ALL = (
    Scenario(
        name="seed-2p2d",
        description="Two prefill and two decode pods, one of each five to six times as slow: 40 "
        "short requests a second that share nothing. Who sends as many to the slow pods as to the "
        "fast ones cannot keep up.",
        workload=SingleRequests(
            rate=Steady(rate_per_s=40.0),
            requests=12_000,
            question=Length(mean=800.0),
            answer=Length(mean=85.0),
            block_tokens=512,
        ),
        noise=0.0,
        groups=(
            Group(
                role="prefill",
                count=2,
                figures=msgspec.structs.replace(_SMALL_POD, prefill_tokens_per_s=200_000.0),
                speeds=(1.0, 5.0 / 30.0),
            ),
            Group(
                role="decode",
                count=2,
                figures=msgspec.structs.replace(
                    _SMALL_POD, token_delay_s=0.010, sequence_s=0.125e-3
                ),
                speeds=(1.0, 10.0 / 50.0),
            ),
        ),
    ),
    Scenario(
        name="mooncake-conversation",
        description="An hour of a chat service on 8 pods: 12,031 requests of 12,000 tokens in the "
        "mean, of which a third has been seen before. Caches save much, and who follows them "
        "blindly waits in queues.",
        workload=_CONVERSATION,
    ),
    Scenario(
        name="mooncake-synthetic",
        description="3,993 requests with long shared contexts on 8 pods, two thirds of the tokens "
        "seen before: the caches decide whether the pods keep up at all.",
        workload=TraceWorkload(trace="synthetic_trace.jsonl"),
        load=1.5,
    ),
    Scenario(
        name="azure-conversation",
        description="An hour of chats on 8 pods, five times as fast as recorded: 19,366 requests "
        "of 1,150 tokens that share nothing, with a rush in the middle. Pure load balancing.",
        workload=_AZURE,
        load=5.0,
    ),
    Scenario(
        name="hot-prefix",
        description="16 pods; 9 of 10 requests begin with the same 4,096 tokens. One pod cannot "
        "serve them all: see when copies of the prefix are made, and how many.",
        workload=SingleRequests(
            rate=Steady(rate_per_s=60.0),
            requests=18_000,
            question=Length(mean=512.0, most=16_384),
            answer=Length(mean=150.0, most=2_048),
            tree=(Level(choices=1, tokens=4096),),
            shared=0.9,
            unshared=Length(mean=4096.0, variation=0.0),
            block_tokens=128,
        ),
        groups=(msgspec.structs.replace(_FINE, count=16),),
    ),
    Scenario(
        name="sequential-agents",
        description="Agents that work one after the other, ten turns each, on 8 pods: there is "
        "never more than one request. Each agent should stay where its context is, and different "
        "agents should not all end up on one pod.",
        workload=Agents(
            agents=240,
            turns=10,
            start=Length(mean=4_000.0, most=32_768),
            question=Length(mean=400.0, most=8_192),
            answer=Length(mean=150.0, most=2_048),
            block_tokens=128,
        ),
        groups=(_FINE,),
    ),
    Scenario(
        name="slow-pod",
        description="The chat service again; for five minutes two of the 8 pods run at 0.3 of "
        "their speed, and nobody says so.",
        workload=_CONVERSATION,
        load=1.1,
        faults=(SlowPod(pods=(2, 5), factor=1.0 / 0.3, at_s=1000.0, for_s=300.0),),
    ),
    Scenario(
        name="pod-loss",
        description="The chat service again; one pod dies and is back after a minute with an empty "
        "cache, later another one loses its cache and nobody says so.",
        workload=_CONVERSATION,
        faults=(
            DeadPod(pods=(3,), at_s=1000.0, for_s=60.0),
            Flush(pods=(6,), at_s=2000.0),
        ),
    ),
    Scenario(
        name="stale-state",
        description="Everything that the gateway knows of load is three seconds old, as where "
        "engine metrics are polled. Who always takes the pod that looks idle sends it three "
        "seconds of traffic.",
        workload=_AZURE,
        load=5.0,
        late_s=3.0,
    ),
    Scenario(
        name="many-gateways",
        description="16 gateways before 8 pods tell each other once a second what they know: each "
        "sees a sixteenth of the traffic at once and the rest late.",
        workload=_AZURE,
        load=5.0,
        gateways=16,
    ),
    Scenario(
        name="heterogeneous-4p4d",
        description="The chat service on four prefill and four decode pods whose speeds differ by "
        "a factor of three.",
        workload=_CONVERSATION,
        groups=(
            Group(role="prefill", count=4, figures=PREFILL_POD, speeds=UNEQUAL),
            Group(role="decode", count=4, speeds=UNEQUAL),
        ),
        load=0.7,
    ),
    Scenario(
        name="chat-day",
        description="Chats of six turns on 8 pods, from a quiet night to a busy noon and back in "
        "fifteen minutes. Each turn repeats all that was said before, so it is cheap where the "
        "one before it was.",
        workload=Sessions(
            rate=Diurnal(mean_per_s=3.0, swing=0.8, period_s=900.0),
            sessions=2_700,
            turns=Length(mean=6.0, variation=0.5, most=40),
            pause_s=15.0,
            question=Length(mean=200.0, most=4_096),
            answer=Length(mean=300.0, most=2_048),
            tree=(Level(choices=8, tokens=1_024), Level(choices=6, tokens=1_024)),
            block_tokens=128,
        ),
        groups=(_FINE,),
    ),
    Scenario(
        name="rush",
        description="Every minute, ten seconds of four times as many requests as before: more than "
        "8 pods can take. See how fast each strategy works the queues off, and on which pods they "
        "form.",
        workload=SingleRequests(
            rate=Bursts(rate_per_s=20.0, burst_per_s=80.0, period_s=60.0, burst_s=10.0),
            requests=12_000,
            question=Length(mean=600.0, most=16_384),
            answer=Length(mean=150.0, most=2_048),
            tree=(Level(choices=20, tokens=1_024), Level(choices=10, tokens=1_024)),
            block_tokens=128,
        ),
        groups=(_FINE,),
    ),
    Scenario(
        name="ramp",
        description="Load that rises in a straight line to more than 8 unequal pods can serve: see "
        "how far each strategy gets before queues grow.",
        workload=SingleRequests(
            rate=Ramp(from_per_s=5.0, to_per_s=120.0, over_s=480.0),
            requests=28_000,
            question=Length(mean=600.0, most=16_384),
            answer=Length(mean=150.0, most=2_048),
            tree=(Level(choices=20, tokens=1_024), Level(choices=10, tokens=1_024)),
            block_tokens=128,
        ),
        groups=(msgspec.structs.replace(_FINE, speeds=UNEQUAL),),
    ),
)

SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _ALL}
"""By name."""
