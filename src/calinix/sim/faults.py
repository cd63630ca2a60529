"""What can go wrong in a simulated fleet, and when.

Pods are named by their slot; in a smaller fleet the slots are counted round.
"""

from __future__ import annotations

import msgspec


class Fault(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all faults. Times are seconds of the run."""

    at_s: float = 0.0
    """When it begins."""
    for_s: float = float("inf")
    """How long it lasts."""


class SlowPod(Fault, frozen=True, kw_only=True):
    """The pods take `factor` times as long for everything."""

    pods: tuple[int, ...]
    factor: float


class DeadPod(Fault, frozen=True, kw_only=True):
    """The pods' processes die, and come back with empty caches."""

    pods: tuple[int, ...]


class Flush(Fault, frozen=True, kw_only=True):
    """The pods' caches are emptied; `for_s` means nothing here."""

    pods: tuple[int, ...]
    told: bool = False
    """Gateways hear of it (BlocksCleared)."""


class LostEvents(Fault, frozen=True, kw_only=True):
    """Gateways do not hear of first tokens, of cleared caches and of each other."""

    share: float
    """Share of these facts that is lost."""


class LateFacts(Fault, frozen=True, kw_only=True):
    """Gateways know of load only what it was `late_s` ago, their own requests included."""

    late_s: float
