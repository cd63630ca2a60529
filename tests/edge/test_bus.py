"""The bus between workers: frames, however they are cut, and ends that do not wait."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

import kit
from calinix.core.events import PeerFacts, PodFacts, ReplicaFacts, RoleFacts
from calinix.edge import bus
from calinix.edge.bus import BusError, Frames, Kind, Link, Report

REPORT = Report(
    "worker-0.7",
    ("pod-1", "", "pod-3"),
    (PodFacts("pod-1", 2.0, 30.0, 400.0, 5000.0, 0.5),),
    (RoleFacts("single", 9.0, 1000.0),),
    b"\x06\x02\x00",
)
GOLDEN = bytes.fromhex(
    "95 aa776f726b65722d302e37 93a5706f642d31a0a5706f642d33"
    " 9196a5706f642d31cb4000000000000000cb403e000000000000cb4079000000000000"
    "cb40b3880000000000cb3fe0000000000000"
    " 9193a673696e676c65cb4022000000000000cb408f400000000000 c403060200".replace(" ", "")
)


def test_golden_bytes() -> None:
    """A report and every frame have these bytes."""
    assert bus.packed(REPORT) == GOLDEN
    facts, peer = bus.report_of(GOLDEN)
    assert facts == ReplicaFacts(REPORT.replica, REPORT.pods, REPORT.roles, sync_s=0.02)
    assert peer == PeerFacts(REPORT.replica, REPORT.names, REPORT.records)
    assert bus.packed(bus.Hello(3, 77)) == bytes.fromhex("92034d")
    assert bus.hello_of(bytes.fromhex("92034d")) == bus.Hello(3, 77)
    assert bus.packed(bus.Drained("p", True)) == bytes.fromhex("92a170c3")
    assert bus.drained_of(bytes.fromhex("92a170c3")) == bus.Drained("p", True)
    assert bus.frame(Kind.REPORT, b"ab") == bytes.fromhex("0200000001036162")
    assert bus.frame(Kind.ASK) == bytes.fromhex("000000000105")
    assert [kind.value for kind in Kind] == list(range(1, 9))


def test_frames_may_be_cut_anywhere() -> None:
    """The same frames come out, byte by byte or all at once."""
    wire = bus.frame(Kind.GONE, b"x" * 300) + bus.frame(Kind.ASK) + bus.frame(Kind.STOP, b"!")
    want = [(Kind.GONE, b"x" * 300), (Kind.ASK, b""), (Kind.STOP, b"!")]
    for size in (1, 7, len(wire)):
        frames, found = Frames(), []
        for at in range(0, len(wire), size):
            found += frames.feed(wire[at : at + size])
        assert found == want


def test_another_language_is_refused() -> None:
    """Another version, an unknown kind, a frame beyond all bounds, a payload of something else."""
    for head in ("00000000 02 03", "00000000 01 00", "00000000 01 09", "ffffffff 01 03"):
        with pytest.raises(BusError):
            Frames().feed(bytes.fromhex(head.replace(" ", "")))
    for read in (bus.report_of, bus.hello_of, bus.drained_of):
        with pytest.raises(BusError):
            read(b"\x91\x01")


class End:
    """One end, and what it heard."""

    def __init__(self) -> None:
        self.frames: list[tuple[Kind, bytes]] = []
        self.lost: list[str] = []
        self.link = Link(
            lambda _, kind, payload: self.frames.append((kind, payload)),
            lambda _, why: self.lost.append(why),
        )


async def pair() -> tuple[End, End]:
    """Two ends of a unix stream."""
    loop = asyncio.get_running_loop()
    one, other = End(), End()
    left, right = socket.socketpair()
    await loop.create_unix_connection(lambda: one.link, sock=left)
    await loop.create_unix_connection(lambda: other.link, sock=right)
    return one, other


@kit.on_loop
async def test_both_ends_hear_each_other_and_of_an_end() -> None:
    """Frames go both ways; the end of one is told the other; nothing is sent after it."""
    one, other = await pair()
    one.link.send(Kind.READY)
    other.link.send(Kind.REPORT, b"r")
    await kit.until(lambda: bool(one.frames and other.frames), "both have heard")
    assert (one.frames, other.frames) == ([(Kind.REPORT, b"r")], [(Kind.READY, b"")])
    one.link.close()
    await kit.until(lambda: bool(one.lost and other.lost), "both are told")
    other.link.send(Kind.READY)


@kit.on_loop
async def test_nonsense_ends_the_stream() -> None:
    """A version that is not spoken here: closed, and the reason is told."""
    one, other = await pair()
    transport = one.link._transport
    assert transport is not None
    transport.write(b"\x00\x00\x00\x00\x63\x01")
    await kit.until(lambda: bool(other.lost), "it is closed")
    assert "version 99" in other.lost[0]
    await kit.until(lambda: bool(one.lost), "the other end too")


@kit.on_loop
async def test_nobody_waits_for_a_slow_reader(tmp_path: Path) -> None:
    """Reports to one who does not read are dropped at a bound; orders still wait for it."""
    loop = asyncio.get_running_loop()
    mine, theirs = socket.socketpair()
    end = End()
    await loop.create_unix_connection(lambda: end.link, sock=mine)
    payload = os.urandom(64 * 1024)
    for _ in range(100):
        end.link.send(Kind.REPORT, payload)
    end.link.send(Kind.STOP)
    transport = end.link._transport
    assert transport is not None
    assert transport.get_write_buffer_size() < bus.MAX_BEHIND_BYTES + 2 * len(payload)
    assert end.link.dropped > 50
    theirs.setblocking(False)
    frames = Frames()
    heard: list[tuple[Kind, bytes]] = []
    while not heard or heard[-1][0] is not Kind.STOP:
        heard += frames.feed(await loop.sock_recv(theirs, 1 << 20))
    assert len(heard) == 101 - end.link.dropped
    theirs.close()
    await kit.until(lambda: bool(end.lost), "it hears of the end")
