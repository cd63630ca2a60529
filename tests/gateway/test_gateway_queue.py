"""The wait queue over real sockets: who finds every pod full waits, in order and not for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import kit
from calinix.app import App
from calinix.sim.pod_model import PodFigures
from fleets import fleet_of, gateway_of, merged
from gatewaykit import (
    CHAT,
    KEEP,
    Connection,
    RawPod,
    Served,
    admin,
    answer,
    body_of,
    chat_body,
    config_of,
    metrics,
    outcome,
    raw_pod,
    total,
    whole_answer,
)
from streams import ROUND_ROBIN


class Gate:
    """A script that answers one request for each `open`, in the order that they came."""

    def __init__(self) -> None:
        self._opened = asyncio.Semaphore(0)

    async def script(self, served: Served) -> None:
        """Answers when it is let."""
        await self._opened.acquire()
        await whole_answer(served)

    def open(self, count: int = 1) -> None:
        """Lets so many be answered."""
        for _ in range(count):
            self._opened.release()


def queue(max_requests: int = 100, timeout_ms: int = 5_000) -> dict[str, Any]:
    """The keys of the wait queue."""
    return {"gateway": {"waiting": {"maxRequests": max_requests, "timeoutMs": timeout_ms}}}


async def send(port: int, text: str, model: str = "mock", **headers: str) -> kit.Exchange:
    """A chat on its way; its id is its text."""
    body = chat_body(text) | {"model": model}
    lines = {"x-request-id": text, **headers}
    return await kit.Exchange.send(port, kit.request_bytes("POST", CHAT, body, lines))


async def waiting(app: App, count: int) -> None:
    """So many wait."""
    await kit.until(lambda: len(app.gateway.waiting) == count, f"{count} wait")


def one_at_a_time(pod: RawPod, **more: object) -> dict[str, Any]:
    """A pod that is full with one request."""
    return {"url": pod.url, "maxConns": 1, **more}


@kit.on_loop
async def test_full_pods_are_waited_for_in_order() -> None:
    """A full pod gets no request; as each ends the longest waiting goes ahead."""
    gate = Gate()
    async with (
        raw_pod(gate.script) as pod,
        gateway_of(config_of(queue(), p=one_at_a_time(pod))) as app,
    ):
        sent = []
        for number in range(6):
            sent.append(await send(app.server.port, f"r-{number}"))
            await kit.until(lambda n=number: len(app.gateway.flights) == n + 1, "it is in")
        assert len(app.gateway.waiting) == 5
        state = await admin(app, "/admin/state")
        assert (state["inflight"], state["waiting"], state["openLeases"]) == (6, 5, 1)
        assert total(await metrics(app), "calinix_waiting_requests") == 5
        for number in range(6):
            await kit.until(lambda n=number: len(pod.requests) == n + 1, "the next is asked")
            assert f'"r-{number}"'.encode() in body_of(pod.requests[-1])
            gate.open()
            assert (await sent[number].reply()).status == 200


@kit.on_loop
async def test_a_wait_has_an_end() -> None:
    """After the deadline: 429 with Retry-After; the pod was never asked, and no lease is open."""
    gate = Gate()
    async with (
        raw_pod(gate.script) as pod,
        gateway_of(config_of(queue(timeout_ms=200), p=one_at_a_time(pod))) as app,
    ):
        first = await send(app.server.port, "first")
        await kit.until(lambda: bool(pod.requests), "the pod is asked")
        loop = asyncio.get_running_loop()
        begin = loop.time()
        reply = await (await send(app.server.port, "late")).reply()
        assert 0.19 < loop.time() - begin < 1.0
        assert reply.status == 429
        assert reply.headers["retry-after"] == "1"
        assert reply.headers["x-request-id"] == "late"
        assert reply.json()["error"]["type"] == "rate_limit_error"
        gate.open()
        assert (await first.reply()).status == 200
        assert len(pod.requests) == 1


@pytest.mark.parametrize("bound", [0, 2])
@kit.on_loop
async def test_the_queue_has_a_bound(bound: int) -> None:
    """One more than may wait is refused at once; 0: nobody waits."""
    gate = Gate()
    async with (
        raw_pod(gate.script) as pod,
        gateway_of(config_of(queue(bound), p=one_at_a_time(pod))) as app,
    ):
        sent = [await send(app.server.port, f"r-{number}") for number in range(1 + bound)]
        await waiting(app, bound)
        await kit.until(lambda: bool(pod.requests), "the pod is asked")
        reply = await (await send(app.server.port, "one too many")).reply()
        assert reply.status == 429
        assert reply.json()["error"]["code"] == "full"
        gate.open(1 + bound)
        assert [(await exchange.reply()).status for exchange in sent] == [200] * (1 + bound)


@kit.on_loop
async def test_nobody_waits_behind_another_model() -> None:
    """Thirty wait for a full pod; one that waits for another model's pod goes when that is free."""
    gate_a, gate_b = Gate(), Gate()
    async with raw_pod(gate_a.script) as a, raw_pod(gate_b.script) as b:
        config = config_of(
            queue(), a=one_at_a_time(a, model="alpha"), b=one_at_a_time(b, model="beta")
        )
        async with gateway_of(config) as app:
            port = app.server.port
            alphas = [await send(port, f"a-{number}", "alpha") for number in range(31)]
            await waiting(app, 30)
            first, second = [await send(port, f"b-{number}", "beta") for number in range(2)]
            await waiting(app, 31)
            gate_b.open()
            assert (await first.reply()).status == 200
            await kit.until(lambda: len(b.requests) == 2, "the second of beta is asked")
            gate_b.open()
            assert (await second.reply()).status == 200
            assert len(a.requests) == 1
            gate_a.open(31)
            assert {(await exchange.reply()).status for exchange in alphas} == {200}


@kit.on_loop
async def test_nobody_waits_behind_a_pinned_request() -> None:
    """A follow-up that only one full pod can answer holds up nobody that others can serve."""
    gate, other = Gate(), Gate()

    async def stored(served: Served) -> None:
        if b'"previous_response_id"' not in served.request and b"Make" in served.request:
            await served.say(answer(b'{"id":"resp_1","output":[]}'))
        else:
            await gate.script(served)

    async with raw_pod(stored) as a, raw_pod(other.script) as b:
        config = config_of(queue(), a=one_at_a_time(a), b=one_at_a_time(b))
        async with gateway_of(config) as app:
            port = app.server.port
            made = await kit.http(port, "POST", "/v1/responses", {"model": "mock", "input": "Make"})
            assert made.headers["x-calinix-target-pod-id"] == "a"
            follow_up = {"model": "mock", "input": "x", "previous_response_id": "resp_1"}
            data = kit.request_bytes("POST", "/v1/responses", follow_up)
            follow_ups = [await kit.Exchange.send(port, data) for _ in range(3)]
            await waiting(app, 2)
            chats = [await send(port, f"r-{number}") for number in range(2)]
            await waiting(app, 3)
            other.open()
            assert (await chats[0].reply()).headers["x-calinix-target-pod-id"] == "b"
            await kit.until(lambda: len(b.requests) == 2, "the next chat is asked")
            other.open()
            assert (await chats[1].reply()).headers["x-calinix-target-pod-id"] == "b"
            gate.open(3)
            for exchange in follow_ups:
                assert (await exchange.reply()).headers["x-calinix-target-pod-id"] == "a"


@kit.on_loop
async def test_a_client_that_leaves_the_queue() -> None:
    """Its place goes to the next, it is never sent to a pod, and it is counted as gone."""
    gate = Gate()
    async with (
        raw_pod(gate.script) as pod,
        gateway_of(config_of(queue(), p=one_at_a_time(pod))) as app,
    ):
        first = await send(app.server.port, "first")
        await kit.until(lambda: bool(pod.requests), "the pod is asked")
        leaving = await send(app.server.port, "leaving")
        await waiting(app, 1)
        staying = await send(app.server.port, "staying")
        await waiting(app, 2)
        await leaving.leave()
        await waiting(app, 1)
        gate.open(2)
        assert (await first.reply()).status == 200
        assert (await staying.reply()).status == 200
        assert not any(b"leaving" in request for request in pod.requests)
        samples = await metrics(app)
        assert total(samples, "calinix_client_disconnects_total") == 1
        assert total(samples, "calinix_requests_total", status="499") == 1


@kit.on_loop
async def test_without_a_usable_pod_nobody_waits() -> None:
    """Full is waited for, dead is not: 503 at once, also for those that waited before."""
    gate = Gate()
    health = {"health": {"intervalMs": 20, "unhealthyThreshold": 1}}
    async with (
        raw_pod(gate.script) as pod,
        gateway_of(config_of(queue() | health, p=one_at_a_time(pod))) as app,
    ):
        first = await send(app.server.port, "first")
        await kit.until(lambda: bool(pod.requests), "the pod is asked")
        second = await send(app.server.port, "second")
        await waiting(app, 1)
        pod.healthy = False
        reply = await second.reply()
        assert reply.status == 503
        assert reply.json()["error"]["code"] == "no_pod"
        assert reply.headers["retry-after"] == "1"
        assert (await (await send(app.server.port, "third")).reply()).status == 503
        gate.open()
        assert (await first.reply()).status == 200


@kit.on_loop
async def test_a_pipelined_request_finds_the_place_of_the_one_before() -> None:
    """A place is free before the answer is written: the same client's next request gets it."""
    async with raw_pod() as pod, gateway_of(config_of(queue(0), p=one_at_a_time(pod))) as app:
        data = b"".join(
            kit.request_bytes("POST", CHAT, chat_body(f"r-{number}"), KEEP) for number in range(8)
        )
        client = await Connection.send(app.server.port, data)
        assert [(await client.next_reply()).status for _ in range(8)] == [200] * 8
        await client.leave()
        assert len(pod.requests) == 8


@kit.on_loop
async def test_many_wait_for_few_places() -> None:
    """Forty requests for four places: all are served, and no pod ever has more than its own."""
    async with fleet_of(single=2, figures=PodFigures(delay_s=0.005, parallel=2)) as fleet:
        config = fleet.config(merged(ROUND_ROBIN, queue()))
        for entry in config["upstreams"]["single"]["pods"]:
            entry["maxConns"] = 2
        async with gateway_of(config) as app:
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, *(pod.inflight for pod in app.router.pods()))
                    await asyncio.sleep(0)

            watcher = asyncio.ensure_future(watch())
            port = app.server.port
            sent = await asyncio.gather(*(send(port, f"r-{number}") for number in range(40)))
            replies = [await exchange.reply() for exchange in sent]
            watcher.cancel()
            assert [reply.status for reply in replies] == [200] * 40
            assert most == 2
            assert (await outcome(app, "r-39"))["status"] == 200
