"""HostBitmap: the helpers behave as operations on sets of small integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.core import bitmap

SLOTS = st.sets(st.integers(0, 4095), max_size=80)


@given(SLOTS, SLOTS, st.integers(0, 4095))
def test_a_bitmap_is_a_set(one: set[int], other: set[int], slot: int) -> None:
    """Every helper and operator gives what a set of the same slots gives."""
    a, b = bitmap.of(one), bitmap.of(other)
    assert list(bitmap.iterate(a)) == sorted(one)
    assert bitmap.to_array(a).tolist() == sorted(one)
    assert bitmap.of_array(bitmap.to_array(a)) == a
    assert bitmap.count(a) == len(one)
    assert bitmap.contains(a, slot) is (slot in one)
    assert bitmap.first(a) == min(one, default=-1)
    assert set(bitmap.iterate(a | b)) == one | other
    assert set(bitmap.iterate(a & b)) == one & other
    assert set(bitmap.iterate(a & ~b)) == one - other


def test_the_empty_set() -> None:
    """The empty set has no slots and no first one."""
    assert bitmap.EMPTY == bitmap.of([]) == 0
    assert bitmap.to_array(bitmap.EMPTY).shape == (0,)
    assert bitmap.first(bitmap.EMPTY) == -1


def test_a_negative_slot_is_refused() -> None:
    """A slot below zero is a mistake, never a wrong bit."""
    with pytest.raises(ValueError, match="negative"):
        bitmap.bit(-1)
