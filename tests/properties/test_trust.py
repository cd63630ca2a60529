"""Trust: whatever pods answered before, it falls with lies and comes back with the truth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from calinix.core.calibration import DOUBT, FADE_S, LEAST_SAMPLES, LEAST_TRUST, Calibration

ANSWERS = st.lists(
    st.tuples(st.floats(0.0, 1e5), st.integers(0, 100_000), st.integers(0, 100_000)), max_size=60
)
PROMPTS = st.lists(st.integers(400, 100_000), min_size=100, max_size=100)


def trust(calibration: Calibration) -> float:
    """Of the one pod; the bitmap has to say the same."""
    factor = calibration.trust(0)
    assert (calibration.doubted == 1) == (factor < 1.0)
    assert LEAST_TRUST <= factor <= 1.0
    return factor


@given(before=ANSWERS, prompts=PROMPTS, honest=st.floats(0.0, 0.3))
def test_it_falls_with_a_lying_pod_and_comes_back(
    before: list[tuple[float, int, int]], prompts: list[int], honest: float
) -> None:
    """After any past, a hundred lies leave little of it, and a few hundred true answers all."""
    calibration, now = Calibration(1), 0.0
    for believed, found, size in before:
        calibration.cache_seen(0, believed, found, size, now)
        trust(calibration)
    for size in prompts:
        calibration.cache_seen(0, float(size), int(honest * size), size + 1, now)
        trust(calibration)
    # Sizes differ by up to 250 times and weigh, so the oldest third may still be felt.
    assert trust(calibration) < 1.0 - DOUBT
    for size in prompts * 4:
        calibration.cache_seen(0, float(size), size, size + 1, now)
        trust(calibration)
    assert trust(calibration) == 1.0


@given(before=ANSWERS)
def test_nobody_stays_in_doubt_without_evidence(before: list[tuple[float, int, int]]) -> None:
    """However bad it was, trust is back after a few times FADE_S."""
    calibration = Calibration(1)
    for believed, found, size in before:
        calibration.cache_seen(0, believed, found, size, 0.0)
    for n in range(1, 5):
        was = trust(calibration)
        calibration.fade(n * FADE_S)
        assert trust(calibration) >= was
    assert trust(calibration) == 1.0


@given(lies=st.integers(0, LEAST_SAMPLES - 1))
def test_few_answers_condemn_nobody(lies: int) -> None:
    """Fewer than LEAST_SAMPLES lies leave the trust at 1."""
    calibration = Calibration(1)
    for _ in range(lies):
        calibration.cache_seen(0, 10_000.0, 0, 10_000, 0.0)
    assert trust(calibration) == 1.0
