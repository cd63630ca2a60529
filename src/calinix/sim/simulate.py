"""Runs a scenario with a strategy: one function, one record of what happened."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from calinix.core.choice import Recipe
from calinix.core.pods import Role
from calinix.core.router import Router
from calinix.sim.baselines import BASELINES
from calinix.sim.cluster import Cluster, SimPod
from calinix.sim.door import Door
from calinix.sim.fault_plan import plan
from calinix.sim.fleet_config import config_of, converted
from calinix.sim.recorder import Floats, Requests, Samples
from calinix.sim.scenarios import Scenario


class PodSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a run."""

    id: str
    role: Role
    speed: float
    """Prefill tokens per second, beside the mean of its role."""
    work_done: float
    """Tokens of prefill work and of answers."""


class Run(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What happened. Times in seconds of the virtual clock."""

    scenario: str
    strategy: str
    seed: int
    load: float
    config: dict[str, Any]
    """The gateways' configuration, with the keys of the YAML file."""
    requests: Requests
    pods: tuple[PodSummary, ...]
    samples: Samples
    predicted_queue: tuple[tuple[float, Floats], ...]
    """(when, what the first gateway's controllers expected then of the queues, shape (H, pods)): in
    seconds of work where prompts are prefilled, in requests where they are decoded; NaN for pods
    that are not steered."""
    duration_s: float

    @property
    def work_done(self) -> Floats:
        """By pod, in tokens."""
        return np.array([pod.work_done for pod in self.pods])


def run(
    scenario: Scenario,
    strategy: str,
    seed: int,
    *,
    load: float | None = None,
    pods: int | None = None,
    progress: Callable[[float], None] | None = None,
    recipes: Mapping[Role, Recipe] | None = None,
) -> Run:
    """Lets the scenario happen once. Equal arguments give equal runs.

    `strategy` is a strategy of the gateway, or one of BASELINES; `load` times the workload's own
    rate; `pods` in all; `progress` is told the share of the requests that have come. `recipes`
    take the place of the strategy's, for the roles that they name.
    Raises msgspec.ValidationError for a strategy that nobody knows.
    """
    load = scenario.load if load is None else load
    stage = build(scenario, strategy, seed, pods=pods, recipes=recipes)
    cluster = stage.cluster
    _Watch(stage, scenario.workload.requests, progress).look(None)
    cluster.feed(scenario.workload.arrivals(random.Random(f"{seed}/arrivals"), load))
    cluster.clock.run()
    if progress is not None:
        progress(1.0)
    return _summary(scenario, strategy, seed, load, stage)


class Stage(msgspec.Struct, frozen=True, eq=False):
    """Pods and gateways before anything has been asked of them."""

    cluster: Cluster
    doors: list[Door]
    config: dict[str, Any]


def build(
    scenario: Scenario,
    strategy: str,
    seed: int,
    *,
    pods: int | None = None,
    recipes: Mapping[Role, Recipe] | None = None,
) -> Stage:
    """The scenario's pods and gateways, its faults and the gateways' exchange on the clock."""
    described = scenario.pods(pods)
    baseline = BASELINES.get(strategy)
    block_tokens = scenario.workload.block_tokens
    name = strategy if baseline is None else "leastLoad"
    config = config_of(described, name, block_tokens, scenario.settings)
    structs = converted(config)
    cluster = Cluster(described, scenario.noise, seed)
    cluster.streamed_share = scenario.streamed_share
    doors: list[Door] = []
    for number in range(scenario.gateways):
        rng = random.Random(f"{seed}/gateway/{number}")
        own = recipes if baseline is None else baseline(cluster)
        router = Router(structs, rng, own)
        doors.append(Door(cluster, router, structs, rng, block_tokens, scenario.late_s))
    cluster.gateways.extend(doors)
    plan(scenario.faults, cluster, doors)
    if len(doors) > 1 and scenario.sync_s > 0.0:
        _Exchange(doors, scenario.sync_s).plan(0.0)
    return Stage(cluster, doors, config)


class _Exchange:
    """Every period, each gateway tells all others what it has on the pods and has measured."""

    def __init__(self, doors: list[Door], sync_s: float):
        self._doors = doors
        self._sync_s = sync_s
        self._clock = doors[0].clock

    def plan(self, now: float) -> None:
        """The next exchange is a period from now."""
        self._clock.at(now + self._sync_s, self._exchange)

    def _exchange(self, _: None) -> None:
        now = self._clock.now
        for number, door in enumerate(self._doors):
            facts = msgspec.structs.replace(
                door.router.facts(now, f"gateway-{number}"),
                sync_s=self._sync_s,
                gateways=len(self._doors),
            )
            for other in self._doors:
                if other is not door:
                    other.tell(facts, may_be_lost=True)
        self.plan(now)


class _Watch:
    """Takes samples and tells of progress."""

    def __init__(self, stage: Stage, expected: int, progress: Callable[[float], None] | None):
        self._cluster = stage.cluster
        self._door = stage.doors[0]
        self._expected = max(1, expected)
        self._progress = progress

    def look(self, _: None) -> None:
        """One sample; the next one follows by itself."""
        cluster = self._cluster
        recorder, now = cluster.recorder, cluster.clock.now
        weights = np.full(len(cluster.pods), np.nan)
        queues: list[tuple[list[int], list[list[float]]]] = []
        for report in self._door.router.controllers(now).values():
            if report.status is not None:
                weights[report.slots] = report.weights
                queues.append((report.slots, report.queue_trajectory))
        recorder.sample(now, cluster.queues(), weights)
        if queues:
            horizon = max(len(trajectory) for _, trajectory in queues)
            predicted = np.full((horizon, len(weights)), np.nan)
            for slots, trajectory in queues:
                predicted[: len(trajectory), slots] = trajectory
            recorder.predict(now, predicted)
        if self._progress is not None:
            self._progress(min(1.0, len(recorder.arrival_s) / self._expected))
        cluster.clock.at(recorder.next_sample_s, self.look)


def _summary(scenario: Scenario, strategy: str, seed: int, load: float, stage: Stage) -> Run:
    cluster = stage.cluster
    recorder, described = cluster.recorder, cluster.described
    return Run(
        scenario=scenario.name,
        strategy=strategy,
        seed=seed,
        load=load,
        config=stage.config,
        requests=recorder.requests(_ideal_prefill_s(described, recorder.prompt_tokens)),
        pods=tuple(
            PodSummary(id=pod.id, role=pod.role, speed=_speed(pod, described), work_done=work)
            for pod, work in zip(described, cluster.work_done(), strict=True)
        ),
        samples=recorder.samples(),
        predicted_queue=tuple(recorder.predicted),
        duration_s=cluster.clock.now,
    )


def _rate(pod: SimPod) -> float:
    per_token_s = pod.figures.work_token_s or pod.figures.token_delay_s
    return 1.0 / per_token_s if per_token_s else 1.0


def _speed(pod: SimPod, described: list[SimPod]) -> float:
    peers = [_rate(peer) for peer in described if peer.role == pod.role]
    return _rate(pod) * len(peers) / sum(peers)


def _ideal_prefill_s(described: list[SimPod], prompt_tokens: Any) -> Floats:
    """Of each prompt, with nothing cached and nobody else there, on a pod of mean speed."""
    prefillers = [pod.figures for pod in described if pod.role != "decode"]
    sizes, places = np.unique(np.array(prompt_tokens), return_inverse=True)
    ideal_s = np.array(
        [
            sum(figures.prefill_s(int(size)) for figures in prefillers) / len(prefillers)
            for size in sizes
        ],
        dtype=np.float64,
    )
    return ideal_s[places] if len(sizes) else ideal_s
