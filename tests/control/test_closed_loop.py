"""Estimators and controller together, steering weighted round robin over pods that queue."""

from __future__ import annotations

import heapq
import random
from typing import NamedTuple

import numpy as np
import pytest

from calinix.control import (
    ArrivalRate,
    BusyRate,
    MpcSettings,
    PoolController,
    ServiceRate,
    equal_delay_target,
)


class Outcome(NamedTuple):
    """What became of the requests, and where the weights were at the end."""

    mean_s: float
    weights: list[float]


class Pod:
    """One request after the other, each of exponential work; some of a second's work a second."""

    def __init__(self, speed: float):
        self.speed, self.free_s = speed, 0.0
        self.waiting = 0
        self.rate, self.busy = ServiceRate(), BusyRate()

    def take(self, now: float, work: float) -> float:
        """When the request that comes now will be done."""
        self.waiting += 1
        self.busy.began(now)
        self.free_s = max(self.free_s, now) + work / self.speed
        return self.free_s

    def done(self, now: float, came_s: float, work: float) -> None:
        """A request is done."""
        self.waiting -= 1
        self.busy.ended(now)
        self.rate.first_token(now, came_s, work)


def simulate(
    speeds: list[float],
    load: float,
    measured: str = "busy",
    steer: bool = True,
    slow_at_s: float = 1e9,
    seconds: float = 400.0,
) -> Outcome:
    """Poisson arrivals on weighted round robin; from `slow_at_s` on the first pod is at a fifth."""
    rng, pods = random.Random(7), [Pod(speed) for speed in speeds]
    pool = PoolController(MpcSettings(), len(pods))
    arrivals, work_arrivals = ArrivalRate(), ArrivalRate()
    done: list[tuple[float, int, float, float]] = []
    credit = np.zeros(len(pods))
    now, step_s, taken = 0.0, 0.0, []
    while now < seconds:
        now += rng.expovariate(load * sum(speeds))
        if now >= slow_at_s:
            pods[0].speed = speeds[0] / 5.0
        while done and done[0][0] <= now:
            end_s, slot, came_s, work = heapq.heappop(done)
            pods[slot].done(end_s, came_s, work)
        while steer and step_s <= now:
            queue = np.array([float(pod.waiting) for pod in pods])
            if measured == "busy":
                rate = np.array([pod.busy.rate(now) for pod in pods])
                arriving = arrivals.rate(now)
            else:
                rate = np.array([pod.rate.rate() for pod in pods])
                arriving = work_arrivals.rate(now)
            target = equal_delay_target(queue, rate)
            pool.step(step_s, now, range(len(pods)), queue, rate, arriving, target)
            step_s += pool.settings.dt_s
        work = rng.expovariate(1.0)
        arrivals.add(now)
        work_arrivals.add(now, work)
        credit += pool.weights
        slot = int(credit.argmax())
        credit[slot] -= credit.sum()
        end_s = pods[slot].take(now, work)
        taken.append(end_s - now)
        heapq.heappush(done, (end_s, slot, now, work))
    return Outcome(float(np.mean(taken)), pool.weights.tolist())


@pytest.mark.parametrize("measured", ["busy", "first tokens"])
def test_unequal_pods_are_given_what_they_can_do(measured: str) -> None:
    """Equal shares overload slow pods; the controller's cut the mean time to a fifth or less."""
    speeds, load = [20.0, 20.0, 5.0, 5.0], 0.6
    equal = simulate(speeds, load, steer=False)
    steered = simulate(speeds, load, measured)
    assert steered.mean_s < 0.2 * equal.mean_s
    fast, slow = sum(steered.weights[:2]), sum(steered.weights[2:])
    assert fast > 2.0 * slow


@pytest.mark.parametrize("measured", ["busy", "first tokens"])
def test_a_pod_that_gets_slow_loses_its_share(measured: str) -> None:
    """At a fifth of its speed a pod is given less than half of a share, from measurements alone."""
    speeds, load = [10.0, 10.0, 10.0, 10.0], 0.5
    equal = simulate(speeds, load, steer=False, slow_at_s=150.0)
    steered = simulate(speeds, load, measured, slow_at_s=150.0)
    assert steered.mean_s < 0.2 * equal.mean_s
    assert steered.weights[0] < 0.5
    assert min(steered.weights[1:]) > 1.0


def test_equal_pods_stay_about_equal() -> None:
    """Where nothing is to be gained the controller costs little beside plain round robin."""
    speeds, load = [10.0] * 4, 0.7
    equal = simulate(speeds, load, steer=False)
    assert simulate(speeds, load).mean_s < 1.15 * equal.mean_s
