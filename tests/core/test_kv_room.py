"""Mirrors of pods whose KV events come have room for what comes in before the engine evicts."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from calinix.config import CacheRegistry, KvEvents, PodKvEvents
from routing import make_config, make_router, pod_config


@pytest.mark.parametrize(
    ("apply", "bind", "fed", "other"),
    [
        ("auto", None, 200, 200),
        ("clears", "tcp://*:5557", 200, 200),
        ("blocks", None, 300, 200),
        ("blocks", "tcp://*:5557", 300, 300),
    ],
)
def test_where_events_say_what_goes_the_mirror_does_not_evict_first(
    apply: Literal["auto", "blocks", "clears"], bind: str | None, fed: int, other: int
) -> None:
    """Half as much again as the pod holds, for pods whose events may say blocks."""
    config = make_config(
        (
            pod_config("fed", kv_events=PodKvEvents(endpoint="tcp://p:5557")),
            pod_config("other"),
        ),
        cache=CacheRegistry(kv_capacity_tokens=3200, token_block_size=16),
    )
    config = msgspec.structs.replace(config, kv_events=KvEvents(apply=apply, bind=bind))
    per_block = 1 if apply == "blocks" else 2
    found = {pod.id: per_block * pod.capacity_blocks for pod in make_router(config).pods()}
    assert found == {"fed": fed, "other": other}
