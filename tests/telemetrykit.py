"""What tests of telemetry are built from: records, pods, and a reader of the exposition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from calinix.config import Config, Log, parse_config
from calinix.telemetry import Metrics, PodState, RequestRecord


class Pod(msgspec.Struct, frozen=True):
    """A pod as the router tells of it."""

    id: str
    role: str = "single"
    inflight: int = 0
    healthy: bool = True
    draining: bool = False
    ejected: bool = False
    blocks: int = 0


class Pods:
    """A router that only knows its pods."""

    def __init__(self, *pods: Pod):
        self.list = list(pods)

    def pods(self) -> Sequence[PodState]:
        """All of them."""
        return self.list


def record(**fields: object) -> RequestRecord:
    """A good streamed request to pod a, but for `fields`."""
    given_: dict[str, Any] = {
        "request_id": "r-1",
        "endpoint": "/v1/chat/completions",
        "mode": "single",
        "strategy": "cacheAware",
        "model": "m",
        "status": 200,
        "pod_id": "a",
        "received_at": 1.8e9,
        "e2e_us": 1_000_000,
        **fields,
    }
    return RequestRecord(**given_)


def samples(shown: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value of every sample of Calinix, read as Prometheus would."""
    families = text_string_to_metric_families(shown.exposition().decode())
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
        if s.name.startswith("calinix_")
    }


def value(shown: Metrics, name: str, **labels: str) -> float | None:
    """One sample, or None where there is none."""
    return samples(shown).get((name, tuple(sorted(labels.items()))))


def config(log: Log) -> Config:
    """A configuration with this log."""
    plain = parse_config("upstreams: {single: {pods: [{id: a, url: 'http://a:1'}]}}")
    return msgspec.structs.replace(plain, log=log)
