"""The configuration that a simulated gateway runs with: the real schema, filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from calinix.config import Config
from calinix.core.pods import Role
from calinix.sim.cluster import SimPod

_NO_BOUND = 1_000_000
_STEERED = {"weightedRoundRobin", "weightedPowerOfTwo", "predictive"}
"""Strategies that read the controllers' weights: for others they are not worked out."""


def config_of(
    pods: Sequence[SimPod], strategy: str, block_tokens: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A configuration for these pods, with the keys of the YAML file.

    Queues form at the pods, not before them: `maxConns` bounds nothing. The router knows the KV
    capacity of the pods and, of tokens, the block size; it knows none of their speeds.
    `settings` are merged over all this.
    """
    base: dict[str, Any] = {
        "upstreams": _upstreams(pods),
        "gateway": {"strategy": {"name": strategy}, "decisionsKept": 0},
        "controller": {"enabled": strategy in _STEERED},
        "cacheRegistry": {
            "tokenBlockSize": block_tokens,
            "maxPods": len(pods),
        },
    }
    return merged(base, settings)


def converted(config: Mapping[str, Any]) -> Config:
    """The same as structs. Raises msgspec.ValidationError for what the schema does not know."""
    return msgspec.convert(config, Config)


def merged(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with what `extra` says, section by section."""
    result = dict(base)
    for key, new in extra.items():
        value = new
        known = result.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            value = merged(known, value)
        result[key] = value
    return result


def _upstreams(pods: Sequence[SimPod]) -> dict[str, Any]:
    groups: dict[Role, list[dict[str, Any]]] = {"single": [], "prefill": [], "decode": []}
    for slot, pod in enumerate(pods):
        figures = pod.figures
        groups[pod.role].append(
            {
                "id": pod.id,
                "url": f"http://pod-{slot}:8000",
                "maxConns": _NO_BOUND,
                "kvCapacityTokens": figures.kv_capacity_tokens + figures.offload_tokens,
                "labels": {"host": pod.host} if pod.host else {},
            }
        )
    upstreams: dict[str, Any] = {}
    if groups["single"]:
        upstreams["single"] = {"pods": groups["single"]}
    if groups["prefill"]:
        upstreams["dispatch"] = {
            "prefill": {"pods": groups["prefill"]},
            "decode": {"pods": groups["decode"]},
        }
    return upstreams
