"""KV events as engines publish them over ZeroMQ: frames and batches, read and written.

A message is [topic, sequence number, batch]; a batch is msgpack, [time, [events], DP rank]. Two
dialects of events: maps with a "type" (vLLM), and arrays whose first item is the type (older
vLLM, SGLang, which leaves fields out at the end, and the DP rank). A reader takes both, skips
fields that it does not know, and counts events that it does not understand instead of failing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from calinix.errors import CalinixError

Dialect = Literal["maps", "arrays"]
EngineHash = int | bytes
"""An engine's own name of a block: opaque, an integer or (mostly) 32 bytes."""

SEQUENCE_BYTES = 8
END = b"\xff" * SEQUENCE_BYTES
"""Stands where a sequence number would, behind the last batch of a replay."""
MAX_SEQUENCE = (1 << 63) - 1

_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


class UnreadableBatch(CalinixError):
    """A batch that is not msgpack, or has not the shape of a batch."""


class StoredBlocks(msgspec.Struct, gc=False):
    """Full blocks that the engine's cache gained, in chain order. Fields as on the wire."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None
    """The block before the first of these; None: there is none."""
    token_ids: list[int] = []
    """Those of all blocks, one after the other."""
    block_size: int = 0
    lora_id: Any = None
    medium: str | None = None
    """Where the blocks are; None or "GPU": where requests find them."""
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """Per block, what besides tokens made its hash: adapter, media, cache salt (first block)."""
    group_idx: int | None = None
    """Hybrid models: which group of layers the blocks are of."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Any = None


class RemovedBlocks(msgspec.Struct, gc=False):
    """One copy of each of these blocks is gone."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class AllCleared(msgspec.Struct, gc=False):
    """The cache is empty."""


class _StoredMap(StoredBlocks, gc=False, tag="BlockStored"):
    pass


class _RemovedMap(RemovedBlocks, gc=False, tag="BlockRemoved"):
    pass


class _ClearedMap(AllCleared, gc=False, tag="AllBlocksCleared"):
    pass


class _StoredArray(StoredBlocks, gc=False, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(RemovedBlocks, gc=False, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(AllCleared, gc=False, tag="AllBlocksCleared", array_like=True):
    pass


class _Quick(msgspec.Struct, array_like=True, gc=False):
    """A batch of which every event is known and of one dialect."""

    ts: float
    events: list[_StoredMap | _RemovedMap | _ClearedMap]
    data_parallel_rank: int | None = None


class _QuickArrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


class _Slow(msgspec.Struct, array_like=True, gc=False):
    """Any batch: its events are read one by one."""

    ts: Any
    events: list[msgspec.Raw]
    data_parallel_rank: Any = None


class _SlowMap(msgspec.Struct, gc=False):
    events: list[msgspec.Raw]
    ts: Any = None
    data_parallel_rank: Any = None


KvEvent = StoredBlocks | RemovedBlocks | AllCleared


class KvBatch(msgspec.Struct, frozen=True, gc=False):
    """What one message says."""

    events: Sequence[KvEvent]
    rank: int | None
    """The DP rank that published it; None: not told."""
    unreadable: int = 0
    """Events that were not understood."""


class BatchReader:
    """Reads the batches of one publisher; remembers its dialect, so that it is tried first."""

    __slots__ = ("_first", "_second")

    def __init__(self) -> None:
        self._first: Any = _maps
        self._second: Any = _arrays

    def read(self, payload: bytes) -> KvBatch:
        """The events of a batch. Raises UnreadableBatch."""
        try:
            quick = self._first(payload)
        except _UNREADABLE:
            try:
                quick = self._second(payload)
            except _UNREADABLE:
                return _one_by_one(payload)
            self._first, self._second = self._second, self._first
        return KvBatch(quick.events, quick.data_parallel_rank)


_maps = msgspec.msgpack.Decoder(_Quick).decode
_arrays = msgspec.msgpack.Decoder(_QuickArrays).decode
_slow = msgspec.msgpack.Decoder(_Slow).decode
_slow_map = msgspec.msgpack.Decoder(_SlowMap).decode
_any_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap).decode
_any_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode


def _is_map(octets: bytes) -> bool:
    """Whether a msgpack value is a map, by its first byte."""
    return octets[:1] in _MAP_MARKS


_MAP_MARKS = frozenset(bytes([mark]) for mark in (*range(0x80, 0x90), 0xDE, 0xDF))


def _one_by_one(payload: bytes) -> KvBatch:
    """A batch with events that are new, broken or of both dialects; each is judged by itself."""
    try:
        batch = _slow_map(payload) if _is_map(payload) else _slow(payload)
    except _UNREADABLE as error:
        raise UnreadableBatch(f"not a batch of KV events: {error}") from error
    events: list[KvEvent] = []
    for raw in batch.events:
        octets = bytes(raw)
        try:
            events.append(_any_map(octets) if _is_map(octets) else _any_array(octets))
        except _UNREADABLE:
            continue
    rank = batch.data_parallel_rank
    return KvBatch(
        events,
        rank if isinstance(rank, int) and not isinstance(rank, bool) else None,
        len(batch.events) - len(events),
    )


# --- frames ---------------------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message of a publisher."""

    topic: bytes
    sequence: int
    payload: bytes


def read_message(frames: Sequence[bytes]) -> Message | None:
    """What a SUB socket received; None: it is no message of KV events."""
    if len(frames) != 3:
        return None
    topic, number, payload = frames
    sequence = int.from_bytes(number, "big")
    if len(number) != SEQUENCE_BYTES or sequence > MAX_SEQUENCE:
        return None
    return Message(topic, sequence, payload)


def message(topic: bytes, sequence: int, payload: bytes) -> list[bytes]:
    """The frames that a PUB socket sends."""
    return [topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload]


def replay_request(first: int) -> list[bytes]:
    """The frames by which a DEALER asks for every batch from `first` on that is still kept."""
    return [b"", first.to_bytes(SEQUENCE_BYTES, "big")]


def read_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int] | None:
    """(who asks, from which number on) of what a ROUTER received; None: it asks for nothing."""
    if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
        return None
    return frames[0], int.from_bytes(frames[2], "big")


def read_replayed(frames: Sequence[bytes]) -> Message | Literal["end"] | None:
    """One answer to a replay request; "end" behind the last; None: it is no such answer.

    [empty, topic, number, batch] or, by SGLang and older vLLM, the same without the topic.
    """
    if len(frames) not in (3, 4) or frames[0]:
        return None
    number, payload = frames[-2], frames[-1]
    if number == END:
        return "end"
    return read_message((frames[1] if len(frames) == 4 else b"", number, payload))


def replayed(topic: bytes | None, sequence: int, payload: bytes) -> list[bytes]:
    """The frames of one replayed batch, behind the identity; `topic` None: without the topic."""
    number = sequence.to_bytes(SEQUENCE_BYTES, "big")
    return [b"", number, payload] if topic is None else [b"", topic, number, payload]


def replay_end(*, with_topic: bool) -> list[bytes]:
    """The frames behind the last replayed batch, behind the identity."""
    return [b"", b"", END, b""] if with_topic else [b"", END, b""]


# --- writing --------------------------------------------------------------------------------------

_ARRAY_FIELDS = {"BlockStored": 5, "BlockRemoved": 1, "AllBlocksCleared": 0}
"""How many fields an event has in the oldest array dialect."""
_ALWAYS = 7
"""Of BlockStored, the leading fields that vLLM writes even where they are null."""


def write_batch(
    events: Sequence[KvEvent], ts: float, rank: int | None = None, dialect: Dialect = "maps"
) -> bytes:
    """A batch as vLLM writes it (maps), or as SGLang and older vLLM do (arrays); `ts` in seconds.

    Without a rank, none is written.
    """
    wire = [_as_map(event) if dialect == "maps" else _as_array(event) for event in events]
    return msgspec.msgpack.encode([ts, wire] if rank is None else [ts, wire, rank])


def _as_map(event: KvEvent) -> dict[str, Any]:
    tag, fields = _fields(event)
    always = 2 if tag == "BlockRemoved" else _ALWAYS
    kept = {name: v for at, (name, v) in enumerate(fields) if v is not None or at < always}
    return {"type": tag, **kept}


def _as_array(event: KvEvent) -> list[Any]:
    tag, fields = _fields(event)
    values = [value for _, value in fields]
    while len(values) > _ARRAY_FIELDS[tag] and values[-1] is None:
        values.pop()
    return [tag, *values]


def _fields(event: KvEvent) -> tuple[str, list[tuple[str, Any]]]:
    if isinstance(event, StoredBlocks):
        kind: type[msgspec.Struct] = StoredBlocks
        tag = "BlockStored"
    elif isinstance(event, RemovedBlocks):
        kind, tag = RemovedBlocks, "BlockRemoved"
    else:
        kind, tag = AllCleared, "AllBlocksCleared"
    return tag, [(name, getattr(event, name)) for name in kind.__struct_fields__]


def rank_of(payload: bytes) -> int | None:
    """The DP rank at the end of a batch without reading the batch; None: not told, or over 127."""
    if payload[:1] != b"\x93" or payload[-1] > 0x7F:
        return None
    return payload[-1]
