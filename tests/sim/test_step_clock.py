"""The clock of steps: its two directions are each other's inverse, whatever is anchored when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.sim.step_clock import StepClock

STEP_S = st.floats(1e-4, 10.0)
GROWTH_S = st.floats(0.0, 0.1)
AHEAD = st.floats(0.0, 1e4)


def clock(step_s: float, growth_s: float, at_s: float = 100.0, steps: float = 7.0) -> StepClock:
    """A clock at 100 s that has done seven steps."""
    found = StepClock()
    found.anchor(at_s, steps, step_s, growth_s)
    return found


@given(STEP_S, GROWTH_S, AHEAD)
def test_steps_and_times_are_inverse(step_s: float, growth_s: float, ahead: float) -> None:
    """The time of n steps is the time at which n steps are done."""
    one = clock(step_s, growth_s)
    assert one.steps_at(one.time_of(7.0 + ahead)) == pytest.approx(7.0 + ahead, rel=1e-9)


@given(STEP_S, GROWTH_S, AHEAD, AHEAD)
def test_more_steps_take_longer(step_s: float, growth_s: float, one: float, more: float) -> None:
    """Times never fall when steps grow."""
    found = clock(step_s, growth_s)
    assert found.time_of(7.0 + one) <= found.time_of(7.0 + one + more)


@given(STEP_S, GROWTH_S, st.floats(0.0, 1e3), st.floats(0.0, 1e3))
def test_an_anchor_on_the_way_changes_nothing(
    step_s: float, growth_s: float, first: float, second: float
) -> None:
    """Anchored anew where it is, with the step as long as it is there, it goes on the same way."""
    one = clock(step_s, growth_s)
    other = clock(step_s, growth_s)
    middle = 7.0 + first
    other.anchor(one.time_of(middle), middle, step_s + growth_s * first, growth_s)
    expected = pytest.approx(one.time_of(middle + second), rel=1e-9)
    assert other.time_of(middle + second) == expected


@pytest.mark.parametrize("growth_s", [0.0, 1e-15, 1e-9, 0.5])
def test_ten_steps_by_hand(growth_s: float) -> None:
    """Steps of 2 s, each `growth_s` longer than the one before, take 20 s and 50 growths."""
    one = clock(2.0, growth_s, at_s=0.0, steps=0.0)
    assert one.time_of(10.0) == pytest.approx(20.0 + 50.0 * growth_s, rel=1e-12)
    assert one.steps_at(20.0 + 50.0 * growth_s) == pytest.approx(10.0, rel=1e-12)


def test_nothing_happens_before_the_anchor_or_while_it_stands() -> None:
    """Times before the anchor are the anchor's, and without a step under way no step is done."""
    one = clock(1.0, 0.1)
    assert (one.steps_at(50.0), one.time_of(3.0)) == (7.0, 100.0)
    one.anchor(100.0, 7.0, 0.0, 0.0)
    assert one.steps_at(1e9) == 7.0
