"""Runs: the same from the same seed, true to the pods' figures, and with nothing left behind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calinix.config import StrategyName
from calinix.sim.baselines import BASELINES
from calinix.sim.faults import DeadPod, Flush, LateFacts, LostEvents, SlowPod
from calinix.sim.prompts import Length
from calinix.sim.replay import TraceWorkload
from calinix.sim.scenarios import SCENARIOS, Scenario
from calinix.sim.simulate import Run, build, run
from calinix.sim.synthetic import Agents
from simkit import DISPATCH, FIGURES, WORKLOAD, ask, asked, is_idle, scenario, stage

STRATEGIES: list[str] = sorted(get_args(StrategyName))
EVERY = STRATEGIES + sorted(BASELINES)


def octets(found: Run) -> list[bytes]:
    """Everything that a run holds, as bytes."""
    columns = [*msgspec.structs.astuple(found.requests), *msgspec.structs.astuple(found.samples)]
    columns += [queues for _, queues in found.predicted_queue]
    rest = (found.config, found.pods, found.duration_s, [at for at, _ in found.predicted_queue])
    return [column.tobytes() for column in columns] + [msgspec.json.encode(rest)]


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.parametrize("groups", [(), DISPATCH], ids=["single", "dispatch"])
def test_every_strategy_serves_everything(strategy: str, groups: Any) -> None:
    """All requests are answered, by pods that there are, and the figures are whole."""
    changes = {"groups": groups} if groups else {}
    found = run(scenario(**changes), strategy, 1)
    requests = found.requests
    assert set(requests.status) == {200}
    assert len(requests.status) == WORKLOAD.requests
    assert np.all(requests.ttft_s > 0.0)
    assert np.all(requests.e2e_s >= requests.ttft_s)
    assert np.all(requests.pod >= 0)
    assert np.all((requests.prefill_pod >= 0) == bool(groups))
    assert np.all(requests.cached_tokens < requests.prompt_tokens)
    assert np.all(np.isnan(requests.tpot_s) == (requests.output_tokens == 1))
    assert found.work_done.min() > 0.0
    assert {found.pods[slot].role for slot in requests.pod} == {"decode" if groups else "single"}


FAULTS = (
    SlowPod(pods=(0,), factor=3.0, at_s=0.5, for_s=2.0),
    DeadPod(pods=(1,), at_s=1.0, for_s=1.0),
    Flush(pods=(2,), at_s=1.5, told=True),
    LostEvents(share=0.5, at_s=0.3, for_s=2.0),
    LateFacts(late_s=0.5, at_s=2.0, for_s=2.0),
)


@settings(max_examples=25, deadline=None)
@given(
    strategy=st.sampled_from(EVERY),
    seed=st.integers(0, 2**32),
    gateways=st.sampled_from([1, 3]),
    dispatch=st.booleans(),
    faults=st.lists(st.sampled_from(FAULTS), unique_by=repr, max_size=5),
    noise=st.sampled_from([0.0, 0.2]),
    late_s=st.sampled_from([0.0, 0.7]),
)
def test_equal_seeds_give_equal_bytes(
    strategy: str,
    seed: int,
    gateways: int,
    dispatch: bool,
    faults: list[Any],
    noise: float,
    late_s: float,
) -> None:
    """Whatever is rehearsed: the same seed gives the same run, to the byte."""
    one = scenario(
        workload=msgspec.structs.replace(WORKLOAD, requests=50),
        gateways=gateways,
        faults=tuple(faults),
        noise=noise,
        late_s=late_s,
        streamed_share=0.8,
        **({"groups": DISPATCH} if dispatch else {}),
    )
    assert octets(run(one, strategy, seed)) == octets(run(one, strategy, seed))


DIGEST = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from sim.test_simulate import FAULTS, octets
from simkit import scenario
from calinix.sim.simulate import run
one = scenario(gateways=2, faults=FAULTS, noise=0.2, streamed_share=0.8)
print(hashlib.sha256(b"".join(octets(run(one, "predictive", 7)))).hexdigest())
"""


def test_other_processes_give_the_same_bytes() -> None:
    """Nothing depends on a process: not on the seed of its hashes, not on what it ran before."""
    tests = str(Path(__file__).resolve().parents[1])
    found = {
        subprocess.run(
            [sys.executable, "-c", DIGEST, tests],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


def test_other_seeds_give_other_runs() -> None:
    """Arrivals, prompts, ties and noise all depend on the seed."""
    one, other = run(scenario(), "powerOfTwo", 1), run(scenario(), "powerOfTwo", 2)
    assert not np.array_equal(one.requests.arrival_s, other.requests.arrival_s)
    noisy = scenario(workload=TraceWorkload(trace="AzureLLMInferenceTrace_conv.csv", limit=40))
    noisy = msgspec.structs.replace(noisy, noise=0.2)
    times = [run(noisy, "roundRobin", seed).requests for seed in (1, 2)]
    assert np.array_equal(times[0].arrival_s, times[1].arrival_s)
    assert not np.array_equal(times[0].ttft_s, times[1].ttft_s)


@settings(max_examples=25, deadline=None)
@given(
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 99),
    dispatch=st.booleans(),
    faults=st.lists(st.sampled_from(FAULTS[:4]), unique_by=repr, max_size=4),
)
def test_everything_taken_is_given_back(
    strategy: str, seed: int, dispatch: bool, faults: list[Any]
) -> None:
    """At the end no pod and no gateway holds anything, whatever went wrong on the way."""
    one = scenario(faults=tuple(faults), **({"groups": DISPATCH} if dispatch else {}))
    found = build(one, strategy, seed)
    requests = [asked(0.03 * n, 160 + 7 * n, 5 + n % 9, kind=n % 4) for n in range(60)]
    assert is_idle(ask(found, requests))
    assert set(found.cluster.recorder.status) <= {200, 502, 503}


def test_a_lone_request_takes_what_the_figures_say() -> None:
    """Through the router and back: first token after its prefill, then one token a step."""
    found = ask(stage(), [asked(1.0, 320, 11)])
    recorder = found.cluster.recorder
    first_s = recorder.first_s[0] - 1.0
    assert first_s == pytest.approx(FIGURES.prefill_s(320))
    step_s = 0.010 + 1e-4 + 1e-7 * 321
    assert recorder.end_s[0] - recorder.first_s[0] == pytest.approx(10 * step_s + 1e-7 * 50)


def test_a_lone_dispatch_takes_its_prefill_and_its_transfer() -> None:
    """First token after prefill and KV transfer; on one host, after the prefill alone."""
    for host, transfer_s in (("", 0.002 + 320 / 50_000.0), ("a", 0.0)):
        found = stage(groups=DISPATCH)
        for place in found.cluster._places:
            place.pod = msgspec.structs.replace(place.pod, host=host)
        ask(found, [asked(1.0, 320, 11)])
        recorder = found.cluster.recorder
        expected_s = FIGURES.prefill_s(320) + transfer_s + FIGURES.compute_s(1)
        assert recorder.first_s[0] - 1.0 == pytest.approx(expected_s)
        assert (recorder.prefill_pod[0], recorder.pod[0]) == (0, 2)


def test_the_routers_inflight_is_what_the_pods_have() -> None:
    """One gateway, nothing late: at any time it counts as many requests as each pod has."""
    found = stage("leastLoad")
    compared = []

    def compare(_: None) -> None:
        views = [pod.inflight for pod in found.doors[0].router.pods()]
        compared.append((views, found.cluster.queues()))

    for n in range(40):
        found.cluster.clock.at(0.1 + 0.05 * n, compare)
    ask(found, [asked(0.02 * n, 160 + n, 20) for n in range(90)])
    assert all(views == queues for views, queues in compared)
    assert max(max(queues) for _, queues in compared) > 2


def test_the_router_predicts_the_cached_tokens_that_pods_find() -> None:
    """Routing history alone: what the router believes cached is what the pod then has cached."""
    found = stage("cacheAware")
    router = found.doors[0].router
    predicted = []
    route = found.doors[0].route

    def note(*args: Any) -> Any:
        plan: Any = route(*args)
        predicted.append(plan.predicted_cached_tokens)
        return plan

    found.doors[0].route = note  # type: ignore[method-assign, assignment]
    ask(found, [asked(0.2 * n, 160 + 16 * (n % 5), 3, kind=n % 3) for n in range(60)])
    assert predicted == list(found.cluster.recorder.cached_tokens)
    assert max(predicted) > 100
    assert router.open_leases() == 0


def test_what_fits_no_pod_is_refused_and_blames_nobody() -> None:
    """A prompt over the KV capacity is a 400, and the pods go on being used."""
    found = ask(stage(), [asked(0.1 * n, 320 if n % 2 else 30_000) for n in range(12)])
    assert list(found.cluster.recorder.status) == [400, 200] * 6
    assert is_idle(found)


def test_half_of_the_first_tokens_are_not_seen() -> None:
    """Unstreamed requests are marked, end as well, and their first tokens are measured anyway."""
    found = run(scenario(streamed_share=0.5), "predictive", 1)
    assert 0.3 < found.requests.streamed.mean() < 0.7
    assert np.all(found.requests.ttft_s > 0.0)


def test_an_agent_never_has_two_requests_under_way() -> None:
    """Closed loops: each request begins after the one before it has ended."""
    workload = Agents(
        agents=6,
        turns=4,
        start=Length(mean=300.0),
        question=Length(mean=50.0),
        answer=Length(mean=10.0),
        tool_s=0.1,
    )
    requests = run(scenario(workload=workload), "predictive", 1).requests
    assert len(requests.status) == 24
    ends = requests.arrival_s + requests.e2e_s
    assert np.all(requests.arrival_s[1:] > ends[:-1])


def test_gateways_hear_of_each_other() -> None:
    """Three gateways share the requests; after an exchange each counts what the others sent."""
    found = stage("leastLoad", gateways=3, sync_s=0.5)
    seen = []

    def look(_: None) -> None:
        for door in found.doors:
            replicas = door.router._state.replicas
            own = sum(pod.inflight for pod in door.router.pods())
            others = 0.0 if replicas.inflight is None else sum(replicas.inflight)
            seen.append((len(replicas), own + others, sum(found.cluster.queues())))

    found.cluster.clock.at(0.49, look)
    found.cluster.clock.at(0.5, look)
    ask(found, [asked(0.01 * n, 1600, 50) for n in range(48)])
    assert all(count == 0 and known < total for count, known, total in seen[:3])
    assert all(count == 2 and known == total for count, known, total in seen[3:])
    assert is_idle(found)


def test_progress_is_told_and_ends_at_one() -> None:
    """Shares never fall, and the last one is everything."""
    told: list[float] = []
    run(scenario(), "random", 1, progress=told.append)
    assert told == sorted(told)
    assert told[0] == 0.0
    assert told[-1] == 1.0
    assert len(set(told)) > 3


def test_samples_show_queues_weights_and_what_was_expected() -> None:
    """One row a second and pod; a steered strategy has weights of mean 1 and forecasts."""
    busy = scenario(workload=msgspec.structs.replace(WORKLOAD, requests=300), load=2.0)
    found = run(busy, "weightedRoundRobin", 1)
    samples = found.samples
    assert samples.queue.shape == samples.weights.shape == (len(samples.times_s), 3)
    assert list(np.diff(samples.times_s)) == [1.0] * (len(samples.times_s) - 1)
    assert samples.queue.max() > 1
    known = ~np.isnan(samples.weights[:, 0])
    assert known.sum() > 3
    assert samples.weights[known].mean(axis=1) == pytest.approx(1.0)
    assert found.predicted_queue[-1][1].shape == (10, 3)
    assert np.isnan(run(busy, "powerOfTwo", 1).samples.weights).all()


def test_many_samples_are_thinned_out_evenly() -> None:
    """A long run keeps a bounded number of samples, all the same time apart, and of forecasts."""
    workload = Agents(
        agents=60,
        turns=2,
        start=Length(mean=100.0),
        question=Length(mean=10.0),
        answer=Length(mean=2.0),
        tool_s=15.0,
    )
    found = run(scenario(workload=workload), "weightedRoundRobin", 1)
    times_s = found.samples.times_s
    assert found.duration_s > 1_100.0
    assert 512 <= len(times_s) < 1024
    assert set(np.diff(times_s)) == {2.0}
    predicted_s = [at_s for at_s, _ in found.predicted_queue]
    assert 64 <= len(predicted_s) < 128
    assert np.ptp(np.diff(predicted_s)) <= 2.0


SHORT: dict[str, int] = {"limit": 120, "requests": 120, "agents": 8, "sessions": 12}


def shortened(one: Scenario) -> Scenario:
    """The first part of it."""
    workload: Any = one.workload
    fields = {name: value for name, value in SHORT.items() if name in workload.__struct_fields__}
    return msgspec.structs.replace(one, workload=msgspec.structs.replace(workload, **fields))


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_runs_with_any_number_of_pods(name: str) -> None:
    """Each says what people see, and its beginning runs with its own pods and with more."""
    one = SCENARIOS[name]
    assert one.name == name
    assert len(one.description) > 60
    for pods in (None, 2 * len(one.pods())):
        found = run(shortened(one), "predictive", 1, pods=pods)
        assert len(found.pods) == (pods or len(one.pods()))
        assert set(found.requests.status) == {200}
        roles = [pod.role for pod in found.pods]
        assert [pod.role for pod in one.pods()].count("decode") * 2 == roles.count("decode") * (
            1 if pods else 2
        )
        assert sum(pod.speed for pod in found.pods) == pytest.approx(len(found.pods))


def test_load_and_pods_are_what_was_asked_for() -> None:
    """Twice the load: half the time between arrivals. Five pods are five pods."""
    one = shortened(SCENARIOS["mooncake-conversation"])
    usual, double = run(one, "random", 1), run(one, "random", 1, load=2.0, pods=5)
    assert double.requests.arrival_s == pytest.approx(usual.requests.arrival_s / 2)
    assert (usual.load, double.load, len(double.pods)) == (1.0, 2.0, 5)


def test_settings_reach_the_gateways_and_unknown_strategies_do_not() -> None:
    """Keys of the configuration are merged in; a name that nobody knows is an error."""
    literal = scenario(settings={"controller": {"mode": "literal"}, "gateway": {"retries": 0}})
    found = run(literal, "weightedRoundRobin", 1)
    assert found.config["controller"] == {"enabled": True, "mode": "literal"}
    assert found.config["gateway"]["strategy"] == {"name": "weightedRoundRobin"}
    with pytest.raises(msgspec.ValidationError, match="nobody"):
        run(scenario(), "nobody", 1)


def test_ideal_prefills_are_those_of_a_mean_pod() -> None:
    """What goodput allows for: the whole prompt, uncached, alone, at the mean speed."""
    found = run(scenario(), "random", 1).requests
    expected = [FIGURES.prefill_s(int(tokens)) for tokens in found.prompt_tokens]
    assert found.ideal_prefill_s == pytest.approx(expected)


def test_events_per_request_do_not_grow_with_the_pods() -> None:
    """16 times the pods at 16 times the load: the clock has as much to do for each request."""
    events = []
    for pods in (8, 128):
        workload = TraceWorkload(trace="AzureLLMInferenceTrace_conv.csv", limit=1500)
        one = scenario(workload=workload, groups=SCENARIOS["azure-conversation"].groups)
        found = build(one, "powerOfTwo", 1, pods=pods)
        arrivals = list(workload.arrivals(random.Random(1), 5.0 * pods / 8))
        ask(found, arrivals)
        events.append(found.cluster.clock._count / len(arrivals))
    assert events[1] < 1.2 * events[0]
