"""What the configuration, topics and the pods themselves say of their KV events."""

from __future__ import annotations

import msgspec

from calinix.config import Config
from calinix.config.kv_events import say_blocks


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    """Of an adapter, its base model."""


class _Models(msgspec.Struct):
    data: list[_Card] = []


def clears_only(config: Config) -> bool:
    """Whether events may only say that a cache is empty: blocks of text are not the engine's."""
    return not say_blocks(config.kv_events, config.gateway.tokenizer)


def are_configured(config: Config) -> bool:
    """Whether some pod's events may come."""
    single, dispatch = config.upstreams.single, config.upstreams.dispatch
    pods = [*(single.pods if single is not None else ())]
    if dispatch is not None:
        pods += [*dispatch.prefill.pods, *dispatch.decode.pods]
    return config.kv_events.bind is not None or any(pod.kv_events.endpoint for pod in pods)


def at_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a DP rank: engines add the rank to the port."""
    if rank == 0:
        return endpoint
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}"


def model_in(topic: bytes) -> str:
    """The model of a topic `kv@POD@MODEL`; empty where it names none."""
    parts = topic.split(b"@", 2)
    return parts[2].decode("utf-8", "replace") if len(parts) == 3 else ""


def base_model(answer: bytes) -> str | None:
    """The first model of a pod's /v1/models that is no adapter."""
    try:
        models = msgspec.json.decode(answer, type=_Models)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return next((card.id for card in models.data if card.parent is None), None)
