"""PrefixRegistry, both forms: what slots hold, and how it comes, goes and hides."""

from __future__ import annotations

import random

import pytest

from calinix.core.registry import MAX_COPIES
from kvforms import FORMS, Bench, depths

A, B, C, D, E, F = 11, 12, 13, 14, 15, 16


@pytest.fixture(params=FORMS, ids=lambda form: form.name)
def bench(request: pytest.FixtureRequest) -> Bench:
    """Two open slots in one form."""
    return Bench(request.param)


def test_route_stores_what_is_missing(bench: Bench) -> None:
    """A route returns the blocks already there; afterwards the whole chain is."""
    registry = bench.registry
    assert registry.route(1, bench.chain(A, B, C), 1) == 0
    assert registry.route(1, bench.chain(A, B, C, D), 2) == 3
    assert registry.route(1, bench.chain(A, B, E), 3) == 2
    assert registry.route(1, bench.chain(), 4) == 0
    assert registry.blocks(1) == 5
    assert len(registry) == 5
    assert registry.blocks(0) == 0


def test_depths_and_match(bench: Bench) -> None:
    """Both say how many leading blocks each slot holds; the groups cover the candidates."""
    registry = bench.registry
    registry.open_slot(7, 9)
    registry.route(1, bench.chain(A, B, C), 1)
    registry.route(0, bench.chain(A, D), 1)
    chain = bench.chain(A, B, C, E)
    assert depths(registry, chain, [0, 1, 7]) == [1, 3, 0]
    assert depths(registry, chain, [7, 1, 7, 0]) == [0, 3, 0, 1]
    assert depths(registry, chain, []) == []
    assert depths(registry, bench.chain(), [0, 1]) == [0, 0]
    assert registry.match(chain, 0b1000_0011) == [(3, 0b10), (1, 0b01), (0, 0b1000_0000)]
    assert registry.match(chain, 0b10) == [(3, 0b10)]
    assert registry.match(chain, 0) == []
    assert registry.match(bench.chain(), 0b11) == [(0, 0b11)]


def test_match_takes_closed_slots_for_empty(bench: Bench) -> None:
    """A candidate that is not open, or no longer, holds nothing."""
    bench.registry.route(1, bench.chain(A), 1)
    assert bench.registry.match(bench.chain(A), 0xFF) == [(1, 0b10), (0, 0b1111_1101)]
    bench.registry.close_slot(1)
    assert bench.registry.match(bench.chain(A), 0xFF) == [(0, 0xFF)]


def test_eviction_takes_the_least_recent_leaves(bench: Bench) -> None:
    """Beyond the capacity the tail of the least recently used chain goes first."""
    registry = bench.registry
    registry.route(0, bench.chain(A, B), 1)
    registry.route(0, bench.chain(C, D), 2)
    assert bench.shown(0) == [C, D, A, B]
    registry.route(0, bench.chain(A), 3)
    registry.route(0, bench.chain(E), 4)
    assert bench.shown(0) == [E, A, C, D]
    registry.route(0, bench.chain(E, F), 5)
    assert bench.shown(0) == [E, F, A, C]
    assert len(registry) == registry.blocks(0) == 4


def test_a_use_saves_the_whole_path(bench: Bench) -> None:
    """A chain that is used again outlives those that are not, root first."""
    registry = bench.registry
    registry.route(0, bench.chain(A, B), 1)
    registry.route(0, bench.chain(C, D), 2)
    assert registry.route(0, bench.chain(A, B), 3) == 2
    registry.route(0, bench.chain(E, F), 4)
    assert bench.shown(0) == [E, F, A, B]


def test_chain_longer_than_the_capacity(bench: Bench) -> None:
    """Its head is stored; a longer one of the same head changes nothing."""
    registry = bench.registry
    registry.route(0, bench.chain(7, 8, 9), 1)
    registry.route(0, bench.chain(A, B, C, D, E, F), 2)
    assert bench.shown(0) == [A, B, C, D]
    assert registry.route(0, bench.chain(A, B, C, D, E, F), 3) == 4
    assert bench.shown(0) == [A, B, C, D]


def test_slot_without_capacity(bench: Bench) -> None:
    """A capacity of 0 stores nothing and is no error."""
    registry = bench.registry
    registry.open_slot(2, 0)
    assert registry.route(2, bench.chain(A, B), 1) == 0
    registry.confirm(2, bench.chain(A, B))
    assert registry.stored(2, None, [A, B])
    assert registry.blocks(2) == 0


def test_withdraw_takes_speculative_blocks_back(bench: Bench) -> None:
    """What only this request stored goes; what was there before it stays."""
    registry = bench.registry
    registry.route(1, bench.chain(A, B), 1)
    registry.confirm(1, bench.chain(A, B))
    registry.route(1, bench.chain(A, B, C, D), 2)
    registry.withdraw(1, bench.chain(A, B, C, D), 3)
    assert bench.shown(1) == [A, B, C, D]
    registry.withdraw(1, bench.chain(A, B, C, D), 2)
    assert bench.shown(1) == [A, B]
    registry.withdraw(1, bench.chain(A, B, C, D), 2)
    assert bench.shown(1) == [A, B]


def test_newer_ticket_owns_speculative_blocks(bench: Bench) -> None:
    """A speculative block that is used again is the newer request's to withdraw."""
    registry = bench.registry
    registry.route(1, bench.chain(A, B, C), 1)
    registry.route(1, bench.chain(A, B), 2)
    registry.withdraw(1, bench.chain(A, B, C), 1)
    assert bench.shown(1) == [A, B]
    registry.withdraw(1, bench.chain(A, B), 2)
    assert registry.blocks(1) == 0


def test_confirm_brings_everything_back(bench: Bench) -> None:
    """After an answer all blocks are there, even those that were evicted or withdrawn."""
    registry = bench.registry
    registry.route(0, bench.chain(A, B, C), 1)
    registry.route(0, bench.chain(D, E), 2)
    assert bench.shown(0) == [D, E, A, B]
    registry.confirm(0, bench.chain(A, B, C))
    assert bench.shown(0) == [A, B, C, D]
    registry.withdraw(0, bench.chain(A, B, C), 1)
    registry.withdraw(0, bench.chain(D), 2)
    assert bench.shown(0) == [A, B, C]


def test_withdrawing_a_shared_path_hides_the_rest(bench: Bench) -> None:
    """Another request's blocks behind a withdrawn one are found again when it is confirmed."""
    registry = bench.registry
    registry.route(1, bench.chain(A, B, C), 1)
    registry.route(1, bench.chain(A, B, D), 2)
    registry.withdraw(1, bench.chain(A, B, D), 2)
    assert bench.shown(1) == []
    assert bench.hidden(1) == {C}
    assert depths(registry, bench.chain(A, B, C), [1]) == [0]
    registry.confirm(1, bench.chain(A, B, C))
    assert bench.shown(1) == [A, B, C]


def test_events_and_routes_meet(bench: Bench) -> None:
    """A stored event settles a speculative block: no ticket takes it back, one removal does."""
    registry = bench.registry
    registry.route(1, bench.chain(A, B, C), 5)
    assert registry.stored(1, A, [B, C])
    registry.withdraw(1, bench.chain(A, B, C), 5)
    assert bench.hidden(1) == {B, C}
    assert registry.stored(1, None, [A])
    assert registry.stored(1, A, [B])
    assert bench.shown(1) == [A, B]
    registry.removed(1, [B])
    assert bench.shown(1) == [A, B]
    registry.removed(1, [B])
    assert bench.shown(1) == [A]


def test_copies_are_counted(bench: Bench) -> None:
    """A block published twice survives one removal; unknown blocks are ignored."""
    registry = bench.registry
    assert registry.stored(1, None, [A, B])
    assert registry.stored(1, A, [B])
    registry.removed(1, [B, F])
    assert bench.shown(1) == [A, B]
    registry.removed(1, [B, B])
    assert bench.shown(1) == [A]


def test_copies_do_not_wrap(bench: Bench) -> None:
    """Copies stop at their largest number instead of starting again at 0."""
    blocks = [A] * (MAX_COPIES + 5)
    bench.registry.stored(1, None, blocks)
    assert bench.registry.dump(1) == [(A, 0, 0, MAX_COPIES, False, False, 1)]
    bench.registry.removed(1, blocks[: MAX_COPIES - 1])
    assert bench.registry.blocks(1) == 1
    bench.registry.removed(1, [A])
    assert bench.registry.blocks(1) == 0


def test_removing_speculative_and_confirmed_blocks(bench: Bench) -> None:
    """The engine's word counts more than a guess or an answer: one removal and they are gone."""
    bench.registry.route(1, bench.chain(A, B), 1)
    bench.registry.confirm(1, bench.chain(A))
    bench.registry.removed(1, [B, A])
    assert bench.registry.blocks(1) == 0


def test_stored_behind_an_unknown_parent(bench: Bench) -> None:
    """Nothing is stored, and the caller is told; a hidden parent is as good as unknown."""
    registry = bench.registry
    assert not registry.stored(1, A, [B, C])
    assert registry.blocks(1) == 0
    registry.stored(1, None, [A, B])
    registry.removed(1, [A])
    assert not registry.stored(1, B, [C])
    assert bench.hidden(1) == {B}
    assert registry.stored(1, None, [])


def test_removal_in_the_middle_hides_what_is_behind(bench: Bench) -> None:
    """The prefix law: all descendants are hidden, and each is found when it is stored again."""
    registry = bench.registry
    registry.stored(1, None, [A, B, C, D])
    registry.stored(1, C, [E, F])
    registry.stored(1, B, [C])
    registry.removed(1, [B])
    assert bench.shown(1) == [A]
    assert bench.hidden(1) == {C, D, E, F}
    assert depths(registry, bench.chain(A, B, C, D), [1]) == [1]
    registry.stored(1, A, [B])
    assert bench.shown(1) == [A, B]
    assert registry.route(1, bench.chain(A, B, C, E), 9) == 2
    assert depths(registry, bench.chain(A, B, C, E, F), [1]) == [4]
    assert bench.hidden(1) == {D, F}
    # C was held twice, and still is: a route adds no copy and makes nothing speculative.
    registry.removed(1, [C])
    registry.withdraw(1, bench.chain(A, B, C, E), 9)
    assert depths(registry, bench.chain(A, B, C, E), [1]) == [4]
    registry.removed(1, [C, D])
    assert bench.hidden(1) == {E, F}
    assert len(registry) == 2


def test_stored_uses_its_parent(bench: Bench) -> None:
    """Storing behind a block is a use of the path to it."""
    registry = bench.registry
    registry.stored(0, None, [A])
    registry.stored(0, None, [B])
    registry.stored(0, None, [C])
    registry.stored(0, A, [D])
    assert bench.shown(0) == [A, D, C, B]
    registry.stored(0, D, [E])
    assert bench.shown(0) == [A, D, E, C]


def test_clear_and_close(bench: Bench) -> None:
    """Both forget one slot and no other; a slot that is opened again starts cold."""
    registry = bench.registry
    for slot in (0, 1):
        registry.route(slot, bench.chain(A, B, C), 1)
    registry.clear(0)
    assert depths(registry, bench.chain(A, B, C), [0, 1]) == [0, 3]
    assert registry.route(0, bench.chain(A, B), 2) == 0
    registry.close_slot(0)
    assert not registry.is_open(0)
    registry.open_slot(0, 2)
    assert registry.is_open(0)
    assert registry.blocks(0) == 0
    assert registry.route(0, bench.chain(A, B, C), 3) == 0
    assert depths(registry, bench.chain(A, B, C), [0, 1]) == [2, 3]
    registry.open_slot(0, 3)
    assert registry.blocks(0) == 0
    assert registry.route(0, bench.chain(A, B, C), 3) == 0
    assert registry.blocks(0) == 3


def test_sweep_frees_what_is_left(bench: Bench) -> None:
    """After enough sweeps the index holds only what is shown, and nothing shown is lost."""
    registry = bench.registry
    rng = random.Random(1)
    kept = bench.chain(*(rng.getrandbits(64) | 1 for _ in range(50)))
    registry.open_slot(2, 10_000)
    registry.route(2, bench.chain(*(rng.getrandbits(64) | 1 for _ in range(5_000))), 1)
    for slot in (1, 2):
        registry.route(slot, kept, 2)
    registry.clear(2)
    assert depths(registry, kept, [1, 2]) == [50, 0]
    while registry.sweep():
        pass
    assert not registry.sweep()
    assert len(registry) == 50
    assert depths(registry, kept, [1, 2]) == [50, 0]
    registry.close_slot(1)
    while registry.sweep():
        pass
    assert len(registry) == 0


def test_set_capacity(bench: Bench) -> None:
    """A smaller capacity evicts at once, a larger one gives room."""
    registry = bench.registry
    registry.route(0, bench.chain(A, B, C, D), 1)
    registry.set_capacity(0, 2)
    assert bench.shown(0) == [A, B]
    registry.set_capacity(0, 2**80)
    registry.route(0, bench.chain(A, B, C, D, E, F), 1)
    assert registry.blocks(0) == 6
    registry.set_capacity(0, 0)
    assert registry.blocks(0) == 0


def test_set_capacity_does_not_pause(bench: Bench) -> None:
    """A huge eviction is spread over later stores, and ends at the new capacity."""
    registry = bench.registry
    rng = random.Random(2)
    registry.open_slot(2, 20_000)
    registry.route(2, bench.chain(*(rng.getrandbits(64) | 1 for _ in range(9_000))), 1)
    registry.set_capacity(2, 100)
    assert registry.blocks(2) == 9_000 - 4_096
    for i in range(1, 2_000):
        registry.stored(2, None, [i])
    assert registry.blocks(2) == 100
    assert bench.shown(2)[:2] == [1_999, 1_998]
