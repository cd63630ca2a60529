"""Measured prefill rates: what is learned from first tokens, and who is slow beside its peers."""

from __future__ import annotations

import random
from array import array

import pytest

from calinix.core.pods import Pod, PodTable
from calinix.core.rates import PRIOR_TOKENS_PER_S, REQUEST_TOKENS, PrefillRates
from routing import ask, finish, make_config, make_router, pod_config


def table_of(count: int) -> tuple[list[Pod], PrefillRates]:
    """So many pods and their rates."""
    table = PodTable(8)
    pods = [table.place(pod_config(f"p{number}"), "single") for number in range(count)]
    return pods, PrefillRates(8)


def test_a_steady_pod_has_its_rate() -> None:
    """Work over time, the request's own cost included."""
    (pod,), rates = table_of(1)
    assert 1 / rates.pace(pod) == PRIOR_TOKENS_PER_S
    for number in range(50):
        rates.learn(pod, 1000, float(number), number + 0.5)
    assert 1 / rates.pace(pod) == pytest.approx(2000)
    assert rates.measured(pod.slot) == pytest.approx(2000)


def test_waiting_behind_others_is_no_slowness() -> None:
    """Requests dispatched at once and served one after the other show the pod's own pace."""
    (pod,), rates = table_of(1)
    for number in range(1, 50):
        rates.learn(pod, 1000, 0.0, number * 0.5)
    assert 1 / rates.pace(pod) == pytest.approx(2000)


def test_first_tokens_at_one_moment_do_not_spoil_it() -> None:
    """Batched prefills: zero seconds for some, all of it for one."""
    (pod,), rates = table_of(1)
    for batch in range(50):
        for _ in range(4):
            rates.learn(pod, 500, float(batch), batch + 1.0)
    assert 1 / rates.pace(pod) == pytest.approx(2000, rel=0.1)


def test_a_change_is_followed() -> None:
    """A pod that becomes four times slower is known as such within some tens of requests."""
    (pod,), rates = table_of(1)
    now = 0.0
    for seconds in [0.5] * 60 + [2.0] * 40:
        rates.learn(pod, 1000, now, now + seconds)
        now += seconds
    assert 1 / rates.pace(pod) == pytest.approx(500, rel=0.25)


def test_an_unmeasured_pod_has_its_pools_rate() -> None:
    """Nothing known of a pod: the mean of its role; a forgotten pod is one of these."""
    (one, two), rates = table_of(2)
    rates.learn(one, 1000, 0.0, 1.0)
    assert 1 / rates.pace(two) == pytest.approx(1000)
    assert rates.measured(two.slot) is None
    rates.forget(one.slot)
    assert rates.measured(one.slot) is None
    assert rates.samples(one.slot) == 0
    assert rates.mean_wait_s(one.slot) == 0


def test_a_clock_that_goes_back_teaches_nothing() -> None:
    """A negative time is not taken in."""
    (pod,), rates = table_of(1)
    rates.learn(pod, 1000, 5.0, 4.0)
    assert rates.measured(pod.slot) is None


def test_slow_is_relative_to_the_median_of_the_others() -> None:
    """Only pods with enough samples, slow enough to matter, and beyond the factor."""
    pods, rates = table_of(4)
    for pod, seconds in zip(pods, (10.0, 1.0, 1.2, 0.9), strict=True):
        for number in range(20):
            rates.learn(pod, 1000, number * 100.0, number * 100.0 + seconds)
    slots = [pod.slot for pod in pods]
    assert rates.slow(slots, 8.0, 0.5, [8.0] * 4) == [0]
    assert rates.slow(slots, 20.0, 0.5, [8.0] * 4) == []
    assert rates.slow(slots, 8.0, 11.0, [8.0] * 4) == []
    assert rates.slow(slots, 8.0, 0.5, [99.0, 8.0, 8.0, 8.0]) == []
    assert rates.slow([0], 8.0, 0.5, [8.0]) == []


def test_rates_learn_from_what_is_seen() -> None:
    """A streamed answer's first token teaches, one that nobody saw does not."""
    router = make_router(make_config(1))
    plan = ask(router, b"x" * 4000, now=1.0, streamed=True)
    finish(router, plan, now=2.0)
    assert router.pods()[0].tokens_per_s == pytest.approx(1000 + REQUEST_TOKENS, rel=0.01)


def test_pods_that_are_alike_have_one_pace() -> None:
    """What differs by chance alone is not told apart, so that no pod is always the fastest."""
    table, rates = table_of(4)
    rng = random.Random(7)
    now = 0.0
    for _ in range(60):
        for pod in table:
            now += 1.0
            rates.learn(pod, 1000, now, now + 0.5 * rng.gauss(1.0, 0.3))
    rates.refresh([pod.slot for pod in table])
    paces = {round(rates.pace(pod), 9) for pod in table}
    assert max(paces) < 1.03 * min(paces)


def test_a_slower_pod_is_told_apart() -> None:
    """A pod of half the speed is known as such, though its samples scatter."""
    table, rates = table_of(4)
    rng = random.Random(7)
    now = 0.0
    for _ in range(60):
        for pod in table:
            now += 1.0
            took_s = 0.5 * rng.gauss(1.0, 0.2) * (2.0 if pod is table[0] else 1.0)
            rates.learn(pod, 1000, now, now + took_s)
    rates.refresh([pod.slot for pod in table])
    assert rates.pace(table[0]) > 1.7 * rates.pace(table[1])


def test_an_overdue_first_token_slows_a_pod_down() -> None:
    """Twice its time over, waiting counts as time of the pod, until a first token comes."""
    table, rates = table_of(2)
    for number in range(40):
        for pod in table:
            rates.learn(pod, 1000, float(number), number + 0.5)
    pod, before = table[0], rates.pace(table[0])
    rates.wait(pod.slot, 1000.0, 100.0, 100.9)
    assert rates.pace(pod) == before
    rates.wait(pod.slot, 1000.0, 100.0, 160.0)
    assert rates.pace(pod) > 2.0 * before
    rates.learn(pod, 1000, 160.0, 160.5)
    assert rates.pace(pod) < 1.1 * before


def serve(rates: PrefillRates, pods: list[Pod], rounds: int) -> None:
    """So many requests for each of these pods, each at 2000 tokens a second."""
    for number in range(rounds):
        for pod in pods:
            rates.learn(pod, 1000, float(number), number + 0.5)
        rates.refresh([0, 1, 2])


def test_a_pod_that_is_avoided_gets_another_try() -> None:
    """What was slow at first and is avoided since is taken to be as the others after a while."""
    (slow, *others), rates = table_of(3)
    for number in range(10):
        rates.learn(slow, 1000, 10.0 * number, 10.0 * number + 5.0)
    serve(rates, others, 30)
    assert rates.pace(slow) > 5 * rates.pace(others[0])
    serve(rates, others, 500)
    assert rates.pace(slow) == pytest.approx(rates.pace(others[0]), rel=0.01)
    rates.learn(slow, 1000, 600.0, 600.5)
    rates.refresh([0, 1, 2])
    assert rates.pace(slow) == pytest.approx(rates.pace(others[0]), rel=0.01)


def test_a_pool_that_rests_forgets_nothing() -> None:
    """Where no pod is asked no pod is avoided."""
    pods, rates = table_of(3)
    for number in range(50):
        rates.learn(pods[0], 1000, float(number), number + 0.9)
        rates.learn(pods[1], 1000, float(number), number + 0.1)
    rates.refresh([0, 1, 2])
    before = [rates.pace(pod) for pod in pods]
    assert before[0] > 2 * before[1]
    for _ in range(10_000):
        rates.refresh([0, 1, 2])
    assert [rates.pace(pod) for pod in pods] == before


def test_what_other_replicas_measured_counts() -> None:
    """Sums of others go with the own ones; what nobody here has measured is theirs."""
    table, rates = table_of(2)
    tokens, seconds = array("d", [0.0] * 8), array("d", [0.0] * 8)
    tokens[table[1].slot], seconds[table[1].slot] = 1000.0, 2.0
    rates.share(tokens, seconds)
    assert rates.pace(table[1]) == pytest.approx(0.002)
    rates.share(None, None)
    assert rates.pace(table[1]) == pytest.approx(1.0 / PRIOR_TOKENS_PER_S)
