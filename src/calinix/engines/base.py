"""The shape of a P/D protocol: the legs of one request, and what is known of their pods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import msgspec

from calinix.errors import CalinixError

LegRole = Literal["single", "prefill", "decode"]


Draw = Callable[[int], int]
"""Random numbers, handed in by the host: `draw(bits)` is uniform in 0..2**bits - 1."""


class Leg(msgspec.Struct, frozen=True):
    """One HTTP request to one pod of the plan: `role` says which, `body` is sent as it is."""

    role: LegRole
    body: bytes
    answers_client: bool
    """This leg's answer is the client's answer; any other leg's is read and kept from it."""
    drained: bool = False
    """Of its answer only the end counts, and whether it is an error."""
    lines: bytes = b""
    """Further header lines, each with its line end."""
    bootstrap_path: str = ""
    """A GET of this path at the pod's bootstrap server, in the place of the client's request."""


class LegAnswer(msgspec.Struct, frozen=True):
    """The whole answer of a leg that does not answer the client."""

    status: int
    body: bytes


class PrefillAnswer(msgspec.Struct, frozen=True):
    """What is read of a prefill pod's answer: a handle in its exact bytes, where there is one."""

    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class ExchangeError(CalinixError):
    """A leg's answer does not allow the exchange to go on."""


class Prefiller:
    """How decode pods find one prefill pod, and what its bootstrap server has said.

    One is kept for each engine process: `engine_ids` are those of one life.
    """

    __slots__ = ("engine_ids", "host", "port")

    def __init__(self, host: str, port: int | None):
        self.host = host
        """Name or address; an IPv6 address without brackets."""
        self.port = port
        """Of its bootstrap server; None where the configuration names none."""
        self.engine_ids: Mapping[int, str] = {}
        """Data-parallel rank -> engine id (mooncake); empty: not known, to be asked for."""


class Exchange(Protocol):
    """One request's legs, in the order that the engine's protocol wants them."""

    def start(self) -> tuple[Leg, ...]:
        """The legs to send at once."""
        ...

    def after(self, leg: Leg, answer: LegAnswer) -> tuple[Leg, ...]:
        """The legs that follow the answer to `leg` (a 2xx). Raises ExchangeError."""
        ...
