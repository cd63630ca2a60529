"""What workers of one gateway tell each other of their requests, as bytes: both ends.

Records follow each other without padding, all numbers little-endian, the first byte says the kind.
Slots are the sender's; NO_SLOT stands for nobody. Leases are named by their low 32 bits.
"""

from __future__ import annotations

import struct
from typing import Final, Protocol

from calinix.core.events import Failure
from calinix.core.kv import Chain

NO_SLOT: Final = 0xFFFF
MAX_TEXT: Final = 4096
"""Longest text of a record, in bytes; what has a longer one is not told."""
MAX_BLOCKS: Final = 65_536
"""Of a longer chain, its head is told."""

_ROUTED: Final = 1
_PREFILLED: Final = 2
_SETTLED: Final = 3
_LOST: Final = 4
_SESSION: Final = 5
_GOOD: Final = 6
_BAD: Final = 7
_LEARNED: Final = 8
_KEPT: Final = 9
_HELD: Final = 10
_FAILURES: Final = tuple(Failure)

_route = struct.Struct("<BIHHHI")
_hold = struct.Struct("<BHHHI")
_lease = struct.Struct("<BI")
_session = struct.Struct("<BHHfHH")
_good = struct.Struct("<BH")
_bad = struct.Struct("<BHB")
_learned = struct.Struct("<BddIH")
_kept = struct.Struct("<BHH")


class Taker(Protocol):
    """Who is told, record by record."""

    def routed(self, lease: int, slot: int, prefill: int, chain: Chain) -> None:
        """A request with this prompt went to `slot`, in dispatch mode by way of `prefill`."""
        ...

    def held(self, slot: int, prefill: int, chain: Chain) -> None:
        """The same, and the prompt is there already: nothing more will be told of the request."""
        ...

    def prefilled(self, lease: int) -> None:
        """Its prefill pod has the prompt now."""
        ...

    def settled(self, lease: int) -> None:
        """Every pod that it went to has the prompt now."""
        ...

    def lost(self, lease: int) -> None:
        """Nobody knows whether the prompt was ever prefilled."""
        ...

    def session(
        self, tenant: bytes, key: str, slot: int, prefill: int, answer_tokens: float
    ) -> None:
        """The session was served there; `answer_tokens`: its last answer is over, and had these."""
        ...

    def good(self, slot: int) -> None:
        """The pod gave whole good answers."""
        ...

    def bad(self, slot: int, failure: Failure) -> None:
        """A leg failed there."""
        ...

    def learned(self, model: str, units: float, tokens: float, blocks: int) -> None:
        """A prompt of so many bytes (or words) and blocks had so many tokens."""
        ...

    def kept(self, response_id: str, slot: int) -> None:
        """The pod keeps this stored answer."""
        ...


def routed(lease: int, slot: int, prefill: int, chain: Chain) -> bytes:
    """Its record; so do the others below."""
    told = chain.head(MAX_BLOCKS)
    head = _route.pack(_ROUTED, lease & 0xFFFFFFFF, slot, prefill, told.steady, len(told))
    return head + told.packed()


def held(slot: int, prefill: int, chain: Chain) -> bytes:
    """See Taker."""
    told = chain.head(MAX_BLOCKS)
    return _hold.pack(_HELD, slot, prefill, told.steady, len(told)) + told.packed()


def prefilled(lease: int) -> bytes:
    """See Taker."""
    return _lease.pack(_PREFILLED, lease & 0xFFFFFFFF)


def settled(lease: int) -> bytes:
    """See Taker."""
    return _lease.pack(_SETTLED, lease & 0xFFFFFFFF)


def lost(lease: int) -> bytes:
    """See Taker."""
    return _lease.pack(_LOST, lease & 0xFFFFFFFF)


def session(tenant: bytes, key: str, slot: int, prefill: int, answer_tokens: float) -> bytes:
    """See Taker."""
    text = key.encode("utf-8", "surrogatepass")
    if len(tenant) > MAX_TEXT or len(text) > MAX_TEXT:
        return b""
    head = _session.pack(_SESSION, slot, prefill, answer_tokens, len(tenant), len(text))
    return head + tenant + text


def good(slot: int) -> bytes:
    """See Taker."""
    return _good.pack(_GOOD, slot)


def bad(slot: int, failure: Failure) -> bytes:
    """See Taker."""
    return _bad.pack(_BAD, slot, _FAILURES.index(failure))


def learned(model: str, units: float, tokens: float, blocks: int) -> bytes:
    """See Taker."""
    text = model.encode("utf-8", "surrogatepass")
    if len(text) > MAX_TEXT:
        return b""
    return _learned.pack(_LEARNED, units, tokens, blocks, len(text)) + text


def kept(response_id: str, slot: int) -> bytes:
    """See Taker."""
    text = response_id.encode()
    return _kept.pack(_KEPT, slot, len(text)) + text if len(text) <= MAX_TEXT else b""


def deliver(records: bytes, taker: Taker) -> None:
    """Tells `taker` every record. Raises ValueError at the first that is none."""
    at, end = 0, len(records)
    try:
        while at < end:
            kind = records[at]
            if kind == _ROUTED:
                _, lease, slot, prefill, steady, count = _route.unpack_from(records, at)
                at += _route.size
                taker.routed(lease, slot, prefill, Chain.unpacked(records, at, count, steady))
                at += 8 * count
            elif kind == _HELD:
                _, slot, prefill, steady, count = _hold.unpack_from(records, at)
                at += _hold.size
                taker.held(slot, prefill, Chain.unpacked(records, at, count, steady))
                at += 8 * count
            elif kind == _SETTLED:
                taker.settled(_lease.unpack_from(records, at)[1])
                at += _lease.size
            elif kind == _GOOD:
                taker.good(_good.unpack_from(records, at)[1])
                at += _good.size
            else:
                at = _deliver_rare(records, at, kind, taker)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise ValueError(f"no record at byte {at}: {error}") from error


def _deliver_rare(records: bytes, at: int, kind: int, taker: Taker) -> int:
    """Those that few requests bring; returns where the next one begins."""
    if kind in (_PREFILLED, _LOST):
        lease = _lease.unpack_from(records, at)[1]
        if kind == _PREFILLED:
            taker.prefilled(lease)
        else:
            taker.lost(lease)
        return at + int(_lease.size)
    if kind == _SESSION:
        _, slot, prefill, tokens, tenant_bytes, key_bytes = _session.unpack_from(records, at)
        at += _session.size
        middle, end = at + tenant_bytes, at + tenant_bytes + key_bytes
        taker.session(records[at:middle], _text(records, middle, end), slot, prefill, tokens)
        return int(end)
    if kind == _BAD:
        _, slot, failure = _bad.unpack_from(records, at)
        taker.bad(slot, _FAILURES[failure])
        return at + int(_bad.size)
    if kind == _LEARNED:
        _, units, counted, blocks, size = _learned.unpack_from(records, at)
        at += _learned.size
        taker.learned(_text(records, at, at + size), units, counted, blocks)
        return int(at + size)
    if kind == _KEPT:
        _, slot, size = _kept.unpack_from(records, at)
        at += _kept.size
        taker.kept(_text(records, at, at + size), slot)
        return int(at + size)
    raise ValueError(f"no record at byte {at}: kind {kind}")


def _text(records: bytes, at: int, end: int) -> str:
    if end > len(records):
        raise ValueError(f"no record at byte {at}: cut off")
    return records[at:end].decode("utf-8", "surrogatepass")
