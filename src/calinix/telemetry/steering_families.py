"""Metrics of the controllers: weights, queues now and ahead, estimates, where weights come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

STEERING = ("starting", "fresh", "held", "decaying")
"""All values of the label `state`."""


class PodSteering(Protocol):
    """One pod in its pool; queues and rates in the pool's unit."""

    @property
    def pod_id(self) -> str:
        """Its id."""
        ...

    @property
    def weight(self) -> float:
        """Share of the load; 1: the mean."""
        ...

    @property
    def queue(self) -> float | None:
        """What waits there; None: it gets no work."""
        ...

    @property
    def service_rate(self) -> float | None:
        """Units a second; None: it gets no work."""
        ...

    @property
    def queues_ahead(self) -> Sequence[float]:
        """Over the horizon; empty where nothing is predicted."""
        ...

    @property
    def slowness(self) -> float:
        """Above 1: slower than its peers."""
        ...


class PoolSteering(Protocol):
    """One role's controller."""

    @property
    def role(self) -> str:
        """Its role."""
        ...

    @property
    def unit(self) -> str:
        """Of queues and rates."""
        ...

    @property
    def steering(self) -> str:
        """One of STEERING."""
        ...

    @property
    def steps(self) -> int:
        """So far."""
        ...

    @property
    def fallbacks(self) -> int:
        """Of these, without fresh weights."""
        ...

    @property
    def arrival_rate(self) -> float:
        """Units a second."""
        ...

    @property
    def token_s(self) -> float:
        """Seconds per output token, alone on a pod."""
        ...

    @property
    def pods(self) -> Sequence[PodSteering]:
        """Of the role."""
        ...


class SteeringState(Protocol):
    """All of them."""

    @property
    def pools(self) -> Sequence[PoolSteering]:
        """One per role that has pods."""
        ...

    @property
    def replicas(self) -> int:
        """Other routers."""
        ...


class NoSteering:
    """Of a gateway that has no controller."""

    pools: Sequence[PoolSteering] = ()
    replicas = 0


def steering_families(state: SteeringState, labels: Sequence[str]) -> Iterator[Metric]:
    """By pod id and role; queues are in seconds of prefill, of decode pods in requests."""
    yield from _pods(state.pools, labels)
    arrivals = GaugeMetricFamily(
        "calinix_controller_arrival_rate",
        "What arrives at the pool a second, in its queues' unit",
        labels=("role", "unit"),
    )
    token = GaugeMetricFamily(
        "calinix_controller_token_seconds",
        "Time per output token on a pod with nothing else to do, as estimated",
        labels=("role",),
    )
    source = GaugeMetricFamily(
        "calinix_controller_state", "1: where the weights come from", labels=("role", "state")
    )
    steps = CounterMetricFamily(
        "calinix_controller_steps_total", "Steps of the controller", labels=("role",)
    )
    fallbacks = CounterMetricFamily(
        "calinix_controller_fallbacks_total", "Steps without fresh weights", labels=("role",)
    )
    for pool in state.pools:
        arrivals.add_metric((pool.role, pool.unit), pool.arrival_rate)
        token.add_metric((pool.role,), pool.token_s)
        for name in STEERING:
            source.add_metric((pool.role, name), float(pool.steering == name))
        steps.add_metric((pool.role,), pool.steps)
        fallbacks.add_metric((pool.role,), pool.fallbacks)
    yield from (arrivals, token, source, steps, fallbacks)
    yield GaugeMetricFamily(
        "calinix_replicas", "Other routers of the same pods that are heard of", value=state.replicas
    )


def _pods(pools: Sequence[PoolSteering], labels: Sequence[str]) -> Iterator[Metric]:
    gauges = {
        "weight": "Share of the load that the controller gives the pod; 1: the mean",
        "queue": "What waits at the pod, in its pool's unit",
        "queue_ahead": "The same at the end of the horizon, as predicted",
        "service_rate": "What the pod works off a second, in its pool's unit",
        "slowness": "Time per output token over what its pool's model says",
    }
    for name, text in gauges.items():
        family = GaugeMetricFamily(f"calinix_pod_{name}", text, labels=labels)
        for pool in pools:
            for pod in pool.pods:
                figure = _figure(pod, name)
                if figure is not None:
                    family.add_metric((pod.pod_id, pool.role), figure)
        yield family


def _figure(pod: PodSteering, name: str) -> float | None:
    if name == "queue_ahead":
        return pod.queues_ahead[-1] if pod.queues_ahead else None
    figure: float | None = getattr(pod, name)
    return figure
