"""The structs of the configuration's `upstreams`: the pods, and how they work together.

The docstring under a field is its one description, as in schema.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from calinix.config.fields import (
    MAX_COUNT,
    Base,
    FileName,
    PodId,
    PositiveInt,
    Secret,
    Text,
    Url,
)
from calinix.config.kv_events import PodKvEvents


class ClientTls(Base, frozen=True):
    """How https pods are verified."""

    ca_file: FileName | None = None
    """PEM file with the authorities to trust; by default those of the system."""
    verify: bool = True
    """false: any certificate is accepted."""


class Labels(Base, frozen=True):
    """Where a pod runs; locality compares these."""

    host: Text | None = None
    """Machine."""
    zone: Text | None = None
    """Zone, rack or anything else that is near in the network."""


class PodConfig(Base, frozen=True):
    """One engine endpoint."""

    id: PodId
    """Name of the pod; no two pods of a file share one."""
    url: Url
    """Where it listens; OpenAI's paths are added to it."""
    max_conns: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    """Requests it may have inflight; beyond that it is full."""
    labels: Labels = field(default_factory=Labels)
    """Where it runs."""
    api_key: Secret | None = None
    """Sent to it as `authorization: Bearer`. `${NAME}` is taken from the environment."""
    models: tuple[Text, ...] = ()
    """Models (and LoRA adapters) it serves; empty: any."""
    kv_capacity_tokens: PositiveInt | None = None
    """Tokens its KV cache holds; by default what its own metrics page says, else
    cacheRegistry.kvCapacityTokens."""
    kv_events: PodKvEvents = field(default_factory=PodKvEvents)
    """Where it publishes what it caches."""
    bootstrap_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """Prefill pods: port of the bootstrap server that decode pods ask (mooncake, sglang); by
    default the engine's own, 8998."""
    bootstrap_host: Text | None = None
    """Prefill pods: name or address of that server, as decode pods reach it; by default the
    host of `url`."""
    model: Text | None = None
    """Short for `models` with one entry; not beside `models`."""

    def __post_init__(self) -> None:
        if self.model is None:
            return
        if self.models:
            raise ValueError("a pod takes model or models, not both")
        # One place to read from: whoever asks what a pod serves asks `models`.
        msgspec.structs.force_setattr(self, "models", (self.model,))
        msgspec.structs.force_setattr(self, "model", None)


Pods = Annotated[tuple[PodConfig, ...], Meta(min_length=1)]


class PodGroup(Base, frozen=True):
    """The pods of one role."""

    pods: Pods
    """At least one pod."""


class SingleUpstream(Base, frozen=True):
    """Unified pods."""

    pods: Pods
    """At least one pod."""
    mode: Literal["single"] = "single"
    """Says what the group is."""


class DispatchUpstream(Base, frozen=True):
    """Prefill and decode apart."""

    prefill: PodGroup
    """Pods that compute prompts."""
    decode: PodGroup
    """Pods that generate."""
    mode: Literal["dispatch"] = "dispatch"
    """Says what the group is."""
    protocol: Literal["auto", "plain", "nixl", "mooncake", "sglang"] = "auto"
    """How the KV cache gets from prefill to decode: nixl or mooncake (vLLM's connectors), sglang,
    plain (one leg after the other, for engines that share a KV store), or auto (what the pods say
    that they are)."""
    prefill_threshold: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    """A prompt of which the decode pod would have to compute at most this many tokens, because it
    is short or cached there, skips the prefill pod (with the predictive strategy: where that takes
    less time); 0: none does. Not for sglang, whose decode pods serve nothing that is not prefilled
    elsewhere."""


class Upstreams(Base, frozen=True):
    """Either group may be absent, not both."""

    single: SingleUpstream | None = None
    """Unified pods."""
    dispatch: DispatchUpstream | None = None
    """Prefill and decode apart."""
    tls: ClientTls = field(default_factory=ClientTls)
    """How https pods are verified."""
