"""The shape of a P/D protocol: a pure Exchange that names the next HTTP legs."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from calinix.errors import CalinixError

LegRole = Literal["single", "prefill", "decode"]


class Leg(msgspec.Struct, frozen=True):
    """One HTTP request to one pod of the plan: `role` says which, `body` is sent as it is."""

    role: LegRole
    body: bytes
    answers_client: bool
    """This leg's answer is the client's answer; any other leg's is read and kept from it."""


class LegAnswer(msgspec.Struct, frozen=True):
    """The whole answer of a leg that does not answer the client."""

    status: int
    body: bytes


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
