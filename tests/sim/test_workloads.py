"""Workloads: public traces as they were recorded, arrivals at their rates, shared prefixes."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.core.hashing import hash_bytes
from calinix.sim.arrivals import Bursts, Diurnal, Ramp, Rate, Steady, times
from calinix.sim.prompts import Length, Level, Tree, Zipf
from calinix.sim.replay import TraceName, TraceWorkload, rows_of
from calinix.sim.synthetic import Agents, Sessions, SingleRequests
from calinix.sim.workload import SimRequest, Workload, prompt_bytes


def arrivals(workload: Workload, seed: int = 1, load: float = 1.0) -> list[SimRequest]:
    """What the workload begins with."""
    return list(workload.arrivals(random.Random(seed), load))


# --- traces ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trace", "requests", "span_s", "prompt", "answer"),
    [
        ("conversation_trace.jsonl", 12_031, 3537, 12_035, 343),
        ("synthetic_trace.jsonl", 3_993, 1022, 15_325, 149),
        ("AzureLLMInferenceTrace_conv.csv", 19_366, 3502, 1_155, 211),
        ("AzureLLMInferenceTrace_code.csv", 8_819, 3435, 2_048, 28),
    ],
)
def test_the_traces_are_whole(
    trace: TraceName, requests: int, span_s: float, prompt: float, answer: float
) -> None:
    """Number of requests, length and mean sizes are those that the traces are known by."""
    rows = rows_of(trace)
    assert len(rows) == requests
    assert rows[-1].at_s == pytest.approx(span_s, abs=1.0)
    assert sum(row.prompt_tokens for row in rows) / requests == pytest.approx(prompt, abs=1)
    assert sum(row.output_tokens for row in rows) / requests == pytest.approx(answer, abs=1)


@pytest.mark.parametrize(
    ("trace", "share"), [("conversation_trace.jsonl", 0.374), ("synthetic_trace.jsonl", 0.651)]
)
def test_a_cache_without_bounds_would_hit_as_often_as_known(trace: TraceName, share: float) -> None:
    """Leading blocks that any earlier request had are the published share of all tokens."""
    seen: set[int] = set()
    hits = total = 0
    for request in arrivals(TraceWorkload(trace=trace)):
        usable = request.chain[: (request.prompt_tokens - 1) // 512]
        hits += 512 * next((n for n, block in enumerate(usable) if block not in seen), len(usable))
        total += request.prompt_tokens
        seen.update(request.chain)
    assert hits / total == pytest.approx(share, abs=0.006)


def test_mooncakes_ticks_are_spread_and_azures_times_kept() -> None:
    """Within a tick of 3 s arrivals are uniform, seeded; a trace without ticks is as recorded."""
    workload = TraceWorkload(trace="conversation_trace.jsonl", limit=3000)
    one, again, other = (arrivals(workload, seed) for seed in (1, 1, 2))
    moments = [request.arrival_s for request in one]
    assert moments == sorted(moments) == [request.arrival_s for request in again]
    assert moments != [request.arrival_s for request in other]
    within = [at_s % 3.0 for at_s in moments]
    assert sum(within) / len(within) == pytest.approx(1.5, abs=0.05)
    azure = arrivals(TraceWorkload(trace="AzureLLMInferenceTrace_conv.csv", limit=3))
    assert [request.arrival_s for request in azure] == pytest.approx(
        [0.0, 4.314579, 4.541877], abs=1e-6
    )


def test_load_compresses_time_only() -> None:
    """Twice the load: the same requests, in half the time."""
    workload = TraceWorkload(trace="synthetic_trace.jsonl", limit=200)
    one, two = arrivals(workload), arrivals(workload, load=2.0)
    assert [r.arrival_s / 2 for r in one] == pytest.approx([r.arrival_s for r in two])
    assert [r.chain for r in one] == [r.chain for r in two]
    assert len(one) == workload.requests == 200


def test_requests_without_known_blocks_share_nothing() -> None:
    """Azure's requests get blocks of their own, one per full block of the prompt."""
    found = arrivals(TraceWorkload(trace="AzureLLMInferenceTrace_code.csv", limit=50))
    ids = [block for request in found for block in request.chain]
    assert len(ids) == len(set(ids)) == sum(request.prompt_tokens // 512 for request in found)


# --- arrivals --------------------------------------------------------------------------------

RATES: list[Rate] = [
    Steady(rate_per_s=50.0),
    Bursts(rate_per_s=10.0, burst_per_s=90.0, period_s=10.0, burst_s=5.0),
    Diurnal(mean_per_s=50.0, swing=1.0, period_s=20.0),
    Ramp(from_per_s=20.0, to_per_s=100.0, over_s=8.0),
]


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: type(rate).__name__)
def test_arrivals_follow_the_rate(rate: Rate) -> None:
    """In each of the first ten seconds as many arrive as the rate of that second says."""
    counts, runs = [0] * 10, 60
    for seed in range(runs):
        for at_s in times(rate, 1.0, 1_000, random.Random(seed)):
            if at_s < 10.0:
                counts[int(at_s)] += 1
    wanted = [sum(rate.at(second + n / 100) for n in range(100)) / 100 for second in range(10)]
    assert [count / runs for count in counts] == pytest.approx(wanted, rel=0.1, abs=1.7)
    assert rate.peak_per_s >= max(wanted)


@given(st.sampled_from(RATES), st.floats(0.1, 10.0), st.integers(0, 99))
def test_arrivals_are_as_many_as_asked_and_in_order(rate: Rate, load: float, seed: int) -> None:
    """Whatever the rate and the load: the number asked for, in order of time."""
    found = list(times(rate, load, 50, random.Random(seed)))
    assert len(found) == 50
    assert found == sorted(found)


# --- prompts ---------------------------------------------------------------------------------


def test_lengths_have_their_mean_and_bounds() -> None:
    """Lognormal lengths: the asked mean, at least 1, at most the most; without variation fixed."""
    rng, length = random.Random(1), Length(mean=300.0, variation=1.0, most=5_000)
    found = [length.draw(rng) for _ in range(20_000)]
    assert sum(found) / len(found) == pytest.approx(300.0, rel=0.03)
    assert 1 <= min(found) <= max(found) <= 5_000
    assert {Length(mean=7.0, variation=0.0).draw(rng) for _ in range(9)} == {7}


def test_zipf_is_skewed_as_asked() -> None:
    """The first of ten comes about twice as often as the second; without skew as often."""
    for skew, ratio in ((1.0, 2.0), (0.0, 1.0)):
        zipf, rng = Zipf(10, skew), random.Random(1)
        counts = [0] * 10
        for _ in range(20_000):
            counts[zipf.draw(rng)] += 1
        assert counts[0] / counts[1] == pytest.approx(ratio, rel=0.1)
        assert min(counts) > 0


@given(st.integers(1, 64), st.lists(st.integers(1, 100), min_size=1, max_size=3))
def test_paths_of_a_tree_share_exactly_their_common_levels(size: int, levels: list[int]) -> None:
    """Two prefixes have the blocks in common that lie in the levels that they share."""
    tree, rng = Tree(tuple(Level(choices=2, tokens=n, skew=0.0) for n in levels)), random.Random(1)
    drawn = {tuple(tree.draw(size, rng)[1]) for _ in range(40)}
    ends = [sum(levels[: k + 1]) // size for k in range(len(levels))]
    for one in drawn:
        assert len(one) == ends[-1]
        for other in drawn:
            common = next(
                (n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one)
            )
            assert common in {0, *ends}


def test_a_share_of_requests_begins_with_the_hot_prefix() -> None:
    """Nine of ten have its 32 blocks in front, the others nothing in common, all questions own."""
    workload = SingleRequests(
        rate=Steady(rate_per_s=10.0),
        requests=1000,
        question=Length(mean=100.0),
        answer=Length(mean=10.0),
        tree=(Level(choices=1, tokens=512),),
        shared=0.9,
        unshared=Length(mean=512.0, variation=0.0),
    )
    found = arrivals(workload)
    hot = max((request.chain[0] for request in found), key=[r.chain[0] for r in found].count)
    shared = [request for request in found if request.chain[0] == hot]
    assert len(shared) == pytest.approx(900, abs=30)
    assert len({tuple(request.chain[:32]) for request in shared}) == 1
    own = [block for r in found for block in (r.chain[32:] if r in shared else r.chain)]
    assert len(own) == len(set(own))
    assert all(len(request.chain) == request.prompt_tokens // 16 for request in found)


# --- conversations ---------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "question": Length(mean=50.0),
    "answer": Length(mean=30.0),
    "start": Length(mean=200.0),
}


def talk(first: SimRequest, answer_s: float = 2.0) -> list[SimRequest]:
    """The whole conversation (and those that come after it), each answer taking so long."""
    turns = [first]
    while True:
        request = turns[-1]
        assert request.follow is not None
        following = request.follow(request.arrival_s + answer_s)
        if following is None:
            return turns
        turns.append(following)


def test_each_turn_begins_with_all_that_was_said() -> None:
    """A session's prompts grow by answer and question; its blocks only ever get longer."""
    workload = Sessions(
        rate=Steady(rate_per_s=1.0),
        sessions=20,
        turns=Length(mean=6.0, variation=0.0),
        pause_s=5.0,
        tree=(Level(choices=1, tokens=100),),
        **SMALL,
    )
    sessions = [talk(first) for first in arrivals(workload)]
    assert {len(turns) for turns in sessions} == {6}
    assert len({turns[0].session_key for turns in sessions}) == 20
    for turns in sessions:
        assert turns[0].chain[:6] == sessions[0][0].chain[:6]
        for before, after in pairwise(turns):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert tuple(after.chain[: len(before.chain)]) == tuple(before.chain)
            assert after.arrival_s > before.arrival_s + 2.0
            assert after.session_key == before.session_key
    pauses = [
        after.arrival_s - before.arrival_s - 2.0
        for turns in sessions
        for before, after in pairwise(turns)
    ]
    assert sum(pauses) / len(pauses) == pytest.approx(5.0, rel=0.25)


def test_what_is_asked_does_not_depend_on_the_answers() -> None:
    """However long answers take, sessions and agents say the same, in as many turns."""
    sessions = Sessions(
        rate=Steady(rate_per_s=1.0), sessions=9, turns=Length(mean=4.0, variation=0.5), **SMALL
    )
    agents = Agents(agents=9, turns=3, lanes=1, **SMALL)
    for workload in (sessions, agents):
        said = [
            [
                [(turn.prompt_tokens, turn.output_tokens) for turn in talk(first, answer_s)]
                for first in arrivals(workload)
            ]
            for answer_s in (0.1, 30.0)
        ]
        assert said[0] == said[1]


def test_agents_come_one_after_the_other() -> None:
    """One lane: a single first request, and each follows the end of the one before it."""
    workload = Agents(agents=5, turns=4, tool_s=1.0, **SMALL)
    (first,) = arrivals(workload)
    turns = talk(first)
    assert len(turns) == workload.requests == 20
    starts = [request.chain[0] for request in turns]
    assert len(set(starts)) == 5
    assert all(len(set(starts[k : k + 4])) == 1 for k in range(0, 20, 4))
    assert all(after.arrival_s > before.arrival_s + 2.0 for before, after in pairwise(turns))


def test_several_lanes_are_so_many_agents_at_a_time() -> None:
    """Three lanes begin with three agents and have no more in all than asked for."""
    firsts = arrivals(Agents(agents=5, turns=2, lanes=3, **SMALL))
    assert len(firsts) == 3
    assert len([turn for first in firsts for turn in talk(first)]) == 10


# --- what the router gets --------------------------------------------------------------------


@given(st.lists(st.integers(1, 1 << 41), max_size=6), st.integers(0, 31), st.integers(0, 9))
def test_router_and_pods_see_the_same_prefixes(blocks: list[int], rest: int, tail: int) -> None:
    """The prompt's bytes have the asked number of tokens, and blocks are equal where ids are."""
    size = 32
    tokens = len(blocks) * size + rest
    octets = prompt_bytes(blocks, tokens, size, tail)
    assert len(octets) == 4 * tokens
    chain = hash_bytes(1, octets, 4 * size)
    assert len(chain) == len(blocks)
    other = [*blocks[:-1], blocks[-1] + 1] if blocks else []
    changed = hash_bytes(1, prompt_bytes(other, tokens, size, tail + 1), 4 * size)
    assert list(changed)[: len(other) - 1] == list(chain)[: len(other) - 1]
    assert not blocks or changed[len(other) - 1] != chain[len(other) - 1]
