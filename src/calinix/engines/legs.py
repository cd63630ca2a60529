"""The legs of one request, their answers, and what is known of the pods that they go to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

LegRole = Literal["single", "prefill", "decode"]


class Leg:
    """One HTTP request to one pod of the plan: `role` says which, `body` is sent as it is."""

    __slots__ = ("answers_client", "body", "bootstrap_path", "drained", "lines", "role")

    def __init__(
        self,
        role: LegRole,
        body: bytes,
        answers_client: bool,
        drained: bool = False,
        lines: bytes = b"",
        bootstrap_path: str = "",
    ):
        self.role: LegRole = role
        self.body = body
        self.answers_client = answers_client
        """This leg's answer is the client's answer; any other leg's is read and kept from it."""
        self.drained = drained
        """Of its answer only the end counts, and whether it is an error."""
        self.lines = lines
        """Further header lines, each with its line end."""
        self.bootstrap_path = bootstrap_path
        """A GET of this path at the pod's bootstrap server, in place of the client's request."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Leg) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def _fields(self) -> tuple[object, ...]:
        sent = (self.role, self.body, self.lines, self.bootstrap_path)
        return (*sent, self.answers_client, self.drained)


class LegAnswer:
    """The whole answer of a leg that does not answer the client."""

    __slots__ = ("body", "status")

    def __init__(self, status: int, body: bytes):
        self.status = status
        self.body = body


class Prefiller:
    """How decode pods find one prefill pod, and what its bootstrap server has said.

    One is kept for each engine process: `engine_ids` are those of one life.
    """

    __slots__ = ("engine_ids", "host", "host_json", "port", "port_json")

    def __init__(self, host: str, port: int | None):
        self.host = host
        """Name or address; an IPv6 address without brackets."""
        self.port = port
        """Of its bootstrap server; None where the configuration names none."""
        self.host_json = msgspec.json.encode(host)
        self.port_json = msgspec.json.encode(port)
        self.engine_ids: Mapping[int, str] = {}
        """Data-parallel rank -> engine id (mooncake); empty: not known, to be asked for."""
