"""The structs of how pods are picked: strategies with their parameters, and the controller.

The docstring under a field is its one description, as in schema.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from calinix.config.fields import Base, Factor


class Weights(Base, frozen=True):
    """Weights of the four scores, each in [0, 1], for one role; one that is left out is 0."""

    cache: Factor = 0.0
    """Of the share of the prompt's blocks that the pod holds."""
    load: Factor = 0.0
    """Of how few requests the pod has inflight, beside the busiest candidate."""
    sticky: Factor = 0.0
    """Of being the session's last pod."""
    locality: Factor = 0.0
    """Of being near the prefill pod (decode only): the same pod, host or zone."""


class Imbalance(Base, frozen=True):
    """Pods with inflight > factor x mean + offset are dropped before scoring."""

    enabled: bool = True
    """false: a full prefix match may outbid any load."""
    factor: Factor = 1.5
    """Times the mean of the candidates' inflight requests."""
    offset: Factor = 4.0
    """Requests on top of that."""
    copy_offset: Factor = 1.0
    """A prefix that two pods or more hold goes to a further one while all of these have more
    inflight than the mean, by so many requests and by a quarter."""


class Predictive(Base, frozen=True):
    """What the predictive strategy makes of what it measures. All costs are in seconds."""

    attention_tokens: Factor = 0.0
    """Prompt length at which attention doubles what a token costs to prefill; 0: every token
    costs the same. A wrong value is worse than 0."""
    queue_price: Factor = 0.5
    """What a second of prefill is taken to cost the requests behind it, in seconds per request
    that waits on the mean pod: the higher, the more a cached prefix is worth when the pool is
    busy."""
    crowding: Factor = 0.05
    """What each request of a pod costs, in prefills of the mean request."""
    fallback: bool = True
    """Several routers of the same pods: take weighted turns where the others' load is not known
    well enough to compare pods by it, and no pod holds the prompt."""


StrategyName = Literal[
    "random",
    "roundRobin",
    "weightedRoundRobin",
    "leastLoad",
    "powerOfTwo",
    "weightedPowerOfTwo",
    "cacheOnly",
    "cacheAware",
    "predictive",
]


class Strategy(Base, frozen=True):
    """A strategy with its parameters; `strategy: leastLoad` is short for `{name: leastLoad}`."""

    name: StrategyName = "predictive"
    """How pods are picked."""
    single: Weights = field(default_factory=lambda: Weights(cache=0.60, load=0.30, sticky=0.10))
    """cacheAware: weights for a single pod."""
    prefill: Weights = field(default_factory=lambda: Weights(cache=0.65, load=0.25, sticky=0.10))
    """cacheAware: weights for the prefill pod."""
    decode: Weights = field(
        default_factory=lambda: Weights(cache=0.10, load=0.55, sticky=0.10, locality=0.25)
    )
    """cacheAware: weights for the decode pod."""
    imbalance: Imbalance = field(default_factory=Imbalance)
    """cacheAware: which pods are too busy to be scored."""
    predictive: Predictive = field(default_factory=Predictive)
    """predictive: how costs are made of measurements."""


class Controller(Base, frozen=True):
    """The controller of each pool: it predicts queues and steers weights against them."""

    enabled: bool = True
    """false: every weight is 1."""
    step_ms: Annotated[int, Meta(ge=50, le=60_000)] = 500
    """Between two steps; also the length of a step of the prediction."""
    horizon: Annotated[int, Meta(ge=1, le=100)] = 10
    """Steps that are looked ahead."""
    weight_min: Annotated[float, Meta(ge=0.001, le=1.0)] = 0.1
    """Least weight of a pod; the mean is 1."""
    weight_max: Annotated[float, Meta(ge=1.0, le=1000.0)] = 3.0
    """Largest weight of a pod."""
    regularisation: Annotated[float, Meta(ge=1e-6, le=1e6)] = 0.5
    """Price of weights away from 1 beside queues away from the target."""
    mode: Literal["convex", "literal"] = "convex"
    """convex: decides shares of the load, by measured speed; literal: the form that each pod
    decides for itself, by requests and throughput, to compare with."""
