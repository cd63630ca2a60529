"""The registry of exchanges: which one carries a request, by protocol, mode and endpoint."""

# ruff: noqa: ARG001  one signature for all
from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from calinix.core.prompt import Endpoint
from calinix.engines.base import Draw, Exchange, ExchangeError, Prefiller
from calinix.engines.json_edits import without_transfer_fields
from calinix.engines.mooncake import MooncakeExchange
from calinix.engines.plain import (
    NIXL_PREFILL,
    OUTPUT_LIMITS,
    PREFILL,
    OneLeg,
    PrefillDecode,
    can_split,
    is_one_sequence,
)
from calinix.engines.sglang import SglangExchange

Protocol = Literal["plain", "nixl", "mooncake", "sglang"]
"""How KV gets from a prefill pod to a decode pod."""
Engine = Literal["vllm", "sglang", "other"]
"""What a pod is."""

NEEDS_PREFILL: frozenset[Protocol] = frozenset({"sglang"})
"""Protocols whose decode pods serve nothing that no prefill pod has prefilled for them."""


def protocol_of(engine: Engine, bootstrap_port: int | None) -> Protocol:
    """What `auto` stands for where this engine prefills.

    Of vLLM's connectors only Mooncake's needs a port in the configuration. The others take nixl:
    pods that share storage instead do not hear its marker, and answer without a handle.
    """
    if engine == "vllm":
        return "mooncake" if bootstrap_port is not None else "nixl"
    return "sglang" if engine == "sglang" else "plain"


def _plain(body: bytes, endpoint: Endpoint, prefiller: Prefiller, draw: Draw) -> Exchange:
    request = without_transfer_fields(body)
    if not can_split(request, endpoint):
        return OneLeg(body, "decode")
    return PrefillDecode(request, PREFILL[endpoint])


def _nixl(body: bytes, endpoint: Endpoint, prefiller: Prefiller, draw: Draw) -> Exchange:
    request = without_transfer_fields(body)
    if not can_split(request, endpoint, budget_allowed=True) or not is_one_sequence(request):
        return OneLeg(body, "decode")
    return PrefillDecode(request, NIXL_PREFILL[endpoint])


def _mooncake(body: bytes, endpoint: Endpoint, prefiller: Prefiller, draw: Draw) -> Exchange:
    request = without_transfer_fields(body)
    if not can_split(request, endpoint, budget_allowed=True) or not is_one_sequence(request):
        return OneLeg(body, "decode")
    return MooncakeExchange(request, endpoint, prefiller, draw)


def _sglang(body: bytes, endpoint: Endpoint, prefiller: Prefiller, draw: Draw) -> Exchange:
    return SglangExchange(without_transfer_fields(body), prefiller, draw)


EXCHANGES: dict[Protocol, Callable[[bytes, Endpoint, Prefiller, Draw], Exchange]] = {
    "plain": _plain,
    "nixl": _nixl,
    "mooncake": _mooncake,
    "sglang": _sglang,
}


def _undrawn(bits: int) -> int:
    raise ExchangeError(f"no random numbers were handed in, and {bits} bits are needed")


def exchange_for(
    protocol: Protocol,
    mode: Literal["single", "dispatch"],
    endpoint: Endpoint,
    body: bytes,
    prefiller: Prefiller | None = None,
    draw: Draw = _undrawn,
) -> Exchange:
    """The exchange that carries one request, whose transfer fields are already stripped.

    Without a prefill pod, and where a request cannot be split (nothing is generated, an earlier
    response is continued, the prompt's logprobs are asked for, several sequences where the
    protocol moves one), it is one decode leg in dispatch mode. Raises BadRequest when a body that
    must be edited is not a JSON object, and for what the protocol's pods would not survive.
    """
    if mode == "single":
        return OneLeg(body, "single")
    if endpoint not in OUTPUT_LIMITS or prefiller is None:
        return OneLeg(body, "decode")
    return EXCHANGES[protocol](body, endpoint, prefiller, draw)
