"""The mirror: engine hashes become chain hashes; the router believes what the engine has."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from calinix.core.events import BlocksRemoved, BlocksStored
from calinix.engines.kv_events import AllCleared, BatchReader, RemovedBlocks, StoredBlocks
from calinix.engines.kv_mirror import KvMirror
from calinix.engines.kv_names import Namespaces
from kvkit import (
    DATA,
    MODEL,
    Engine,
    believed,
    feed,
    into,
    messages,
    mirror_of,
    recorded,
    told_router,
)

SIZE = 16
PREFIX = list(range(100, 228))
PROMPTS = {  # of the recorded steps whose tokens are known
    "A": ([*PREFIX, *range(10)], ""),
    "B": ([*PREFIX, *range(600, 640)], ""),
    "C": (PREFIX, ""),
    "D": ([*PREFIX, *range(10)], "tenant-a"),
    "E": ([*PREFIX[:64], *range(700, 800)], ""),
    "H": ([*PREFIX, *range(10)], ""),
}


def stored(
    names: list[int],
    tokens: list[int],
    parent: int | None = None,
    size: int = SIZE,
    **fields: object,
) -> StoredBlocks:
    """An event that stores these blocks."""
    return StoredBlocks(list(names), parent, tokens, size, **fields)  # type: ignore[arg-type]


def test_predictions_are_what_the_engine_reported() -> None:
    """At every recorded step, the cached tokens believed from the events so far are its own."""
    router = told_router(block=32)
    apply = into(mirror_of(router, block=32))
    lines = recorded("events_int.jsonl")
    found = messages("events_int.jsonl")
    steps = [json.loads(line) for line in (DATA / "steps.jsonl").read_text().splitlines()]
    at = compared = 0
    for step in steps:
        while at < len(lines) and lines[at]["recv"] < step["t"]:
            apply(found[at])
            at += 1
        name = step["step"].split(":")[0]
        if name in PROMPTS:
            tokens, salt = PROMPTS[name]
            capped = min(believed(router, "single-0", tokens, salt=salt), (len(tokens) - 1) // 32)
            assert capped * 32 == step["result"][0], step["step"]
            compared += 1
    assert compared == len(PROMPTS)


def test_a_block_that_was_published_twice_goes_with_its_second_removal() -> None:
    """The recorded full hit stores its last block again; after both removals it is gone."""
    router = told_router(block=32)
    apply = into(mirror_of(router, block=32))
    found = messages("events_int.jsonl")
    last = 17554738273725456331
    removals = 0
    for message in found[:12]:
        batch = BatchReader().read(message.payload)
        for event in batch.events:
            removals += isinstance(event, RemovedBlocks) and event.block_hashes == [last]
        apply(message)
        held = believed(router, "single-0", PREFIX)
        if message.sequence in range(3, 11):
            assert held == 4
    assert removals == 2
    assert believed(router, "single-0", PREFIX) < 4


def test_both_kinds_of_hashes_name_the_same_blocks() -> None:
    """A pod with 32-byte hashes and one with integers are believed to hold the same prompt."""
    router = told_router(pods=2, block=32)
    for pod_id, topic in (("single-0", "kv@np@tiny"), ("single-1", "kv@nd@tiny")):
        into(mirror_of(router, pod_id, block=32))(messages("events_bytes.jsonl", topic)[0])
    prompt = [300 + 37 * at for at in range(128)]
    event = recorded("events_bytes.jsonl")[0]["payload"][1][0]
    prompt = event["token_ids"]
    assert believed(router, "single-0", prompt) == believed(router, "single-1", prompt) == 4


def test_tenants_adapters_and_models_are_apart() -> None:
    """A salt or an adapter has a namespace of its own, as it has in prompts."""
    router = told_router()
    engine, mirror = Engine(100), mirror_of(router)
    tokens = list(range(64))
    engine.run(tokens, salt="blue")
    engine.run(tokens, lora="poet")
    engine.run(tokens[:32], salt="blue", lora="poet")
    feed(engine, into(mirror))
    assert believed(router, "single-0", tokens) == 0
    assert believed(router, "single-0", tokens, salt="blue") == 4
    assert believed(router, "single-0", tokens, salt="red") == 0
    assert believed(router, "single-0", tokens, model="poet") == 4
    assert believed(router, "single-0", tokens, model="poet", salt="blue") == 2
    assert believed(router, "single-0", tokens, model="other") == 0


def test_what_no_prompt_key_can_be_is_not_entered() -> None:
    """Images, nameless adapters, odd salts, other media: they end a chain, and are counted."""
    router = told_router()
    mirror = mirror_of(router)
    tokens = list(range(48))
    image = [None, [["digest", 3]], None]
    mirror.apply([stored([1, 2, 3], tokens, extra_keys=image)])
    mirror.apply([stored([4], tokens[:16], 3)])
    mirror.apply([stored([5, 6], tokens[16:], lora_id=7)])
    mirror.apply([stored([7], tokens[:16], extra_keys=[["x" * 300]])])
    mirror.apply([stored([8], tokens[:16], extra_keys=[["salt", "more"]])])
    mirror.apply([stored([9], tokens[16:32], medium="CPU")])
    mirror.apply([RemovedBlocks([1], "CPU")])
    counts = mirror.counts
    assert believed(router, "single-0", tokens) == 1
    assert (counts.stored, counts.foreign, counts.orphans, counts.elsewhere) == (1, 6, 1, 2)


def test_layers_that_do_not_decide_a_hit_are_left_out() -> None:
    """Of a hybrid model the first group of full attention counts, whichever is published first."""
    router = told_router()
    mirror = mirror_of(router)
    tokens = list(range(32))
    mirror.apply([stored([1, 2], tokens, group_idx=1, kv_cache_spec_kind="sliding_window")])
    assert believed(router, "single-0", tokens) == 2
    mirror.apply([stored([1], tokens[:16], group_idx=0, kv_cache_spec_kind="full_attention")])
    assert believed(router, "single-0", tokens) == 1
    mirror.apply([stored([1, 2], tokens, group_idx=2, kv_cache_spec_kind="full_attention")])
    mirror.apply([RemovedBlocks([1], "GPU", 1)])
    assert believed(router, "single-0", tokens) == 1
    mirror.apply([RemovedBlocks([1], "GPU", 0)])
    assert believed(router, "single-0", tokens) == 0


def test_orphans_wait_for_their_parent() -> None:
    """Blocks behind an unknown one are ignored until that one, and they, are stored."""
    router = told_router()
    mirror = mirror_of(router)
    tokens = list(range(64))
    late = stored([3, 4], tokens[32:], 2)
    mirror.apply([late])
    assert believed(router, "single-0", tokens) == 0
    mirror.apply([stored([1, 2], tokens[:32])])
    assert believed(router, "single-0", tokens) == 2
    mirror.apply([late])
    assert believed(router, "single-0", tokens) == 4
    assert mirror.counts.orphans == 2


def test_malformed_events_change_nothing() -> None:
    """Counts that do not fit, sizes and token ids that cannot be: counted, and that is all."""
    router = told_router()
    mirror = mirror_of(router)
    mirror.apply([stored([1], list(range(16)))])
    for bad in (
        stored([2], list(range(15))),
        stored([], []),
        stored([2], [], size=0),
        stored([2], [], size=-1),
        stored([2], [-1] * 16),
        stored([2], [2**32] * 16),
    ):
        mirror.apply([bad])
    mirror.apply([RemovedBlocks([99, b"", b"short"])])
    assert believed(router, "single-0", list(range(16))) == 1
    assert (len(mirror), mirror.counts.malformed, mirror.counts.removed) == (1, 5, 0)


def test_a_name_that_comes_to_mean_another_block() -> None:
    """Where a hash says nothing of what is before the block, the earlier meaning is given up."""
    router = told_router()
    mirror = mirror_of(router)
    a, b = list(range(16)), list(range(100, 116))
    mirror.apply([stored([1], a), stored([2], b)])
    mirror.apply([stored([1], b, 2)])
    assert believed(router, "single-0", a) == 0
    assert believed(router, "single-0", b + b) == 2
    mirror.apply([RemovedBlocks([1])])
    assert believed(router, "single-0", b + b) == 1


def test_after_a_gap_the_first_removal_counts() -> None:
    """Copies counted before events were lost may be gone: a removal takes the block for good."""
    router = told_router()
    mirror = mirror_of(router)
    tokens = list(range(16))
    mirror.apply([stored([1], tokens), stored([1], tokens)])
    mirror.doubt()
    mirror.apply([stored([1], tokens)])
    assert believed(router, "single-0", tokens) == 1
    mirror.apply([RemovedBlocks([1])])
    assert believed(router, "single-0", tokens) == 0
    mirror.apply([stored([1], tokens), stored([1], tokens), RemovedBlocks([1])])
    assert believed(router, "single-0", tokens) == 1


def test_a_removal_in_the_middle_hides_what_is_behind_it() -> None:
    """The prefix law holds: nothing is believed past the hole until it is stored again."""
    router = told_router()
    engine, mirror = Engine(100), mirror_of(router)
    apply = into(mirror)
    tokens = list(range(16 * 6 + 1))
    engine.run(tokens)
    feed(engine, apply)
    assert engine.drop(engine.names(tokens)[2])
    feed(engine, apply)
    assert believed(router, "single-0", tokens) == engine.holds(tokens) == 2
    engine.run(tokens)
    feed(engine, apply)
    assert believed(router, "single-0", tokens) == engine.holds(tokens) == 6


def test_a_mirror_is_bounded() -> None:
    """Beyond its limit it forgets the oldest names; the index still believes in their blocks."""
    router = told_router()
    mirror = mirror_of(router, limit=64)
    rng = random.Random(1)
    prompts = [[rng.randrange(1000) for _ in range(SIZE)] for _ in range(200)]
    for name, tokens in enumerate(prompts):
        mirror.apply([stored([name], tokens)])
        assert len(mirror) <= 64
    assert mirror.counts.forgotten > 100
    assert believed(router, "single-0", prompts[0]) == 1


def test_a_cleared_cache_of_one_rank_leaves_the_others() -> None:
    """Two ranks hold a prompt: when one is cleared it is still there, its own blocks are not."""
    router = told_router()
    first, second = mirror_of(router), mirror_of(router)
    first.alone = second.alone = False
    shared, own = list(range(32)), list(range(500, 532))
    first.apply([stored([1, 2], shared), stored([3, 4], own)])
    second.apply([stored([1, 2], shared)])
    first.apply([AllCleared()])
    assert believed(router, "single-0", shared) == 2
    assert believed(router, "single-0", own) == 0
    second.clear()
    assert believed(router, "single-0", shared) == 0
    assert router.pods()[0].blocks == 0


@pytest.mark.parametrize("engine_size", [1, 4, 8, 12, 16, 24, 32, 48])
def test_blocks_of_other_sizes(engine_size: int) -> None:
    """Whatever an engine's block size, all whole blocks of ours in what it holds are believed."""
    router = told_router(block=16)
    engine, mirror = Engine(1000, engine_size), mirror_of(router, block=16)
    apply = into(mirror)
    rng = random.Random(engine_size)
    stem = [rng.randrange(1000) for _ in range(200)]
    prompts = [
        stem[: rng.randrange(200)] + [rng.randrange(1000) for _ in range(90)] for _ in range(40)
    ]
    for prompt in prompts:
        engine.run(prompt)
        feed(engine, apply)
    for prompt in prompts:
        held = engine.holds(prompt) * engine_size // 16
        assert believed(router, "single-0", prompt) == held
    assert mirror.block_size == engine_size


@pytest.mark.parametrize("engine_size", [1, 4, 8, 12])
def test_a_block_of_ours_goes_with_any_of_its_parts(engine_size: int) -> None:
    """Of the engine blocks that make up one of ours, each takes it away, whichever goes first."""
    tokens = list(range(48))
    for victim in range(48 // engine_size):
        router = told_router(block=16)
        engine, mirror = Engine(100, engine_size), mirror_of(router, block=16)
        apply = into(mirror)
        engine.run(tokens)
        feed(engine, apply)
        assert believed(router, "single-0", tokens) == 3
        assert engine.drop(engine.names(tokens)[victim])
        feed(engine, apply)
        assert believed(router, "single-0", tokens) == engine.holds(tokens) * engine_size // 16
        engine.run([*tokens, 1])
        feed(engine, apply)
        assert believed(router, "single-0", tokens) == 3


def test_many_forks_in_the_middle_of_a_block() -> None:
    """Prompts that part inside one of our blocks: each goes alone, the stem takes the others."""
    router = told_router(block=16)
    engine, mirror = Engine(1000, 8), mirror_of(router, block=16)
    apply = into(mirror)
    stem = list(range(8))
    prompts = [[*stem, *range(100 * fork, 100 * fork + 9)] for fork in range(1, 61)]
    for prompt in prompts:
        engine.run(prompt)
        feed(engine, apply)
    for prompt in prompts[::3]:
        assert engine.drop(engine.names(prompt)[1])
    feed(engine, apply)
    for number, prompt in enumerate(prompts):
        assert believed(router, "single-0", prompt) == (number % 3 > 0)
    assert engine.drop(engine.names(stem)[0])
    feed(engine, apply)
    assert not any(believed(router, "single-0", prompt) for prompt in prompts)


def test_events_tell_chains_that_join() -> None:
    """What a mirror emits are chains: each BlocksStored begins where its parent ends."""
    told: list[object] = []
    mirror = KvMirror("p", MODEL, Namespaces(SIZE), 100, told.append)
    tokens = list(range(96))
    mirror.apply([stored([1, 2], tokens[:32]), stored([3, 4, 5, 6], tokens[32:], 2)])
    mirror.apply([RemovedBlocks([6, 5])])
    first, second, third = told
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert isinstance(third, BlocksRemoved)
    assert first.parent is None
    assert second.parent == first.blocks[-1]
    assert third.blocks == (second.blocks[3], second.blocks[2])
    assert len(set(first.blocks + second.blocks)) == 6
    assert all(a != b for a, b in pairwise(first.blocks))
