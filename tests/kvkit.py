"""What tests of KV events are built from: recorded messages, a router that is told, an engine.

`Engine` is a model of vLLM's block pool, written for these tests: hashes by parent, tokens and
salt, copies of one block, least recently used blocks go first, tails before heads.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from calinix.config import CacheRegistry
from calinix.core.events import Event
from calinix.core.router import Router
from calinix.engines.kv_events import (
    AllCleared,
    BatchReader,
    Dialect,
    EngineHash,
    KvEvent,
    Message,
    RemovedBlocks,
    StoredBlocks,
    read_message,
    write_batch,
)
from calinix.engines.kv_mirror import KvMirror
from calinix.engines.kv_names import Namespaces
from calinix.engines.kv_pod import KvPod, KvPodSettings
from routing import make_config, make_router, request

DATA = Path(__file__).parent / "data" / "kv_events"
MODEL = "tiny"


def recorded(name: str) -> list[dict[str, Any]]:
    """The lines of a recorded file; `frames` added as bytes."""
    lines = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    for line in lines:
        line["frames"] = [bytes.fromhex(frame) for frame in line.get("frames_hex", [])]
    return lines


def messages(name: str, topic: str | None = None) -> list[Message]:
    """The messages of a recorded file, those of one topic where it is given."""
    found = [read_message(line["frames"]) for line in recorded(name)]
    whole = [one for one in found if one is not None]
    assert len(whole) == len(found)
    return [one for one in whole if topic is None or one.topic == topic.encode()]


def told_router(pods: int = 1, block: int = 16, capacity_tokens: int = 1 << 20) -> Router:
    """A router that hashes token ids in blocks of `block`; its pods are single-0, single-1 ..."""
    cache = CacheRegistry(token_block_size=block, kv_capacity_tokens=capacity_tokens)
    return make_router(make_config(single=pods, cache=cache))


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as prompts hold them."""
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def believed(
    router: Router, pod_id: str, tokens: Sequence[int], *, model: str = MODEL, salt: str = ""
) -> int:
    """Leading blocks of the prompt that the router believes on the pod. Changes nothing."""
    asked = request(token_bytes(tokens), prompt_is_tokens=True, model=model, tenant=salt.encode())
    state = router._state
    prompt = state.preparer.prepare(asked)
    pod = state.table.find(pod_id)
    assert pod is not None
    ((depth, _),) = state.registry.match(prompt.chain, 1 << pod.slot)
    return depth


def mirror_of(
    router: Router, pod_id: str = "single-0", block: int = 16, limit: int = 1 << 20
) -> KvMirror:
    """A mirror that tells `router` of one of its pods."""
    return KvMirror(
        pod_id, MODEL, Namespaces(block), limit, lambda event: router.observe(event, 1.0)
    )


class Line:
    """A line to a publisher's replay endpoint that a test answers by hand."""

    def __init__(self, *, can_ask: bool = True):
        self.can_ask = can_ask
        self.asked: list[int] = []
        self.hung_up = 0
        self.waiting = False

    def ask(self, first: int) -> bool:
        """Notes the request."""
        if self.can_ask:
            self.asked.append(first)
        return self.can_ask

    def hang_up(self) -> None:
        """Notes it."""
        self.hung_up += 1

    def waits(self) -> bool:
        """As the test says."""
        return self.waiting


class Told:
    """A KvPod before a router, with its lines and every event that it told."""

    def __init__(
        self,
        router: Router,
        pod_id: str = "single-0",
        *,
        ranks: int = 1,
        block: int = 16,
        can_ask: bool = True,
        capacity_tokens: int = 1 << 20,
        check_s: float = 5.0,
        clears_only: bool = False,
    ):
        self.router = router
        self.pod_id = pod_id
        self.events: list[Event] = []
        self.lines = [Line(can_ask=can_ask) for _ in range(ranks)]
        self.now = 10.0
        settings = KvPodSettings(
            pod_id=pod_id,
            model=MODEL,
            ranks=ranks,
            capacity_tokens=capacity_tokens,
            check_s=check_s,
            clears_only=clears_only,
        )
        self.pod = KvPod(
            settings,
            Namespaces(block),
            self._emit,
            lambda: router.epoch(pod_id),
            self.lines.__getitem__,
        )

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self.router.observe(event, self.now)

    def live(self, *found: Message, rank: int = 0) -> None:
        """Messages as a SUB socket would bring them."""
        for message in found:
            self.pod.live(rank, message, self.now)

    def replay(self, *answers: Message, end: bool = True, rank: int = 0) -> None:
        """Answers to the request that is open."""
        for answer in answers:
            self.pod.replayed(rank, answer, self.now)
        if end:
            self.pod.replayed(rank, "end", self.now)
        self.drain()

    def drain(self) -> None:
        """What waited for a replay has its turns."""
        for _ in range(10_000):
            if not self.pod.drain(self.now):
                return
        raise AssertionError("it never ends")

    def tick(self, after_s: float = 0.0) -> None:
        """Time goes on."""
        self.now += after_s
        self.pod.tick(self.now)
        self.drain()

    def source(self) -> str:
        """What the pod's blocks stand on."""
        return self.pod.source

    def kinds(self) -> list[str]:
        """Names of the events so far, without signs of life."""
        return [type(event).__name__ for event in self.events if type(event).__name__ != "PodHeard"]


class _Held:
    """A physical block of the engine."""

    def __init__(self, name: int):
        self.name = name
        self.users = 0


class Engine:
    """A pod's prefix cache and its publisher, in the manner of vLLM."""

    def __init__(
        self,
        capacity: int,
        size: int = 16,
        *,
        dialect: Dialect = "maps",
        hashes: Literal["int", "bytes"] = "int",
        rank: int | None = 0,
        topic: bytes = b"",
        kept: int = 10_000,
    ):
        self.capacity = capacity
        self.size = size
        self.dialect: Dialect = dialect
        self.hashes = hashes
        self.rank = rank
        self.topic = topic
        self.sequence = 0
        self.started = 0
        self.kept: deque[Message] = deque(maxlen=kept)
        self._free: OrderedDict[int, _Held] = OrderedDict()
        self._cached: dict[int, list[_Held]] = {}
        self._blocks = 0
        self._pending: list[KvEvent] = []
        self.evictions = 0

    def names(self, tokens: Sequence[int], salt: str = "", lora: str = "") -> list[int]:
        """The names of the full blocks of a prompt."""
        found, state = [], 0
        for start in range(0, len(tokens) - self.size + 1, self.size):
            keys = (lora, salt if start == 0 else "")
            state = hash((state, keys, *tokens[start : start + self.size])) & (2**64 - 1)
            found.append(state)
        return found

    def holds(self, tokens: Sequence[int], salt: str = "", lora: str = "") -> int:
        """Leading full blocks of a prompt that are cached."""
        names = self.names(tokens, salt, lora)
        return next((at for at, name in enumerate(names) if name not in self._cached), len(names))

    def run(self, tokens: Sequence[int], salt: str = "", lora: str = "") -> int:
        """Computes a prompt; the cached blocks that it found. The last token is always computed."""
        names = self.names(tokens, salt, lora)
        hits = min(self.holds(tokens, salt, lora), (len(tokens) - 1) // self.size)
        used = []
        for name in names[:hits]:
            block = self._cached[name][0]
            self._free.pop(id(block), None)
            used.append(block)
        for name in names[hits:]:
            fresh = self._new(name)
            if fresh is None:
                break
            used.append(fresh)
        self._publish_stored(tokens, names, hits, len(used), salt, lora)
        for block in reversed(used):
            self._free[id(block)] = block
        return hits

    def drop(self, name: int) -> bool:
        """Takes one copy of a block out, wherever it stands in its chain."""
        for held in list(self._free.values()):
            if held.name == name:
                del self._free[id(held)]
                self._forget(held)
                self._blocks -= 1
                return True
        return False

    def reset(self) -> None:
        """Everything is forgotten; said with the next batch."""
        self._free.clear()
        self._cached.clear()
        self._blocks = 0
        self._pending.append(AllCleared())

    def restart(self) -> None:
        """Another process with an empty cache."""
        self.reset()
        self._pending.clear()
        self.sequence = 0
        self.started += 1
        self.kept.clear()

    def flush(self) -> Message | None:
        """The batch of what has happened since the last one; None: nothing has."""
        if not self._pending:
            return None
        ts = 1000.0 * self.started + self.sequence
        payload = write_batch(self._pending, ts, self.rank, self.dialect)
        message = Message(self.topic, self.sequence, payload)
        self.sequence += 1
        self._pending = []
        self.kept.append(message)
        return message

    def replay(self, first: int) -> list[Message]:
        """What a replay request brings."""
        return [message for message in self.kept if message.sequence >= first]

    def _new(self, name: int) -> _Held | None:
        if self._blocks >= self.capacity:
            if not self._free:
                return None
            _, oldest = self._free.popitem(last=False)
            self.evictions += 1
            self._forget(oldest)
        else:
            self._blocks += 1
        block = _Held(name)
        self._cached.setdefault(name, []).append(block)
        return block

    def _forget(self, block: _Held) -> None:
        copies = self._cached[block.name]
        copies.remove(block)
        if not copies:
            del self._cached[block.name]
        self._pending.append(RemovedBlocks([self._wire(block.name)], "GPU", 0))

    def _publish_stored(
        self,
        tokens: Sequence[int],
        names: list[int],
        hits: int,
        stored: int,
        salt: str,
        lora: str,
    ) -> None:
        if stored <= hits:
            return
        keys = [
            [*([lora] if lora else []), *([salt] if salt and at == 0 else [])] or None
            for at in range(hits, stored)
        ]
        self._pending.append(
            StoredBlocks(
                [self._wire(name) for name in names[hits:stored]],
                self._wire(names[hits - 1]) if hits else None,
                list(tokens[hits * self.size : stored * self.size]),
                self.size,
                lora_id=1 if lora else None,
                medium="GPU",
                lora_name=lora or None,
                extra_keys=keys,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
        )

    def _wire(self, name: int) -> EngineHash:
        return name if self.hashes == "int" else name.to_bytes(32, "big")


def feed(engine: Engine, apply: Callable[[Message], None]) -> None:
    """Publishes what has happened, if anything has."""
    message = engine.flush()
    if message is not None:
        apply(message)


def into(mirror: KvMirror, reader: BatchReader | None = None) -> Callable[[Message], None]:
    """Applies a message to a mirror, whatever its number."""
    reader = reader or BatchReader()

    def apply(message: Message) -> None:
        mirror.apply(reader.read(message.payload).events)

    return apply
