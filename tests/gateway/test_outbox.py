"""What one worker's Router does, another's knows: both whole, with the real payloads between."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import kit
from calinix.config import Config
from calinix.core.events import (
    Failed,
    Failure,
    Finished,
    FirstToken,
    PrefillDone,
    ProbeSucceeded,
    PromptTokens,
    ResponseStored,
)
from calinix.core.recorded import RecordedRouter
from calinix.core.requests import RouteRequest
from calinix.core.router import Router
from calinix.edge.bus import SYNC_S, report_of
from calinix.gateway.outbox import FULL_LEASES, REPEAT_S, Outbox
from routing import ask, make_config, make_router, serve


class Pair:
    """A worker that tells, and one that is told."""

    def __init__(self, config: Config):
        self.loop = asyncio.get_running_loop()
        self.payloads: list[bytes] = []
        self.told = make_router(config, now=self.now)
        self.outbox = Outbox("a", self.loop, self._send)
        self.teller: Router = RecordedRouter(config, random.Random(1), self.outbox)
        for pod in self.teller.pods():
            self.teller.observe(ProbeSucceeded(pod.id), self.now)
        self.outbox.start(self.teller)

    @property
    def now(self) -> float:
        """The loop's time."""
        return self.loop.time()

    def _send(self, payload: bytes) -> None:
        self.payloads.append(payload)
        for event in report_of(payload):
            self.told.observe(event, self.now)

    def blocks(self) -> dict[str, int]:
        """What the told one believes of the pods' caches."""
        return {pod.id: pod.blocks for pod in self.told.pods() if pod.blocks}

    def load(self) -> list[float]:
        """The teller's load, as the told one knows it."""
        replicas = self.told._state.replicas
        assert replicas.inflight is not None
        assert replicas.work is not None
        return [*replicas.inflight[:2], replicas.work[0]]

    def do(self, *events: Any) -> None:
        """Facts at the teller, then a report."""
        for event in events:
            self.teller.observe(event, self.now)
        self.outbox.flush()

    def end(self) -> None:
        """No more reports."""
        self.outbox.stop()


@kit.on_loop
async def test_a_fact_is_told_in_time() -> None:
    """A report comes by itself, not later than SYNC_S after the fact, and none without facts."""
    pair = Pair(make_config(single=2))
    await asyncio.sleep(2 * SYNC_S)
    assert not pair.payloads
    plan = ask(pair.teller, 6, pair.now)
    began_s = pair.now
    await kit.until(lambda: bool(pair.payloads), "the others are told")
    assert pair.now - began_s < SYNC_S + 0.5  # of a busy machine; the timer itself is shorter
    assert pair.blocks() == {plan.pod.id: 6}
    pair.end()


@kit.on_loop
async def test_a_request_from_its_route_to_its_end() -> None:
    """Load, prompt and end are known at the other one at each step; nothing is left behind."""
    pair = Pair(make_config(single=1))
    plan = ask(pair.teller, 6, pair.now)
    pair.do()
    assert pair.load()[0] == 1.0
    assert pair.load()[2] > 0.0
    pair.do(FirstToken(plan.lease_id))
    assert pair.load()[0] == 1.0
    assert pair.load()[2] == 0.0
    pair.do(Finished(plan.lease_id, 200, 200, 0, 10))
    assert pair.load() == [0.0, 0.0, 0.0]
    assert pair.blocks() == {"single-0": 6}
    again = ask(pair.told, 6, pair.now)
    assert again.cached_blocks == 6
    pair.end()


@kit.on_loop
async def test_who_becomes_idle_says_so_at_once() -> None:
    """The end of a worker's last request does not wait for a report's usual time; others' do."""
    for ending in (Finished, Failed):
        pair = Pair(make_config(single=1))
        pair.outbox._reported_s = pair.now
        first, last = (ask(pair.teller, 6, pair.now) for _ in range(2))
        usual = pair.outbox._timer
        pair.teller.observe(ended(ending, first.lease_id), pair.now)
        assert pair.outbox._timer is usual
        assert usual is not None
        pair.teller.observe(ended(ending, last.lease_id), pair.now)
        sooner = pair.outbox._timer
        assert sooner is not None
        assert usual.cancelled()
        assert sooner.when() < usual.when()
        await kit.until(lambda pair=pair: bool(pair.payloads), "the others are told")
        assert pair.load() == [0.0, 0.0, 0.0]
        await asyncio.sleep(2 * SYNC_S)
        assert len(pair.payloads) == 1
        pair.end()


def ended(ending: type[Finished | Failed], lease_id: int) -> Finished | Failed:
    """Either end of a lease."""
    if ending is Failed:
        return Failed(lease_id, "single", Failure.CANCELLED)
    return Finished(lease_id, 200, 100, 0, 5)


@kit.on_loop
async def test_a_request_that_fails() -> None:
    """Its blocks are taken back, its pod's failure is counted; a client that left is no failure."""
    pair = Pair(make_config(single=1))
    for failure, streak in ((Failure.CANCELLED, 0), (Failure.CLOSED, 1), (Failure.BROKEN, 2)):
        plan = ask(pair.teller, 6, pair.now)
        pair.do()
        assert pair.blocks() == {"single-0": 6}
        pair.do(Failed(plan.lease_id, "single", failure))
        assert pair.blocks() == {}
        assert pair.told.pods()[0].failures_in_row == streak
    plan = ask(pair.teller, 6, pair.now)
    pair.do(Finished(plan.lease_id, 503))
    assert (pair.blocks(), pair.told.pods()[0].cooling) == ({}, True)
    serve(pair.teller, 6, pair.now)
    pair.do()
    assert pair.told.pods()[0].failures_in_row == 0
    pair.end()


@kit.on_loop
async def test_dispatch() -> None:
    """Prefill and decode pod are both told of; what the prefill pod has, it keeps."""
    pair = Pair(make_config(prefill=1, decode=1))
    plan = ask(pair.teller, 6, pair.now)
    pair.do(PrefillDone(plan.lease_id))
    pair.do(Failed(plan.lease_id, "decode", Failure.CLOSED))
    assert pair.blocks() == {"prefill-0": 6}
    pair.end()


@kit.on_loop
async def test_sessions_and_stored_answers() -> None:
    """The last pod and the size of the last answer; a stored answer at once."""
    pair = Pair(make_config(single=8, strategy="cacheAware"))
    plan = ask(pair.teller, 0, pair.now, session_key="s", tenant=b"t")
    pair.do(Finished(plan.lease_id, 200, 100, 0, 25))
    session = pair.told._state.sessions.find((b"t", "s"), pair.now)
    assert session is not None
    assert session.single is not None
    assert (session.single.id, session.answer_tokens) == (plan.pod.id, 25.0)
    pair.teller.observe(ResponseStored("resp_9", "single-4"), pair.now)
    await kit.until(
        lambda: pair.told.response_owner("resp_9", pair.now) == "single-4", "it is told"
    )
    pair.end()


@kit.on_loop
async def test_late_tokens_bring_a_second_chain() -> None:
    """A prompt that was routed by its bytes and is known by its tokens later: told by both."""
    pair = Pair(make_config(single=1))
    plan = ask(pair.teller, 6, pair.now)
    pair.do()
    pair.do(PromptTokens(plan.lease_id, "", b"", bytes(4 * 16 * 3)))
    assert pair.blocks() == {"single-0": 9}
    pair.do(Failed(plan.lease_id, "single", Failure.CANCELLED))
    assert pair.blocks() == {}
    pair.end()


@kit.on_loop
async def test_load_is_told_again_and_much_is_told_at_once() -> None:
    """Idle workers repeat themselves; a full box does not wait; after the stop all is silent."""
    pair = Pair(make_config(single=1))
    await kit.until(lambda: bool(pair.payloads), "it repeats itself", 5 * REPEAT_S)
    count = len(pair.payloads)
    for number in range(3):
        pair.teller.route(request_of_size(number), pair.now)
    pair.do()
    assert len(pair.payloads) == count + 2  # cut, and the rest
    for _ in range(FULL_LEASES + 1):
        serve(pair.teller, 1, pair.now)
    assert len(pair.payloads) == count + 3
    pair.end()
    count = len(pair.payloads)
    serve(pair.teller, 1, pair.now)
    await asyncio.sleep(2 * SYNC_S)
    assert len(pair.payloads) == count


def request_of_size(number: int) -> RouteRequest:
    """A prompt of very many blocks of token ids."""
    ids = bytes([number, 1, 2, 3]) * (16 * 20_000)
    return RouteRequest(request_id="r", prompt=ids, prompt_is_tokens=True, streamed=True)


@kit.on_loop
async def test_sizes_are_told() -> None:
    """What a pod counts of a prompt teaches the other one's estimates."""
    pair = Pair(make_config(single=1))
    before = pair.told._state.preparer.ratio("").value
    for _ in range(20):
        plan = ask(pair.teller, 64, pair.now)
        pair.do(Finished(plan.lease_id, 200, 8192, 0, 2))
    assert pair.told._state.preparer.ratio("").value < 0.5 * before
    pair.end()
