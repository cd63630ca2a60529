"""The structs of the configuration: every key, its type, bounds, default and meaning.

Keys are camelCase in YAML and snake_case here. The docstring under a field is its one
description: the JSON Schema and docs/configuration.md are made from it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from calinix.config.fields import (
    Base,
    FileName,
    Mode,
    Ms,
    Path,
    Port,
    PositiveInt,
    Secret,
    Text,
)
from calinix.config.kv_events import KvEvents
from calinix.config.policy import Controller, Strategy, StrategyName
from calinix.config.scrape import Scrape
from calinix.config.tokens import TokenizerName, Tokenizing
from calinix.config.upstreams import Upstreams


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


class Gateway(Base, frozen=True):
    """The inference port and how it routes."""

    host: Text = "0.0.0.0"  # noqa: S104  an inference port is there to be reached
    """Address to listen on."""
    port: Port = 8080
    """Port to listen on; 0: any free one."""
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Processes that serve the port together, one for each core that it is to have; they tell each
    other within 20 ms what they route."""
    strategy: StrategyName | Strategy = "predictive"
    """How pods are picked: a name, or a mapping with a name and its parameters."""
    default_mode: Mode | None = None
    """Mode of requests without x-calinix-mode; by default single where that group exists."""
    tokenizer: TokenizerName = "bytes"
    """What prompts are cut into: bytes (fast), whitespace-separated words, or the engine's own
    tokens by the tokenizer in a model's folder (needs calinix[hf]; where a prompt's tokens cannot
    be told, its bytes)."""
    tokenizing: Tokenizing = field(default_factory=Tokenizing)
    """Exact tokens."""
    block_size: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    """Bytes or words per block; by default 128 bytes or 32 words. Tokens have
    cacheRegistry.tokenBlockSize."""
    api_keys: tuple[Secret, ...] = ()
    """Keys that clients must send as `authorization: Bearer`; empty: anyone may. `${NAME}` is
    taken from the environment."""
    forward_authorization: bool = False
    """Pass the client's authorization header on to pods that have no apiKey."""
    session_from_user: bool = False
    """Take OpenAI's `user` as session key where no other is sent; it is often constant, and then
    everything goes to one pod."""
    inject_usage: bool = False
    """Ask pods for the usage of streams whose clients did not, for chat and completions, and take
    the extra chunk out of the answer."""
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
    """KV capacity of a pod where neither the file nor the pod itself states one."""
    calibrate: bool = True
    """A pod that turns out not to hold what it is believed to hold loses trust: its cached prefixes
    count less until it does. false: the errors are shown, and nothing else."""
    token_block_size: Annotated[int, Meta(ge=1, le=65_536)] = 16
    """Token ids per block, for prompts that are sent as token ids, and for `tokenizer: hf:`; best
    the engine's own block size."""


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
    kv_events: KvEvents = field(default_factory=KvEvents)
    """KV events of all pods."""
    scrape: Scrape = field(default_factory=Scrape)
    """What pods are asked at their /metrics."""
    controller: Controller = field(default_factory=Controller)
    """Weights of the pods, renewed a few times a second."""
    sessions: Sessions = field(default_factory=Sessions)
    """The table of sessions' last pods."""
    admin: Admin = field(default_factory=Admin)
    """Metrics and admin JSON."""
    log: Log = field(default_factory=Log)
    """Logs."""
