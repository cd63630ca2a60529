"""The registry against a model: a tree of prefixes per slot, kept in plain lists.

`RegistryMachine` walks through chains that are paths of one tree, as real prompts are, and holds
every form to the model, the LRU order included. `ContradictionMachine` feeds chains that no
prompt can give; there the forms must still agree, and keep the prefix law and the LRU law.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from calinix.core import hashing
from calinix.core.registry import PrefixRegistry
from kvforms import FORMS

Path = tuple[int, ...]

MAX_PODS = 70
SLOTS = (0, 1, 64, 69)
DEPTH, BRANCHES = 6, 2
TREE = [p for n in range(1, DEPTH + 1) for p in itertools.product(range(BRANCHES), repeat=n)]


def block_of(path: Path) -> int:
    """The chain hash of the prefix `path`."""
    state = hashing.OFFSET
    for branch in path:
        state = hashing.step(state, branch)
    return state


BLOCK_OF = {path: block_of(path) for path in TREE}


class Held:
    """What a slot of the model knows of one block."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.ticket: int | None = None
        """The request that made it, while it is speculative."""
        self.last_ticket = 0
        self.copies = 0
        self.hidden = False


class ModelSlot:
    """One pod's cache: blocks by path, and their paths from the most to the least recent use."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.held: dict[Path, Held] = {}
        self.order: list[Path] = []

    @property
    def widths(self) -> int:
        return sum(held.width for held in self.held.values())

    def shows(self, path: Path) -> bool:
        return not path or (path in self.held and not self.held[path].hidden)

    def depth(self, path: Path) -> int:
        return max(
            n for n in range(len(path) + 1) if all(self.shows(path[:k]) for k in range(n + 1))
        )

    def touch(self, path: Path) -> None:
        for n in range(len(path), 0, -1):
            self.order.remove(path[:n])
            self.order.insert(0, path[:n])

    def lose(self, path: Path) -> None:
        del self.held[path]
        self.order.remove(path)
        for other, held in self.held.items():
            if other[: len(path)] == path:
                held.hidden = True

    def gain(self, path: Path, steady: int) -> bool:
        """Shows the block behind its parent; False when there is no room for it."""
        if path not in self.held:
            width = hashing.width_of(len(path) - 1, steady)
            while self.widths + width > self.capacity:
                if not self.order or self.order[-1] == path[:-1]:
                    return False
                self.lose(self.order[-1])
            self.held[path] = Held(width)
        else:
            self.order.remove(path)
            self.held[path].hidden = False
        at = self.order.index(path[:-1]) + 1 if path[:-1] else 0
        self.order.insert(at, path)
        return True

    def use(self, path: Path, steady: int) -> tuple[list[Held], list[Held]]:
        """Touches and stores the path; returns the blocks that were held, and the new ones."""
        depth = self.depth(path)
        self.touch(path[:depth])
        before = [self.held[path[:n]] for n in range(1, depth + 1)]
        new: list[Held] = []
        for n in range(depth + 1, len(path) + 1):
            known = path[:n] in self.held
            if not self.gain(path[:n], steady):
                break
            (before if known and path[:n] in self.held else new).append(self.held[path[:n]])
        return before, new


paths = st.lists(st.integers(0, BRANCHES - 1), max_size=DEPTH).map(tuple)
some_path = paths.filter(bool)
slots = st.sampled_from(SLOTS)
tickets = st.integers(0, 3)


class RegistryMachine(RuleBasedStateMachine):
    """Every form does what the model does."""

    steady = 0

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[tuple[Any, PrefixRegistry]] = [
            (form.chain, form.registry(MAX_PODS, 3)) for form in FORMS
        ]
        self.model: dict[int, ModelSlot] = {}
        for slot, capacity in zip(SLOTS, (3, 7, 12, 100), strict=True):
            self.open(slot, capacity)

    def open(self, slot: int, capacity: int) -> None:
        for _, registry in self.forms:
            registry.open_slot(slot, capacity)
        self.model[slot] = ModelSlot(capacity)

    def chain_of(self, chain: Any, path: Path) -> Any:
        return chain.of((BLOCK_OF[path[:n]] for n in range(1, len(path) + 1)), self.steady)

    def depth(self, blocks: int) -> int:
        return hashing.depth_of(blocks, self.steady)

    def call(self, method: str, slot: int, path: Path | None, *rest: int) -> Any:
        """Calls all forms, with a chain where there is a path; they must give the same."""
        results = []
        for chain, registry in self.forms:
            arguments: list[Any] = [slot]
            if path is not None:
                arguments.append(self.chain_of(chain, path))
            results.append(getattr(registry, method)(*arguments, *rest))
        assert all(result == results[0] for result in results)
        return results[0]

    @rule(slot=slots, path=paths, ticket=tickets)
    def route(self, slot: int, path: Path, ticket: int) -> None:
        model = self.model[slot]
        assert self.call("route", slot, path, ticket) == self.depth(model.depth(path))
        before, new = model.use(path, self.steady)
        for held in new:
            held.ticket = held.last_ticket = ticket
        for held in before:
            if held.ticket is not None:
                held.ticket = held.last_ticket = ticket

    @rule(slot=slots, path=paths)
    def confirm(self, slot: int, path: Path) -> None:
        self.call("confirm", slot, path)
        before, new = self.model[slot].use(path, self.steady)
        for held in before + new:
            held.ticket = None

    @rule(slot=slots, path=paths, ticket=tickets)
    def withdraw(self, slot: int, path: Path, ticket: int) -> None:
        self.call("withdraw", slot, path, ticket)
        model = self.model[slot]
        for n in range(len(path), 0, -1):
            if path[:n] in model.held and model.held[path[:n]].ticket == ticket:
                model.lose(path[:n])

    @rule(slot=slots, path=some_path, known=st.integers(0, DEPTH))
    def stored(self, slot: int, path: Path, known: int) -> None:
        model = self.model[slot]
        known = min(known, len(path) - 1)
        blocks = [BLOCK_OF[path[:n]] for n in range(known + 1, len(path) + 1)]
        parent = BLOCK_OF[path[:known]] if known else None
        answers = {registry.stored(slot, parent, blocks) for _, registry in self.forms}
        assert answers == {model.shows(path[:known])}
        if model.shows(path[:known]):
            before, new = model.use(path, 0)
            for held in (before + new)[known:]:
                held.ticket = None
                held.copies += 1

    @rule(slot=slots, some=st.lists(some_path, max_size=4))
    def removed(self, slot: int, some: list[Path]) -> None:
        model = self.model[slot]
        for _, registry in self.forms:
            registry.removed(slot, [BLOCK_OF[path] for path in some])
        for path in some:
            if path in model.held:
                model.held[path].copies -= 1
                if model.held[path].copies <= 0:
                    model.lose(path)

    @rule(slot=slots)
    def clear(self, slot: int) -> None:
        self.call("clear", slot, None)
        self.model[slot] = ModelSlot(self.model[slot].capacity)

    @rule(slot=slots, capacity=st.integers(0, 12))
    def new_epoch(self, slot: int, capacity: int) -> None:
        self.call("close_slot", slot, None)
        self.open(slot, capacity)

    @rule(slot=slots, capacity=st.integers(0, 12))
    def set_capacity(self, slot: int, capacity: int) -> None:
        self.call("set_capacity", slot, None, capacity)
        model = self.model[slot]
        model.capacity = capacity
        while model.widths > capacity:
            model.lose(model.order[-1])

    @rule()
    def sweep(self) -> None:
        for _, registry in self.forms:
            while registry.sweep():
                pass
        shown = {p for model in self.model.values() for p in model.held if model.shows(p)}
        assert {len(registry) for _, registry in self.forms} == {len(shown)}

    @rule(path=paths)
    def look_up(self, path: Path) -> None:
        """The index says of every slot what the model says."""
        expected = [self.depth(self.model[slot].depth(path)) for slot in SLOTS]
        for chain, registry in self.forms:
            blocks = self.chain_of(chain, path)
            out = np.zeros(len(SLOTS))
            deepest = registry.depths(blocks, np.array(SLOTS, np.int32), out)
            assert (out.tolist(), deepest) == (expected, max(expected))
            groups = registry.match(blocks, sum(1 << slot for slot in SLOTS))
            assert groups == sorted(groups, reverse=True)
            assert sum(slots for _, slots in groups) == sum(1 << slot for slot in SLOTS)
            for slot, depth in zip(SLOTS, expected, strict=True):
                assert [d for d, members in groups if members >> slot & 1] == [depth]

    @invariant()
    def forms_hold_what_the_model_holds(self) -> None:
        for slot, model in self.model.items():
            expected = [
                (
                    BLOCK_OF[path],
                    BLOCK_OF[path[:-1]] if path[:-1] and not held.hidden else 0,
                    held.last_ticket,
                    max(held.copies, 0),
                    held.ticket is not None,
                    held.hidden,
                    held.width,
                )
                for path, held in ((path, model.held[path]) for path in model.order)
            ]
            for _, registry in self.forms:
                assert registry.dump(slot) == expected
                assert registry.blocks(slot) == model.widths <= model.capacity

    @invariant()
    def prefix_law(self) -> None:
        for model in self.model.values():
            assert all(model.shows(path[:-1]) for path in model.held if model.shows(path))


class GrowingMachine(RegistryMachine):
    """The same with chains whose blocks grow: of widths 1, 1, 2, 4, 8 and 16."""

    steady = 2


blocks = st.integers(1, 9)
chains = st.lists(blocks, max_size=12)


class ContradictionMachine(RuleBasedStateMachine):
    """Chains in any order, with repetitions: the forms agree and keep their laws."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[tuple[Any, PrefixRegistry]] = [
            (form.chain, form.registry(2, 2)) for form in FORMS
        ]
        for _, registry in self.forms:
            registry.open_slot(0, 4)
            registry.open_slot(1, 8)

    @rule(slot=st.integers(0, 1), chain=chains, ticket=tickets, method=st.integers(0, 2))
    def use(self, slot: int, chain: list[int], ticket: int, method: int) -> None:
        results = []
        for make, registry in self.forms:
            if method == 0:
                results.append(registry.route(slot, make.of(chain), ticket))
            elif method == 1:
                registry.confirm(slot, make.of(chain))
            else:
                registry.withdraw(slot, make.of(chain), ticket)
        assert len(set(results)) <= 1

    @rule(slot=st.integers(0, 1), parent=st.none() | blocks, chain=chains)
    def stored(self, slot: int, parent: int | None, chain: list[int]) -> None:
        assert len({registry.stored(slot, parent, chain) for _, registry in self.forms}) == 1

    @rule(slot=st.integers(0, 1), chain=chains)
    def removed(self, slot: int, chain: list[int]) -> None:
        for _, registry in self.forms:
            registry.removed(slot, chain)

    @rule(slot=st.integers(0, 1), capacity=st.integers(0, 9))
    def set_capacity(self, slot: int, capacity: int) -> None:
        for _, registry in self.forms:
            registry.set_capacity(slot, capacity)

    @rule(slot=st.integers(0, 1))
    def clear(self, slot: int) -> None:
        for _, registry in self.forms:
            registry.clear(slot)

    @rule(chain=chains)
    def look_up(self, chain: list[int]) -> None:
        groups = [registry.match(make.of(chain), 3) for make, registry in self.forms]
        assert all(group == groups[0] for group in groups)

    @invariant()
    def forms_agree_and_parents_are_ahead(self) -> None:
        for slot in (0, 1):
            dumps = [registry.dump(slot) for _, registry in self.forms]
            assert all(dump == dumps[0] for dump in dumps)
            ahead: set[int] = set()
            for block, parent, _, _, _, hidden, _ in dumps[0]:
                assert parent == 0 or (parent in ahead and not hidden)
                if not hidden:
                    ahead.add(block)
            shown = {block for block, *_, hidden, _ in dumps[0] if not hidden}
            for make, registry in self.forms:
                for block in range(1, 10):
                    found = registry.match(make.of([block]), 1 << slot)
                    assert found == [(int(block in shown), 1 << slot)]


@pytest.mark.parametrize("machine", [RegistryMachine, GrowingMachine, ContradictionMachine])
def test_registry_against_its_model(machine: type[RuleBasedStateMachine]) -> None:
    """No sequence of calls takes any form apart from the model, or from the other form."""
    run_state_machine_as_test(
        machine, settings=settings(max_examples=120, stateful_step_count=40, deadline=None)
    )
