"""The configuration: one schema from the YAML file to frozen structs.

Keys are camelCase in YAML and snake_case here. Every field has its default and its meaning in
one place; `calinix check --schema` and docs/configuration.md are made from these structs.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Ms = Annotated[int, Meta(ge=1, le=86_400_000)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Mode = Literal["single", "dispatch"]


class Base(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"
):
    """Frozen, strict, camelCase outside."""


class Limits(Base):
    """Bounds on what a client may send."""

    header_bytes: Annotated[int, Meta(ge=1024)] = 65_536
    body_bytes: PositiveInt = 67_108_864
    connections: PositiveInt = 8192
    pipelined_requests: PositiveInt = 16


class Timeouts(Base):
    """How long each step may take. See docs/configuration.md for what each one ends in."""

    connect_ms: Ms = 2_000
    first_token_ms: Ms = 120_000
    idle_ms: Ms = 60_000
    total_ms: Ms = 600_000
    prefill_ms: Ms = 120_000
    client_ms: Ms = 30_000
    keep_alive_ms: Ms = 75_000
    drain_ms: Ms = 30_000


class Waiting(Base):
    """The queue for requests that find every pod full."""

    max_requests: NonNegativeInt = 1024
    timeout_ms: Ms = 5_000


class ServerTls(Base):
    """Certificate of the inference port."""

    cert_file: str
    key_file: str


class ClientTls(Base):
    """How https pods are verified."""

    ca_file: str | None = None
    verify: bool = True


class Weights(Base):
    """Weights of the four scores for one role."""

    cache: NonNegativeFloat = 0.0
    load: NonNegativeFloat = 0.0
    sticky: NonNegativeFloat = 0.0
    locality: NonNegativeFloat = 0.0


class Imbalance(Base):
    """Pods with inflight > factor x mean + offset are dropped before scoring."""

    enabled: bool = True
    factor: NonNegativeFloat = 1.5
    offset: NonNegativeFloat = 4.0


StrategyName = Literal[
    "random", "roundRobin", "leastLoad", "powerOfTwo", "cacheOnly", "cacheAware"
]


class Strategy(Base):
    """A strategy with its parameters; `strategy: cacheAware` is short for `{name: cacheAware}`."""

    name: StrategyName = "cacheAware"
    single: Weights = field(default_factory=lambda: Weights(cache=0.60, load=0.30, sticky=0.10))
    prefill: Weights = field(default_factory=lambda: Weights(cache=0.65, load=0.25, sticky=0.10))
    decode: Weights = field(
        default_factory=lambda: Weights(cache=0.10, load=0.55, sticky=0.10, locality=0.25)
    )
    imbalance: Imbalance = field(default_factory=Imbalance)


class Gateway(Base):
    """The inference port and how it routes."""

    host: str = "0.0.0.0"  # noqa: S104  an inference port is there to be reached
    port: Port = 8080
    strategy: StrategyName | Strategy = "cacheAware"
    default_mode: Mode | None = None
    tokenizer: Literal["bytes", "words"] = "bytes"
    block_size: PositiveInt | None = None
    """Tokens per block; by default 128 for `bytes`, 32 for `words`."""
    api_keys: tuple[str, ...] = ()
    forward_authorization: bool = False
    session_from_user: bool = False
    passthrough_paths: tuple[str, ...] = ()
    deterministic: bool = False
    """Ties by pod id instead of at random."""
    seed: int | None = None
    """Seed of the router's random numbers; by default taken from the system."""
    decisions_kept: NonNegativeInt = 1024
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    retries: Annotated[int, Meta(ge=0, le=1)] = 1
    waiting: Waiting = field(default_factory=Waiting)
    tls: ServerTls | None = None


class Passive(Base):
    """What a pod's answers to real requests say of its health."""

    enabled: bool = True
    failures: PositiveInt = 5
    """Connect failures, 5xx answers or missing first tokens in a row that eject a pod."""
    eject_ms: Ms = 10_000
    """How long an ejected pod rests before one request may try it again (half-open)."""
    max_eject_ms: Ms = 60_000
    slow_factor: Annotated[float, Meta(ge=1.5)] = 8.0
    """A pod whose time to first token per uncached token is this many times the median of its
    peers is ejected as slow."""


class Health(Base):
    """Active probes (the first five keys) and passive rules."""

    endpoint: str = "/health"
    interval_ms: Ms = 2_000
    timeout_ms: Ms = 2_000
    healthy_threshold: PositiveInt = 2
    unhealthy_threshold: PositiveInt = 3
    passive: Passive = field(default_factory=Passive)


class CacheRegistry(Base):
    """What is known of the pods' KV caches."""

    enabled: bool = True
    max_pods: Annotated[int, Meta(ge=1, le=4096)] = 256
    shards_count: Annotated[int, Meta(ge=1, le=65536)] = 256
    stale_ttl_ms: Ms = 30_000
    """How long a pod that nothing is heard of stays trusted; not an expiry of blocks."""
    kv_capacity_tokens: PositiveInt = 524_288
    """KV capacity of a pod that does not state its own."""


class Sessions(Base):
    """The table of sessions' last pods."""

    max_sessions: NonNegativeInt = 65_536
    ttl_ms: Ms = 3_600_000


class Admin(Base):
    """Metrics and admin JSON; loopback by default."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Port = 9090


class Log(Base):
    """Structured logs on standard error; one line a request when `requests` is set."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"
    requests: bool = True
    requests_file: str | None = None
    """Where request lines go; standard output by default."""


class Labels(Base):
    """Where a pod runs; locality compares these."""

    host: str | None = None
    zone: str | None = None


class PodConfig(Base):
    """One engine endpoint."""

    id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
    url: str
    max_conns: PositiveInt = 1024
    labels: Labels = field(default_factory=Labels)
    api_key: str | None = None
    models: tuple[str, ...] = ()
    """Models (and LoRA adapters) it serves; empty: any."""
    kv_capacity_tokens: PositiveInt | None = None


class PodGroup(Base):
    """The pods of one role."""

    pods: tuple[PodConfig, ...]


class SingleUpstream(Base):
    """Unified pods."""

    pods: tuple[PodConfig, ...]
    mode: Literal["single"] = "single"


class DispatchUpstream(Base):
    """Prefill and decode apart."""

    prefill: PodGroup
    decode: PodGroup
    mode: Literal["dispatch"] = "dispatch"
    protocol: Literal["plain", "nixl"] = "plain"


class Upstreams(Base):
    """Either group may be absent, not both."""

    single: SingleUpstream | None = None
    dispatch: DispatchUpstream | None = None
    tls: ClientTls = field(default_factory=ClientTls)


class Config(Base):
    """The whole file."""

    upstreams: Upstreams
    version: Literal[1] = 1
    gateway: Gateway = field(default_factory=Gateway)
    health: Health = field(default_factory=Health)
    cache_registry: CacheRegistry = field(default_factory=CacheRegistry)
    sessions: Sessions = field(default_factory=Sessions)
    admin: Admin = field(default_factory=Admin)
    log: Log = field(default_factory=Log)
