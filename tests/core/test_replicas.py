"""What other routers of the same pods say: sums, flows, what is unseen, and who is gone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.core.events import PodFacts, ReplicaFacts, RoleFacts
from calinix.core.replicas import ECHO_S, MAX_REPLICAS, Replicas
from routing import make_config, make_router


def replicas_of(pods: int = 2) -> Replicas:
    """Nobody heard of, of so many single pods."""
    return make_router(make_config(pods))._state.replicas


def report(name: str = "b", inflight: float = 0.0, requests: float = 0.0, **more: object) -> object:
    """So many requests on the first pod; so many routed since the start."""
    roles = (RoleFacts("single", requests, 100.0 * requests),)
    pods = (PodFacts("single-0", inflight),)
    return ReplicaFacts(name, pods, roles, **more)  # type: ignore[arg-type]


def say(replicas: Replicas, now: float, **more: object) -> None:
    """A report comes in."""
    replicas.absorb(report(**more), now)  # type: ignore[arg-type]


def test_alone_there_is_nothing_to_add() -> None:
    """Without others there are no columns, no flow and nothing unseen."""
    replicas = replicas_of()
    assert replicas.inflight is None
    assert (len(replicas), replicas.sync_s, replicas.unseen("single", 9.0)) == (0, 0.0, 0.0)


def test_reports_replace_and_add_up() -> None:
    """Of one replica the last report counts, of several their sum."""
    replicas = replicas_of()
    say(replicas, 1.0, name="b", inflight=5.0)
    say(replicas, 2.0, name="b", inflight=3.0)
    say(replicas, 2.0, name="c", inflight=4.0)
    assert replicas.inflight is not None
    assert list(replicas.inflight)[:2] == [7.0, 0.0]
    assert len(replicas) == 2


def test_a_host_may_know_of_more() -> None:
    """`gateways` counts replicas that were not heard of yet; `sync_s` says how often to expect."""
    replicas = replicas_of()
    say(replicas, 1.0, gateways=16, sync_s=5.0)
    assert (len(replicas), replicas.sync_s) == (15, 5.0)


def test_flow_and_what_is_unseen() -> None:
    """Between two reports the others are taken to go on as they did; age counts from the truth."""
    replicas = replicas_of()
    for second in range(20):
        say(replicas, float(second), requests=8.0 * second)
    assert replicas.flow("single") == pytest.approx((8.0, 800.0))
    assert replicas.unseen("single", 19.0) == 0.0
    assert replicas.unseen("single", 20.5) == pytest.approx(12.0)
    say(replicas, 20.5, requests=160.0, age_s=0.5)
    assert replicas.unseen("single", 20.5) == pytest.approx(4.0)
    assert replicas.flow("decode") == (0.0, 0.0)


def test_a_replica_that_began_anew() -> None:
    """Its counters start at 0 again: that is no flow backwards."""
    replicas = replicas_of()
    for second, requests in enumerate((0.0, 10.0, 20.0, 0.0, 10.0)):
        say(replicas, float(second), requests=requests)
    assert replicas.flow("single")[0] == pytest.approx(10.0)


def test_nonsense_is_left_out() -> None:
    """Unknown pods, negative numbers and what is no number."""
    replicas = replicas_of()
    facts = (PodFacts("gone", 5.0), PodFacts("single-0", -5.0), PodFacts("single-1", float("nan")))
    replicas.absorb(ReplicaFacts("b", facts), 1.0)
    assert replicas.inflight is not None
    assert not any(replicas.inflight)


def test_who_says_nothing_is_gone() -> None:
    """After ten seconds or four of its periods a replica's load is forgotten."""
    replicas = replicas_of()
    say(replicas, 0.0, name="b", inflight=5.0, sync_s=1.0)
    say(replicas, 0.0, name="slow", inflight=2.0, sync_s=5.0)
    replicas.refresh(9.0)
    assert len(replicas) == 2
    replicas.refresh(11.0)
    assert replicas.inflight is not None
    assert replicas.inflight[0] == 2.0
    replicas.refresh(21.0)
    assert replicas.inflight is None


def test_workers_that_are_silent_have_done_nothing() -> None:
    """What a worker routes is told at once: of a silent one, nothing is unseen after ECHO_S."""
    replicas = replicas_of()
    for second in range(20):
        say(replicas, float(second), requests=100.0 * second, sync_s=0.02)
    assert replicas.unseen("single", 19.01) == pytest.approx(1.0)
    assert replicas.unseen("single", 19.9) == pytest.approx(100.0 * ECHO_S)


reports = st.tuples(
    st.sampled_from(["b", "c", "d"]),
    st.sampled_from([0.02, 1.0]),
    st.dictionaries(st.sampled_from(["single-0", "single-1"]), st.integers(0, 9)),
)


@given(st.lists(st.one_of(reports, st.integers(0, 3), st.sampled_from(["lapse", "b", "c"]))))
def test_sums_that_follow_changes_are_the_sums(steps: list[Any]) -> None:
    """Report by report, echo by echo, the columns are what adding all up anew gives."""
    replicas, now = replicas_of(), 1.0
    for step in steps:
        now += 0.01
        if isinstance(step, int) and step < 2:
            replicas.echo(step, 10.0, now)
        elif isinstance(step, int):
            replicas.over(step - 2, now - 0.005)
        elif step == "lapse":
            replicas.lapse(now)
        elif isinstance(step, str):
            replicas.forget(step)
        else:
            name, sync_s, loads = step
            pods = tuple(PodFacts(pod, float(n), 7.0 * n, 3.0 * n) for pod, n in loads.items())
            replicas.absorb(ReplicaFacts(name, pods, sync_s=sync_s), now)
        seen = columns(replicas)
        replicas.refresh(now)
        assert columns(replicas) == seen


def columns(replicas: Replicas) -> list[list[float] | None]:
    """What is looked at."""
    found = (replicas.inflight, replicas.work, replicas.context, replicas.in_workers)
    return [None if one is None else list(one) for one in found]


def test_replicas_are_bounded() -> None:
    """Only so many are listened to."""
    replicas = replicas_of()
    for number in range(MAX_REPLICAS + 5):
        say(replicas, 1.0, name=str(number))
    assert len(replicas) == MAX_REPLICAS
