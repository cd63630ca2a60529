"""The simulated pods, the gateways before them, and the requests on their way between.

The gateways' Routers are the real ones; the pods are models. The cluster knows the truth.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import log, sqrt
from typing import Protocol

import msgspec

from calinix.core.choice import Recipe
from calinix.core.pods import Role
from calinix.sim.clock import VirtualClock
from calinix.sim.pod_figures import PodFigures
from calinix.sim.pod_jobs import Step, StepKind
from calinix.sim.pod_model import Job, JobTooLargeError, PodModel
from calinix.sim.recorder import Recorder
from calinix.sim.workload import SimRequest

NEVER_S = float("inf")
_PREFILLED = StepKind.PREFILLED


class SimPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as a scenario describes it."""

    id: str
    role: Role
    figures: PodFigures
    host: str = ""
    """KV caches move in no time between pods of one host."""


class Leg(Protocol):
    """Whoever has sent a job to a pod."""

    def on_prefilled(self, job: Job, at_s: float) -> None:
        """The job's first token is there."""
        ...

    def on_finished(self, job: Job, at_s: float) -> None:
        """Its last token is there."""
        ...

    def on_lost(self, job: Job, at_s: float) -> None:
        """The pod died with it."""
        ...


class Gateway(Protocol):
    """One gateway, as the cluster sees it."""

    def receive(self, request: SimRequest, now: float) -> None:
        """A client's request comes in."""
        ...


class _Place:
    """Where a pod runs: its model, and who has sent it what."""

    __slots__ = ("armed_s", "legs", "model", "pod", "slot", "slow_factor", "up", "work_tokens")

    def __init__(self, pod: SimPod, slot: int, model: PodModel):
        self.pod = pod
        self.slot = slot
        self.model = model
        self.legs: dict[str, tuple[Job, Leg]] = {}
        self.armed_s = NEVER_S
        self.up = True
        self.slow_factor = 1.0
        self.work_tokens = 0.0
        """Of processes that have died."""


class Cluster:
    """Pods by slot, as the routers number them: single, then prefill, then decode."""

    def __init__(self, pods: Sequence[SimPod], noise: float, seed: int):
        self.clock = VirtualClock()
        self.recorder = Recorder(len(pods))
        self.noise = noise
        self._seed = seed
        self._lives = 0
        self._places = [
            _Place(pod, slot, self._new_model(pod, slot)) for slot, pod in enumerate(pods)
        ]
        self.pods = [place.model for place in self._places]
        """The models by slot: `waiting`, `running`, `kv_usage`, what they predict."""
        self.current: SimRequest | None = None
        """The request that is being routed, with its true chain and sizes."""
        self.gateways: list[Gateway] = []
        self.open = 0
        """Requests that have come and not ended, and follow-ups that will come."""
        self._arrivals: Iterator[SimRequest] = iter(())
        self._more = False
        self._pick = random.Random(f"{seed}/gateways")
        self._stream = random.Random(f"{seed}/streams")
        self.streamed_share = 1.0

    def _new_model(self, pod: SimPod, slot: int) -> PodModel:
        self._lives += 1
        rng = random.Random(f"{self._seed}/pod/{slot}/{self._lives}")
        return PodModel(pod.figures, noise_of(self.noise, rng))

    @property
    def described(self) -> list[SimPod]:
        """The pods as the scenario describes them, by slot."""
        return [place.pod for place in self._places]

    # --- requests ----------------------------------------------------------------------------

    def feed(self, arrivals: Iterator[SimRequest]) -> None:
        """Requests come, in order of arrival."""
        self._arrivals = arrivals
        self._more = True
        self._next_arrival()

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is None:
            self._more = False
            self._stop_if_done()
        else:
            self.clock.at(request.arrival_s, self._arrive, request)

    def _arrive(self, request: SimRequest) -> None:
        self.open += 1
        self._receive(request)
        self._next_arrival()

    def _receive(self, request: SimRequest) -> None:
        if self.streamed_share < 1.0:
            request.streamed = self._stream.random() < self.streamed_share
        gateways = self.gateways
        which = self._pick.randrange(len(gateways)) if len(gateways) > 1 else 0
        gateways[which].receive(request, self.clock.now)

    def ended(self, request: SimRequest, *, good: bool) -> None:
        """The client has its answer, or an error; perhaps it goes on."""
        self.open -= 1
        if good and request.follow is not None:
            following = request.follow(self.clock.now)
            if following is not None:
                self.open += 1
                self.clock.at(following.arrival_s, self._receive, following)
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        if not self.open and not self._more:
            self.clock.stop()

    # --- pods --------------------------------------------------------------------------------

    def submit(self, slot: int, job: Job, leg: Leg) -> bool:
        """Sends a job to a pod; False: nobody listens there. Raises JobTooLargeError."""
        place = self._places[slot]
        if not place.up:
            return False
        place.model.submit(job, self.clock.now)
        place.legs[job.id] = (job, leg)
        self._settle(place)
        return True

    def cancel(self, slot: int, job: Job) -> None:
        """Nobody wants the job's answer any more."""
        place = self._places[slot]
        if place.legs.pop(job.id, None) is not None:
            place.model.cancel(job, self.clock.now)
            self._settle(place)

    def release(self, slot: int, job: Job) -> None:
        """The KV cache that a prefill held has been fetched, or is not needed."""
        place = self._places[slot]
        if place.model.release(job.id, self.clock.now):
            self._settle(place)

    def is_up(self, slot: int) -> bool:
        """Whether the pod's process runs."""
        return self._places[slot].up

    def share_host(self, slot: int, other: int) -> bool:
        """Whether two pods run on one machine."""
        host = self._places[slot].pod.host
        return bool(host) and host == self._places[other].pod.host

    def queues(self) -> list[int]:
        """Requests waiting or running, by slot."""
        return [model.waiting + model.running for model in self.pods]

    def work_done(self) -> list[float]:
        """Tokens of prefill work and of answers, by slot."""
        return [place.work_tokens + _work_of(place.model) for place in self._places]

    def _settle(self, place: _Place) -> None:
        """Tells what has happened on the pod by now, and when to look again."""
        model = place.model
        for step in model.advance(self.clock.now):
            self._tell(place, step)
        if model is not place.model:
            return
        next_s = model.next_s()
        if next_s is None:
            place.armed_s = NEVER_S
        elif next_s != place.armed_s:
            place.armed_s = next_s
            self.clock.at(next_s, self._due, (place, next_s))

    def _due(self, what: tuple[_Place, float]) -> None:
        place, armed_s = what
        if place.armed_s == armed_s:
            place.armed_s = NEVER_S
            self._settle(place)

    def _tell(self, place: _Place, step: Step) -> None:
        job = step.job
        if step.kind is _PREFILLED:
            found = place.legs.get(job.id)
            if found is not None:
                found[1].on_prefilled(job, step.at_s)
        else:
            found = place.legs.pop(job.id, None)
            if found is not None:
                found[1].on_finished(job, step.at_s)

    # --- faults ------------------------------------------------------------------------------

    def slow_down(self, slot: int, factor: float) -> None:
        """The pod takes `factor` times as long for everything from now on."""
        place = self._places[slot]
        place.slow_factor = factor
        self._settle(place)
        place.model.slow_down(factor, self.clock.now)
        self._settle(place)

    def flush(self, slot: int) -> None:
        """The pod's cache is emptied."""
        self._places[slot].model.blocks.clear()

    def kill(self, slot: int) -> None:
        """The pod's process dies with all that it has."""
        place = self._places[slot]
        if not place.up:
            return
        self._settle(place)
        lost = list(place.legs.values())
        place.up = False
        place.legs = {}
        place.armed_s = NEVER_S
        place.work_tokens += _work_of(place.model)
        place.model = self.pods[slot] = self._new_model(place.pod, slot)
        for job, leg in lost:
            leg.on_lost(job, self.clock.now)

    def revive(self, slot: int) -> None:
        """A new process with an empty cache."""
        place = self._places[slot]
        place.up = True
        place.model.slow_down(place.slow_factor, self.clock.now)


Baseline = Callable[[Cluster], Mapping[Role, Recipe]]
"""A strategy that knows more than a router may: it is given the cluster."""


def _work_of(model: PodModel) -> float:
    return model.counters.work_tokens + model.counters.output_tokens


def noise_of(variation: float, rng: random.Random) -> Callable[[], float] | None:
    """Draws factors of mean 1 and this coefficient of variation (lognormal); None for 0."""
    if variation <= 0.0:
        return None
    sigma = sqrt(log(1.0 + variation * variation))
    mu = -0.5 * sigma * sigma
    return lambda: rng.lognormvariate(mu, sigma)


__all__ = ["Baseline", "Cluster", "Gateway", "JobTooLargeError", "Leg", "SimPod", "noise_of"]
