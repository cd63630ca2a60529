"""The structs of the configuration's KV events: where pods publish what they cache.

The docstring under a field is its one description, as in schema.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from calinix.config.fields import Base, Ms, Text
from calinix.config.tokens import hf_path

ZmqEndpoint = Annotated[
    str,
    Meta(
        pattern=r"^(tcp://[!-~]+:[0-9]{1,5}|ipc://[!-~]+)$",
        extra={"expected": "tcp://host:port or ipc://path"},
    ),
]
Ranks = Annotated[int, Meta(ge=1, le=64)]


class PodKvEvents(Base, frozen=True):
    """The KV events of one pod."""

    endpoint: ZmqEndpoint | None = None
    """Where it publishes them (the engine binds it); by default it is not asked, and may publish
    to kvEvents.bind."""
    replay_endpoint: ZmqEndpoint | None = None
    """Where it repeats them: at the start, after a gap, and to show that it lives; without it what
    is lost stays lost."""
    ranks: Ranks = 1
    """Data parallel ranks behind the pod; rank n publishes at the endpoint's port plus n."""
    topic: Text | None = None
    """Topic of its messages at kvEvents.bind; by default whatever begins with `kv@ID@`, with the
    pod's id."""
    base_model: Text | None = None
    """Name of its base model, as clients ask for it; by default the first of its models, the one
    in its topic, or what it lists itself."""


class KvEvents(Base, frozen=True):
    """KV events of all pods: what engines say of their own caches."""

    bind: ZmqEndpoint | None = None
    """Address at which the gateway receives the events of pods that connect to it, told apart by
    topic."""
    apply: Literal["auto", "blocks", "clears"] = "auto"
    """What events may say: blocks, or only that a cache is empty (clears); auto: blocks where
    prompts are hashed by tokens (hf), since nothing else can be compared with theirs. Choose blocks
    where clients send token ids."""
    check_ms: Ms = 5_000
    """A pod that publishes nothing is asked for its last events after this."""


def say_blocks(events: KvEvents, tokenizer: str) -> bool:
    """Whether events may say blocks; else only that a cache is empty: text has no token ids."""
    if events.apply == "auto":
        return hf_path(tokenizer) is not None
    return events.apply == "blocks"
