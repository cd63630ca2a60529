"""The innermost steps of the bytes path: both forms do the same, and lose no byte."""

from __future__ import annotations

import asyncio
import functools
import socket
from typing import Any, cast

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from calinix.edge import bytes_path, fast
from calinix.edge.http_wire import frame_chunk

bodies = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5)
framing = st.lists(
    st.sampled_from([b"5\r\n", b"hello", b"\r\n", b"0\r\n\r\n", b"A", b"5;x\r\n", b"00000005\r\n"]),
    max_size=8,
).map(b"".join)


@pytest.mark.parametrize("form", [fast, bytes_path])
@given(bodies)
def test_whole_chunks_are_read(form: Any, parts: list[bytes]) -> None:
    """The bodies of whole chunks come back joined."""
    data = b"".join(map(frame_chunk, parts))
    assert form.whole_chunks(data) == b"".join(parts)


@pytest.mark.parametrize("form", [fast, bytes_path])
@given(bodies, st.data())
def test_a_chunk_cut_short_is_left_to_the_parser(
    form: Any, parts: list[bytes], data: st.DataObject
) -> None:
    """No prefix that ends inside of a chunk is taken for whole chunks."""
    framed = [frame_chunk(part) for part in parts]
    whole = b"".join(framed)
    ends = {sum(map(len, framed[:count])) for count in range(len(framed) + 1)}
    cut = data.draw(st.integers(0, len(whole)))
    found = form.whole_chunks(whole[:cut])
    assert (found is not None) == (cut in ends and cut > 0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"0\r\n\r\n",
        b"1\r\na\r\n0\r\n\r\n",
        b"1;x=y\r\na\r\n",
        b"1\na\n",
        b"1\r\nab\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b" 1\r\na\r\n",
        b"000000001\r\na\r\n",
        b"ffffffff\r\na\r\n",
        b"\r\n",
        b"1\r",
        b"1",
    ],
)
@pytest.mark.parametrize("form", [fast, bytes_path])
def test_what_is_not_plain_chunks_is_left_to_the_parser(form: Any, data: bytes) -> None:
    """Extensions, the last chunk, odd or long sizes and parts of chunks are not taken."""
    assert form.whole_chunks(data) is None


@given(framing | st.binary(max_size=30))
def test_both_forms_agree_on_any_bytes(data: bytes) -> None:
    """Whatever the bytes are, both forms give the same body or none."""
    assert fast.whole_chunks(data) == bytes_path.whole_chunks(data)


@given(st.lists(st.sampled_from([b"data:", b"\n", b"data", b" x", b"\r\n", b":"])).map(b"".join))
def test_both_forms_count_the_same_events(data: bytes) -> None:
    """Events are the lines that begin with `data:`."""
    expected = sum(line.startswith(b"data:") for line in data.split(b"\n"))
    assert fast.count_events(data) == bytes_path.count_events(data) == expected


class _Kept:
    """In the place of a transport: keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.written.append(data)


texts = st.lists(st.sampled_from([b"data:", b"data: x\n\n", b"\n", b"da", b"ta:", b": hi\n"]))
reads = st.lists(
    st.lists(texts.map(b"".join).filter(bool).map(frame_chunk), min_size=1, max_size=3).map(
        b"".join
    )
    | framing
    | st.binary(max_size=20),
    max_size=6,
)


@pytest.mark.parametrize("form", [fast, bytes_path])
@given(reads)
def test_a_relay_passes_whole_chunks_on_and_keeps_count(form: Any, parts: list[bytes]) -> None:
    """Reads of whole chunks go out as they came, and what is told of them is what they hold."""
    transport = _Kept()
    loop: Any = asyncio.new_event_loop()
    relay = form.Relay(form.Outlet(transport, loop), iter(range(1, 100)).__next__)
    loop.close()
    passed = [data for data in parts if relay.pass_on(data)]
    found = [bytes_path.whole_chunks(data) for data in parts]
    bodies = [body for body in found if body is not None]
    assert passed == transport.written == [d for d, b in zip(parts, found, strict=True) if b]
    assert relay.events == sum(map(bytes_path.count_events, bodies))
    assert relay.body_bytes == sum(map(len, bodies))
    assert relay.last_s == len(bodies)
    assert relay.take() == b"".join(bodies)
    assert (relay.events, relay.body_bytes, relay.last_s) == (0, 0, 0.0)
    assert relay.take() == b""


@pytest.mark.parametrize("form", [fast, bytes_path])
@given(st.lists(st.binary(max_size=3).map(lambda piece: piece * 300), max_size=40))
def test_the_end_of_an_answer_is_kept_however_it_is_cut(form: Any, pieces: list[bytes]) -> None:
    """Two pieces hold the last SHORT_BYTES at least, and little more than the last two reads."""
    whole, kept = b"".join(pieces), b"".join(functools.reduce(form.with_end, pieces, (b"", b"")))
    assert whole.endswith(kept)
    assert len(kept) >= min(len(whole), bytes_path.SHORT_BYTES)
    assert len(kept) < 2 * (bytes_path.SHORT_BYTES + 900)


@pytest.mark.parametrize("form", [fast, bytes_path])
@given(st.lists(st.integers(1, 700) | st.integers(1, 3000), max_size=30))
def test_a_relay_keeps_the_end_of_what_it_passed_on(form: Any, sizes: list[int]) -> None:
    """Whole reads, SHORT_BYTES at least with their framing, and not much more; then nothing."""
    loop: Any = asyncio.new_event_loop()
    relay = form.Relay(form.Outlet(_Kept(), loop), float)
    loop.close()
    bodies = [bytes([65 + number % 26]) * size for number, size in enumerate(sizes)]
    framed = [frame_chunk(body) for body in bodies]
    assert all(map(relay.pass_on, framed))
    kept = relay.take()
    ends = [b"".join(bodies[at:]) for at in range(len(bodies) + 1)]
    assert kept in ends
    read = sum(map(len, framed[ends.index(kept) :]))
    assert min(sum(map(len, framed)), bytes_path.SHORT_BYTES) <= read < 8192
    assert relay.take() == b""


class Collector(asyncio.Protocol):
    """Writes `size` bytes in pieces as soon as it is connected, through an outlet."""

    def __init__(self, pieces: list[tuple[bytes, bytes]]):
        self.pieces = pieces
        self.paused = 0
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        loop = asyncio.get_running_loop()
        self.outlet = fast.Outlet(transport, loop)  # type: ignore[arg-type]
        for first, second in self.pieces:
            if second:
                self.outlet.write_both(first, second)
            else:
                self.outlet.write(first)
        self.transport = transport

    def itself(self) -> Collector:
        return self

    def pause_writing(self) -> None:
        self.paused += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.outlet.close()
        self.lost = True


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("size", [10, 300_000])
def test_bytes_arrive_whole_and_in_order(run: Any, size: int) -> None:
    """A reader that is slow gets every byte in order, and the writer is told to pause."""
    pieces = [(bytes([65 + i]) * size, b"+" * (size if i % 2 else 0)) for i in range(26)]
    expected = b"".join(first + second for first, second in pieces)

    async def main() -> tuple[bytes, int]:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        protocol = Collector(pieces)
        await loop.create_connection(lambda: protocol, sock=ours)
        got = b""
        while len(got) < len(expected):
            got += await loop.sock_recv(theirs, 100_000)
        protocol.transport.close()
        theirs.close()
        return got, protocol.paused

    got, paused = run(main())
    assert got == expected
    assert bool(paused) == (size > 1000)


def test_writing_to_a_closed_peer_ends_the_connection() -> None:
    """A peer that is gone is found out by the transport: the protocol hears that it is lost."""

    async def main() -> bool:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        protocol = Collector([(b"a", b"")])
        await loop.create_connection(lambda: protocol, sock=ours)
        theirs.close()
        for _ in range(100):
            protocol.outlet.write(b"more")
            await asyncio.sleep(0)
            if protocol.lost:
                break
        return protocol.lost

    assert uvloop.run(main())


def _received(peer: socket.socket) -> bytes:
    """What has come to a peer that does not wait."""
    try:
        return peer.recv(1_000_000)
    except BlockingIOError:
        return b""


async def _pairs(count: int) -> list[tuple[Collector, socket.socket]]:
    """Connections whose outlets have written nothing yet, and their peers."""
    found = []
    for _ in range(count):
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        protocol = Collector([])
        connect = asyncio.get_running_loop().create_connection
        await connect(functools.partial(Collector.itself, protocol), sock=ours)
        found.append((protocol, theirs))
    return found


def _close(pairs: list[tuple[Collector, socket.socket]]) -> None:
    for protocol, peer in pairs:
        protocol.transport.close()
        peer.close()


def test_what_one_turn_writes_goes_out_at_its_end() -> None:
    """Two connections written in one turn of the loop have their bytes when it has ended."""

    async def main() -> tuple[list[bytes], list[bytes]]:
        pairs = await _pairs(2)
        for protocol, _ in pairs:
            protocol.outlet.write(b"a")
            protocol.outlet.write(b"b")
        during = [_received(peer) for _, peer in pairs]
        await asyncio.sleep(0.01)
        after = [_received(peer) for _, peer in pairs]
        _close(pairs)
        return during, after

    during, after = uvloop.run(main())
    assert during == [b"", b""]
    assert after == [b"ab", b"ab"]


def test_flush_does_not_wait_for_the_end_of_the_turn() -> None:
    """What was written before an end of the stream arrives before it, and once."""

    async def main() -> bytes:
        pairs = await _pairs(1)
        protocol, peer = pairs[0]
        protocol.outlet.write_both(b"head", b"body")
        protocol.outlet.flush()
        cast("asyncio.Transport", protocol.transport).write_eof()
        await asyncio.sleep(0.01)
        got = _received(peer)
        _close(pairs)
        return got

    assert uvloop.run(main()) == b"headbody"


def test_a_lost_connection_takes_what_waits_with_it() -> None:
    """What waits for a connection that is lost in the same turn is written to nobody."""

    async def main() -> tuple[bytes, bytes]:
        pairs = await _pairs(2)
        (lost, lost_peer), (kept, kept_peer) = pairs
        for protocol in (lost, kept):
            protocol.outlet.write(b"a")
        lost.outlet.close()
        await asyncio.sleep(0.01)
        got = _received(lost_peer), _received(kept_peer)
        _close(pairs)
        return got

    lost, kept = uvloop.run(main())
    assert (lost, kept) == (b"" if fast.Outlet is not bytes_path.Outlet else b"a", b"a")


steps = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["write", "both", "flush", "turn", "turn"]),
        st.integers(1, 70_000),
    ),
    max_size=60,
)


@settings(max_examples=40, deadline=None)
@given(steps)
def test_any_order_of_writes_and_turns_keeps_the_bytes_in_order(
    found: list[tuple[int, str, int]],
) -> None:
    """Gathered, flushed or written at once: each connection's bytes arrive in their order."""

    async def main() -> None:
        pairs = await _pairs(3)
        expected = [b""] * 3
        got = [b""] * 3
        for number, (which, verb, size) in enumerate(found):
            outlet = pairs[which][0].outlet
            data = bytes([65 + number % 26]) * size
            if verb == "write":
                outlet.write(data)
                expected[which] += data
            elif verb == "both":
                outlet.write_both(data, b"+")
                expected[which] += data + b"+"
            elif verb == "flush":
                outlet.flush()
            else:
                await asyncio.sleep(0)
            got = [before + _received(peer) for before, (_, peer) in zip(got, pairs, strict=True)]
        deadline = asyncio.get_running_loop().time() + 10
        while got != expected and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0)
            got = [before + _received(peer) for before, (_, peer) in zip(got, pairs, strict=True)]
        _close(pairs)
        assert got == expected

    uvloop.run(main())
