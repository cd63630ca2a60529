"""What workers of one gateway tell each other: the bytes, and what a Router makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from calinix.config import CacheRegistry, Health
from calinix.core import peer_records as records
from calinix.core.events import (
    Failure,
    PeerFacts,
    PodFacts,
    PodRestarted,
    ReplicaFacts,
    ReplicaGone,
)
from calinix.core.kv import Chain
from calinix.core.peers import MAX_PEERS
from calinix.core.requests import RefusalReason
from calinix.core.router import Router
from routing import ask, fail, finish, make_config, make_router, pods, refused, text

CHAIN = Chain.of([1, 0x0102030405060708, 2**64 - 1], 64)
GOLDEN = bytes.fromhex(
    "01 04030201 0500 ffff 4000 03000000"
    " 0100000000000000 0807060504030201 ffffffffffffffff"
    " 02 02000000 03 03000000 04 04000000"
    " 05 0100 0200 0000c842 0100 0200 74 c3a9"
    " 06 0700 07 0800 02"
    " 08 0000000000004940 0000000000002440 06000000 0100 6d"
    " 09 0300 0600 726573705f31"
    " 0a 0500 0400 4000 03000000"
    " 0100000000000000 0807060504030201 ffffffffffffffff".replace(" ", "")
)


class Told:
    """A Taker that remembers."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *told: self.all.append((name, *told))


def packed() -> bytes:
    """One record of every kind."""
    return (
        records.routed(0x7_01020304, 5, records.NO_SLOT, CHAIN)
        + records.prefilled(2)
        + records.settled(3)
        + records.lost(4)
        + records.session(b"t", "é", 1, 2, 100.0)
        + records.good(7)
        + records.bad(8, Failure.SERVER_ERROR)
        + records.learned("m", 50.0, 10.0, 6)
        + records.kept("resp_1", 3)
        + records.held(5, 4, CHAIN)
    )


def test_golden_bytes() -> None:
    """Every record has these bytes, and says this again."""
    assert packed() == GOLDEN
    told = Told()
    records.deliver(GOLDEN, told)
    assert told.all == [
        ("routed", 0x01020304, 5, records.NO_SLOT, CHAIN),
        ("prefilled", 2),
        ("settled", 3),
        ("lost", 4),
        ("session", b"t", "é", 1, 2, 100.0),
        ("good", 7),
        ("bad", 8, Failure.SERVER_ERROR),
        ("learned", "m", 50.0, 10.0, 6),
        ("kept", "resp_1", 3),
        ("held", 5, 4, CHAIN),
    ]


def test_what_is_cut_off_or_unknown_is_no_record() -> None:
    """A ValueError, wherever the bytes end, and whatever they begin with."""
    whole, at = packed(), 0
    ends = {0}
    for piece in (39, 5, 5, 5, 16, 3, 4, 24, 11, 35):
        at += piece
        ends.add(at)
    assert at == len(whole)
    for end in range(len(whole)):
        if end in ends:
            records.deliver(whole[:end], Told())
        else:
            with pytest.raises(ValueError, match=r"record|hashes"):
                records.deliver(whole[:end], Told())
    for bad in (b"\x00", b"\x0b\x00\x00\x00\x00", records.bad(1, Failure.CLOSED)[:-1] + b"\xff"):
        with pytest.raises(ValueError, match="no record"):
            records.deliver(bad, Told())


def test_long_texts_are_not_told() -> None:
    """Bounded by MAX_TEXT; nothing else is lost by it."""
    long = "x" * (records.MAX_TEXT + 1)
    assert records.session(b"", long, 0, 0, 0.0) == b""
    assert records.session(long.encode(), "k", 0, 0, 0.0) == b""
    assert records.learned(long, 1.0, 1.0, 1) == b""
    assert records.kept(long, 0) == b""


def chain_of(router: Router, prompt: bytes) -> Chain:
    """As the router itself cuts it."""
    return router._state.preparer.chain_of("", b"", prompt, False)


def tell(router: Router, *parts: bytes, who: str = "b", now: float = 1.0) -> None:
    """Another worker, whose slots are as those of this one, tells this."""
    router.observe(PeerFacts(who, router.pod_names(), b"".join(parts)), now)


def held(router: Router) -> list[int]:
    """Blocks on each pod."""
    return [pod.blocks for pod in router.pods()]


def test_prompts_of_others_are_known() -> None:
    """What another worker routed is a hit here, at once and after it is prefilled."""
    router = make_router(make_config(single=4))
    chain = chain_of(router, text(8))
    tell(router, records.routed(1, 2, records.NO_SLOT, chain))
    plan = ask(router, 8)
    assert (plan.pod.id, plan.cached_blocks) == ("single-2", 8)
    finish(router, plan)
    tell(router, records.settled(1))
    assert held(router) == [0, 0, 8, 0]


def test_slots_are_the_senders() -> None:
    """Pods are meant by their ids; one that is not configured here is left out."""
    router = make_router(make_config(single=2))
    chain = chain_of(router, text(4))
    names = ("", "unknown", "single-1")
    for slot in (0, 1, 2, 3, records.NO_SLOT):
        told = records.routed(slot, slot, records.NO_SLOT, chain) + records.settled(slot)
        router.observe(PeerFacts("b", names, told), 1.0)
    assert held(router) == [0, 4]


def test_what_was_lost_is_taken_back() -> None:
    """A failed request's blocks go, but not those that were there before, or of own requests."""
    router = make_router(make_config(single=1))
    head, whole = chain_of(router, text(4)), chain_of(router, text(8))
    tell(router, records.routed(1, 0, records.NO_SLOT, head), records.settled(1))
    tell(router, records.routed(2, 0, records.NO_SLOT, whole))
    assert held(router) == [8]
    tell(router, records.lost(2), records.lost(2), records.settled(2))
    assert held(router) == [4]
    plan = ask(router, text(6, kind=1))
    tell(router, records.routed(plan.lease_id, 0, records.NO_SLOT, chain_of(router, text(2, 2))))
    fail(router, plan, Failure.CANCELLED)
    assert held(router) == [6]  # another's ticket is never an own one


def test_a_prefill_pod_and_its_decode_pod() -> None:
    """Both have the prompt; what fails after the prefill leaves it on the prefill pod."""
    router = make_router(make_config(prefill=1, decode=1))
    chain = chain_of(router, text(4))
    names = router.pod_names()
    prefill, decode = names.index("prefill-0"), names.index("decode-0")
    tell(router, records.routed(1, decode, prefill, chain))
    assert sorted(held(router)) == [4, 4]
    tell(router, records.prefilled(1), records.lost(1))
    assert {pod.id: pod.blocks for pod in router.pods()} == {"prefill-0": 4, "decode-0": 0}


def test_a_worker_that_is_gone_leaves_nothing() -> None:
    """Its load, its room on full pods and what it had under way go with it."""
    router = make_router(make_config(single=pods("single", 1, max_conns=4)))
    chain = chain_of(router, text(4))
    router.observe(ReplicaFacts("b", (PodFacts("single-0", 4.0),), sync_s=0.02), 1.0)
    tell(router, records.routed(1, 0, records.NO_SLOT, chain))
    assert refused(router).reason is RefusalReason.FULL
    assert router._state.ledger.full == 1
    router.observe(ReplicaGone("b"), 2.0)
    assert router._state.ledger.full == 0
    assert router._state.replicas.inflight is None
    assert held(router) == [0]
    router.observe(ReplicaGone("b"), 2.0)  # harmless


def test_tickets_of_peers_are_never_alike() -> None:
    """What one takes back is not another one's, whatever their names; places are used again."""
    router = make_router(make_config(single=1))
    peers = router._handlers[PeerFacts].__self__  # type: ignore[attr-defined]
    for number in range(MAX_PEERS + 2):
        tell(router, who=f"w{number}")
    marks = [peer.mark for peer in peers._peers.values()]
    assert len(set(marks)) == len(marks) == MAX_PEERS
    router.observe(ReplicaGone("w3"), 2.0)
    tell(router, who="new")
    assert peers._peers["new"].mark == marks[3]


def test_of_very_long_prompts_the_head_is_told() -> None:
    """No prompt makes a report that is too long for the bus."""
    whole = Chain.of(range(1, records.MAX_BLOCKS + 3))
    for told in (records.routed(1, 0, records.NO_SLOT, whole), records.held(0, 0, whole)):
        heard = Told()
        records.deliver(told, heard)
        assert heard.all[0][-1] == whole.head(records.MAX_BLOCKS)


def test_sessions_and_stored_answers_of_others() -> None:
    """A session goes on where another worker had it; a stored answer is asked for there."""
    router = make_router(make_config(single=8, strategy="cacheAware"))
    tell(router, records.session(b"", "s", 5, records.NO_SLOT, 0.0), records.kept("resp_1", 6))
    assert ask(router, session_key="s").pod.id == "single-5"
    assert router.response_owner("resp_1", 2.0) == "single-6"
    tell(router, records.session(b"", "s", 3, records.NO_SLOT, 50.0))
    session = router._state.sessions.find((b"", "s"), 1.0)
    assert session is not None
    assert session.answer_tokens == 50.0


def test_failures_add_up_over_workers() -> None:
    """Failures in a row are those that any worker saw; a good answer anywhere ends the row."""
    rules = Health()
    most = rules.passive.failures
    router = make_router(make_config(single=4, health=rules))
    bad = records.bad(1, Failure.SERVER_ERROR)
    tell(router, *[bad] * (most - 1), records.good(1), *[bad] * (most - 1))
    assert not router.pods()[1].ejected
    tell(router, records.bad(1, Failure.CANCELLED), records.bad(2, Failure.REFUSED))
    assert (router.pods()[1].ejected, router.pods()[2].cooling) == (False, True)
    tell(router, bad)
    assert router.pods()[1].ejected


def test_a_refused_connection_empties_the_cache_here_too() -> None:
    """Who finds nobody listening tells the others: the process and its cache are gone."""
    router = make_router(make_config(single=2))
    epoch = router.epoch("single-0")
    chain = chain_of(router, text(4))
    tell(router, records.routed(1, 0, records.NO_SLOT, chain), records.settled(1))
    tell(router, records.bad(0, Failure.CONNECT))
    assert router.epoch("single-0") != epoch
    assert held(router) == [0, 0]


def test_what_was_told_of_an_earlier_life_is_left_out() -> None:
    """A request that was told before the pod began anew says nothing of it afterwards."""
    router = make_router(make_config(single=1))
    chain = chain_of(router, text(4))
    tell(router, records.routed(1, 0, records.NO_SLOT, chain))
    router.observe(PodRestarted("single-0"), 1.0)
    tell(router, records.settled(1))
    tell(router, records.routed(2, 0, records.NO_SLOT, chain))
    assert held(router) == [4]


def test_sizes_of_prompts_are_learned_together() -> None:
    """Bytes per token of a model follow what other workers' pods count."""
    router = make_router(make_config(single=1))
    before = ask(router, 64).prompt_tokens
    for _ in range(50):
        tell(router, records.learned("", 8192.0, 4096.0, 64))
    assert ask(router, 64).prompt_tokens > 1.5 * before


def test_what_is_there_already_is_told_in_one() -> None:
    """A prompt that was prefilled before it could be told: on both pods, and nothing is open."""
    router = make_router(make_config(prefill=1, decode=1))
    names = router.pod_names()
    slots = (names.index("decode-0"), names.index("prefill-0"))
    tell(router, records.held(*slots, chain_of(router, text(4))))
    assert held(router) == [4, 4]
    tell(router, records.held(9, records.NO_SLOT, chain_of(router, text(4))))
    assert held(router) == [4, 4]


def test_a_cache_that_is_off_learns_nothing() -> None:
    """`cacheRegistry.enabled: false` holds for what others say, too."""
    router = make_router(make_config(single=1, cache=CacheRegistry(enabled=False)))
    chain = Chain.of([1, 2, 3])
    tell(router, records.routed(1, 0, records.NO_SLOT, chain), records.settled(1))
    tell(router, records.held(0, records.NO_SLOT, chain))
    assert held(router) == [0]


def test_open_requests_of_a_peer_are_bounded() -> None:
    """A peer that never says what became of its requests takes no more than so much memory."""
    router = make_router(make_config(single=1))
    peers = router._handlers[PeerFacts].__self__  # type: ignore[attr-defined]
    one = Chain.of([7])
    for start in range(0, 20_000, 5_000):
        told = [records.routed(start + n, 0, records.NO_SLOT, one) for n in range(5_000)]
        tell(router, *told)
    assert len(peers) == 16_384
