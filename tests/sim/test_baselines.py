"""What others route by: each formula decides as its original does, on a cluster that is known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from calinix.config import Strategy, parse_config
from calinix.config.near import SIMULATED
from calinix.core.events import Finished, FirstToken, ProbeSucceeded
from calinix.core.pods import Role
from calinix.core.requests import RoutePlan, RouteRequest
from calinix.core.router import Router
from calinix.errors import ConfigError
from calinix.sim.baselines import BASELINES
from calinix.sim.cluster import Cluster, SimPod
from calinix.sim.fleet_config import config_of, converted
from calinix.sim.pod_figures import PodFigures
from calinix.sim.pod_model import Job
from calinix.sim.workload import SimRequest, prompt_bytes

BLOCK = 16
FIGURES = PodFigures(prefill_tokens_per_s=1000.0, token_delay_s=0.01, kv_capacity_tokens=160_000)


class Stage:
    """A cluster of idle pods, a router that routes by a baseline, and requests to try it with."""

    def __init__(
        self,
        name: str,
        pods: int = 4,
        role: Role = "single",
        speeds: Sequence[float] = (1.0,),
        seed: int = 1,
    ):
        roles: list[Role] = [role] if role == "single" else ["prefill", "decode"]
        described = [
            SimPod(id=f"{one}-{n}", role=one, figures=FIGURES.scaled(speeds[n % len(speeds)]))
            for one in roles
            for n in range(pods)
        ]
        self.cluster = Cluster(described, 0.0, seed)
        config = converted(config_of(described, "leastLoad", BLOCK, {}))
        self.router = Router(config, random.Random(seed), BASELINES[name](self.cluster))
        for pod in described:
            self.router.observe(ProbeSucceeded(pod.id), 0.0)
        self._count = 0

    def route(self, tokens: int = 160, kind: int = 0, output: int = 10) -> RoutePlan:
        """A request of so many tokens; of one kind all begin alike."""
        self._count += 1
        chain = [kind << 32 | block for block in range(1, tokens // BLOCK + 1)]
        asked = SimRequest(0.0, tokens, output, chain)
        self.cluster.current = asked
        plan = self.router.route(
            RouteRequest(
                request_id=str(self._count),
                prompt=prompt_bytes(chain, tokens, BLOCK, self._count),
                prompt_is_tokens=True,
                streamed=True,
            ),
            1.0,
        )
        assert isinstance(plan, RoutePlan)
        return plan

    def end(self, plan: RoutePlan) -> None:
        """The request is over."""
        self.router.observe(FirstToken(plan.lease_id), 1.5)
        self.router.observe(Finished(plan.lease_id, 200), 2.0)

    def serve(self, tokens: int = 160, kind: int = 0) -> str:
        """A request from its route to its end; the pod."""
        plan = self.route(tokens, kind)
        self.end(plan)
        return plan.pod.id

    def fill(self, slot: int, jobs: int, tokens: int = 1600) -> None:
        """Work on a pod, of which no router knows; none of it shared with requests."""
        for number in range(jobs):
            chain = [slot << 40 | number << 20 | block for block in range(1, tokens // BLOCK)]
            job = Job(id=f"{slot}/{number}", prompt_tokens=tokens, output_tokens=1000, chain=chain)
            self.cluster.pods[slot].submit(job, 0.0)
        self.cluster.pods[slot].advance(0.0)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("role", ["single", "prefill"])
def test_each_routes_in_both_modes(name: str, role: Role) -> None:
    """Every baseline gives plans, spreads different prompts, and leaves no lease behind."""
    stage = Stage(name, role=role)
    plans = [stage.route(kind=number) for number in range(40)]
    assert len({plan.pod.id for plan in plans}) > 1
    assert all((plan.prefill is None) == (role == "single") for plan in plans)
    for plan in plans:
        stage.end(plan)
    assert stage.router.open_leases() == 0


@pytest.mark.parametrize("name", BASELINES)
def test_equal_seeds_pick_alike(name: str) -> None:
    """A baseline draws from the router's own numbers only."""
    one, other = (
        [stage.route(kind=n % 5).pod.id for n in range(60)] for stage in (Stage(name), Stage(name))
    )
    assert one == other


@pytest.mark.parametrize("name", ["smgCacheAware", "dynamoCost", "llmdDefault", "aibrixPrefix"])
def test_a_known_prompt_goes_where_it_is(name: str) -> None:
    """With idle pods, the second request of a kind goes to the pod of the first."""
    stage = Stage(name)
    for kind in range(10):
        assert stage.serve(kind=kind) == stage.serve(kind=kind)


def test_smg_follows_a_prefix_over_its_threshold_only() -> None:
    """Over 0.3 of the prompt known: there. Less: the least loaded, whoever knows it."""
    stage = Stage("smgCacheAware", pods=2)
    known = stage.route(tokens=320).pod.id
    assert stage.route(tokens=1040).pod.id == known  # 320 of 1040 tokens, although it is busier
    stage = Stage("smgCacheAware", pods=2)
    known = stage.route(tokens=320).pod.id
    assert stage.route(tokens=1120).pod.id != known


def test_smg_leaves_the_prefix_when_loads_differ_much() -> None:
    """More than 64 requests and 1.5 times apart: the least loaded gets it; and is known then."""
    stage = Stage("smgCacheAware", pods=2)
    hot = [stage.route().pod.id for _ in range(66)]
    assert set(hot[:65]) == {hot[0]}
    assert hot[65] != hot[0]


def test_smg_remembers_by_its_own_history() -> None:
    """It knows what it sent, even where the gateway's own index is off."""
    described = [SimPod(id=f"p-{n}", role="single", figures=FIGURES) for n in range(4)]
    stage = Stage("smgCacheAware")
    config = config_of(described, "leastLoad", BLOCK, {"cacheRegistry": {"enabled": False}})
    recipes = BASELINES["smgCacheAware"](stage.cluster)
    stage.router = Router(converted(config), random.Random(1), recipes)
    for pod in described:
        stage.router.observe(ProbeSucceeded(pod.id), 0.0)
    for kind in range(5):
        assert stage.serve(kind=kind) == stage.serve(kind=kind)


def test_dynamo_counts_blocks_to_compute_and_in_use() -> None:
    """A pod with a long prompt under way is avoided until it is done; then its prefix draws."""
    stage = Stage("dynamoCost", pods=2)
    long = stage.route(tokens=1600)
    assert stage.route(tokens=160, kind=1).pod.id != long.pod.id
    # 10 blocks there against 100 in use here, of which 10 would not have to be computed.
    assert stage.route(tokens=160, kind=0).pod.id != long.pod.id
    stage.end(long)
    assert stage.route(tokens=1600, kind=0).pod.id == long.pod.id


def test_dynamo_counts_shared_blocks_once() -> None:
    """Ten requests with one prefix hold its blocks once: they stay together."""
    stage = Stage("dynamoCost", pods=4)
    first = stage.route(tokens=1600)
    stage.router.observe(FirstToken(first.lease_id), 1.5)
    assert {stage.route(tokens=1616).pod.id for _ in range(10)} == {first.pod.id}


def test_llmd_weighs_queue_kv_and_prefix() -> None:
    """A whole prompt known (3) outbids the only queue (2); half of it known (1.5) does not."""
    stage = Stage("llmdDefault", pods=2)
    known = stage.route()
    stage.fill(known.pod.slot, 20)
    assert stage.cluster.pods[known.pod.slot].waiting > 10
    assert stage.route().pod.id == known.pod.id
    assert stage.route(tokens=320).pod.id != known.pod.id


def test_aibrix_takes_the_match_within_one_deviation() -> None:
    """A match on a pod that is busier than mean and deviation is passed over."""
    stage = Stage("aibrixPrefix", pods=4)
    hot = [stage.route().pod.id for _ in range(3)]
    assert len(set(hot)) > 1
    counts = Counter(stage.route().pod.id for _ in range(200))
    assert max(counts.values()) < 100


def test_clairvoyant_sees_what_no_router_sees() -> None:
    """Queues that others made, speeds, and what really is cached."""
    stage = Stage("clairvoyant", pods=3, speeds=(1.0, 1.0, 0.2))
    stage.fill(0, 5)
    assert {stage.serve(kind=kind) for kind in range(10)} == {"single-1"}
    stage = Stage("clairvoyant", pods=2)
    pod = stage.cluster.pods[1]
    chain = list(range(1, 101))
    pod.submit(Job(id="warm", prompt_tokens=1600, output_tokens=1, chain=chain), 0.0)
    pod.advance(10.0)
    assert stage.serve(tokens=1600) == "single-1"


def test_clairvoyant_decodes_where_it_is_fastest() -> None:
    """The decode pod is the one with the shortest way to the last token."""
    stage = Stage("clairvoyant", pods=2, role="prefill", speeds=(0.2, 1.0))
    plans = [stage.route(kind=kind) for kind in range(5)]
    assert {plan.pod.id for plan in plans} == {"decode-1"}
    assert {plan.prefill.id for plan in plans if plan.prefill} == {"prefill-1"}


def test_no_gateway_takes_a_baseline() -> None:
    """A file that names one is refused, and told where it belongs; the list of them is whole."""
    assert set(BASELINES) == SIMULATED
    for name in BASELINES:
        text = "upstreams: {single: {pods: [{id: p, url: 'http://p:1'}]}}\n"
        for strategy in (name, f"{{name: {name}}}"):
            with pytest.raises(ConfigError, match="baseline of `calinix simulate` only"):
                parse_config(f"{text}gateway: {{strategy: {strategy}}}\n")
    assert Strategy(name="leastLoad").name == "leastLoad"
