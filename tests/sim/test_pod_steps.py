"""Pods that work in shared steps: exact against a stepping reference, and what always holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calinix.sim.cluster import noise_of
from calinix.sim.pod_figures import PodFigures
from calinix.sim.pod_model import Job, PodModel, Step, StepKind

FIGURES = PodFigures(
    prefill_tokens_per_s=1000.0,
    token_delay_s=0.010,
    sequence_s=0.002,
    kv_token_s=5e-5,
    chunk_tokens=50.0,
    attention_tokens=200.0,
    request_tokens=10.0,
    block_size=4,
    kv_capacity_tokens=400,
)
PART = 1.0 / 64.0
"""Of a step: how finely the reference goes."""


def job(name: str, prompt: int, output: int, chain: tuple[int, ...] | None = None) -> Job:
    """A job that shares nothing with others, unless it is given a chain."""
    own = tuple(hash((name, k)) for k in range((prompt + output) // 4))
    return Job(
        id=name,
        prompt_tokens=prompt,
        output_tokens=output,
        chain=own if chain is None else chain,
    )


@dataclass
class Sequence:
    """A job of the reference."""

    name: str
    at_s: float
    prompt: int
    output: int
    work: float = 0.0
    done: float = 0.0
    """Tokens after the first."""
    times: list[float] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """KV blocks of prompt and answer."""
        return -(-(self.prompt + self.output) // 4)


def stepped(load: list[tuple[float, int, int]], figures: PodFigures) -> dict[str, list[float]]:
    """(first token, end) of each job, by going through time in small parts of steps."""
    coming = [Sequence(f"j{n}", *one) for n, one in enumerate(load)]
    coming.sort(key=lambda one: one.at_s)
    for one in coming:
        mean_context = 0.5 * one.prompt / figures.attention_tokens
        one.work = one.prompt * (1.0 + mean_context) + figures.request_tokens
    everybody, waiting = list(coming), list[Sequence]()
    head: Sequence | None = None
    decoding: list[Sequence] = []
    now, free = 0.0, figures.capacity_blocks
    while coming or waiting or head or decoding:
        if not (waiting or head or decoding):
            now = max(now, coming[0].at_s)
        while coming and coming[0].at_s <= now:
            waiting.append(coming.pop(0))
        if head is None and waiting and waiting[0].blocks <= free:
            head = waiting.pop(0)
            free -= head.blocks
        step_s = figures.token_delay_s + figures.sequence_s * len(decoding)
        step_s += figures.kv_token_s * sum(one.prompt + 1 + one.done for one in decoding)
        if head is not None:
            step_s += figures.chunk_tokens / (figures.prefill_tokens_per_s or 1.0)
            head.work -= PART * figures.chunk_tokens
        now += PART * step_s
        for one in decoding:
            one.done += PART
        for one in [one for one in decoding if one.done >= one.output - 1]:
            decoding.remove(one)
            one.times.append(now)
            free += one.blocks
        if head is not None and head.work <= 0.0:
            head.times.append(now)
            if head.output == 1:
                head.times.append(now)
                free += head.blocks
            else:
                decoding.append(head)
            head = None
    return {one.name: one.times for one in everybody}


def play(
    load: list[tuple[float, int, int]],
    figures: PodFigures = FIGURES,
    looks: list[float] | None = None,
    model: PodModel | None = None,
) -> list[Step]:
    """Runs the load in the model, looking in between at the given times too."""
    model = PodModel(figures) if model is None else model
    actions: list[tuple[float, int]] = [(at_s, -1) for at_s in looks or []]
    actions += [(at_s, number) for number, (at_s, _, _) in enumerate(load)]
    steps: list[Step] = []
    for now, number in sorted(actions):
        steps += model.advance(now)
        if number >= 0:
            model.submit(job(f"j{number}", *load[number][1:]), now)
            steps += model.advance(now)
        assert model.blocks.used <= model.blocks.room
        assert 0.0 <= model.kv_usage <= 1.0
    steps += model.advance(1e9)
    assert (model.running, model.waiting, model.blocks.used) == (0, 0, 0)
    assert model.next_s() is None
    return steps


def times(steps: list[Step]) -> dict[str, list[float]]:
    """(first token, end) of each job."""
    found: dict[str, list[float]] = {}
    for step in steps:
        found.setdefault(step.job.id, []).append(step.at_s)
    return found


LOADS = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(1, 150), st.integers(1, 40)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(LOADS)
def test_times_are_those_of_stepping_through(load: list[tuple[float, int, int]]) -> None:
    """Every first token and every end is where small parts of steps, one by one, put it."""
    exact, reference = times(play(load)), stepped(load, FIGURES)
    # Each event of the reference is late by up to a part of a step, and delays what follows it.
    slack_s = 3.0 * len(load) * PART * 0.2
    for name, (first_s, end_s) in reference.items():
        assert exact[name][0] == pytest.approx(first_s, abs=slack_s)
        assert exact[name][1] == pytest.approx(end_s, abs=slack_s)


@given(LOADS, st.lists(st.floats(0.0, 10.0), max_size=6))
def test_looking_changes_nothing(load: list[tuple[float, int, int]], looks: list[float]) -> None:
    """However often `advance` is called, the same things happen at exactly the same times."""
    told = [(step.job.id, step.kind, step.at_s) for step in play(load)]
    assert [(step.job.id, step.kind, step.at_s) for step in play(load, looks=looks)] == told
    moments = [at_s for _, _, at_s in told]
    assert moments == sorted(moments)


@given(LOADS)
def test_first_tokens_come_in_order_of_arrival(load: list[tuple[float, int, int]]) -> None:
    """One prompt after the other is computed, and nobody ends before its first token."""
    steps = play(load)
    order = sorted(range(len(load)), key=lambda number: (load[number][0], number))
    firsts = [step.job.id for step in steps if step.kind is StepKind.PREFILLED]
    assert firsts == [f"j{number}" for number in order]
    assert all(first_s <= end_s for first_s, end_s in times(steps).values())


@given(LOADS)
def test_work_is_conserved(load: list[tuple[float, int, int]]) -> None:
    """All prompts and answers are counted once; without decodes the pod computes without a gap."""
    model = PodModel(FIGURES)
    play(load, model=model)
    assert model.counters.prompt_tokens == sum(prompt for _, prompt, _ in load)
    assert model.counters.output_tokens == sum(output for _, _, output in load)
    assert model.counters.finished == len(load)
    model = PodModel(FIGURES)
    at_once = [(0.0, prompt, 1) for _, prompt, _ in load]
    last_s = play(at_once, model=model)[-1].at_s
    assert last_s == pytest.approx(model.counters.work_tokens * FIGURES.work_token_s)


@given(LOADS, st.lists(st.tuples(st.integers(0, 7), st.floats(0.0, 5.0)), max_size=6))
def test_cancelled_jobs_leave_nothing(
    load: list[tuple[float, int, int]], cancels: list[tuple[int, float]]
) -> None:
    """Jobs cancelled at any time: all others end, and everything is given back."""
    model = PodModel(FIGURES)
    jobs = {n: job(f"j{n}", prompt, output) for n, (_, prompt, output) in enumerate(load)}
    actions = [(at_s, 0, number) for number, (at_s, _, _) in enumerate(load)]
    for number, later_s in cancels:
        if number in jobs:
            actions.append((load[number][0] + later_s, 1, number))
    for now, is_cancel, number in sorted(actions):
        model.advance(now)
        if is_cancel:
            model.cancel(jobs[number], now)
        else:
            model.submit(jobs[number], now)
        model.advance(now)
    model.advance(1e9)
    assert (model.running, model.waiting, model.blocks.used) == (0, 0, 0)
    assert model.next_s() is None
    assert model.counters.finished + model.counters.cancelled == len(load)


def test_a_lone_request_by_hand() -> None:
    """100 tokens are 135 tokens of work, 2.7 chunks of 60 ms; then 9 steps over a growing KV."""
    first_s, end_s = times(play([(0.0, 100, 10)]))["j0"]
    assert first_s == pytest.approx(2.7 * (0.010 + 50 / 1000.0))
    assert end_s - first_s == pytest.approx(9 * (0.012 + 5e-5 * 101) + 5e-5 * 81 / 2)


def test_a_prefill_slows_decodes_and_the_other_way_round() -> None:
    """Two requests at once take longer than each alone, and less than one after the other."""
    alone = times(play([(0.0, 100, 40)]))["j0"]
    both = times(play([(0.0, 100, 40), (0.2, 100, 40)]))
    assert both["j0"][1] > alone[1]
    assert both["j1"][0] - 0.2 > alone[0]
    assert both["j1"][1] < 2 * alone[1]


def test_tokens_between_are_counted_in_steps() -> None:
    """A stream's tokens come with the steps: the model says when each one is there."""
    model = PodModel(FIGURES)
    one = job("a", 20, 6)
    model.submit(one, 0.0)
    model.advance(0.0)
    first_s = model.next_s()
    assert first_s is not None
    model.advance(first_s)
    for index in range(1, 6):
        at_s = one.token_s(index)
        assert (one.tokens_at(at_s - 1e-4), one.tokens_at(at_s)) == (index, index + 1)
    model.advance(9.0)
    assert one.tokens_at(9.0) == 6
    assert one.ended_s == pytest.approx(one.token_s(5))
    assert one.ended_s is not None
    assert one.token_delay_s == pytest.approx((one.ended_s - first_s) / 5)


def test_a_slow_pod_takes_as_many_times_as_long() -> None:
    """Slowed to a third in the middle, what is left of a request takes three times as long."""
    model = PodModel(FIGURES)
    one = job("a", 100, 20)
    model.submit(one, 0.0)
    model.advance(0.0)
    usual = times(play([(0.0, 100, 20)]))["j0"]
    middle_s = 0.3
    model.advance(middle_s)
    model.slow_down(3.0, middle_s)
    end_s = model.advance(99.0)[-1].at_s
    assert end_s == pytest.approx(middle_s + 3.0 * (usual[1] - middle_s))


def test_a_faster_pod_is_faster_in_everything() -> None:
    """Figures scaled by two halve the whole way of a request."""
    load = [(0.0, 100, 20)]
    first_s, end_s = times(play(load))["j0"]
    assert times(play(load, FIGURES.scaled(2.0)))["j0"] == pytest.approx([first_s / 2, end_s / 2])


def test_kv_that_comes_from_elsewhere_takes_its_transfer() -> None:
    """Only what is not here already is moved, beside the steps; on the same machine nothing is."""
    figures = msgspec.structs.replace(FIGURES, transfer_tokens_per_s=100.0, transfer_delay_s=0.5)
    model = PodModel(figures)
    chain = tuple(range(1, 11))
    for name, local, expected_s in (("a", False, 0.9), ("b", False, 0.58), ("c", True, 0.0)):
        one = job(name, 40, 1, chain)
        one.external, one.local = True, local
        start_s = 10.0 * ord(name)
        model.submit(one, start_s)
        took_s = model.advance(start_s + 9.0)[0].at_s - start_s
        assert took_s == pytest.approx(expected_s + 0.001, abs=0.05)
    assert model.counters.work_tokens == 0.0


def test_cached_prefixes_outlast_what_jobs_can_hold() -> None:
    """With a second tier, prompts stay cached that the jobs' room alone could not keep."""
    for offload, cached in ((0, 0), (800, 96)):
        model = PodModel(msgspec.structs.replace(FIGURES, offload_tokens=offload))
        prompts = [tuple(range(1000 * n, 1000 * n + 25)) for n in range(1, 9)]
        for now, chain in enumerate([*prompts, prompts[0]]):
            one = job(f"j{now}", 100, 1, chain)
            model.submit(one, 10.0 * now)
            model.advance(10.0 * now + 9.0)
        assert one.cached_tokens == cached


@given(LOADS)
def test_what_is_predicted_for_an_idle_pod_comes_true(load: list[tuple[float, int, int]]) -> None:
    """Without other decodes, the predicted first token is the one that comes."""
    _, prompt, output = load[0]
    model = PodModel(FIGURES)
    queued = [job(f"q{n}", size, 1) for n, (_, size, _) in enumerate(load[1:])]
    for one in queued:
        model.submit(one, 5.0)
        model.advance(5.0)
    late = job("late", prompt, output)
    expected_s = model.predicted_first_token_s(late.chain, prompt, 5.0)
    finish_s = model.predicted_finish_s(late.chain, prompt, output, 5.0)
    model.submit(late, 5.0)
    model.advance(1e6)
    assert late.prefilled_s == pytest.approx(5.0 + expected_s)
    assert finish_s >= expected_s


def draws(seed: int) -> Iterator[float]:
    """Factors of noise."""
    draw = noise_of(0.2, random.Random(seed))
    assert draw is not None
    while True:
        yield draw()


def test_noise_has_mean_one_and_the_asked_spread() -> None:
    """Ten thousand factors: mean 1 and variation 0.2 within a few hundredths."""
    found = [factor for factor, _ in zip(draws(1), range(10_000), strict=False)]
    mean = sum(found) / len(found)
    spread = (sum((factor - mean) ** 2 for factor in found) / len(found)) ** 0.5
    assert mean == pytest.approx(1.0, abs=0.01)
    assert spread == pytest.approx(0.2, abs=0.01)
    assert noise_of(0.0, random.Random(1)) is None


def test_noise_changes_times_but_not_from_seed_to_same_seed() -> None:
    """A noisy pod's times differ from the model's, and are the same for the same seed."""
    load = [(0.1 * n, 50, 10) for n in range(6)]
    runs = [
        times(play(load, model=PodModel(FIGURES, noise_of(0.2, random.Random(seed)))))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0] != times(play(load))
