"""How near a decode pod is to its prefill pod: by labels, then by measured transfer times."""

from __future__ import annotations

import pytest

from calinix.config import Labels
from calinix.core.events import Finished, FirstToken, PrefillDone
from calinix.core.pods import PodTable
from calinix.core.router import Router
from calinix.core.transfers import FAR, MEASURED, ZONE, Transfers
from routing import ask, make_config, make_router, pod_config


def router_of() -> Router:
    """A prefill pod in zone a, decode pods on its host, in its zone, and elsewhere."""
    prefill = (pod_config("prefill-0", labels=Labels(host="h", zone="a")),)
    decode = (
        pod_config("same-host", labels=Labels(host="h", zone="a")),
        pod_config("same-zone", labels=Labels(host="i", zone="a")),
        pod_config("elsewhere", labels=Labels(host="j", zone="b")),
    )
    return make_router(make_config(prefill=prefill, decode=decode, strategy="cacheAware"))


def nearness(router: Router) -> dict[str, float]:
    """The locality scores of the next decision, by pod."""
    decode = ask(router, 4, now=0.0).to_dict()["choices"][1]
    return {one["podId"]: one["scores"]["locality"] for one in decode["candidates"]}


def transfer(router: Router, pod_id: str, seconds: float, *, transferred: bool = False) -> None:
    """A request whose KV took so long to get to this pod."""
    others = sum(1 << pod.slot for pod in router.pods() if pod.id not in (pod_id, "prefill-0"))
    plan = ask(router, 400, now=0.0, avoid=others)
    assert plan.pod.id == pod_id
    router.observe(PrefillDone(plan.lease_id, transferred), 1.0)
    router.observe(FirstToken(plan.lease_id), 1.0 + seconds)
    router.observe(Finished(plan.lease_id, 200), 2.0 + seconds)


def test_labels_alone_at_first() -> None:
    """Nothing is measured: whoever shares a host or a zone is near, all others are not."""
    assert nearness(router_of()) == {"same-host": 1.0, "same-zone": 1.0, "elsewhere": 0.0}


def test_measured_ways_are_graded() -> None:
    """When all ways are measured, the score is the time saved beside the slowest of them."""
    router = router_of()
    seconds = {"same-host": 0.5, "same-zone": 1.0, "elsewhere": 2.0}
    for pod_id in ("same-host", "same-zone"):
        for _ in range(200):
            transfer(router, pod_id, seconds[pod_id])
    assert set(nearness(router).values()) == {0.0, 1.0}  # one way is not measured yet
    for _ in range(MEASURED):
        transfer(router, "elsewhere", seconds["elsewhere"])
    assert len(set(nearness(router).values())) == 3
    for _ in range(300):
        transfer(router, "elsewhere", seconds["elsewhere"])
    found = nearness(router)
    assert found["elsewhere"] == 0.0
    assert found["same-host"] == pytest.approx(0.75, abs=0.05)
    assert found["same-zone"] == pytest.approx(0.5, abs=0.05)


def test_a_measured_time_goes_before_a_label() -> None:
    """A link within the zone that is slower than the way out of it makes its pods the far ones."""
    router = router_of()
    for pod_id, seconds in (("same-host", 0.5), ("same-zone", 3.0), ("elsewhere", 1.0)):
        for _ in range(300):
            transfer(router, pod_id, seconds)
    found = nearness(router)
    assert found["same-zone"] == 0.0
    assert found["elsewhere"] > 0.5


def test_an_answer_after_the_transfer_times_nothing() -> None:
    """Where the prefill pod answers only when the KV has arrived, labels stay what counts."""
    router = router_of()
    for pod_id in ("same-host", "same-zone", "elsewhere"):
        for _ in range(2 * MEASURED):
            transfer(router, pod_id, 1.0, transferred=True)
    assert nearness(router) == {"same-host": 1.0, "same-zone": 1.0, "elsewhere": 0.0}


def test_ways_follow_the_labels() -> None:
    """How near pods are is kept, and worked out anew when a pod's labels change."""
    table, transfers = PodTable(8), Transfers()
    table.place(pod_config("prefill-0", labels=Labels(zone="a")), "prefill")
    decode = table.place(pod_config("decode-0", labels=Labels(zone="b")), "decode")
    among = table.slot_set(1 << decode.slot)
    ways = transfers.ways(table, 0, among)
    assert (list(ways.kinds), list(ways.near)) == ([FAR], [0.0])
    assert transfers.ways(table, 0, among) is ways
    table.update(decode, pod_config("decode-0", labels=Labels(zone="a")))
    ways = transfers.ways(table, 0, among)
    assert (list(ways.kinds), list(ways.near)) == ([ZONE], [1.0])
