"""PrefixRegistry, both forms, at its limits: sizes, chosen keys, wrong calls, memory."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from calinix.core import kv
from calinix.core.hashing import GOLDEN, MASK
from kvforms import FORMS, Bench, depths

A, B, C, D, E = 11, 12, 13, 14, 15


@pytest.fixture(params=FORMS, ids=lambda form: form.name)
def bench(request: pytest.FixtureRequest) -> Bench:
    """Two open slots in one form."""
    return Bench(request.param)


@pytest.mark.parametrize("max_pods", [1, 63, 64, 65, 256, 4096])
def test_every_width_of_the_bitmap(bench: Bench, max_pods: int) -> None:
    """The first and the last slot are told apart for any number of pods."""
    last = max_pods - 1
    registry = bench.form.registry(max_pods, 3)
    for slot in {0, last}:
        registry.open_slot(slot, 10)
    registry.route(last, bench.chain(A, B), 1)
    if last:
        registry.route(0, bench.chain(A), 1)
        assert registry.match(bench.chain(A, B), 1 | 1 << last) == [(2, 1 << last), (1, 1)]
        assert depths(registry, bench.chain(A, B), [0, last]) == [1, 2]
    registry.close_slot(last)
    assert registry.match(bench.chain(A, B), 1 << last) == [(0, 1 << last)]


def test_many_slots_share_blocks(bench: Bench) -> None:
    """A block held by every slot goes only when the last of them loses it."""
    registry = bench.form.registry(256, 16)
    chain = bench.chain(A, B)
    for slot in range(256):
        registry.open_slot(slot, 10)
        registry.route(slot, chain, slot)
    assert registry.match(chain, (1 << 256) - 1) == [(2, (1 << 256) - 1)]
    for slot in range(255):
        registry.removed(slot, [B])
        registry.close_slot(slot) if slot % 2 else registry.removed(slot, [A])
    assert registry.match(chain, (1 << 256) - 1) == [(2, 1 << 255), (0, (1 << 255) - 1)]
    registry.withdraw(255, chain, 255)
    while registry.sweep():
        pass
    assert len(registry) == 0


def chosen_keys(kind: str, count: int) -> list[int]:
    """Hashes that would cluster if they were used as they are, or after one multiplication."""
    undo = pow(GOLDEN, -1, 1 << 64)
    make: Callable[[int], int] = {
        "counting": lambda i: i,
        "high bits": lambda i: i << 44,
        "low half equal": lambda i: i << 32 | 0x1234_5678,
        "fibonacci undone": lambda i: (i * undo) & MASK,
        "random": lambda _: 0,
    }[kind]
    rng = random.Random(5)
    return [make(i) or rng.getrandbits(64) | 1 for i in range(1, count + 1)]


@pytest.mark.parametrize("kind", ["counting", "high bits", "low half equal", "fibonacci undone"])
def test_chosen_keys_do_not_cluster(bench: Bench, kind: str) -> None:
    """Chosen hashes are found again, and cost about as much time as random ones."""
    count = 30_000

    def seconds(keys: list[int]) -> float:
        registry = bench.form.registry(4, 16)
        registry.open_slot(0, count)
        chain = bench.chain(*keys)
        start = time.process_time()
        registry.route(0, chain, 1)
        assert registry.route(0, chain, 2) == count
        registry.removed(0, keys[::-1])
        assert registry.blocks(0) == len(registry) == 0
        return time.process_time() - start

    fair = min(seconds(chosen_keys("random", count)) for _ in range(2))
    assert min(seconds(chosen_keys(kind, count)) for _ in range(2)) < 10 * fair + 0.01


def test_extreme_hashes(bench: Bench) -> None:
    """The smallest and the largest hash are blocks like others."""
    chain = bench.chain(1, MASK, 1 << 63, MASK - 1)
    bench.registry.route(1, chain, 0xFFFF_FFFF)
    assert depths(bench.registry, chain, [1]) == [4]
    bench.registry.withdraw(1, chain, 0xFFFF_FFFF)
    assert bench.registry.blocks(1) == 0


def test_contradicting_chains(bench: Bench) -> None:
    """A chain with repetitions, or in another order than before, breaks nothing."""
    registry = bench.registry
    registry.route(1, bench.chain(A, B, A, B, C, C), 1)
    registry.route(1, bench.chain(C, B, A, D), 2)
    registry.stored(1, D, [A, A, E])
    registry.removed(1, [B, B, A])
    registry.confirm(1, bench.chain(E, D, A, B))
    registry.withdraw(1, bench.chain(C, B, A, D, D), 2)
    assert registry.blocks(1) == len(registry.dump(1))
    registry.removed(1, [A, B, C, D, E] * 3)
    assert registry.blocks(1) == len(registry) == 0


def test_forms_agree_at_scale() -> None:
    """Thousands of blocks on eight slots: growth, eviction, sharing, clearing and sweeping."""
    rng = random.Random(6)
    registries = [form.registry(130, 5) for form in FORMS]
    slots = [0, 1, 63, 64, 65, 127, 128, 129]
    for registry in registries:
        for slot in slots:
            registry.open_slot(slot, 900 + slot)
    family = [[rng.getrandbits(64) | 1 for _ in range(40)] for _ in range(12)]
    for turn in range(1_500):
        head = rng.choice(family)[: rng.randrange(1, 41)]
        tail = [rng.getrandbits(64) | 1 for _ in range(rng.randrange(25))]
        blocks, slot = head + tail, rng.choice(slots)
        method = rng.choices(
            ["route", "confirm", "withdraw", "stored", "removed", "clear", "sweep"],
            [60, 10, 10, 10, 8, 1, 3],
        )[0]
        results = []
        for form, registry in zip(FORMS, registries, strict=True):
            chain = form.chain.of(blocks)
            if method in {"route", "withdraw"}:
                results.append(getattr(registry, method)(slot, chain, turn % 5))
            elif method == "stored":
                results.append(registry.stored(slot, None, chain))
            elif method == "sweep":
                while registry.sweep():
                    pass
                results.append(len(registry))
            elif method == "clear":
                registry.clear(slot)
            else:
                results.append(getattr(registry, method)(slot, chain.head(len(head))))
            results.append(registry.match(chain, sum(1 << one for one in slots)))
        half = len(results) // len(FORMS)
        assert results == results[:half] * len(FORMS)
        if turn % 300 == 299:
            for one in slots:
                dumps = [registry.dump(one) for registry in registries]
                assert dumps == [dumps[0]] * len(FORMS)
                assert 0 < len(dumps[0]) <= 900 + one


def bad_calls(bench: Bench) -> list[tuple[type[Exception], str, tuple[Any, ...]]]:
    """(error, method, arguments) of calls that must be refused."""
    chain = bench.chain(A, B)
    slots, out = np.array([0, 1], np.int32), np.zeros(2)
    calls: list[tuple[type[Exception], str, tuple[Any, ...]]] = []
    methods: dict[str, tuple[Any, ...]] = {
        "route": (chain, 1), "confirm": (chain,), "withdraw": (chain, 1), "clear": (),
        "stored": (None, [A]), "removed": ([A],), "blocks": (), "dump": (),
        "set_capacity": (5,), "open_slot": (5,), "close_slot": (), "is_open": (),
    }  # fmt: skip
    for name, rest in methods.items():
        calls += [(ValueError, name, (slot, *rest)) for slot in (-1, 8, 2**70, -(2**70))]
        calls += [(TypeError, name, (slot, *rest)) for slot in (1.0, "1", None)]
        if name not in {"open_slot", "is_open"}:
            calls.append((ValueError, name, (5, *rest)))
    for name in ("route", "withdraw"):
        calls += [(ValueError, name, (0, chain, ticket)) for ticket in (-1, 2**32, 2**70)]
        calls += [(TypeError, name, (0, chain, ticket)) for ticket in (1.0, None)]
        calls += [(TypeError, name, (0, other, 1)) for other in (None, [A], (A,), b"ab")]
    calls += [(TypeError, "confirm", (0, other)) for other in (None, [A])]
    for wrong, error in ((0, ValueError), (-1, ValueError), (2**64, ValueError), ("1", TypeError)):
        calls.append((error, "removed", (0, [A, wrong])))
        calls.append((error, "stored", (0, None, [A, wrong])))
        calls.append((error, "stored", (0, wrong, [A])))
    for name in ("open_slot", "set_capacity"):
        calls += [
            (ValueError, name, (0, -1)),
            (TypeError, name, (0, 1.5)),
            (TypeError, name, (0, None)),
        ]
    calls += [(ValueError, "match", (chain, mask)) for mask in (-1, 1 << 8, 1 << 70)]
    calls += [(TypeError, "match", (chain, None)), (TypeError, "match", ([A], 1))]
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    bad_arrays: list[tuple[type[Exception], Any, Any]] = [
        (ValueError, slots.astype(np.int64), out), (ValueError, slots, out.astype(np.float32)),
        (ValueError, slots.astype(np.uint32), out), (ValueError, slots, np.zeros(3)),
        (ValueError, slots, np.zeros((2, 1))), (ValueError, slots.reshape(2, 1), out),
        (ValueError, slots.astype(">i4"), out), (ValueError, slots, frozen),
        (ValueError, np.array([0, 8], np.int32), out),
        (ValueError, np.array([-1, 0], np.int32), out),
        (ValueError, np.array([0, 5], np.int32), out), (TypeError, [0, 1], out),
        (TypeError, slots, [0.0, 0.0]), (TypeError, None, out), (TypeError, slots, None),
    ]  # fmt: skip
    calls += [(error, "depths", (chain, one, two)) for error, one, two in bad_arrays]
    calls += [(TypeError, "depths", (other, slots, out)) for other in (None, [A])]
    return calls


def test_bad_calls_are_refused_and_change_nothing(bench: Bench) -> None:
    """Every wrong argument raises ValueError or TypeError, and the registry is as before."""
    registry = bench.registry
    registry.route(0, bench.chain(A, C), 3)
    before = registry.dump(0), registry.dump(1), registry.blocks(0)
    for error, method, arguments in bad_calls(bench):
        call = getattr(registry, method)
        with pytest.raises(error):
            call(*arguments)
    assert (registry.dump(0), registry.dump(1), registry.blocks(0)) == before


def test_bad_sizes_are_refused(bench: Bench) -> None:
    """max_pods is 1 to 4096, shards 1 to 65536."""
    make: Any = bench.form.registry
    for max_pods, shards in [(0, 1), (4097, 1), (-1, 1), (1, 0), (1, 65537), (2**70, 1)]:
        with pytest.raises(ValueError, match=r"must be in"):
            make(max_pods, shards)
    for wrong in (None, 1.0, "1"):
        with pytest.raises(TypeError):
            make(wrong, 1)
        with pytest.raises(TypeError):
            make(1, wrong)
    assert make(1, 65536).blocks is not None


def test_numpy_numbers_and_views(bench: Bench) -> None:
    """Slots may be numpy integers, and arrays may be strided or read-only where only read."""
    registry: Any = bench.registry
    assert registry.route(np.int32(1), bench.chain(A, B), np.uint32(7)) == 0
    slots = np.array([0, 9, 1, 9], np.int32)[::2]
    slots.flags.writeable = False
    out = np.zeros(4)
    registry.depths(bench.chain(A, B), slots, out[::2])
    assert out.tolist() == [0.0, 0.0, 2.0, 0.0]
    assert registry.stored(1, B, bench.chain(C))
    registry.removed(1, bench.chain(C))


def test_a_sequence_that_closes_the_slot(bench: Bench) -> None:
    """Arguments are read before anything is looked up: a hostile sequence finds no way in."""
    registry = bench.registry

    class Hostile(Sequence[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: Any) -> Any:
            if registry.is_open(1):
                registry.close_slot(1)
            if i >= 2:
                raise IndexError
            return i + 1

    registry.stored(1, None, [A])
    with pytest.raises(ValueError, match="not open"):
        registry.stored(1, None, Hostile())
    registry.open_slot(1, 5)
    with pytest.raises(ValueError, match="not open"):
        registry.removed(1, Hostile())


LEAK = """
import resource, sys
from calinix.core import kv, hashing, registry
form = registry if sys.argv[1] == "reference" else kv
chains, rounds, size = (hashing, 12, 4000) if sys.argv[1] == "reference" else (kv, 60, 40000)
prompt = b"some words to hash " * (size // 2)
def one(seed):
    r = form.PrefixRegistry(64, 16)
    chain = chains.hash_bytes(seed, prompt, 4)
    r.open_slot(1, size); r.open_slot(2, size // 4)
    for slot in (1, 2):
        r.route(slot, chain, 1); r.withdraw(slot, chain.head(size // 8), 1)
    r.clear(1); r.sweep(); r.route(1, chain, 2); r.close_slot(2); r.match(chain, 3)
    r.dump(1); chains.hash_words(seed, prompt, 3); list(chain); chain == chain.head(3)
    try: chains.Chain.of([1, 2, 0])
    except ValueError: pass
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for seed in range(1, 5): one(seed)
before = peak()
for seed in range(1, rounds): one(seed)
print(peak() - before)
"""


def test_nothing_leaks(bench: Bench) -> None:
    """Registries and chains made and dropped in a loop leave the peak memory where it was."""
    run = subprocess.run(
        [sys.executable, "-c", LEAK, bench.form.name], capture_output=True, text=True, check=True
    )
    # In kilobytes (bytes on macOS); one leaked registry alone would be 2 MB a round.
    assert int(run.stdout) < 6_000 * (1024 if sys.platform == "darwin" else 1)


def test_compiled_where_there_is_a_compiler() -> None:
    """With a C compiler at hand the compiled form was built and is the one in use."""
    assert kv.COMPILED or not any(map(shutil.which, ("cc", "gcc", "clang")))


def test_works_without_the_compiled_part() -> None:
    """Where _native cannot be imported, kv offers the reference and says so."""
    code = (
        "import sys; sys.modules['calinix.core._native'] = None\n"
        "from calinix.core import kv, registry, hashing\n"
        "assert not kv.COMPILED\n"
        "assert kv.PrefixRegistry is registry.PrefixRegistry and kv.Chain is hashing.Chain\n"
        "r = kv.PrefixRegistry(4, 4); r.open_slot(0, 9)\n"
        "print(r.route(0, kv.hash_bytes(kv.seed_of(b'm'), b'abcdef', 2), 1), r.blocks(0))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "3"]
