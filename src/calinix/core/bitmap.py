"""HostBitmap: a set of pods as one Python int, bit `slot` for the pod in that slot.

Union, intersection and difference are `|`, `&` and `& ~`: one operation whatever the number of
pods. Nothing here is slower than the number of slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

HostBitmap: TypeAlias = int

EMPTY: HostBitmap = 0


def bit(slot: int) -> HostBitmap:
    """The set with this one slot. Raises ValueError for a negative slot."""
    return 1 << slot


def of(slots: Iterable[int]) -> HostBitmap:
    """The set of these slots."""
    bitmap = 0
    for slot in slots:
        bitmap |= 1 << slot
    return bitmap


def contains(bitmap: HostBitmap, slot: int) -> bool:
    """Whether `slot` is in the set."""
    return bool(bitmap >> slot & 1)


def count(bitmap: HostBitmap) -> int:
    """How many slots are in the set."""
    return bitmap.bit_count()


def first(bitmap: HostBitmap) -> int:
    """The lowest slot, -1 for the empty set."""
    return (bitmap & -bitmap).bit_length() - 1


def iterate(bitmap: HostBitmap) -> Iterator[int]:
    """The slots in ascending order."""
    while bitmap:
        low = bitmap & -bitmap
        yield low.bit_length() - 1
        bitmap ^= low


def to_array(bitmap: HostBitmap) -> npt.NDArray[np.intp]:
    """The slots in ascending order as an array, shape (count,)."""
    size = (bitmap.bit_length() + 7) // 8
    octets = np.frombuffer(bitmap.to_bytes(size, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(octets, bitorder="little"))


def of_array(slots: npt.NDArray[np.intp]) -> HostBitmap:
    """The set of these slots, shape (count,)."""
    return of(slots.tolist())
