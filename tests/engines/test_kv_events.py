"""KV events on the wire: recorded messages say what is documented, and are written as recorded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from calinix.engines.kv_events import (
    AllCleared,
    BatchReader,
    Dialect,
    KvEvent,
    RemovedBlocks,
    StoredBlocks,
    UnreadableBatch,
    message,
    rank_of,
    read_message,
    read_replay_request,
    read_replayed,
    replay_end,
    replay_request,
    replayed,
    write_batch,
)
from kvkit import DATA, recorded

FILES = ("events_int.jsonl", "events_bytes.jsonl")
NAMES = {"BlockStored": StoredBlocks, "BlockRemoved": RemovedBlocks, "AllBlocksCleared": AllCleared}


def told(event: KvEvent, name: str) -> Any:
    """A field of an event as the recordings spell it."""
    value: Any = getattr(event, name)
    if isinstance(value, bytes):
        return {"bytes_hex": value.hex()}
    if name == "block_hashes":
        return [{"bytes_hex": v.hex()} if isinstance(v, bytes) else v for v in value]
    return value


@pytest.mark.parametrize("name", FILES)
def test_recorded_messages_say_what_is_documented(name: str) -> None:
    """Topic, number, rank and every field of every event are those beside the frames."""
    reader = BatchReader()
    for line in recorded(name):
        found = read_message(line["frames"])
        assert found is not None
        assert (found.topic.decode(), found.sequence) == (line["topic"], line["seq"])
        batch = reader.read(found.payload)
        _, events, rank = line["payload"]
        assert (batch.rank, batch.unreadable) == (rank, 0)
        assert rank_of(found.payload) == rank
        assert len(batch.events) == len(events)
        for event, fields in zip(batch.events, events, strict=True):
            assert NAMES[fields.pop("type")] in type(event).__mro__
            assert {key: told(event, key) for key in fields} == fields


@pytest.mark.parametrize("name", FILES)
def test_batches_are_written_as_the_engine_writes_them(name: str) -> None:
    """What is read of a recorded message and written again is the same bytes."""
    for line in recorded(name):
        topic, number, payload = line["frames"]
        batch = BatchReader().read(payload)
        ts = msgspec.msgpack.decode(payload)[0]
        assert write_batch(batch.events, ts, batch.rank) == payload
        assert message(topic, int.from_bytes(number, "big"), payload) == [topic, number, payload]


def test_a_recorded_replay_is_read_to_its_end() -> None:
    """Thirteen batches from number 3 on, then the end; written again, they are the same frames."""
    answers = msgspec.json.decode((DATA / "replay_from_3.json").read_bytes(), type=list[list[str]])
    frames = [[bytes.fromhex(frame) for frame in answer] for answer in answers]
    found = [read_replayed(one) for one in frames]
    assert found[-1] == "end"
    assert replay_end(with_topic=True) == frames[-1]
    numbers = []
    for one, answer in zip(frames[:-1], found[:-1], strict=True):
        assert answer is not None
        assert answer != "end"
        numbers.append(answer.sequence)
        assert replayed(answer.topic, answer.sequence, answer.payload) == one
        assert BatchReader().read(answer.payload).unreadable == 0
    assert numbers == list(range(3, 16))


STORED = StoredBlocks([1, 2], None, list(range(32)), 16, None)
EVENTS: list[KvEvent] = [STORED, RemovedBlocks([2]), AllCleared()]


def test_arrays_are_read_like_maps() -> None:
    """The positional dialect, without rank, gives the same events; SGLang's bytes are pinned."""
    payload = write_batch(EVENTS, 1.5, dialect="arrays")
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [["BlockStored", [1, 2], None, list(range(32)), 16, None], ["BlockRemoved", [2]],
         ["AllBlocksCleared"]],
    ]  # fmt: skip
    batch = BatchReader().read(payload)
    assert batch.rank is None
    assert rank_of(payload) is None
    maps = BatchReader().read(write_batch(EVENTS, 1.5, 3)).events
    assert [as_dict(event) for event in batch.events] == [as_dict(event) for event in maps]


def as_dict(event: KvEvent) -> dict[str, Any]:
    """Its fields, by whatever struct it came."""
    return {name: getattr(event, name) for name in event.__struct_fields__}


def test_a_reader_follows_a_dialect_that_changes() -> None:
    """One publisher may be another version from one batch to the next."""
    reader = BatchReader()
    dialects: tuple[Dialect, ...] = ("maps", "arrays", "arrays", "maps")
    for dialect in dialects:
        assert len(reader.read(write_batch(EVENTS, 1.0, 0, dialect)).events) == 3


def test_longer_arrays_of_later_versions() -> None:
    """Array events with medium, adapter, keys and more fields behind are read by position."""
    event = ["BlockStored", [7], 6, [1, 2], 2, 5, "CPU", "lora", [["x"]], 1, "kind", None, "new"]
    batch = BatchReader().read(msgspec.msgpack.encode([1, [event], 2, "later"]))
    (found,) = batch.events
    assert isinstance(found, StoredBlocks)
    assert (found.parent_block_hash, found.lora_id, found.medium) == (6, 5, "CPU")
    assert (found.lora_name, found.extra_keys, found.group_idx) == ("lora", [["x"]], 1)
    assert (batch.rank, batch.unreadable) == (2, 0)


def test_unknown_and_missing_fields_and_events() -> None:
    """New fields are skipped, left out ones have defaults, new or broken events are counted."""
    events = [
        {"type": "BlockStored", "block_hashes": [1], "shiny": {"a": [1]}},
        {"type": "BlockMoved", "block_hashes": [1]},
        {"type": "BlockRemoved", "block_hashes": "no list"},
        ["BlockRemoved", [b"x" * 32]],
        "nonsense",
        {"type": "AllBlocksCleared", "why": "asked"},
    ]
    batch = BatchReader().read(msgspec.msgpack.encode([1.0, events, "rank"]))
    assert batch.unreadable == 3
    assert batch.rank is None
    first, second, third = batch.events
    assert isinstance(first, StoredBlocks)
    assert (first.token_ids, first.block_size, first.parent_block_hash) == ([], 0, None)
    assert isinstance(second, RemovedBlocks)
    assert second.block_hashes == [b"x" * 32]
    assert isinstance(third, AllCleared)


def test_a_batch_that_is_a_map() -> None:
    """Versions that write the batch itself with names are read too."""
    payload = msgspec.msgpack.encode(
        {"ts": 1.0, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 1, "new": 2}
    )
    batch = BatchReader().read(payload)
    assert (batch.rank, len(batch.events)) == (1, 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\x93", b"\xc1", b"\x90", b"\x92\x01\x02", b"\x80", b"\x91" * 5000,
        b"\x92\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff", msgspec.msgpack.encode("text"),
    ],
)  # fmt: skip
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    """Truncated, too deep, too long by its own word, or something else: one kind of error."""
    with pytest.raises(UnreadableBatch):
        BatchReader().read(payload)


def test_frames_that_are_no_message() -> None:
    """Wrong counts and wrong numbers are no message, no answer and no request."""
    number = (5).to_bytes(8, "big")
    assert read_message([b"t", number, b"p"]) is not None
    for frames in ([], [b"t"], [number, b"p"], [b"t", b"5", b"p"], [b"t", b"\xff" * 8, b"p"]):
        assert read_message(frames) is None
    answer = read_replayed([b"", number, b"p"])
    assert answer not in (None, "end")
    assert read_replayed([b"", b"\xff" * 8, b""]) == "end"
    for frames in ([], [b"x", number, b"p"], [b"", b"t", b"5", b"p"]):
        assert read_replayed(frames) is None
    assert read_replay_request([b"me", *replay_request(7)]) == (b"me", 7)
    for frames in ([b"me", b"", b"7"], [b"me", number], [b"me", b"x", number]):
        assert read_replay_request(frames) is None
