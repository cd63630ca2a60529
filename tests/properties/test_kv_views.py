"""Whatever engines do and whatever bytes come: the router's view of a pod is that pod's own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from calinix.config import (
    CacheRegistry,
    Config,
    Gateway,
    KvEvents,
    PodConfig,
    PodKvEvents,
    SingleUpstream,
    Upstreams,
)
from calinix.core.router import Router
from calinix.edge.http_client import PodClient
from calinix.edge.kv_feed import KvFeed
from calinix.engines.kv_events import Dialect, replayed
from calinix.engines.kv_events import message as frames_of
from kvkit import Engine, Told, believed, feed, into, messages, mirror_of, told_router

STEMS = [[stem * 1000 + at for at in range(120)] for stem in range(3)]
SALTS = ("", "blue")
DIALECTS: tuple[Dialect, ...] = ("maps", "arrays")
HASHES: tuple[Literal["int", "bytes"], ...] = ("int", "bytes")

prompts = st.tuples(
    st.integers(0, 2),
    st.integers(1, 120),
    st.integers(0, 3),
    st.integers(0, 50),
    st.sampled_from(SALTS),
)


def tokens_of(prompt: tuple[int, int, int, int, str]) -> list[int]:
    """A prefix of one of the stems, and an end of its own."""
    stem, length, kind, more, _ = prompt
    return STEMS[stem][:length] + [9000 + 100 * kind + at for at in range(more)]


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(st.one_of(prompts, st.sampled_from(["reset", "restart", "gap"])), max_size=40),
    capacity=st.integers(8, 60),
    size=st.sampled_from([4, 8, 16, 32]),
    dialect=st.sampled_from(DIALECTS),
    hashes=st.sampled_from(HASHES),
)
def test_the_view_is_the_engines(
    asked: list[Any], capacity: int, size: int, dialect: Dialect, hashes: Literal["int", "bytes"]
) -> None:
    """After each step, replayed gaps and restarts too, both hold the same whole blocks."""
    engine = Engine(capacity, size, dialect=dialect, hashes=hashes)
    whole = max(1, size // 16)
    told = Told(told_router())
    told.tick()
    told.replay()
    done: list[tuple[int, int, int, int, str]] = []
    unheard = False
    for step in asked:
        if step == "reset":
            engine.reset()
            continue  # said with the next batch
        if step == "restart":
            engine.restart()
            unheard = True
            continue
        if step == "gap" and unheard:
            # Were it lost, the new numbers might seem to go on from the old ones.
            continue
        salted = dialect == "maps"  # the oldest arrays have no extra keys
        prompt = (0, 120, 0, 9, "") if step == "gap" else step
        prompt = prompt if salted else (*prompt[:4], "")
        done.append(prompt)
        engine.run(tokens_of(prompt), prompt[4])
        message = engine.flush()
        if message is None or step == "gap":
            continue
        told.live(message)
        unheard = False
        while len(told.lines[0].asked) > 1:
            told.replay(*engine.replay(told.lines[0].asked.pop()))
        for one in done[-8:]:
            held = engine.holds(tokens_of(one), one[4]) * size // 16
            seen = believed(told.router, "single-0", tokens_of(one), salt=one[4])
            # Prompts may share a part of a larger engine block: engines do not find that.
            assert seen // whole * whole == held
    assert told.pod.view().lost_batches == 0


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(prompts, min_size=1, max_size=20),
    drops=st.lists(st.integers(0, 200), max_size=30),
    size=st.sampled_from([4, 8, 16, 32]),
)
def test_blocks_that_go_from_the_middle(
    asked: list[tuple[int, int, int, int, str]], drops: list[int], size: int
) -> None:
    """Removals in any order: never is more believed than the engine holds."""
    engine, router = Engine(1000, size), told_router()
    whole = max(1, size // 16)
    apply = into(mirror_of(router))
    rng = random.Random(len(drops))
    for at in drops or [0]:
        engine.run(tokens_of(asked[at % len(asked)]), asked[at % len(asked)][4])
        names = sorted(engine._cached)
        if names and rng.random() < 0.7:
            engine.drop(names[at % len(names)])
        feed(engine, apply)
        for one in asked:
            held = engine.holds(tokens_of(one), one[4]) * size // 16
            seen = believed(router, "single-0", tokens_of(one), salt=one[4])
            assert seen // whole * whole <= held


# --- bytes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fed() -> Iterator[tuple[KvFeed, Router]]:
    """A feed with two pods at a bound endpoint; `np` holds what was recorded of it."""
    config = Config(
        upstreams=Upstreams(
            single=SingleUpstream(
                pods=tuple(
                    PodConfig(id=name, url=f"http://{name}:1", kv_events=PodKvEvents(ranks=ranks))
                    for name, ranks in (("np", 1), ("nd", 3))
                )
            )
        ),
        gateway=Gateway(),
        kv_events=KvEvents(bind="tcp://127.0.0.1:*", apply="blocks"),
        cache_registry=CacheRegistry(token_block_size=16),
    )
    loop = uvloop.new_event_loop()
    router = Router(config, random.Random(1))
    found = KvFeed(
        config, loop, lambda event: router.observe(event, 1.0), router.epoch, clock=lambda: 1.0
    )
    try:
        assert config.upstreams.single is not None
        for pod in config.upstreams.single.pods:
            found.add(pod, PodClient(pod.url, loop, connect_timeout_s=1.0))
        found._need_sockets()
        for one in messages("events_bytes.jsonl", "kv@np@tiny")[:6]:
            found._bound_message(0, frames_of(one.topic, one.sequence, one.payload))
        yield found, router
    finally:
        found.stop()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


RECORDED = [
    frames_of(one.topic, one.sequence, one.payload)
    for name in ("events_int.jsonl", "events_bytes.jsonl")
    for one in messages(name)
]
ACCIDENTS = ("flip", "cut", "drop", "add", "swap")
edits = st.lists(
    st.tuples(
        st.sampled_from(ACCIDENTS), st.integers(0, 1 << 16), st.binary(min_size=1, max_size=6)
    ),
    min_size=1,
    max_size=6,
)


def edited(octets: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    """The bytes after some accidents."""
    found = bytearray(octets)
    for kind, where, new in changes:
        at = where % (len(found) + 1)
        if kind == "flip" and at < len(found):
            found[at] ^= new[0]
        elif kind == "cut":
            del found[at:]
        elif kind == "drop":
            del found[at : at + len(new)]
        elif kind == "add":
            found[at:at] = new
        elif kind == "swap":
            found[at : at + len(new)] = new
    return bytes(found)


@settings(max_examples=400, deadline=None)
@given(
    which=st.integers(0, len(RECORDED) - 1),
    payload=edits,
    number=st.one_of(st.none(), st.binary(max_size=9), st.integers(0, 40)),
    extra=st.lists(st.binary(max_size=4), max_size=2),
    by_replay=st.booleans(),
)
def test_broken_bytes_harm_nobody_else(
    fed: tuple[KvFeed, Router],
    which: int,
    payload: list[tuple[str, int, bytes]],
    number: bytes | int | None,
    extra: list[bytes],
    by_replay: bool,
) -> None:
    """Mutated messages of one pod never raise, and the other pod's blocks stay what they were."""
    feed_, router = fed
    _, sequence, octets = RECORDED[which]
    if isinstance(number, int):
        sequence = number.to_bytes(8, "big")
    elif number is not None:
        sequence = number
    broken = edited(octets, payload)
    before = router._state.registry.dump(slot_of(router, "np"))
    assert before
    feed_._bound_message(0, [b"kv@nd@tiny", sequence, broken, *extra])
    if by_replay:
        pod = feed_._fed["nd"].pod
        assert pod is not None
        pod.tick(1.0)
        for line in feed_._fed["nd"].lines:
            line._sent = True
            line._receive([*replayed(b"t", int.from_bytes(sequence[:7], "big"), broken), *extra])
            line._receive([b"", b"", sequence, broken])
            line._sent = False
    assert router._state.registry.dump(slot_of(router, "np")) == before


def slot_of(router: Router, pod_id: str) -> int:
    """Where the pod is."""
    pod = router._state.table.find(pod_id)
    assert pod is not None
    return pod.slot


@settings(max_examples=200, deadline=None)
@given(topic=st.binary(max_size=20), payload=st.binary(max_size=200))
def test_strangers_are_nobody(fed: tuple[KvFeed, Router], topic: bytes, payload: bytes) -> None:
    """Messages that name no configured pod change nothing at all."""
    feed_, router = fed
    if topic.startswith((b"kv@np@", b"kv@nd@")):
        return
    before = [router._state.registry.dump(slot_of(router, name)) for name in ("np", "nd")]
    feed_._bound_message(0, [topic, bytes(8), payload])
    assert before == [router._state.registry.dump(slot_of(router, name)) for name in ("np", "nd")]
