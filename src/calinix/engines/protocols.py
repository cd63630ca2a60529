"""The registry of exchanges: which one carries a request, by protocol, mode and endpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from calinix.core.prompt import Endpoint
from calinix.engines.base import Exchange, decode_members
from calinix.engines.plain import OUTPUT_LIMITS, OneLeg, PrefillDecode, can_split
from calinix.engines.vllm import NixlExchange, is_one_sequence

Protocol = Literal["plain", "nixl"]
"""`upstreams.dispatch.protocol`."""


def _plain(body: bytes, endpoint: Endpoint) -> Exchange:
    members = decode_members(body)
    if not can_split(members, endpoint):
        return OneLeg(body, "decode")
    return PrefillDecode(body, members, endpoint)


def _nixl(body: bytes, endpoint: Endpoint) -> Exchange:
    members = decode_members(body)
    if not can_split(members, endpoint, budget_allowed=True) or not is_one_sequence(members):
        return OneLeg(body, "decode")
    return NixlExchange(body, members, endpoint)


EXCHANGES: dict[Protocol, Callable[[bytes, Endpoint], Exchange]] = {
    "plain": _plain,
    "nixl": _nixl,
}


def exchange_for(
    protocol: Protocol, mode: Literal["single", "dispatch"], endpoint: Endpoint, body: bytes
) -> Exchange:
    """The exchange that carries one request, whose transfer fields are already stripped.

    What cannot be split (nothing is generated, an earlier response is continued, or several
    sequences where the protocol moves one) is one decode leg in dispatch mode. Raises BadRequest
    when a body that must be edited is not a JSON object.
    """
    if mode == "single":
        return OneLeg(body, "single")
    if endpoint not in OUTPUT_LIMITS:
        return OneLeg(body, "decode")
    return EXCHANGES[protocol](body, endpoint)
