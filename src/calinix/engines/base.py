"""The shape of a P/D protocol: an exchange of legs, and how it ends in an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from calinix.engines.legs import Leg, LegAnswer, LegRole, Prefiller
from calinix.errors import CalinixError

__all__ = [
    "Draw",
    "Exchange",
    "ExchangeError",
    "Leg",
    "LegAnswer",
    "LegRole",
    "PrefillAnswer",
    "Prefiller",
]

Draw = Callable[[int], int]
"""Random numbers, handed in by the host: `draw(bits)` is uniform in 0..2**bits - 1."""


class PrefillAnswer(msgspec.Struct, frozen=True):
    """What is read of a prefill pod's answer: a handle in its exact bytes, where there is one."""

    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class ExchangeError(CalinixError):
    """A leg's answer does not allow the exchange to go on."""


class Exchange(Protocol):
    """One request's legs, in the order that the engine's protocol wants them."""

    def start(self) -> tuple[Leg, ...]:
        """The legs to send at once."""
        ...

    def after(self, leg: Leg, answer: LegAnswer) -> tuple[Leg, ...]:
        """The legs that follow the answer to `leg` (a 2xx). Raises ExchangeError."""
        ...
