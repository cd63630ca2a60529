"""Faults that a mock pod is told to have: each does what it says, to as many as it says."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import pytest

import kit
from calinix.errors import BadRequest
from calinix.sim.mock_faults import (
    MAX_FAULTS,
    Fault,
    FaultKind,
    FaultSet,
    faults_from_json,
    faults_from_text,
)
from calinix.sim.mock_pod import MockPod
from calinix.sim.pod_model import PodFigures

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
STREAM = HELLO | {"stream": True}


def test_faults_as_text() -> None:
    """The command line's form: kinds, settings, several of them."""
    assert faults_from_text("status:status=429,count=2; slow:factor=2.5,forS=3;hang") == [
        Fault(kind="status", status=429, count=2),
        Fault(kind="slow", factor=2.5, for_s=3.0),
        Fault(kind="hang"),
    ]
    assert faults_from_text(" ; ") == []


@pytest.mark.parametrize("text", ["explode", "slow:factor=0", "status:status=200", "hang:x=1", ":"])
def test_faults_that_are_none(text: str) -> None:
    """Unknown kinds and settings, and values out of bounds, are refused."""
    with pytest.raises(BadRequest, match="not a fault"):
        faults_from_text(text)


def test_a_kind_that_is_none_is_told_with_those_that_are() -> None:
    """On the command line and as JSON; of another mistake the kinds are not told."""
    for as_json in (b"", b'{"kind":"foo"}', b'[{"kind":"hang"},{"kind":"foo"}]'):
        with pytest.raises(BadRequest) as caught:
            faults_from_json(as_json) if as_json else faults_from_text("foo")
        assert "'foo'" in caught.value.message
        assert caught.value.message.endswith(f"; there are {', '.join(get_args(FaultKind))}")
    with pytest.raises(BadRequest) as caught:
        faults_from_text("slow:factor=0")
    assert "there are" not in caught.value.message


def test_faults_as_json() -> None:
    """One or several; nonsense is refused."""
    one = Fault(kind="reset", chunks=3, everywhere=True)
    assert faults_from_json(b'{"kind":"reset","chunks":3,"everywhere":true}') == [one]
    assert faults_from_json(b'[{"kind":"hang"},{"kind":"refuse","forS":1}]')[1].for_s == 1
    with pytest.raises(BadRequest):
        faults_from_json(b'{"kind":"nope"}')


def test_counts_and_times_run_out() -> None:
    """A fault strikes its count and ends at its time; ended ones make room for others."""
    faults = FaultSet()
    faults.add(Fault(kind="status", count=1), 0.0)
    faults.add(Fault(kind="hang", for_s=5.0), 0.0)
    struck = [faults.strike(now, inference=True) for now in (1.0, 1.0, 5.0)]
    assert [fault.kind if fault else None for fault in struck] == ["status", "hang", None]
    faults.add(Fault(kind="slow", factor=2.0), 0.0)
    faults.add(Fault(kind="slow", factor=3.0, for_s=1.0), 0.0)
    assert (faults.slow_factor(0.5), faults.slow_factor(1.5)) == (6.0, 2.0)
    for _ in range(MAX_FAULTS):
        faults.add(Fault(kind="status", count=1), 9.0)
        faults.strike(9.0, inference=True)
    for _ in range(MAX_FAULTS - 1):
        faults.add(Fault(kind="hang"), 9.0)
    with pytest.raises(BadRequest):
        faults.add(Fault(kind="hang"), 9.0)


async def tell(pod: MockPod, **fault: Any) -> None:
    """POST /mock/faults."""
    assert (await kit.http(pod.port, "POST", "/mock/faults", fault)).status == 200


@pytest.mark.parametrize("status", [429, 500, 503])
@kit.on_loop
async def test_a_status_for_as_many_as_told(status: int) -> None:
    """Two requests get the status in the error shape, the third is served; probes are spared."""
    async with MockPod() as pod:
        await tell(pod, kind="status", status=status, count=2)
        assert (await kit.http(pod.port, "GET", "/health")).status == 200
        replies = [await kit.http(pod.port, "POST", CHAT, HELLO) for _ in range(3)]
        assert [reply.status for reply in replies] == [status, status, 200]
        assert replies[0].json()["error"]["code"] == status
        assert ("retry-after" in replies[0].headers) == (status != 500)


@kit.on_loop
async def test_everywhere_includes_probes() -> None:
    """A fault for everything makes the health probe fail, until it is cleared."""
    async with MockPod() as pod:
        await tell(pod, kind="status", status=500, everywhere=True)
        assert (await kit.http(pod.port, "GET", "/health")).status == 500
        listed = (await kit.http(pod.port, "GET", "/mock/faults")).json()["faults"]
        assert [fault["kind"] for fault in listed] == ["status"]
        await kit.http(pod.port, "DELETE", "/mock/faults")
        assert (await kit.http(pod.port, "GET", "/health")).status == 200


@pytest.mark.parametrize("body", [HELLO, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["hang", "hangAfterHeaders"])
@kit.on_loop
async def test_hanging(kind: str, body: dict[str, Any]) -> None:
    """No byte, or a head and no more; the client's leaving is noticed and no slot is taken."""
    async with MockPod() as pod:
        await tell(pod, kind=kind, count=1)
        exchange = await kit.Exchange.send(pod.port, kit.request_bytes("POST", CHAT, body))
        if kind == "hangAfterHeaders":
            await exchange.read_until(b"\r\n\r\n")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await exchange.read_until(b"{")
        assert (exchange.wire != b"") == (kind == "hangAfterHeaders")
        assert pod.model.running == 0
        await exchange.leave()
        await kit.until(lambda: pod.cancelled == 1, "the pod noticed")
        assert (await kit.http(pod.port, "POST", CHAT, HELLO)).status == 200


@pytest.mark.parametrize("chunks", [0, 1, 5])
@kit.on_loop
async def test_reset_after_some_events(chunks: int) -> None:
    """Exactly so many events arrive, then the connection breaks; the slot is free again."""
    async with MockPod(figures=PodFigures(token_delay_s=0.005)) as pod:
        await tell(pod, kind="reset", chunks=chunks, count=1)
        reply = await kit.http(pod.port, "POST", CHAT, STREAM)
        assert not reply.complete
        assert len(reply.events()) == chunks
        await kit.until(lambda: pod.model.running == 0, "the slot is free")
        assert (pod.served, pod.model.blocks.used) == (0, 0)
        assert (await kit.http(pod.port, "POST", CHAT, STREAM)).complete


@kit.on_loop
async def test_reset_inside_a_whole_body() -> None:
    """Not streamed: half of the body, short of its length, then the connection breaks."""
    async with MockPod() as pod:
        await tell(pod, kind="reset", chunks=1)
        reply = await kit.http(pod.port, "POST", CHAT, HELLO)
        assert reply.status == 200
        assert 0 < len(reply.body) < int(reply.headers["content-length"])
        assert not reply.complete
        embeddings = await kit.http(pod.port, "POST", "/v1/embeddings", {"input": "a"})
        assert embeddings.status == 0


@kit.on_loop
async def test_slow_stretches_time() -> None:
    """A factor of ten on a 20 ms prefill and 5 ms tokens."""
    async with MockPod(figures=PodFigures(delay_s=0.02, token_delay_s=0.005)) as pod:
        await tell(pod, kind="slow", factor=10)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await kit.http(pod.port, "POST", CHAT, HELLO | {"max_tokens": 5})
        assert 0.38 < loop.time() - begun < 10.0


@kit.on_loop
async def test_refusing_connections_for_a_while() -> None:
    """The listener closes, streams under way break, and later it is back with its cache."""
    async with MockPod(figures=PodFigures(token_delay_s=0.01)) as pod:
        long = kit.request_bytes("POST", CHAT, STREAM | {"max_tokens": 5000})
        exchange = await kit.Exchange.send(pod.port, long)
        await exchange.read_until(b"data:")
        await tell(pod, kind="refuse", forS=0.3)
        assert not (await exchange.reply()).complete

        async def refused() -> bool:
            try:
                await kit.http(pod.port, "GET", "/health")
            except ConnectionRefusedError:
                return True
            return False

        async def open_again() -> bool:
            return not await refused()

        await kit.until(refused, "nobody listens")
        await kit.until(open_again, "the pod listens again")
        assert (await kit.http(pod.port, "POST", CHAT, HELLO)).status == 200
        assert pod.cancelled == 1


@kit.on_loop
async def test_refusing_until_it_is_cleared() -> None:
    """In process a closed listener is opened again by clear_faults."""
    async with MockPod() as pod:
        pod.add_faults([Fault(kind="refuse")])

        async def refused() -> bool:
            try:
                await kit.http(pod.port, "GET", "/health")
            except ConnectionRefusedError:
                return True
            return False

        await kit.until(refused, "nobody listens")
        pod.clear_faults()

        async def healthy() -> bool:
            return not await refused()

        await kit.until(healthy, "the pod listens again")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/mock/faults", {"kind": "x"}), ("POST", "/mock/kv/redeem", {"a": 1})],
)
@kit.on_loop
async def test_nonsense_is_refused(method: str, path: str, body: dict[str, Any]) -> None:
    """The mock's own paths check what they are given; unknown ones do not exist."""
    async with MockPod() as pod:
        assert (await kit.http(pod.port, method, path, body)).status == 400
        assert (await kit.http(pod.port, "GET", "/mock/nothing")).status == 404
