"""What one DP rank of a pod caches, by its KV events: engine hashes and our chain hashes for them.

An engine names its blocks by hashes of its own. Here they are opaque: of each block its tokens
are hashed on from its parent's, as prompts are (core/prepare.py), and the name is remembered, so
that a removal can be told in our hashes. What a mirror finds out it emits as core.events.

Blocks of engine and index may differ in size. An engine block ends none, one or several of ours,
and ours may begin in the engine blocks before it; it is there while all of these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import msgspec

from calinix.core.events import BlocksCleared, BlocksRemoved, BlocksStored, Event
from calinix.core.kv import hash_bytes
from calinix.engines.kv_events import AllCleared, KvEvent, RemovedBlocks, StoredBlocks
from calinix.engines.kv_names import Namespaces, key_of, salt_of, token_bytes

_MASK = (1 << 64) - 1
_COPY = 1 << 64
_COPIES = 0xFFFF
_ERA_SHIFT = 80
_FORGET_SHARE = 64
"""Beyond its limit a mirror forgets one in so many of its oldest blocks at once."""
_FEW = 16
_REMOVALS = 1024
"""Blocks of one event where a whole mirror is removed."""
_FOUND_BY_REQUESTS = frozenset({None, "GPU", "gpu"})
_FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})


class MirrorCounts:
    """What a mirror has met, in blocks of the engine."""

    __slots__ = ("elsewhere", "foreign", "forgotten", "malformed", "orphans", "removed", "stored")

    def __init__(self) -> None:
        self.stored = 0
        self.removed = 0
        self.orphans = 0
        """Stored behind a block that is not known: ignored."""
        self.elsewhere = 0
        """In another medium, or of other layers than those that decide: not counted."""
        self.foreign = 0
        """With media, or an adapter without a name: no prompt key is like theirs."""
        self.malformed = 0
        self.forgotten = 0
        """Beyond the limit."""


class _Odd(msgspec.Struct, gc=False):
    """What is to know of an engine block that does not end exactly one of ours.

    There may be very many, so garbage collection is not to visit them: they hold numbers only.
    """

    own: tuple[int, ...]
    """Our blocks that end in it."""
    pending: bytes
    """Tokens behind the last of ours."""
    seed: int
    """First state of the chain, for as long as none of ours has ended."""
    parent: int
    carried: bool
    """`pending` begins before this block."""
    users: tuple[int, ...] | dict[int, None] = ()
    """Blocks in which something ends that begins here; seldom more than one."""

    def used_by(self, key: int) -> None:
        """Something ends in that block."""
        users = self.users
        if isinstance(users, dict):
            users[key] = None
        elif len(users) >= _FEW:
            self.users = dict.fromkeys((*users, key))
        elif key not in users:
            self.users = (*users, key)

    def unused_by(self, key: int) -> None:
        """Nothing ends there any more."""
        users = self.users
        if isinstance(users, dict):
            users.pop(key, None)
        elif key in users:
            self.users = tuple(user for user in users if user != key)


class KvMirror:
    """The blocks of one publisher. Bounded by `limit` blocks; wrong events change nothing else."""

    __slots__ = (
        "_blocks", "_emit", "_era", "_group", "_group_is_full", "_namespaces", "_odd", "alone",
        "block_size", "counts", "limit", "model", "pod_id", "stored_tokens",
    )  # fmt: skip

    def __init__(
        self,
        pod_id: str,
        model: str,
        namespaces: Namespaces,
        limit: int,
        emit: Callable[[Event], None],
    ):
        self.pod_id = pod_id
        self.model = model
        """The base model's name, as clients ask for it; adapters come by their own."""
        self.limit = limit
        self.alone = True
        """No other rank has blocks of this pod: a cleared cache is a cleared pod."""
        self.counts = MirrorCounts()
        self.stored_tokens = 0
        self.block_size = 0
        """Tokens of the engine's blocks, as last seen."""
        self._namespaces = namespaces
        self._emit = emit
        self._group = -1
        self._group_is_full = False
        self._era = 0
        # Packed into integers, which garbage collection need not visit: of an engine hash, our
        # hash at its end, the copies (16 bits) and the era in which it was first stored.
        self._blocks: dict[int, int] = {}
        self._odd: dict[int, _Odd] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, events: Iterable[KvEvent]) -> None:
        """What the engine did, in its order; removals that follow each other are told at once."""
        gone: list[int] = []
        for event in events:
            if isinstance(event, RemovedBlocks):
                self._removed(event, gone)
                continue
            if gone:
                self._emit(BlocksRemoved(self.pod_id, tuple(gone)))
                gone = []
            if isinstance(event, StoredBlocks):
                self._stored(event)
            elif isinstance(event, AllCleared):
                self.clear()
        if gone:
            self._emit(BlocksRemoved(self.pod_id, tuple(gone)))

    def doubt(self) -> None:
        """Events are lost: how many copies there are of what is known, nobody knows.

        From now on the first removal of such a block takes it away for good.
        """
        self._era += 1

    def clear(self) -> None:
        """The engine's cache is empty."""
        if self.alone:
            self._emit(BlocksCleared(self.pod_id))
        else:
            ours = [
                block
                for key, packed in self._blocks.items()
                for block in self._own(key, packed) * _copies(packed)
            ]
            for start in range(0, len(ours), _REMOVALS):
                self._emit(BlocksRemoved(self.pod_id, tuple(ours[start : start + _REMOVALS])))
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more, and nobody is told."""
        self._blocks = {}
        self._odd = {}

    # --- stored ------------------------------------------------------------------------------

    def _stored(self, event: StoredBlocks) -> None:
        names, size = event.block_hashes, event.block_size
        count = len(names)
        if event.medium not in _FOUND_BY_REQUESTS or not self._decides(event):
            self.counts.elsewhere += count
            return
        if size < 1 or count < 1 or len(event.token_ids) != count * size:
            self.counts.malformed += count
            return
        parent = event.parent_block_hash
        seed = state = above = 0
        pending = b""
        if parent is None:
            if event.lora_id is not None and event.lora_name is None:
                self.counts.foreign += count
                return
        else:
            parent = key_of(parent)
            known = self._blocks.get(parent)
            if known is None:
                self.counts.orphans += count
                return
            state = above = known & _MASK
            if parent in self._odd:
                pending, seed = self._odd[parent].pending, self._odd[parent].seed
        tokens = event.token_ids
        if event.extra_keys is not None and any(event.extra_keys):
            salt, usable = salt_of(event)
            if usable < count:
                self.counts.foreign += count - usable
                names, tokens = names[:usable], tokens[: usable * size]
                if not names:
                    return
        else:
            salt = b""
        octets = token_bytes(tokens)
        if octets is None:
            self.counts.malformed += count
            return
        if parent is None:
            seed = self._namespaces.seed(event.lora_name or self.model, salt)
        self.block_size = size
        self.stored_tokens += len(tokens)
        self.counts.stored += len(names)
        chain = tuple(
            hash_bytes(state or seed, pending + octets, 4 * self._namespaces.block_tokens)
        )
        keys = [name if type(name) is int else key_of(name) for name in names]
        if size == self._namespaces.block_tokens and not pending:
            self._enter(keys, chain)
        else:
            self._enter_odd(keys, chain, size, pending + octets, seed, above, parent or 0)
        if chain:
            self._emit(BlocksStored(self.pod_id, above or None, chain))
        if len(self._blocks) > self.limit:
            self._forget_oldest()

    def _enter(self, keys: Sequence[int], chain: Sequence[int]) -> None:
        """Engine blocks that are blocks of ours."""
        blocks, fresh = self._blocks, _COPY | self._era << _ERA_SHIFT
        for key, ours in zip(keys, chain, strict=True):
            packed = blocks.get(key)
            if packed is None:
                blocks[key] = ours | fresh
            elif packed & _MASK == ours and key not in self._odd:
                if _copies(packed) < _COPIES:
                    blocks[key] = packed + _COPY
            else:
                # Another block of the same name: only one of them can be told apart later.
                self._drop(key)
                blocks[key] = ours | fresh

    def _enter_odd(
        self,
        keys: Sequence[int],
        chain: Sequence[int],
        size: int,
        octets: bytes,
        seed: int,
        above: int,
        parent: int,
    ) -> None:
        """Engine blocks of another size than ours, or that do not begin where one of ours does.

        `octets` are their tokens, behind those that the parent left over.
        """
        block = 4 * self._namespaces.block_tokens
        at = len(octets) - 4 * size * len(keys)
        ended = 0
        for key in keys:
            began, at = at, at + 4 * size
            own = tuple(chain[ended : at // block])
            if own:
                above = own[-1]
            was_carried = began % block > 0
            ended = at // block
            odd = _Odd(
                own,
                octets[ended * block : at],
                seed,
                parent,
                carried=was_carried and not own,
            )
            packed = self._blocks.get(key)
            if packed is not None and packed & _MASK == above and self._own(key, packed) == own:
                if _copies(packed) < _COPIES:
                    self._blocks[key] = packed + _COPY
            else:
                if packed is not None:
                    self._drop(key)
                self._blocks[key] = above | _COPY | self._era << _ERA_SHIFT
                self._odd[key] = odd
                if own and was_carried:
                    for before in self._begun_in(parent):
                        before.used_by(key)
            parent = key

    def _begun_in(self, key: int) -> Iterable[_Odd]:
        """The blocks, from this one up, that what is pending behind it began in."""
        for _ in range(self._namespaces.block_tokens):
            odd = self._odd.get(key)
            if odd is None or not odd.pending:
                return
            yield odd
            if not odd.carried:
                return
            key = odd.parent

    def _decides(self, event: StoredBlocks) -> bool:
        """Whether hits depend on the layers that the blocks are of: the first of full attention."""
        group = event.group_idx or 0
        if group == self._group:
            return True
        full = event.kv_cache_spec_kind in _FULL_ATTENTION
        if self._group >= 0 and (self._group_is_full or not full):
            return False
        if self._blocks:
            self.clear()
        self._group, self._group_is_full = group, full
        return True

    def _forget_oldest(self) -> None:
        """Those that were first stored longest ago; the index keeps them, as if by history."""
        oldest = list(islice(self._blocks, self.limit // _FORGET_SHARE + 1))
        self.counts.forgotten += len(oldest)
        for key in oldest:
            del self._blocks[key]
            self._unlink(key)

    # --- removed -----------------------------------------------------------------------------

    def _removed(self, event: RemovedBlocks, gone: list[int]) -> None:
        """Adds our blocks that go, one for each copy."""
        if event.medium not in _FOUND_BY_REQUESTS or (
            self._group >= 0 and (event.group_idx or 0) != self._group
        ):
            self.counts.elsewhere += len(event.block_hashes)
            return
        blocks, odd, era = self._blocks, self._odd, self._era
        for name in event.block_hashes:
            key = name if type(name) is int else key_of(name)
            packed = blocks.get(key)
            if packed is None:
                continue
            self.counts.removed += 1
            copies = packed >> 64 & _COPIES
            if copies > 1 and packed >> _ERA_SHIFT == era:
                blocks[key] = packed - _COPY
                gone += self._own(key, packed)
            elif odd or copies > 1:
                gone += self._take(key)
            else:
                del blocks[key]
                gone.append(packed & _MASK)

    def _drop(self, key: int) -> None:
        """The block goes with all its copies."""
        gone = self._take(key)
        if gone:
            self._emit(BlocksRemoved(self.pod_id, tuple(gone)))

    def _take(self, key: int) -> list[int]:
        """Takes the block out, and what began in it; our blocks that go, one for each copy."""
        gone: list[int] = []
        waiting = [key]
        while waiting:
            key = waiting.pop()
            packed = self._blocks.pop(key, None)
            if packed is None:
                continue
            gone += self._own(key, packed) * _copies(packed)
            waiting += self._unlink(key)
        return gone

    def _unlink(self, key: int) -> Iterable[int]:
        """Forgets what is odd of a block that went; the blocks in which ends what began in it."""
        odd = self._odd.pop(key, None)
        if odd is None:
            return ()
        if odd.own:
            for before in self._begun_in(odd.parent):
                before.unused_by(key)
        return odd.users

    def _own(self, key: int, packed: int) -> tuple[int, ...]:
        """Our blocks that end in a block of the engine."""
        odd = self._odd.get(key) if self._odd else None
        return (packed & _MASK,) if odd is None else odd.own


def _copies(packed: int) -> int:
    return packed >> 64 & _COPIES
