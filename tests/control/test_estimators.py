"""The estimators against streams of which the truth is known."""

from __future__ import annotations

import math
import random

import pytest

from calinix.control import ArrivalRate, BusyRate, ServiceRate, TpotModel


def test_arrival_rate_of_a_poisson_stream() -> None:
    """Over a long stream the mean of the estimate is the rate; amounts are added up."""
    rng, arrivals = random.Random(1), ArrivalRate(10.0)
    now, seen = 0.0, []
    while now < 2000.0:
        now += rng.expovariate(20.0)
        arrivals.add(now, 3.0)
        seen.append(arrivals.rate(now))
    assert sum(seen[1000:]) / len(seen[1000:]) == pytest.approx(60.0, rel=0.02)


def test_arrival_rate_is_right_from_the_start() -> None:
    """What was not watched does not count as empty: after three seconds the rate is there."""
    arrivals = ArrivalRate(10.0)
    for number in range(60):
        arrivals.add(number / 20.0)
    assert arrivals.rate(3.0) == pytest.approx(20.0, rel=0.4)
    assert 0.2 < arrivals.confidence(3.0) < 0.5


def test_arrival_rate_follows_a_step_and_forgets() -> None:
    """Two time constants after a step most of it is seen; silence is believed just as fast."""
    arrivals = ArrivalRate(10.0)
    for number in range(1000):
        arrivals.add(number / 10.0)
    before = arrivals.rate(100.0)
    for number in range(800):
        arrivals.add(100.0 + number / 40.0)
    assert before == pytest.approx(10.0, rel=0.02)
    assert arrivals.rate(120.0) == pytest.approx(40.0 - 30.0 * math.exp(-2.0), rel=0.02)
    assert arrivals.rate(150.0) < 0.06 * arrivals.rate(120.0)
    assert arrivals.age_s(150.0) == pytest.approx(30.0, abs=0.1)


def test_arrival_rate_without_arrivals() -> None:
    """Before the first arrival: no rate, no confidence; nonsense is no arrival."""
    arrivals = ArrivalRate()
    for amount in (math.nan, math.inf, -1.0, 0.0):
        arrivals.add(1.0, amount)
    assert (arrivals.rate(1.0), arrivals.confidence(1.0)) == (0.0, 0.0)
    assert arrivals.age_s(1.0) == math.inf


def served(rate: ServiceRate, speed: float, load: float, rng: random.Random, start: float) -> float:
    """200 requests through a FIFO pod of this speed; gives the end."""
    arrival, free = start, start
    for _ in range(200):
        work = rng.uniform(100.0, 4000.0)
        arrival += work / (speed * load)
        free = max(arrival, free) + work / speed
        rate.first_token(free, arrival, work)
    return free


@pytest.mark.parametrize("load", [0.3, 0.9, 2.0])
def test_service_rate_is_the_speed_at_any_load(load: float) -> None:
    """Waiting behind others does not make a pod look slow, nor does idling."""
    rate = ServiceRate()
    served(rate, 8000.0, load, random.Random(2), 5.0)
    assert rate.rate() == pytest.approx(8000.0, rel=1e-6)
    assert rate.confidence(0.0) > 0.8


def test_service_rate_follows_a_slow_down() -> None:
    """A fifth of the speed is seen within some tens of requests."""
    rate, rng = ServiceRate(), random.Random(3)
    end = served(rate, 8000.0, 0.9, rng, 0.0)
    served(rate, 1600.0, 0.9, rng, end)
    assert rate.rate() == pytest.approx(1600.0, rel=0.01)


def test_service_rate_knows_nothing_at_first() -> None:
    """NaN, which the controller reads as the pool's mean; samples that make no sense are none."""
    rate = ServiceRate()
    rate.first_token(1.0, 2.0, 100.0)
    rate.first_token(1.0, 0.0, math.nan)
    assert math.isnan(rate.rate())
    assert (rate.confidence(1.0), rate.age_s(1.0)) == (0.0, math.inf)
    assert not rate.waiting(50.0, 0.0, 100.0)


def test_an_overdue_request_makes_its_pod_slower() -> None:
    """A pod that stands still loses its rate before any first token says so, and wins it back."""
    rate = ServiceRate()
    for number in range(100):
        rate.first_token(number + 1.0, float(number), 1000.0)
    assert not rate.waiting(101.5, 100.0, 1000.0)
    assert rate.rate() == pytest.approx(1000.0)
    assert rate.waiting(103.0, 100.0, 1000.0)
    early = rate.rate()
    assert rate.waiting(160.0, 100.0, 1000.0)
    assert rate.rate() < 0.5 * early < 500.0
    rate.none_waiting()
    assert rate.rate() == pytest.approx(1000.0)
    rate.waiting(160.0, 100.0, 1000.0)
    rate.first_token(160.0, 100.0, 1000.0)
    settled = rate.rate()
    rate.first_token(161.0, 160.0, 1000.0)
    assert settled < rate.rate() < 1000.0


def test_an_abandoned_request_is_remembered() -> None:
    """Time that brought no first token stays in the rate once the request is given up."""
    rate = ServiceRate()
    for number in range(100):
        rate.first_token(number + 1.0, float(number), 1000.0)
    rate.waiting(140.0, 100.0, 1000.0)
    overdue = rate.rate()
    rate.abandoned(140.0, 100.0)
    rate.none_waiting()
    assert rate.rate() == pytest.approx(overdue)


def test_busy_rate_does_not_depend_on_what_is_given() -> None:
    """At a tenth of the load a pod completes a tenth, and its busy rate stays what it was."""
    for idle_s in (0.0, 0.1, 4.5):
        busy, now = BusyRate(), 0.0
        for _ in range(200):
            busy.began(now)
            busy.ended(now + 0.5)
            now += 0.5 + idle_s
        assert busy.rate(now) == pytest.approx(2.0, rel=0.03), idle_s


def test_busy_rate_counts_batches() -> None:
    """Four at a time in half a second each: eight completions per busy second."""
    busy, now = BusyRate(), 0.0
    for _ in range(100):
        for _ in range(4):
            busy.began(now)
        for _ in range(4):
            busy.ended(now + 0.5)
        now += 2.0
    assert busy.rate(now) == pytest.approx(8.0, rel=0.05)


def test_busy_rate_of_a_pod_that_stands_still() -> None:
    """With requests inflight and none completed the rate falls; with none inflight it stays."""
    busy = BusyRate()
    for number in range(100):
        busy.began(float(number))
        busy.ended(number + 1.0)
    assert busy.rate(500.0) == pytest.approx(busy.rate(100.0))
    busy.began(500.0)
    assert busy.rate(530.0) < 0.1 * 1.0
    assert busy.age_s(530.0) == pytest.approx(430.0)
    assert busy.confidence(530.0) < 0.1


def test_busy_rate_counts_only_what_was_completed() -> None:
    """Failures end a request and are no service; more ends than begins do no harm."""
    busy = BusyRate()
    assert math.isnan(busy.rate(0.0))
    for number in range(100):
        busy.began(float(number))
        busy.ended(number + 1.0, completed=number % 2 == 0)
    assert busy.rate(100.0) == pytest.approx(0.5, rel=0.15)
    busy.ended(101.0)
    assert busy.rate(200.0) == busy.rate(100.0)


def test_tpot_model_finds_the_line() -> None:
    """b0 and b1 out of noisy answers, and a pod's slowness beside them."""
    rng, model = random.Random(4), TpotModel(4)
    for number in range(4000):
        slot, inflight = number % 4, float(rng.randrange(1, 60))
        slow = 2.0 if slot == 3 else 1.0
        noise = rng.uniform(0.8, 1.2)
        model.add(float(number), slot, inflight, slow * noise * (0.010 + 0.0003 * inflight))
    # The slow pod pulls the pool's line up by a quarter.
    assert model.b0_s == pytest.approx(0.0125, rel=0.1)
    assert model.b1_s == pytest.approx(0.000375, rel=0.1)
    assert model.slowness(3) / model.slowness(0) == pytest.approx(2.0, rel=0.15)
    assert model.tpot_s(3, 20.0) == pytest.approx(0.032, rel=0.15)
    assert model.confidence(4000.0) > 0.9


def test_tpot_model_at_one_load_invents_no_slope() -> None:
    """While the load never varies the slope stays 0 and nothing winds up; then it is learned."""
    model, now = TpotModel(1), 0.0
    for _ in range(50_000):
        now += 1.0
        model.add(now, 0, 8.0, 0.02)
    assert model.b1_s == 0.0
    assert model.b0_s == pytest.approx(0.02)
    for number in range(2000):
        inflight = float(4 + number % 9)
        model.add(now + number, 0, inflight, 0.012 + 0.001 * inflight)
    assert model.b1_s == pytest.approx(0.001, rel=0.05)


def test_tpot_model_keeps_within_reason() -> None:
    """Nonsense is no answer; a slope that is too steep or negative is not believed."""
    model = TpotModel(1)
    for inflight, tpot_s in ((1.0, math.nan), (math.inf, 0.1), (1.0, 0.0), (-1.0, 0.1)):
        model.add(1.0, 0, inflight, tpot_s)
    assert (model.confidence(1.0), model.age_s(1.0), model.tpot_s(0, 5.0)) == (0.0, math.inf, 0.0)
    for number in range(100):
        model.add(1.0, 0, float(number % 10), 0.01 * (number % 10) + 0.01)
    assert model.b1_s == 0.002
    for number in range(5000):
        model.add(1.0, 0, float(number % 10), 0.2 - 0.01 * (number % 10))
    assert model.b1_s == 0.0
    model.forget(0)
    assert model.slowness(0) == 1.0


def test_confidence_grows_with_samples_and_fades_with_age() -> None:
    """More samples are trusted more, old ones less, and never outside [0, 1]."""
    rate = ServiceRate()
    seen = []
    for number in range(50):
        rate.first_token(number + 1.0, float(number), 10.0)
        seen.append(rate.confidence(number + 1.0))
    assert seen == sorted(seen)
    assert 0.0 < rate.confidence(1e6) < 0.01 < rate.confidence(110.0) < seen[-1] < 1.0
