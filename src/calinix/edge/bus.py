"""The bus between the workers of one gateway and their supervisor: frames, both ends.

A worker has one unix stream to the supervisor, which passes reports on to the other workers. A
frame is a head (payload bytes u32, version u8, kind u8, little-endian) and its payload. Nobody
ever waits for a reader: reports to one who is behind are dropped, and the next one says anew what
counts, since load is told as it is and not as it changed.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections.abc import Callable
from typing import Final, cast

import msgspec

from calinix.core.events import PeerFacts, PodFacts, ReplicaFacts, RoleFacts

VERSION: Final = 1
SYNC_S: Final = 0.02
"""At most so long after a fact the others are told."""
MAX_FRAME_BYTES: Final = 16 << 20
MAX_BEHIND_BYTES: Final = 1 << 20
"""To one that has so much unread, no report is written."""
MAX_LOST_BYTES: Final = 64 << 20
"""One that has so much unread is cut off, whatever it is written."""

_head = struct.Struct("<IBB")


class Kind(enum.IntEnum):
    """What a frame says."""

    HELLO = 1
    """Worker to supervisor, first of all: Hello."""
    READY = 2
    """Worker: its ports are open."""
    REPORT = 3
    """Worker to all others: Report."""
    GONE = 4
    """Supervisor: the worker of this name has ended."""
    ASK = 5
    """Supervisor: somebody is new, say all."""
    STOP = 6
    """Supervisor: drain; a payload of 1 byte: at once."""
    RELOAD = 7
    """Supervisor: read the file again; a payload of 1 byte: open the request log anew only."""
    DRAIN = 8
    """Supervisor: Drained."""


class BusError(Exception):
    """The other end speaks another language."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who a worker is."""

    index: int
    pid: int


class Drained(msgspec.Struct, frozen=True, array_like=True):
    """A pod is to get no new work, or is to get some again."""

    pod_id: str
    draining: bool


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has on the pods, and what it did since its last report."""

    replica: str
    names: tuple[str, ...]
    """Pod ids by its slots."""
    pods: tuple[PodFacts, ...]
    roles: tuple[RoleFacts, ...]
    records: bytes
    """Of core/peer_records.py."""


_encoder = msgspec.msgpack.Encoder()
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_hellos: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_drains: msgspec.msgpack.Decoder[Drained] = msgspec.msgpack.Decoder(Drained)


def packed(body: Hello | Drained | Report) -> bytes:
    """A payload."""
    return _encoder.encode(body)


def report_of(payload: bytes) -> tuple[ReplicaFacts, PeerFacts]:
    """The facts of a REPORT. Raises BusError."""
    try:
        said = _reports.decode(payload)
    except msgspec.MsgspecError as error:
        raise BusError(f"no report: {error}") from error
    facts = ReplicaFacts(said.replica, said.pods, said.roles, sync_s=SYNC_S)
    return facts, PeerFacts(said.replica, said.names, said.records)


def hello_of(payload: bytes) -> Hello:
    """Of a HELLO. Raises BusError."""
    try:
        return _hellos.decode(payload)
    except msgspec.MsgspecError as error:
        raise BusError(f"no hello: {error}") from error


def drained_of(payload: bytes) -> Drained:
    """Of a DRAIN. Raises BusError."""
    try:
        return _drains.decode(payload)
    except msgspec.MsgspecError as error:
        raise BusError(f"no drain: {error}") from error


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return _head.pack(len(payload), VERSION, kind) + payload


class Frames:
    """Frames out of a stream's bytes, however they are cut."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, data: bytes) -> list[tuple[Kind, bytes]]:
        """Those that are whole now. Raises BusError."""
        kept = self._kept
        kept += data
        at, found = 0, []
        while len(kept) - at >= _head.size:
            size, version, kind = _head.unpack_from(kept, at)
            if version != VERSION or not Kind.HELLO <= kind <= Kind.DRAIN:
                raise BusError(f"version {version}, kind {kind}: this end speaks {VERSION}")
            if size > MAX_FRAME_BYTES:
                raise BusError(f"a frame of {size} bytes")
            start = at + _head.size
            if len(kept) < start + size:
                break
            found.append((Kind(kind), bytes(kept[start : start + size])))
            at = start + size
        del kept[:at]
        return found


class Link(asyncio.Protocol):
    """One end of a stream between a worker and the supervisor."""

    def __init__(
        self,
        on_frame: Callable[[Link, Kind, bytes], None],
        on_lost: Callable[[Link, str], None],
    ):
        self.dropped = 0
        """Reports that were not written."""
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._why = "closed"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream is open (asyncio)."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came in (asyncio). A fault in them ends the stream."""
        try:
            for kind, payload in self._frames.feed(data):
                self._on_frame(self, kind, payload)
        except BusError as error:
            self._why = str(error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """The other end is gone (asyncio)."""
        self._transport = None
        self._on_lost(self, str(error) if error is not None else self._why)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Never waits. A report to one who is behind is dropped."""
        transport = self._transport
        if transport is None:
            return
        behind = transport.get_write_buffer_size()
        if behind > MAX_BEHIND_BYTES and kind is Kind.REPORT:
            self.dropped += 1
        elif behind > MAX_LOST_BYTES:
            self._why = "it does not read"
            transport.abort()
        else:
            transport.write(frame(kind, payload))

    def close(self) -> None:
        """Ends the stream when all is written."""
        if self._transport is not None:
            self._transport.close()
