"""The structs of the configuration: every key, its type, bounds, default and meaning.

Keys are camelCase in YAML and snake_case here. The docstring under a field is its one
description: the JSON Schema and docs/configuration.md are made from it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

MAX_COUNT = 1_000_000_000_000

PositiveInt = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Factor = Annotated[float, Meta(ge=0, le=1e9)]
Ms = Annotated[int, Meta(ge=1, le=86_400_000)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
FileName = Annotated[
    str, Meta(min_length=1, max_length=4096, extra={"expected": "the name of a file"})
]
Url = Annotated[
    str, Meta(min_length=1, extra={"expected": "http://host:port or https://host:port"})
]
Path = Annotated[str, Meta(pattern=r"^/[!-~]*$", extra={"expected": "a path that begins with '/'"})]
PodId = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        extra={"expected": "1 to 128 letters, digits or any of . _ : -"},
    ),
]
Secret = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=4096,
        extra={"secret": True},
        extra_json_schema={"writeOnly": True},
    ),
]
Mode = Literal["single", "dispatch"]

MASK = "***"
SECRET_FIELDS = frozenset({"api_key", "api_keys"})
SECRET_KEYS = frozenset({"apiKey", "apiKeys"})


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Frozen, strict, camelCase outside. `repr` never shows a secret."""

    def __repr__(self) -> str:
        shown = (
            f"{name}={MASK if name in SECRET_FIELDS and value else repr(value)}"
            for name in self.__struct_fields__
            for value in (getattr(self, name),)
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class Limits(Base, frozen=True):
    """Bounds on what a client may send."""

    header_bytes: Annotated[int, Meta(ge=1024, le=1_048_576)] = 65_536
    """Bytes of a request's head; one over it is answered 431."""
    body_bytes: PositiveInt = 67_108_864
    """Bytes of a request's body; one over it is answered 413."""
    connections: Annotated[int, Meta(ge=1, le=1_000_000)] = 8192
    """Client connections; one over it is answered 503 and closed."""
    pipelined_requests: Annotated[int, Meta(ge=1, le=10_000)] = 16
    """Requests of one connection that may wait for their turn before its reading pauses."""


class Timeouts(Base, frozen=True):
    """How long each step may take."""

    connect_ms: Ms = 2_000
    """To open a connection to a pod; then the request goes to another pod, once."""
    first_token_ms: Ms = 120_000
    """Streamed: from sending the request to the pod to its first SSE data event; then 504, and it
    counts against the pod."""
    idle_ms: Ms = 60_000
    """Streamed: between two events; then an error event and the end of the connection, and it
    counts against the pod."""
    total_ms: Ms = 600_000
    """Not streamed: to the whole answer; then 504. By itself it never ejects a pod."""
    prefill_ms: Ms = 120_000
    """Dispatch: to the answer of a prefill leg; then another prefill pod, once; then 504."""
    client_ms: Ms = 30_000
    """For a client to send one whole request, then 408; and to take anything at all of what waits
    for it, then its connection is cut."""
    keep_alive_ms: Ms = 75_000
    """A client connection without a request is closed after this."""
    drain_ms: Ms = 30_000
    """At shutdown: for the answers that are still owed; then their connections are cut."""


class Waiting(Base, frozen=True):
    """The queue for requests that find every pod full."""

    max_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 1024
    """Requests that may wait; one over it is answered 429. 0: nobody waits."""
    timeout_ms: Ms = 5_000
    """How long one may wait; then 429."""


class ServerTls(Base, frozen=True):
    """Certificate of the inference port; both files are needed."""

    cert_file: FileName
    """PEM file with the certificate and its chain."""
    key_file: FileName
    """PEM file with its private key."""


class ClientTls(Base, frozen=True):
    """How https pods are verified."""

    ca_file: FileName | None = None
    """PEM file with the authorities to trust; by default those of the system."""
    verify: bool = True
    """false: any certificate is accepted."""


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


StrategyName = Literal["random", "roundRobin", "leastLoad", "powerOfTwo", "cacheOnly", "cacheAware"]


class Strategy(Base, frozen=True):
    """A strategy with its parameters; `strategy: cacheAware` is short for `{name: cacheAware}`."""

    name: StrategyName = "cacheAware"
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


class Gateway(Base, frozen=True):
    """The inference port and how it routes."""

    host: Text = "0.0.0.0"  # noqa: S104  an inference port is there to be reached
    """Address to listen on."""
    port: Port = 8080
    """Port to listen on; 0: any free one."""
    strategy: StrategyName | Strategy = "cacheAware"
    """How pods are picked: a name, or a mapping with a name and its parameters."""
    default_mode: Mode | None = None
    """Mode of requests without x-calinix-mode; by default single where that group exists."""
    tokenizer: Literal["bytes", "words"] = "bytes"
    """What prompts are cut into: bytes (fast) or whitespace-separated words."""
    block_size: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    """Bytes or words per block; by default 128 bytes or 32 words."""
    api_keys: tuple[Secret, ...] = ()
    """Keys that clients must send as `authorization: Bearer`; empty: anyone may. `${NAME}` is
    taken from the environment."""
    forward_authorization: bool = False
    """Pass the client's authorization header on to pods that have no apiKey."""
    session_from_user: bool = False
    """Take OpenAI's `user` as session key where no other is sent; it is often constant, and then
    everything goes to one pod."""
    passthrough_paths: tuple[Path, ...] = ()
    """Further engine paths that are passed on to a pod and count as load."""
    deterministic: bool = False
    """Ties are broken by pod id instead of at random."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """Seed of the router's random numbers; by default taken from the system."""
    decisions_kept: Annotated[int, Meta(ge=0, le=1_000_000)] = 1024
    """Last decisions kept with their explanation."""
    limits: Limits = field(default_factory=Limits)
    """Bounds on what a client may send."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """How long each step may take."""
    retries: Annotated[int, Meta(ge=0, le=1)] = 1
    """1: a request that its pod cannot have begun is sent once more, to another pod."""
    waiting: Waiting = field(default_factory=Waiting)
    """The queue for requests that find every pod full."""
    tls: ServerTls | None = None
    """Certificate of the inference port; by default plain HTTP."""


class Passive(Base, frozen=True):
    """What a pod's answers to real requests say of its health."""

    enabled: bool = True
    """false: only probes decide."""
    failures: PositiveInt = 5
    """Connect failures, 5xx answers or missing first tokens in a row that eject a pod."""
    eject_ms: Ms = 10_000
    """How long an ejected pod rests before one request may try it again (half-open)."""
    max_eject_ms: Ms = 60_000
    """Longest rest; it doubles with every ejection in a row."""
    slow_factor: Annotated[float, Meta(ge=1.5, le=1e6)] = 8.0
    """A pod whose time to first token per uncached token is this many times the median of its
    peers is ejected as slow."""


class Health(Base, frozen=True):
    """Active probes, and what answers to real requests say."""

    endpoint: Path = "/health"
    """Path that is probed with GET; 2xx is good."""
    interval_ms: Ms = 2_000
    """Between two probes of a pod."""
    timeout_ms: Ms = 2_000
    """For a probe's answer."""
    healthy_threshold: PositiveInt = 2
    """Good probes in a row that bring a pod back; at start one is enough."""
    unhealthy_threshold: PositiveInt = 3
    """Bad probes in a row that take a pod out."""
    passive: Passive = field(default_factory=Passive)
    """What a pod's answers to real requests say of its health."""


class CacheRegistry(Base, frozen=True):
    """What is known of the pods' KV caches."""

    enabled: bool = True
    """false: nothing is remembered, and no prompt is ever believed cached."""
    max_pods: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Pods that can be told apart, over all groups."""
    shards_count: Annotated[int, Meta(ge=1, le=65536)] = 256
    """Shards of the index."""
    stale_ttl_ms: Ms = 30_000
    """How long a pod that nothing is heard of stays trusted; not an expiry of blocks."""
    kv_capacity_tokens: PositiveInt = 524_288
    """KV capacity of a pod that does not state its own."""
    token_block_size: Annotated[int, Meta(ge=1, le=65_536)] = 16
    """Token ids per block, for prompts that are sent as token ids."""


class Sessions(Base, frozen=True):
    """The table of sessions' last pods."""

    max_sessions: Annotated[int, Meta(ge=0, le=10_000_000)] = 65_536
    """Sessions remembered; 0: none."""
    ttl_ms: Ms = 3_600_000
    """A session without a request is forgotten after this."""


class Admin(Base, frozen=True):
    """Metrics and admin JSON; loopback by default."""

    enabled: bool = True
    """false: no admin port."""
    host: Text = "127.0.0.1"
    """Address to listen on."""
    port: Port = 9090
    """Port to listen on; 0: any free one."""


class Log(Base, frozen=True):
    """Operational logs on standard error, and the request log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is written."""
    format: Literal["auto", "json", "console"] = "auto"
    """auto: console on a terminal, JSON lines otherwise."""
    requests: bool = True
    """One JSON line for every finished request."""
    requests_file: FileName | None = None
    """File that request lines are appended to; by default standard output."""
    journal_file: FileName | None = None
    """File for a journal of every routing call, prompts included, that `calinix replay` reads; by
    default none is kept. The one of the process before goes on under this name with `.1` behind."""
    journal_max_bytes: PositiveInt = 1_073_741_824
    """Size at which the journal ends."""


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
    """Tokens its KV cache holds; by default cacheRegistry.kvCapacityTokens."""
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
    protocol: Literal["plain", "nixl"] = "plain"
    """How the KV cache gets from prefill to decode: nixl (vLLM's NixlConnector), or plain (one leg
    after the other, for engines that share a KV store)."""


class Upstreams(Base, frozen=True):
    """Either group may be absent, not both."""

    single: SingleUpstream | None = None
    """Unified pods."""
    dispatch: DispatchUpstream | None = None
    """Prefill and decode apart."""
    tls: ClientTls = field(default_factory=ClientTls)
    """How https pods are verified."""


class Config(Base, frozen=True):
    """The whole file."""

    upstreams: Upstreams
    """The pods."""
    version: Literal[1] = 1
    """Version of this format."""
    gateway: Gateway = field(default_factory=Gateway)
    """The inference port and how it routes."""
    health: Health = field(default_factory=Health)
    """Probes and passive rules."""
    cache_registry: CacheRegistry = field(default_factory=CacheRegistry)
    """What is known of the pods' KV caches."""
    sessions: Sessions = field(default_factory=Sessions)
    """The table of sessions' last pods."""
    admin: Admin = field(default_factory=Admin)
    """Metrics and admin JSON."""
    log: Log = field(default_factory=Log)
    """Logs."""
