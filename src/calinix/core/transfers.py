"""How long KV takes from a prefill pod to a decode pod: seconds per token, by how near they are.

Measured from the prefill's answer to the first token, per kind of way. What else is in that time
(the decode pod's own step) is the same on every way, and a constant changes no comparison.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from calinix.core.bitmap import HostBitmap
from calinix.core.columns import Floats, Slots
from calinix.core.pods import PodTable, SlotSet

SAME, HOST, ZONE, FAR = range(4)
"""The same engine, the same host label, the same zone label, none of these."""
START_S = (0.0, 5e-6, 1e-5, 2e-5)
"""Seconds per token before anything is measured: 320 KB a token at 64, 32 and 16 GB/s."""
START_TOKENS = 200_000.0
"""How much measured traffic weighs as much as that."""
MEASURED = 8
"""So many transfers make a kind of way a measured one."""
_KEEP = 0.99
_MAX_WAYS = 1024


class Ways:
    """How near each slot of a set is to one slot. Never to be written to."""

    __slots__ = ("kinds", "near", "present")

    def __init__(self, table: PodTable, origin: int, slots: Slots):
        places = np.asarray(slots)
        self.kinds: npt.NDArray[np.intp] = np.full(len(places), FAR, dtype=np.intp)
        for kind, column in ((ZONE, table.zones), (HOST, table.hosts), (SAME, table.urls)):
            code = column.item(origin)
            if code:
                self.kinds[column[places] == code] = kind
        self.near: npt.NDArray[np.float64] = (self.kinds != FAR).astype(np.float64)
        """1 for every slot that is not far."""
        self.present: tuple[int, ...] = tuple(np.unique(self.kinds).tolist())
        """The kinds that there are."""


class Transfers:
    """Per kind of way, sums with forgetting."""

    def __init__(self) -> None:
        self._seconds = [pace * START_TOKENS for pace in START_S]
        self._tokens = [START_TOKENS] * len(START_S)
        self._samples = [MEASURED, 0, 0, 0]
        self._version = -1
        self._ways: dict[tuple[int, HostBitmap], Ways] = {}

    def learn(self, kind: int, tokens: float, seconds: float) -> None:
        """The KV of so many tokens was there after so long."""
        if kind != SAME and tokens > 0.0 and seconds >= 0.0:
            self._seconds[kind] = _KEEP * self._seconds[kind] + seconds
            self._tokens[kind] = _KEEP * self._tokens[kind] + tokens
            self._samples[kind] += 1

    def kind_pace(self, kind: int) -> float:
        """Seconds per token on a kind of way."""
        return self._seconds[kind] / self._tokens[kind]

    def pace(self, table: PodTable, origin: int, slot: int) -> float:
        """Seconds per token from one slot to another."""
        return self.kind_pace(self.kind(table, origin, slot))

    def kind(self, table: PodTable, origin: int, slot: int) -> int:
        """How near two slots are."""
        columns = (table.urls, table.hosts, table.zones)
        for kind, column in enumerate(columns):
            if column.item(origin) and column.item(origin) == column.item(slot):
                return kind
        return FAR

    def ways(self, table: PodTable, origin: int, among: SlotSet) -> Ways:
        """From one slot to each of these; made once, as long as the pods stay who they are."""
        if self._version != table.version or len(self._ways) >= _MAX_WAYS:
            self._ways.clear()
            self._version = table.version
        key = (origin, among.bitmap)
        found = self._ways.get(key)
        if found is None:
            found = self._ways[key] = Ways(table, origin, among.slots)
        return found

    def paces(self, ways: Ways) -> Floats:
        """Seconds per token on each of these ways."""
        paces = np.array([self.kind_pace(kind) for kind in range(len(START_S))])
        found: Floats = paces[ways.kinds]
        return found

    def nearness(self, ways: Ways) -> Floats | None:
        """In [0, 1] per way, by measured paces: 0 for the slowest of them, 1 for no time.

        None where they are all alike, or one of their kinds is not measured yet.
        """
        present = ways.present
        if len(present) < 2 or any(self._samples[kind] < MEASURED for kind in present):
            return None
        slowest = max(self.kind_pace(kind) for kind in present)
        if slowest <= 0.0:
            return None
        found: Floats = 1.0 - np.asarray(self.paces(ways)) / slowest
        return found
