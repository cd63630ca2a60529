"""The pod table: slots, epochs, roles, models, labels, and what a reload does to them."""

from __future__ import annotations

import pytest

from calinix.config import CacheRegistry, Labels
from calinix.core.events import PodAdded, PodDraining, PodRemoved, ProbeSucceeded
from calinix.core.pods import PodTable
from calinix.errors import ConfigError
from routing import ask, finish, make_config, make_router, pod_config, pods, refused, serve


def test_slots_and_epochs() -> None:
    """A pod has a slot of its own, and an epoch that is never used twice."""
    table = PodTable(3)
    one, two = table.place(pod_config("a"), "single"), table.place(pod_config("b"), "decode")
    assert (one.slot, two.slot) == (0, 1)
    assert table.is_current(one)
    renewed = table.renew(one)
    assert renewed.slot == one.slot
    assert not table.is_current(one)
    assert len({one.epoch, two.epoch, renewed.epoch}) == 3
    table.retire(renewed)
    table.free(renewed.slot)
    again = table.place(pod_config("a"), "single")
    assert again.slot == 0
    assert again.epoch not in {one.epoch, two.epoch, renewed.epoch}
    assert not table.is_current(renewed)


def test_roles_and_models_as_bitmaps() -> None:
    """Who has a role, who serves a model; no model named means all."""
    table = PodTable(8)
    table.place(pod_config("a"), "single")
    table.place(pod_config("b", models=("m", "lora")), "single")
    table.place(pod_config("c", models=("m",)), "decode")
    assert table.role("single") == 0b011
    assert table.role("prefill") == 0
    assert table.serving("m") == 0b111
    assert table.serving("lora") == 0b011
    assert table.serving("x") == 0b001
    assert table.serving("") == 0b111


def test_labels_urls_and_ranks_as_columns() -> None:
    """Equal labels have equal numbers, none has 0; ranks are the order of ids."""
    table = PodTable(4)
    table.place(pod_config("b", labels=Labels(zone="z", host="h")), "single")
    table.place(pod_config("a", labels=Labels(zone="z")), "single")
    table.place(pod_config("c", labels=Labels(zone="h"), url="http://b:8000"), "single")
    assert table.zones[0] == table.zones[1] != table.zones[2]
    assert table.hosts[0]
    assert table.hosts[0] != table.zones[2]
    assert table.hosts[1] == table.hosts[2] == 0
    assert table.urls[0] == table.urls[2] != table.urls[1]
    assert table.ranks[:3].tolist() == [1, 0, 2]


def test_slot_sets_are_bounded() -> None:
    """However many sets are asked for, only so many are kept."""
    table = PodTable(64)
    for members in range(1, 3000):
        found = table.slot_set(members)
        assert found.count == members.bit_count()
        assert found.index(found.slots[-1]) == found.count - 1
    assert len(table.slot_sets) <= 1024


def test_more_pods_than_slots() -> None:
    """One pod over cacheRegistry.maxPods is refused by name, at start and later."""
    cache = CacheRegistry(max_pods=2)
    with pytest.raises(ConfigError, match=r"single-2.*maxPods is 2"):
        make_router(make_config(3, cache=cache))
    router = make_router(make_config(2, cache=cache))
    with pytest.raises(ConfigError, match="no slot is free"):
        router.observe(PodAdded(pod_config("x"), "single"), 1.0)
    assert len(router.pods()) == 2
    serve(router)


def test_new_settings_keep_the_state() -> None:
    """A known pod with other settings keeps slot, epoch, health, load and cache."""
    router = make_router(make_config(1))
    finish(router, ask(router, 10))
    open_plan = ask(router, 10)
    before = router.pods()[0]
    router.observe(PodAdded(pod_config("single-0", max_conns=1), "single"), 2.0)
    after = router.pods()[0]
    assert (after.slot, after.epoch, after.blocks, after.inflight, after.state) == (
        before.slot, before.epoch, 10, 1, "healthy",
    )  # fmt: skip
    assert after.max_conns == 1
    assert "full" in refused(router).message
    finish(router, open_plan)
    serve(router)


def test_another_address_is_another_engine() -> None:
    """A pod whose url changed starts cold, and has to be probed again."""
    router = make_router(make_config(1))
    finish(router, ask(router, 10))
    epoch = router.pods()[0].epoch
    router.observe(PodAdded(pod_config("single-0", url="http://other:1"), "single"), 2.0)
    view = router.pods()[0]
    assert view.epoch != epoch
    assert (view.blocks, view.state, view.url) == (0, "starting", "http://other:1")


def test_removed_and_added_at_once_stays_warm() -> None:
    """A reload that takes a pod out and puts it back does not lose what it knows."""
    router = make_router(make_config(2))
    finish(router, ask(router, 10, avoid=0b10))
    open_plan = ask(router, 10, avoid=0b10)
    router.observe(PodRemoved("single-0"), 2.0)
    assert [view.id for view in router.pods()] == ["single-1"]
    assert serve(router) == "single-1"
    router.observe(PodAdded(pod_config("single-0", max_conns=7), "single"), 2.0)
    view = router.pods()[0]
    assert (view.id, view.blocks, view.inflight, view.max_conns) == ("single-0", 10, 1, 7)
    finish(router, open_plan)
    router.tick(3.0)
    assert router.pods()[0].blocks == 10


def test_removed_for_good_is_forgotten() -> None:
    """After its last lease a removed pod leaves nothing, and comes back cold."""
    router = make_router(make_config(2))
    finish(router, ask(router, 10, avoid=0b10))
    router.observe(PodRemoved("single-0"), 2.0)
    router.tick(3.0)
    router.observe(PodAdded(pod_config("single-0"), "single"), 4.0)
    router.observe(ProbeSucceeded("single-0"), 4.0)
    view = next(view for view in router.pods() if view.id == "single-0")
    assert view.blocks == 0
    assert ask(router, 10, now=5.0, avoid=1 << 1).cached_blocks == 0


def test_another_role_is_another_pod() -> None:
    """The same id under another role gets a slot of its own."""
    router = make_router(make_config(2, 1, 1))
    router.observe(PodAdded(pod_config("single-0"), "decode"), 1.0)
    found = [(view.id, view.role, view.state) for view in router.pods()]
    assert ("single-0", "decode", "starting") in found
    assert ("single-0", "single", "healthy") not in found
    assert serve(router, mode="single") == "single-1"


def test_draining_pods_get_nothing_new() -> None:
    """A draining pod ends what it has, gets nothing new, and can be taken back."""
    router = make_router(make_config(pods("single", 2)))
    plan = ask(router, avoid=0b10)
    router.observe(PodDraining("single-0", True), 1.0)
    assert router.pods()[0].draining
    assert {serve(router) for _ in range(10)} == {"single-1"}
    assert router.usable_pods() == ["single-1"]
    assert "draining" in refused(router, avoid=0b10).message
    finish(router, plan)
    router.observe(PodDraining("single-0", False), 2.0)
    assert {serve(router) for _ in range(30)} == {"single-0", "single-1"}
