"""The pod model: first in first out, prefix hits as vLLM counts them, times exact and pure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.sim.kv_blocks import chain_of
from calinix.sim.pod_model import (
    Job,
    JobTooLargeError,
    PodFigures,
    PodModel,
    Step,
    StepKind,
)


def job(
    name: str,
    prompt: Sequence[int],
    output: int = 1,
    *,
    block_size: int = 4,
    hold: bool = False,
    external: bool = False,
) -> Job:
    """A job whose answer's tokens are -1, -2, ..."""
    tokens = [*prompt, *range(-1, -1 - output, -1)]
    return Job(
        id=name,
        prompt_tokens=len(prompt),
        output_tokens=output,
        chain=chain_of(b"m", tokens, block_size),
        hold=hold,
        external=external,
    )


def told(steps: list[Step]) -> list[tuple[str, str, float]]:
    """Steps as (job, kind, time)."""
    return [(step.job.id, step.kind.value, round(step.at_s, 6)) for step in steps]


def figures(**changes: float) -> PodFigures:
    """Blocks of 4 tokens, 100 of them."""
    settings = {"block_size": 4, "kv_capacity_tokens": 400, **changes}
    return PodFigures(**settings)  # type: ignore[arg-type]


def test_prefills_are_first_in_first_out() -> None:
    """One slot: each prompt starts when the one before is computed, while decoding goes on."""
    model = PodModel(figures(delay_s=1.0, token_delay_s=0.4))
    for name in "abc":
        model.submit(job(name, [ord(name)], 3), 0.0)
    model.advance(0.0)
    assert (model.running, model.waiting) == (1, 2)
    assert told(model.advance(10.0)) == [
        ("a", "prefilled", 1.0),
        ("a", "finished", 1.8),
        ("b", "prefilled", 2.0),
        ("b", "finished", 2.8),
        ("c", "prefilled", 3.0),
        ("c", "finished", 3.8),
    ]
    assert (model.running, model.waiting, model.blocks.used) == (0, 0, 0)


def test_parallel_slots_prefill_together() -> None:
    """Two slots: the third prompt waits for the first of them."""
    model = PodModel(figures(delay_s=1.0, parallel=2))
    for name in "abc":
        model.submit(job(name, [ord(name)]), 0.0)
    prefilled = [step.at_s for step in model.advance(9.0) if step.kind is StepKind.PREFILLED]
    assert prefilled == [1.0, 1.0, 2.0]


def test_prefill_takes_time_for_uncached_tokens_only() -> None:
    """At 10 tokens/s and a fixed second: 12 tokens 2.2 s; the same again computes 4, 1.4 s."""
    model = PodModel(figures(delay_s=1.0, prefill_tokens_per_s=10.0))
    first, again = job("a", range(12)), job("b", range(12))
    model.submit(first, 0.0)
    assert told(model.advance(5.0))[0] == ("a", "prefilled", 2.2)
    model.submit(again, 5.0)
    assert told(model.advance(10.0))[0] == ("b", "prefilled", 6.4)
    assert (first.cached_tokens, again.cached_tokens) == (0, 8)


@pytest.mark.parametrize(
    ("tokens", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12)]
)
def test_full_blocks_hit_and_the_last_token_is_computed(tokens: int, cached: int) -> None:
    """A prompt of n cached tokens hits floor((n - 1) / block) blocks, as engines have it."""
    model = PodModel(figures())
    model.submit(job("first", range(40)), 0.0)
    model.advance(0.0)
    again = job("again", range(tokens))
    model.submit(again, 1.0)
    model.advance(1.0)
    assert again.cached_tokens == cached
    assert model.counters.cached_tokens == cached
    assert model.counters.computed_tokens == 40 + tokens - cached


def test_generated_blocks_are_cached_too() -> None:
    """The next turn of a chat hits what was generated, up to the last token's missing KV."""
    model = PodModel(figures())
    model.submit(job("a", range(6), 7), 0.0)
    model.advance(0.0)
    follow = job("b", [*range(6), *range(-1, -8, -1), 50, 51, 52], 1)
    model.submit(follow, 1.0)
    model.advance(1.0)
    assert follow.cached_tokens == 12


def test_another_namespace_shares_nothing() -> None:
    """The same tokens under another model or salt are no hit."""
    model = PodModel(figures())
    model.submit(job("a", range(12)), 0.0)
    model.advance(0.0)
    other = job("b", range(12))
    other.chain = chain_of(b"other", range(12), 4)
    model.submit(other, 1.0)
    model.advance(1.0)
    assert other.cached_tokens == 0


def test_the_least_recently_used_prefix_goes() -> None:
    """With room for two prompts, a third evicts the one that was used longest ago."""
    model = PodModel(figures(kv_capacity_tokens=20))
    prompts = {name: [ord(name)] * 11 for name in "abc"}
    seen = []
    for now, name in enumerate("abacab"):
        one = job(f"{name}{now}", prompts[name])
        model.submit(one, float(now))
        model.advance(float(now))
        seen.append(one.cached_tokens)
    assert seen == [0, 0, 8, 0, 8, 0]


def test_no_kv_room_means_waiting() -> None:
    """A job that does not fit beside the running one waits until that one has ended."""
    model = PodModel(figures(kv_capacity_tokens=16, token_delay_s=1.0, parallel=4))
    model.submit(job("a", range(8), 4), 0.0)
    model.submit(job("b", range(20, 28), 4), 0.0)
    model.advance(0.0)
    assert (model.running, model.waiting) == (1, 1)
    assert model.kv_usage == 0.75
    assert told(model.advance(3.0))[-2:] == [("a", "finished", 3.0), ("b", "prefilled", 3.0)]


def test_what_can_never_fit_is_refused() -> None:
    """A prompt over the whole capacity raises and leaves no trace."""
    model = PodModel(figures(kv_capacity_tokens=16))
    with pytest.raises(JobTooLargeError):
        model.submit(job("a", range(16), 1), 0.0)
    assert model.waiting == 0


@pytest.mark.parametrize(("at_s", "place"), [(0.5, "waiting"), (1.5, "prefill"), (3.0, "decode")])
def test_cancelling_frees_slot_and_blocks(at_s: float, place: str) -> None:
    """Wherever the second job is, its cancellation lets the third go on at once."""
    model = PodModel(figures(delay_s=1.0, token_delay_s=1.0))
    first, second, third = job("a", [1]), job("b", [2], 9), job("c", [3])
    for one in (first, second, third):
        model.submit(one, 0.0)
    model.advance(at_s)
    assert model.cancel(second, at_s)
    assert not model.cancel(second, at_s)
    done = {step.job.id: step.at_s for step in model.advance(99.0)}
    assert "b" not in done
    assert (third.prefilled_s, place) in ((2.0, "waiting"), (2.5, "prefill"), (3.0, "decode"))
    assert (model.blocks.used, model.counters.cancelled) == (0, 1)


def test_held_blocks_stay_until_released() -> None:
    """A prefill for another pod keeps its blocks pinned after its end."""
    model = PodModel(figures())
    model.submit(job("a", range(12), hold=True), 0.0)
    model.advance(0.0)
    assert (model.held, model.running, model.blocks.used) == (1, 0, 4)
    assert model.release("a", 1.0)
    assert not model.release("a", 1.0)
    assert (model.held, model.blocks.used) == (0, 0)


def test_external_tokens_cost_no_prefill() -> None:
    """KV from another pod: only the last token is computed, and the rest is counted apart."""
    model = PodModel(figures(delay_s=5.0, prefill_tokens_per_s=10.0))
    one = job("a", range(12), external=True)
    model.submit(one, 0.0)
    assert told(model.advance(1.0))[0] == ("a", "prefilled", 0.1)
    assert model.counters.external_tokens == 12
    assert model.counters.computed_tokens == 0
    again = job("b", range(12), external=True)
    model.submit(again, 2.0)
    model.advance(3.0)
    assert (again.cached_tokens, again.external_tokens) == (8, 4)


def test_a_slow_pod_stretches_what_begins() -> None:
    """The factor counts for prefills and decodes that begin after it is set."""
    model = PodModel(figures(delay_s=1.0, token_delay_s=1.0))
    model.submit(job("a", [1], 3), 0.0)
    model.advance(0.0)
    model.slow_factor = 2.0
    assert told(model.advance(9.0)) == [("a", "prefilled", 1.0), ("a", "finished", 5.0)]


def test_tokens_over_time() -> None:
    """The first token comes with the prefill, the others one by one."""
    model = PodModel(figures(delay_s=1.0, token_delay_s=0.25))
    one = job("a", [1], 4)
    model.submit(one, 0.0)
    model.advance(1.0)
    assert [one.tokens_at(t) for t in (0.9, 1.0, 1.24, 1.25, 1.5, 1.75, 9.0)] == [
        0,
        1,
        1,
        2,
        3,
        4,
        4,
    ]
    assert one.token_s(3) == 1.75


def test_what_is_pooled_ends_with_its_prefill() -> None:
    """A job without output finishes when its prompt is computed and leaves nothing cached."""
    model = PodModel(figures(delay_s=1.0))
    model.submit(Job(id="p", prompt_tokens=9, output_tokens=0, chain=()), 0.0)
    assert told(model.advance(2.0)) == [("p", "prefilled", 1.0), ("p", "finished", 1.0)]
    assert (model.blocks.cached, model.blocks.used, model.counters.output_tokens) == (0, 0, 0)


LOADS = st.lists(
    st.tuples(
        st.floats(0, 5), st.integers(1, 30), st.integers(0, 4), st.integers(0, 2), st.floats(0, 9)
    ),
    max_size=12,
)


def play(load: list[tuple[float, int, int, int, float]], pauses: list[float]) -> list[str]:
    """Runs the load, stopping at the given times too; all steps, with their times."""
    model = PodModel(figures(delay_s=0.5, prefill_tokens_per_s=50.0, token_delay_s=0.1))
    actions: list[tuple[float, int, Job | None]] = [(at, -1, None) for at in pauses]
    for number, (at, length, output, family, _) in enumerate(load):
        prompt = [family] * length
        actions.append((at, number, job(f"j{number}", prompt, output)))
    steps: list[Step] = []
    for now, _, one in sorted(actions, key=lambda action: action[:2]):
        steps += model.advance(now)
        if one is not None:
            model.submit(one, now)
            steps += model.advance(now)
    steps += model.advance(1e9)
    assert (model.running, model.waiting, model.blocks.used) == (0, 0, 0)
    assert model.next_s() is None
    assert model.counters.finished == len(load)
    return [f"{step.job.id} {step.kind.value} {step.at_s!r}" for step in steps]


@given(LOADS, st.lists(st.floats(0, 12), max_size=6))
def test_times_do_not_depend_on_when_one_looks(
    load: list[tuple[float, int, int, int, float]], pauses: list[float]
) -> None:
    """However often `advance` is called, every job ends, everything is freed, at the same times."""
    assert play(load, pauses) == play(load, [])
    times = [float(line.rsplit(" ", 1)[1]) for line in play(load, pauses)]
    assert times == sorted(times)


@given(LOADS)
def test_cancelled_jobs_leave_nothing_behind(
    load: list[tuple[float, int, int, int, float]],
) -> None:
    """Jobs cancelled at any time: the pod is empty in the end and next_s names no ghost."""
    model = PodModel(figures(delay_s=0.5, token_delay_s=0.1))
    actions: list[tuple[float, int, Job, bool]] = []
    for number, (at, length, output, family, later) in enumerate(load):
        one = job(f"j{number}", [family] * length, output)
        actions += [(at, number, one, True), (at + later, number, one, False)]
    for now, _, one, arrives in sorted(actions, key=lambda action: (*action[:2], not action[3])):
        model.advance(now)
        if arrives:
            model.submit(one, now)
        else:
            model.cancel(one, now)
        model.advance(now)
    assert (model.running, model.waiting, model.blocks.used) == (0, 0, 0)
    assert model.next_s() is None
    assert model.counters.finished + model.counters.cancelled == len(load)
