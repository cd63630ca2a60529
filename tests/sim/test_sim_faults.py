"""Faults in the simulated fleet do what they say, begin and end when they say, and are survived."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from calinix.core.columns import Loads
from calinix.core.events import Failed, Finished, FirstToken
from calinix.sim.faults import DeadPod, Flush, LateFacts, LostEvents, SlowPod
from calinix.sim.simulate import Stage
from simkit import DISPATCH, FIGURES, ask, asked, is_idle, stage


def told(found: Stage) -> list[tuple[float, Any]]:
    """What the first gateway's router hears of its requests from now on: (when, event)."""
    door, heard = found.doors[0], list[tuple[float, Any]]()
    observe = door.router.observe

    def listen(event: Any, now: float) -> None:
        if isinstance(event, FirstToken | Finished | Failed):
            heard.append((now, event))
        observe(event, now)

    door.router.observe = listen  # type: ignore[method-assign]
    return heard


def test_a_slow_pod_is_slow_from_the_beginning_to_the_end_of_the_fault() -> None:
    """Turn by turn over two pods: the slow one takes four times as long, within the fault only."""
    found = stage(faults=(SlowPod(pods=(1,), factor=4.0, at_s=10.0, for_s=10.0),))
    ask(found, [asked(float(n), 320, 2, kind=n) for n in range(30)])
    recorder = found.cluster.recorder
    took_s = np.array(recorder.first_s) - np.array(recorder.arrival_s)
    expected_s = np.full(30, FIGURES.prefill_s(320))
    slots = np.array(recorder.pod)
    expected_s[(slots == 1) & (np.arange(30) >= 10) & (np.arange(30) < 20)] *= 4.0
    assert took_s == pytest.approx(expected_s)


def test_a_pod_that_dies_loses_its_requests_and_later_ones_go_elsewhere() -> None:
    """Under way: 502, once, and no retry. Coming: connect fails, another pod answers."""
    found = stage(faults=(DeadPod(pods=(0,), at_s=1.05, for_s=30.0),))
    heard = told(found)
    ask(found, [asked(0.1 * n, 1600, 100, kind=n) for n in range(30)])
    recorder = found.cluster.recorder
    lost = [n for n in range(30) if recorder.status[n] == 502]
    assert lost
    assert all(recorder.arrival_s[n] < 1.05 and not recorder.retries[n] for n in lost)
    again = [n for n in range(30) if recorder.retries[n]]
    assert again
    assert all(recorder.status[n] == 200 and recorder.pod[n] != 0 for n in again)
    failures = [event.failure.value for _, event in heard if isinstance(event, Failed)]
    assert set(failures) <= {"connect", "closed", "broken"}
    assert failures.count("connect") == len(again)
    assert is_idle(found)


def test_a_pod_that_comes_back_is_used_again_and_is_cold() -> None:
    """After its return and two good probes it answers, and nothing is believed cached there."""
    found = stage("leastLoad", faults=(DeadPod(pods=(0,), at_s=5.0, for_s=5.0),))
    requests = [asked(0.2 * n, 320, 30) for n in range(150)]
    ask(found, requests)
    recorder = found.cluster.recorder
    there = [n for n in range(150) if recorder.pod[n] == 0]
    assert any(recorder.arrival_s[n] < 5.0 for n in there)
    assert not any(5.0 < recorder.arrival_s[n] < 10.0 for n in there)
    later = [n for n in there if recorder.arrival_s[n] > 10.0]
    assert later
    assert recorder.cached_tokens[later[0]] == 0
    assert recorder.cached_tokens[later[-1]] == 304
    assert set(recorder.status) == {200}


def test_a_prefill_that_dies_is_done_elsewhere_and_keeps_the_client() -> None:
    """A prefill leg answers nobody: it is tried once more on the other prefill pod."""
    found = stage(groups=DISPATCH, faults=(DeadPod(pods=(0,), at_s=1.1, for_s=9.0),))
    ask(found, [asked(1.0, 3200, 20)])
    recorder = found.cluster.recorder
    assert (recorder.status[0], recorder.retries[0], recorder.prefill_pod[0]) == (200, 1, 1)
    assert recorder.first_s[0] > 1.1 + FIGURES.scaled(0.5).prefill_s(3200)
    assert is_idle(found)


def test_a_decode_pod_that_is_gone_is_picked_anew_and_the_prefill_kept() -> None:
    """It died during the prefill: the KV cache goes to the other decode pod, no prompt anew."""
    found = stage(groups=DISPATCH, faults=(DeadPod(pods=(2,), at_s=1.1, for_s=9.0),))
    ask(found, [asked(1.0, 3200, 20)])
    recorder, pods = found.cluster.recorder, found.cluster.pods
    assert (recorder.status[0], recorder.retries[0], recorder.pod[0]) == (200, 1, 3)
    assert [pod.counters.finished for pod in pods] == [1, 0, 0, 1]
    assert pods[3].counters.external_tokens == 3200
    assert is_idle(found)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_flushed_cache_is_empty_and_gateways_know_it_if_told(is_told: bool) -> None:
    """After the flush nothing is cached; the router believes so only where it heard of it."""
    found = stage("cacheOnly", faults=(Flush(pods=(0, 1, 2), at_s=3.5, told=is_told),))
    router = found.doors[0].router
    believed = []
    for at_s in (3.4, 3.6):
        found.cluster.clock.at(
            at_s, lambda _: believed.append(sum(p.blocks for p in router.pods()))
        )
    ask(found, [asked(float(n), 320, 2) for n in range(1, 6)])
    assert list(found.cluster.recorder.cached_tokens) == [0, 304, 304, 0, 304]
    assert believed == [20, 0 if is_told else 20]


def test_lost_events_are_first_tokens_not_ends() -> None:
    """With everything lost that may be, first tokens are not heard of and leases still end."""
    found = stage(faults=(LostEvents(share=1.0, at_s=0.95, for_s=2.0),))
    heard = told(found)
    ask(found, [asked(0.5 * n, 320, 3) for n in range(10)])
    firsts = [now for now, event in heard if isinstance(event, FirstToken)]
    assert [now for now in firsts if 0.95 < now < 2.95] == []
    assert len(firsts) == 6
    assert sum(isinstance(event, Finished) for _, event in heard) == 10
    assert is_idle(found)


def test_late_facts_hide_load_for_as_long_as_asked() -> None:
    """Three seconds late: what was sent shows after three seconds, its end three after its end."""
    found = stage("leastLoad", late_s=3.0)
    views = []

    def look(_: None) -> None:
        views.append(sum(pod.inflight for pod in found.doors[0].router.pods()))

    clock = found.cluster.clock
    for at_s in (1.5, 3.9, 4.1):
        clock.at(at_s, look)
    heard = told(found)
    ask(found, [asked(1.0, 320, 400)])
    end_s = found.cluster.recorder.end_s[0]
    assert views == [0, 0, 1]
    assert end_s > 4.2
    first_s = found.cluster.recorder.first_s[0]
    assert [type(event) for _, event in heard] == [FirstToken]
    assert heard[0][0] == pytest.approx(first_s + 3.0)


def test_no_column_of_load_shows_what_is_to_be_late() -> None:
    """Right after a route every column that the ledger has is as it was before."""
    found = stage("predictive", late_s=3.0)
    columns = vars(Loads(1))
    loads = found.doors[0].router._state.ledger.loads

    def shown() -> dict[str, list[float]]:
        return {name: list(getattr(loads, name)) for name in columns}

    before = shown()
    found.cluster.feed(iter([asked(0.0, 320, 5)]))
    found.cluster.clock.at(0.0, lambda _: found.cluster.clock.stop())
    found.cluster.clock.run()
    assert found.doors[0].router.open_leases() == 1
    assert shown() == before
    assert {"inflight", "prefill_tokens", "decode_tokens", "work"} <= columns.keys()


def test_late_facts_herd_least_load_and_spare_turns() -> None:
    """Who goes by what it sees sends a burst to one pod; who takes turns does not look."""
    burst = [asked(1.0 + 0.001 * n, 320, 5, kind=n) for n in range(30)]
    spread = {}
    for strategy in ("leastLoad", "roundRobin"):
        found = ask(
            stage(strategy, late_s=1.0, settings={"gateway": {"deterministic": True}}), burst
        )
        spread[strategy] = sorted(np.bincount(found.cluster.recorder.pod, minlength=3))
    assert spread == {"leastLoad": [0, 0, 30], "roundRobin": [10, 10, 10]}


def test_facts_can_be_late_for_a_while() -> None:
    """A request's facts are as late as they were when it came; then everything is fresh again."""
    found = stage(faults=(LateFacts(late_s=2.0, at_s=0.5, for_s=1.0),))
    heard = told(found)
    ask(found, [asked(at_s, 320, 200) for at_s in (0.1, 1.0, 2.0)])
    recorder = found.cluster.recorder
    expected = [recorder.first_s[0], recorder.first_s[1] + 2.0, recorder.first_s[2]]
    firsts = [now for now, event in heard if isinstance(event, FirstToken)]
    assert sorted(firsts) == pytest.approx(sorted(expected))


def test_the_rates_that_late_gateways_learn_are_not_off_by_the_delay() -> None:
    """A busy pod's measured speed is the same, whether its first tokens are told late or not."""
    measured = []
    for late_s in (0.0, 3.0):
        found = stage(late_s=late_s)
        rates: list[float] = []

        def look(_: None, found: Stage = found, rates: list[float] = rates) -> None:
            facts = found.doors[0].router.facts(found.cluster.clock.now).pods
            rates.extend(pod.rate_tokens / pod.rate_s for pod in facts)

        found.cluster.clock.at(19.0, look)
        ask(found, [asked(0.2 * n, 1600, 20, kind=n) for n in range(100)])
        measured.append(rates)
    assert measured[1] == pytest.approx(measured[0], rel=0.1)


def test_faults_of_pods_that_a_smaller_fleet_lacks_go_round() -> None:
    """Slot 5 of three pods is slot 2."""
    found = stage(faults=(SlowPod(pods=(5,), factor=2.0, at_s=0.5),))
    ask(found, [asked(1.0, 320, 2)])
    assert [pod.slow_factor for pod in found.cluster.pods] == [1.0, 1.0, 2.0]


def test_a_slow_machine_stays_slow_over_a_restart() -> None:
    """The process is new, the machine is not."""
    faults = (SlowPod(pods=(0,), factor=2.0, at_s=0.5), DeadPod(pods=(0,), at_s=1.0, for_s=1.0))
    found = stage(faults=faults)
    ask(found, [asked(3.0, 320, 2)])
    assert found.cluster.pods[0].slow_factor == 2.0
