"""Keys of the file that speak of routing, each set in YAML and seen in what a router picks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import yaml

from calinix.config import parse_config
from calinix.core.events import PodDraining, PodHeard, PodRemoved, ProbeFailed, ProbeSucceeded
from calinix.core.kv import COMPILED
from calinix.core.router import Router
from calinix.errors import ConfigError
from fleets import merged
from routing import ask, fail, finish, make_router, serve

ROLES = ("single", "prefill", "decode")


def router_of(extra: dict[str, Any] | None = None, **pods: dict[str, Any]) -> Router:
    """Three pods of every role (`pods` adds keys by id), all healthy, ties by id."""
    entries = {
        role: [
            {"id": f"{role}-{n}", "url": f"http://{role}-{n}:1", **pods.get(f"{role}_{n}", {})}
            for n in range(3)
        ]
        for role in ROLES
    }
    base = {
        "gateway": {"deterministic": True},
        "upstreams": {
            "single": {"pods": entries["single"]},
            "dispatch": {role: {"pods": entries[role]} for role in ("prefill", "decode")},
        },
    }
    return make_router(parse_config(yaml.safe_dump(merged(base, extra or {}))))


def only(router: Router, number: int, does: Callable[[], object]) -> None:
    """`does`, with the pods of this number alone in every role."""
    others = [f"{role}-{n}" for role in ROLES for n in range(3) if n != number]
    for draining in (True, False):
        for pod_id in others:
            router.observe(PodDraining(pod_id, draining), 1.0)
        if draining:
            does()


def picked(router: Router, role: str, **request: Any) -> str:
    """The pod of this role that a request of twenty blocks goes to."""
    mode = "single" if role == "single" else "dispatch"
    plan = ask(router, 20, mode=mode, **request)
    pod = plan.prefill if role == "prefill" else plan.pod
    assert pod is not None
    finish(router, plan)
    return pod.id


def weights(role: str, **of: float) -> dict[str, Any]:
    """A file with these weights for the role."""
    return {"gateway": {"strategy": {"name": "cacheAware", role: of}}}


@pytest.mark.parametrize("role", ROLES)
def test_weight_of_the_cache(role: str) -> None:
    """With it the pod that holds the prompt is picked, without it the first of equals."""
    for weight, number in ((0.0, 0), (0.5, 2)):
        router = router_of(weights(role, cache=weight))
        mode = "single" if role == "single" else "dispatch"
        only(router, 2, partial(serve, router, 20, mode=mode))
        assert picked(router, role) == f"{role}-{number}"


@pytest.mark.parametrize("role", ROLES)
def test_weight_of_the_load(role: str) -> None:
    """With it an idle pod is picked rather than the busy one that holds the prompt."""
    mode = "single" if role == "single" else "dispatch"
    for weight, number in ((0.0, 0), (1.0, 1)):
        router = router_of(weights(role, cache=0.1, load=weight))
        for _ in range(3):
            only(router, 0, partial(ask, router, 20, mode=mode))
        assert picked(router, role) == f"{role}-{number}"


@pytest.mark.parametrize("role", ROLES)
def test_weight_of_the_session(role: str) -> None:
    """With it a session goes where it went, without it to the first of equals."""
    mode = "single" if role == "single" else "dispatch"
    for weight, number in ((0.0, 0), (0.5, 2)):
        router = router_of(weights(role, sticky=weight))
        only(router, 2, partial(serve, router, 1, mode=mode, session_key="s"))
        assert picked(router, role, session_key="s") == f"{role}-{number}"
        assert picked(router, role, session_key="t") == f"{role}-0"


@pytest.mark.parametrize("label", ["zone", "host"])
def test_weight_of_locality_and_the_labels(label: str) -> None:
    """With it decode goes near the prefill pod: the same zone or host, as labelled."""
    near = {"labels": {label: "here"}}
    pods = {"prefill_0": near, "decode_2": near, "decode_1": {"labels": {label: "there"}}}
    for weight, number in ((0.0, 0), (0.5, 2)):
        router = router_of(weights("decode", locality=weight), **pods)
        assert picked(router, "decode") == f"decode-{number}"


@pytest.mark.parametrize("role", ["single", "prefill"])
def test_locality_is_for_decode_alone(role: str) -> None:
    """For the others, who have nothing to be near to, a weight is refused; 0 may be written."""
    assert router_of(weights(role, locality=0.0))
    with pytest.raises(ConfigError, match=rf"gateway\.strategy\.{role}\.locality: expected 0: "):
        router_of(weights(role, locality=1.0))


@pytest.mark.parametrize(
    ("rule", "number"),
    [
        ({}, 0),
        ({"factor": 0.5}, 1),
        ({"offset": 0.5}, 1),
        ({"factor": 0.5, "offset": 0.5, "enabled": False}, 0),
    ],
)
def test_imbalance(rule: dict[str, Any], number: int) -> None:
    """Inflight 6, 0, 0 and the prompt on the first: dropped by factor x 2 + offset, or not."""
    extra = merged(weights("single", cache=1.0), {"gateway": {"strategy": {"imbalance": rule}}})
    router = router_of(extra)
    only(router, 0, lambda: [ask(router, 20, mode="single") for _ in range(6)])
    assert picked(router, "single") == f"single-{number}"


@pytest.mark.parametrize(("offset", "is_copied"), [(1.0, True), (6.0, False)])
def test_copy_offset(offset: float, is_copied: bool) -> None:
    """Two pods hold the prompt and have four requests each: a third one gets it, or does not."""
    rule = {"gateway": {"strategy": {"imbalance": {"copyOffset": offset}}}}
    router = router_of(merged(weights("single", cache=1.0), rule))
    for number in (0, 1):
        only(router, number, lambda: [ask(router, 20, mode="single") for _ in range(4)])
    assert (picked(router, "single") == "single-2") is is_copied


@pytest.mark.parametrize(
    ("gateway", "blocks"),
    [({}, 3), ({"blockSize": 100}, 4), ({"tokenizer": "words", "blockSize": 10}, 9)],
)
def test_tokenizer_and_block_size(gateway: dict[str, Any], blocks: int) -> None:
    """A hundred short words are so many blocks of bytes, or of words."""
    router = router_of({"gateway": gateway})
    prompt = b" ".join(b"abc" for _ in range(99)) + b" "
    assert ask(router, prompt + b"tail", mode="single").prompt_blocks in (blocks, blocks + 1)


def test_probe_thresholds() -> None:
    """`healthyThreshold` and `unhealthyThreshold`: so many in a row, and not one fewer."""
    router = router_of({"health": {"healthyThreshold": 4, "unhealthyThreshold": 2}})
    for event, count in ((ProbeFailed("single-0"), 2), (ProbeSucceeded("single-0"), 4)):
        before = router.pods()[0].healthy
        for number in range(1, count + 1):
            assert router.pods()[0].healthy is before
            router.observe(event, float(number))
        assert router.pods()[0].healthy is not before


def test_passive_rules() -> None:
    """`failures` ejects, `ejectMs` is the first rest, `maxEjectMs` the longest; or none at all."""
    for enabled in (True, False):
        passive = {"enabled": enabled, "failures": 2, "ejectMs": 3_000, "maxEjectMs": 4_000}
        router = router_of({"health": {"passive": passive}})
        now = 0.0
        for rest_s in (3.0, 4.0, 4.0):
            for _ in range(1 if now else 2):
                assert not router.pods()[0].ejected
                fail(router, ask(router, now=now, pinned_pod="single-0"), now=now)
            assert router.pods()[0].ejected is enabled
            router.tick(now + rest_s - 0.1)
            assert router.pods()[0].ejected is enabled
            now += rest_s
            router.tick(now)


@pytest.mark.parametrize(("factor", "ejected"), [(3.0, True), (30.0, False)])
def test_slow_factor(factor: float, ejected: bool) -> None:
    """A pod ten times as slow as its peers rests, or is still slow enough to stay."""
    router = router_of(
        {"health": {"passive": {"slowFactor": factor}}, "cacheRegistry": {"enabled": False}}
    )
    now = 1.0
    for _ in range(10):
        for number in range(3):
            if f"single-{number}" in router.usable_pods():
                plan = ask(router, b"x" * 4000, now=now, pinned_pod=f"single-{number}")
                finish(router, plan, now + (10.0 if number == 0 else 1.0))
        now += 30.0
        for view in router.pods():
            router.observe(PodHeard(view.id), now)
        router.tick(now)
    assert router.pods()[0].ejected is ejected


@pytest.mark.parametrize(("enabled", "hit"), [(True, 20), (False, 0)])
def test_registry_enabled(enabled: bool, hit: int) -> None:
    """Without the registry a repeated prompt is not believed to be anywhere."""
    router = router_of({"cacheRegistry": {"enabled": enabled}})
    serve(router, 20, mode="single")
    assert ask(router, 20, mode="single").cached_blocks == hit


@pytest.mark.parametrize("shards", [1, 64])
def test_shards_count(shards: int) -> None:
    """What a removed pod leaves is freed a shard at a time: as many steps as there are shards."""
    router = router_of({"cacheRegistry": {"shardsCount": shards}})
    for number in range(100):
        only(router, 0, partial(serve, router, b"%d" % number * 2_000, mode="single"))
    router.observe(PodRemoved("single-0"), 2.0)
    router._roster.free_retired()
    steps = 1
    while router._state.registry.sweep():
        steps += 1
    assert steps == (shards if COMPILED else 1)


@pytest.mark.parametrize(("ttl_ms", "cached"), [(5_000, 0), (60_000, 20)])
def test_stale_ttl(ttl_ms: int, cached: int) -> None:
    """A pod heard of again after ten seconds is trusted to be the same, or is not."""
    router = router_of({"cacheRegistry": {"staleTtlMs": ttl_ms}})
    only(router, 0, lambda: serve(router, 20, mode="single"))
    router.observe(ProbeSucceeded("single-0"), 11.0)
    plan = ask(router, 20, now=11.0, pinned_pod="single-0")
    assert plan.cached_blocks == cached


@pytest.mark.parametrize(("sessions", "stays"), [
    ({}, True), ({"ttlMs": 1_000}, False), ({"maxSessions": 0}, False), ({"maxSessions": 1}, False)
])  # fmt: skip
def test_sessions(sessions: dict[str, Any], stays: bool) -> None:
    """A session is remembered for its time, among as many as there is room for."""
    router = router_of(merged(weights("single", sticky=1.0), {"sessions": sessions}))
    only(router, 2, lambda: serve(router, 1, mode="single", session_key="s"))
    serve(router, 1, mode="single", session_key="another")
    plan = ask(router, 1, now=3.0, mode="single", session_key="s")
    assert plan.pod.id == ("single-2" if stays else "single-0")
