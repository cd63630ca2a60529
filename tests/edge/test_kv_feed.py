"""The feed over real sockets: ranks, many pods, turns of the loop, places, and who is absent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

import kit
from calinix.edge import kv_sockets
from calinix.edge.http_client import PodClient
from calinix.edge.kv_feed import SILENT_S
from calinix.edge.kv_lines import AT_ONCE, Places, ReplayLine
from calinix.edge.kv_settings import at_rank, base_model, model_in
from calinix.edge.kv_sockets import BURST, Inlet, Sockets
from calinix.engines.kv_events import Message, replay_end
from calinix.engines.kv_events import message as frames_of
from calinix.errors import ConfigError
from feedkit import (
    Clock,
    Source,
    config_of,
    feeding,
    listens,
    pod_of,
    prompt,
    sources,
    two_free_ports,
)
from kvkit import MODEL, Engine, believed


@kit.on_loop
async def test_forty_pods_at_once() -> None:
    """Each pod's events reach its own view, those from before the start included."""
    with sources(40) as found:
        for number, source in enumerate(found):
            source.run(number)
        config = config_of(*[listens(source, f"p{n}") for n, source in enumerate(found)])
        async with feeding(config) as (feed, router):
            await kit.until(
                lambda: all(view.stored for view in feed.views().values()), "all are heard"
            )
            for number, source in enumerate(found):
                source.run(100 + number)
            await kit.until(
                lambda: all(view.batches == [2] for view in feed.views().values()), "and again"
            )
            for number in range(40):
                held = [believed(router, f"p{n}", prompt(number)) for n in range(40)]
                assert held == [2 * (n == number) for n in range(40)]


@kit.on_loop
async def test_256_pods_at_one_endpoint() -> None:
    """One bound socket hears as many pods as there may be, and tells them apart by topic."""
    count = 256
    engines = [Engine(1000) for _ in range(count)]
    pods = [pod_of(f"p{n}") for n in range(count)]
    async with feeding(config_of(*pods, bind="tcp://127.0.0.1:*")) as (feed, router):
        publisher = Sockets(asyncio.get_running_loop()).publish(feed.bound[0])

        def all_are_heard() -> bool:
            for number, engine in enumerate(engines):
                engine.run(prompt(number))
                if (message := engine.flush()) is not None:
                    topic = b"kv@p%d@%b" % (number, MODEL.encode())
                    publisher.send(frames_of(topic, message.sequence, message.payload))
                engine.reset()
            return all(view.stored for view in feed.views().values())

        await kit.until(all_are_heard, "all are heard")
        for number in (0, 1, 10, 100, 255):
            held = [believed(router, f"p{n}", prompt(number)) for n in range(count)]
            assert held == [2 * (n == number) for n in range(count)]
        assert feed.strangers == 0
        publisher.close()


@kit.on_loop
async def test_a_pod_that_comes_later_may_have_more_ranks() -> None:
    """The bound endpoint grows with the ranks of pods that are added while it runs, for all."""
    port = two_free_ports()
    loop = asyncio.get_running_loop()
    config = config_of(pod_of("p"), bind=f"tcp://127.0.0.1:{port}")
    async with feeding(config) as (feed, _):
        assert len(feed.bound) == 1
        for pod in (pod_of("q", ranks=2), pod_of("r")):
            feed.add(pod, PodClient(pod.url, loop, connect_timeout_s=1.0))
        assert feed.bound == [f"tcp://127.0.0.1:{port + rank}" for rank in range(2)]
        publisher = Sockets(loop).publish(feed.bound[1])
        engine = Engine(1000, rank=1)

        def is_heard() -> bool:
            engine.run(prompt(7))
            if (message := engine.flush()) is not None:
                topic = b"kv@q@%b" % MODEL.encode()
                publisher.send(frames_of(topic, message.sequence, message.payload))
            engine.reset()
            return feed.views()["q"].batches[1] > 0

        await kit.until(is_heard, "its second rank is heard")
        assert feed.strangers == 0
        publisher.close()


@kit.on_loop
async def test_a_port_that_a_further_rank_cannot_have() -> None:
    """That is said, and the pods that are there already are listened to as before."""
    port = two_free_ports()
    config = config_of(pod_of("p"), bind=f"tcp://127.0.0.1:{port}")
    async with feeding(config) as (feed, _):
        with socket.socket() as taken, capture_logs() as logs:
            taken.bind(("127.0.0.1", port + 1))
            taken.listen()
            pod = pod_of("q", ranks=2)
            client = PodClient(pod.url, asyncio.get_running_loop(), connect_timeout_s=1.0)
            feed.add(pod, client)
        said = [(line["event"], line["pod"]) for line in logs]
        assert ("kv_events_off", "q") in said
        assert len(feed.bound) == 1


@kit.on_loop
async def test_ranks_count_up_from_the_ports() -> None:
    """Each data parallel rank is listened to, and asked, at the endpoint's port plus its number."""
    sockets = Sockets(asyncio.get_running_loop())
    live, replay = two_free_ports(), two_free_ports()
    found = [
        Source(sockets, Engine(100, rank=rank), live + rank, replay + rank) for rank in range(2)
    ]
    found[0].run(1)
    found[1].run(2)
    pod = pod_of("p", endpoint=f"tcp://127.0.0.1:{live}", ranks=2,
                 replay_endpoint=f"tcp://127.0.0.1:{replay}")  # fmt: skip
    async with feeding(config_of(pod)) as (feed, router):
        await kit.until(lambda: feed.views()["p"].batches == [1, 1], "both ranks are heard")
        assert [believed(router, "p", prompt(kind)) for kind in (1, 2)] == [2, 2]
        found[1].engine.reset()
        found[1].run(3)
        await kit.until(lambda: feed.views()["p"].batches == [1, 2], "the second goes on")
        assert [believed(router, "p", prompt(kind)) for kind in (1, 2, 3)] == [2, 0, 2]
    for source in found:
        source.close()


@kit.on_loop
async def test_a_publisher_that_does_not_answer() -> None:
    """Replays without an answer hold nobody up: live events count, and other pods' replays come."""
    with sources(AT_ONCE + 4) as found:
        for source in found[:-1]:
            source.deaf = True
        for number, source in enumerate(found):
            source.run(number)
        config = config_of(*[listens(source, f"p{n}") for n, source in enumerate(found)])
        clock = Clock()
        async with feeding(config, clock) as (feed, _):
            last = f"p{len(found) - 1}"
            await kit.until(lambda: sum(one.requests for one in found) >= AT_ONCE, "asked")
            clock.more_s += 2.5
            await kit.until(lambda: sum(one.requests for one in found) > AT_ONCE, "given up")
            clock.more_s += 2.5
            await kit.until(lambda: feed.views()[last].source == "events", "the last one's turn")
            found[0].run(500)
            await kit.until(lambda: feed.views()["p0"].batches == [2], "live events count")
            assert feed.views()["p0"].source == "gapped"


@kit.on_loop
async def test_people_are_told_once_that_nothing_comes() -> None:
    """A pod at a wrong endpoint stands on history, and the log says so one time."""
    with capture_logs() as said:
        clock = Clock()
        async with feeding(config_of(pod_of("p", endpoint="tcp://127.0.0.1:9")), clock) as (
            feed,
            _,
        ):
            for _ in range(3):
                clock.more_s += SILENT_S + 1
                await asyncio.sleep(0.15)
            await kit.until(lambda: bool(said), "a warning")
            assert feed.views()["p"].source == "history"
    assert [line["event"] for line in said] == ["kv_events_missing"]


@kit.on_loop
async def test_an_address_that_is_taken() -> None:
    """What cannot be bound is an error with the key's name; a pod's bad endpoint is only logged."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        bind = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"kvEvents: cannot bind tcp://127.0.0.1:\d+"):
            async with feeding(config_of(pod_of("p"), bind=bind)):
                pass
    with capture_logs() as said:
        async with feeding(config_of(pod_of("p", endpoint="tcp://host!:5557"))) as (feed, _):
            assert feed.views() == {}
    assert [line["event"] for line in said] == ["kv_events_off"]


@kit.on_loop
async def test_without_pyzmq() -> None:
    """Where pyzmq is not installed, a gateway that needs it says which extra brings it."""
    patch = pytest.MonkeyPatch()
    with patch.context() as inside:
        inside.setattr(kv_sockets, "zmq", None)
        for config in (
            config_of(pod_of("p", endpoint="tcp://127.0.0.1:9")),
            config_of(pod_of("p"), bind="tcp://127.0.0.1:0"),
        ):
            with pytest.raises(ConfigError, match=r"calinix\[events\]"):
                async with feeding(config):
                    pass
        async with feeding(config_of(pod_of("p"))) as (feed, _):
            assert feed.views() == {}


@kit.on_loop
async def test_a_turn_of_the_loop_is_shared() -> None:
    """However much has come, one turn takes a bounded part of it, a burst from each socket."""
    loop = asyncio.get_running_loop()
    ticks = iter(range(10**9))
    sockets = Sockets(loop, clock=lambda: next(ticks) * 1e-6)
    publishers = [sockets.publish("tcp://127.0.0.1:*") for _ in range(2)]
    taken: list[int] = []
    turns: list[int] = []
    inlets = [
        sockets.subscribe(
            publisher.endpoint,
            (b"",),
            lambda _, number=number: taken.append(number),  # type: ignore[misc]
        )
        for number, publisher in enumerate(publishers)
    ]

    async def connected() -> bool:
        for publisher in publishers:
            publisher.send([b"hello"])
        return set(taken) == {0, 1}

    await kit.until(connected, "both are connected")
    await asyncio.sleep(0.05)
    for inlet in inlets:  # what comes from now on waits in the sockets
        loop.remove_reader(inlet.socket.fileno())
    for _ in range(500):
        for publisher in publishers:
            publisher.send([b"x"])
    await asyncio.sleep(0.2)
    taken.clear()
    for inlet in inlets:
        sockets.wake(inlet)
    while len(taken) < 1000:
        before = len(taken)
        await asyncio.sleep(0)
        turns.append(len(taken) - before)
    assert max(turns) <= 100
    assert len(set(taken[: 2 * BURST])) == 2
    for inlet in inlets:
        sockets.close(inlet)
    for publisher in publishers:
        publisher.close()


class Wire:
    """What a ReplayLine needs of Sockets."""

    def __init__(self, *, connected: bool = True) -> None:
        self.connected = connected
        self.sent = 0

    def dial(self, endpoint: str, deliver: Callable[[list[bytes]], None]) -> object:
        """A connection."""
        return object()

    def can_send(self, inlet: Inlet) -> bool:
        """Whether it is there."""
        return self.connected

    def send(self, inlet: Inlet, frames: list[bytes]) -> bool:
        """Counts."""
        self.sent += 1
        return True

    def close(self, inlet: Inlet) -> None:
        """Nothing to do."""


def test_places_are_bounded_and_given_back() -> None:
    """Never are more replays under way than there are places; an ended one lets the next begin."""
    wire: Any = Wire()
    places = Places(2)
    answers: list[object] = []
    lines = [ReplayLine(wire, places, "tcp://x:1", answers.append) for _ in range(5)]
    assert all(line.ask(0) for line in lines)
    assert wire.sent == 2
    assert [line.waits() for line in lines] == [False, False, True, True, True]
    lines[0]._receive(replay_end(with_topic=True))
    assert answers == ["end"]
    assert wire.sent == 3
    lines[3].hang_up()
    lines[1].hang_up()
    assert wire.sent == 4
    for line in lines:
        line.hang_up()
    assert lines[0].ask(0)
    assert lines[1].ask(0)
    assert wire.sent == 6
    absent: Any = Wire(connected=False)
    lost = ReplayLine(absent, places, "tcp://x:1", answers.append)
    assert lost.ask(0)
    assert not lost.waits()
    assert absent.sent == 0
    assert not ReplayLine(wire, places, None, answers.append).ask(0)


def test_names_and_addresses() -> None:
    """Models in topics and lists, and the endpoints of ranks."""
    assert model_in(b"kv@pod@org/model@v2") == "org/model@v2"
    assert model_in(b"kv@pod") == model_in(b"") == ""
    assert at_rank("tcp://[::1]:5557", 3) == "tcp://[::1]:5560"
    assert at_rank("ipc://x", 0) == "ipc://x"
    cards = b'{"data":[{"id":"poet","parent":"base"},{"id":"base","root":"x","parent":null}]}'
    assert base_model(cards) == "base"
    assert base_model(b"{}") is None
    assert base_model(b'{"data":[{"id":1}]}') is None
    assert base_model(b"\xff") is None


def test_a_message_of_no_pod_is_counted() -> None:
    """Strangers at the bound endpoint, and frames that are no message, change nothing."""

    async def main() -> None:
        async with feeding(config_of(pod_of("p"), bind="tcp://127.0.0.1:0")) as (feed, _):
            assert len(feed.bound) == 1
            feed._bound_message(0, [b"kv@q@m", bytes(8), b""])
            feed._bound_message(0, [b"kv@p@m"])
            for number in range(5000):
                feed._bound_message(0, [b"x%d" % number, bytes(8), b""])
            assert feed.strangers == 5002
            assert len(feed._topics) <= 4096
            assert feed.views()["p"].unreadable == 0

    kit.run(main())


def test_a_message_at_a_pods_own_endpoint_needs_no_topic() -> None:
    """Whatever its topic, what comes there is the pod's; what is no message is counted as such."""

    async def main() -> None:
        async with feeding(config_of(pod_of("p", endpoint="tcp://127.0.0.1:9"))) as (feed, router):
            fed = feed._fed["p"]
            engine = Engine(10)
            engine.run(prompt(1))
            message = engine.flush()
            assert isinstance(message, Message)
            feed._message(fed, 0, frames_of(b"kv@other@m", 0, message.payload))
            feed._message(fed, 0, [b"nonsense"])
            assert believed(router, "p", prompt(1)) == 2
            assert feed.views()["p"].unreadable == 1

    kit.run(main())
