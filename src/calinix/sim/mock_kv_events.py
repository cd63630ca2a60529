"""A mock pod's KV events: what its blocks do, published over ZeroMQ as engines publish it.

One batch per step of the pod; numbers from 0 for each engine process; the last batches are kept
and repeated to whoever asks. A cleared cache is told with the next blocks, as by vLLM: an idle
pod publishes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

from calinix.edge.kv_sockets import Inlet, Publisher, Sockets
from calinix.engines.kv_events import (
    AllCleared,
    Dialect,
    EngineHash,
    KvEvent,
    RemovedBlocks,
    StoredBlocks,
    message,
    read_replay_request,
    replay_end,
    replayed,
    write_batch,
)

KEPT_BATCHES = 10_000
_U64 = (1 << 64) - 1
_MAX_NOTES = 1 << 20


class KvEventsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a mock pod publishes its KV events."""

    endpoint: str
    """With a `*` the pod binds, otherwise it connects, as vLLM does."""
    replay_endpoint: str | None = None
    topic: str = ""
    dialect: Dialect = "maps"
    """maps as vLLM, or arrays as SGLang: without rank, and replays without topic."""
    hashes: str = "int"
    """int, or bytes: 32 of them."""
    kept_batches: int = KEPT_BATCHES


class KvPublisher:
    """The publisher of one mock pod (kv_blocks.Watcher). `open` binds, `close` ends it."""

    def __init__(self, options: KvEventsOptions, base_model: str, block_size: int):
        self.options = options
        self.endpoint = options.endpoint
        """With the real port, once it is open."""
        self.replay_endpoint = options.replay_endpoint
        self.silent = False
        """A fault: batches are made, and kept, but not sent."""
        self._base_model = base_model
        self._size = block_size
        self._notes: OrderedDict[int, tuple[list[int], int, str, str]] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sockets: Sockets | None = None
        self._publisher: Publisher | None = None
        self._router: Inlet | None = None
        self._flush_asked = False
        self.new_engine()

    def new_engine(self) -> None:
        """Another process: an empty cache, numbers from 0."""
        self.next_sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=self.options.kept_batches)
        self._batch: list[KvEvent] = []

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Opens the sockets. Raises ConfigError."""
        self._loop = loop
        self._sockets = Sockets(loop)
        self._publisher = self._sockets.publish(self.endpoint)
        self.endpoint = self._publisher.endpoint
        if self.replay_endpoint is not None:
            self._router = self._sockets.answer(self.replay_endpoint, self._asked)
            self.replay_endpoint = self._sockets.address(self._router)

    def close(self) -> None:
        """Closes the sockets; what was not sent is lost."""
        if self._sockets is not None:
            if self._router is not None:
                self._sockets.close(self._router)
            if self._publisher is not None:
                self._publisher.close()
        self._sockets = self._publisher = self._router = self._loop = None

    def note(self, chain: Sequence[int], tokens: list[int], model: str, salt: str) -> None:
        """A prompt with its answer is going to be computed: what the chain's blocks will hold."""
        lora = "" if model == self._base_model else model
        for position, block in enumerate(chain):
            self._notes[block] = (tokens, position, lora, salt)
            self._notes.move_to_end(block)
        while len(self._notes) > _MAX_NOTES:
            self._notes.popitem(last=False)

    # --- what the blocks do ------------------------------------------------------------------

    def stored(self, chain: Sequence[int], position: int) -> None:
        """The block at this place of a chain is computed."""
        block = chain[position]
        if block not in self._notes:
            return
        tokens, at, lora, salt = self._notes[block]
        piece = tokens[at * self._size : (at + 1) * self._size]
        keys = [*([lora] if lora else []), *([salt] if salt and at == 0 else [])]
        parent = self._name(chain[position - 1]) if position else None
        last = self._batch[-1] if self._batch else None
        if (
            isinstance(last, StoredBlocks)
            and parent is not None
            and last.block_hashes[-1] == parent
        ):
            assert last.extra_keys is not None
            last.block_hashes.append(self._name(block))
            last.token_ids += piece
            last.extra_keys.append(keys or None)
        else:
            self._batch.append(
                StoredBlocks(
                    [self._name(block)],
                    parent,
                    piece,
                    self._size,
                    lora_id=1 if lora else None,
                    medium="GPU",
                    lora_name=lora or None,
                    extra_keys=[keys or None],
                    group_idx=0,
                    kv_cache_spec_kind="full_attention",
                )
            )
        self._flush_soon()

    def removed(self, block: int) -> None:
        """The block was evicted."""
        self._batch.append(RemovedBlocks([self._name(block)], "GPU", 0))
        self._flush_soon()

    def cleared(self) -> None:
        """The cache was emptied; said with what comes next."""
        self._batch.append(AllCleared())

    # --- sockets -----------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        if self._loop is not None and not self._flush_asked:
            self._flush_asked = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Publishes what has gathered, as one batch."""
        self._flush_asked = False
        if not self._batch or self._publisher is None:
            return
        is_map = self.options.dialect == "maps"
        events = self._batch if is_map else [_bare(event) for event in self._batch]
        payload = write_batch(events, time.time(), 0 if is_map else None, self.options.dialect)
        self._batch = []
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        self._kept.append((sequence, payload))
        if not self.silent:
            self._publisher.send(message(self.options.topic.encode(), sequence, payload))

    def _asked(self, frames: list[bytes]) -> None:
        """Somebody asks for a replay."""
        asked = read_replay_request(frames)
        if asked is None or self._sockets is None or self._router is None:
            return
        identity, first = asked
        with_topic = self.options.dialect == "maps"
        topic = self.options.topic.encode() if with_topic else None
        for sequence, payload in self._kept:
            if sequence >= first:
                self._sockets.send(self._router, [identity, *replayed(topic, sequence, payload)])
        self._sockets.send(self._router, [identity, *replay_end(with_topic=with_topic)])

    def _name(self, block: int) -> EngineHash:
        number = block & _U64
        return number if self.options.hashes == "int" else number.to_bytes(32, "big")


def _bare(event: KvEvent) -> KvEvent:
    """With the fields of SGLang's events alone."""
    if isinstance(event, StoredBlocks):
        return StoredBlocks(
            event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size
        )
    return RemovedBlocks(event.block_hashes) if isinstance(event, RemovedBlocks) else event
