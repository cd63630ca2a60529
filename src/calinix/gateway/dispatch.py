"""Which P/D protocol carries a request: as configured, or as the pods say that they are."""

from __future__ import annotations

import os
from typing import Final

import structlog

from calinix.config import DispatchUpstream
from calinix.core.prompt import Endpoint
from calinix.core.requests import RoutePlan
from calinix.edge.identify import Identity
from calinix.engines.base import Exchange
from calinix.engines.protocols import NEEDS_PREFILL, Protocol, exchange_for, protocol_of
from calinix.gateway.upstreams import Upstream, Upstreams

log = structlog.get_logger()

_NUMBERS_BYTES: Final = 2048


class SystemNumbers:
    """Random numbers from the system: two gateways must never invent the same room.

    Many are asked for at once, as a call costs more than the numbers.
    """

    __slots__ = ("_at", "_octets")

    def __init__(self) -> None:
        self._octets = b""
        self._at = 0

    def draw(self, bits: int) -> int:
        """Uniform in 0..2**bits - 1; at most 128 bits."""
        at, count = self._at, (bits + 7) >> 3
        if at + count > len(self._octets):
            self._octets = os.urandom(_NUMBERS_BYTES)
            at = 0
        self._at = at + count
        return int.from_bytes(self._octets[at : at + count], "little") >> (8 * count - bits)


class Dispatch:
    """The dispatch group's protocol. `auto` follows the engines of the pods, as they are told."""

    def __init__(self, upstreams: Upstreams):
        self._upstreams = upstreams
        self._protocol: Protocol | None = None
        self._decode: frozenset[str] = frozenset()
        self._draw = SystemNumbers().draw
        self.asked_pods: frozenset[str] = frozenset()
        """Those that are to say what they are."""
        self.must_split: bool | None = None
        """True: decode pods serve nothing that is not prefilled elsewhere; None: they may."""

    def adopt(self, group: DispatchUpstream | None) -> None:
        """The configured group; None where there is none."""
        if group is None:
            self._protocol = "plain"
        elif group.protocol == "auto":
            self._protocol = None
        else:
            self._protocol = group.protocol
        prefill = [pod.id for pod in group.prefill.pods] if group else []
        decode = [pod.id for pod in group.decode.pods] if group else []
        self._decode = frozenset(decode)
        if self._protocol is None:
            self.asked_pods = frozenset((*prefill, *decode))
        else:
            self.asked_pods = frozenset()
        self._look()

    def identified(self, pod_id: str, identity: Identity) -> None:
        """A pod has said what it is."""
        if pod_id not in self._upstreams:
            return
        upstream = self._upstreams[pod_id]
        if upstream.identity != identity:
            upstream.identify(identity)
            log.info("pod_identified", pod=pod_id, engine=identity.engine, version=identity.version)
            self._look()
            self._warn_of_mixture()

    def _warn_of_mixture(self) -> None:
        """KV of one engine is of no use to another."""
        found = {
            upstream.identity.engine
            for upstream in self._upstreams
            if upstream.pod.id in self.asked_pods and upstream.identity is not None
        }
        if len(found) > 1:
            log.warning("pods_of_several_engines", engines=sorted(found))

    def engine_of(self, pod_id: str) -> dict[str, str | None]:
        """For people: what a pod said that it is; null where it was not asked, or not yet."""
        identity = self._upstreams[pod_id].identity if pod_id in self._upstreams else None
        if identity is None:
            return {"engine": None, "engineVersion": None}
        return {"engine": identity.engine, "engineVersion": identity.version}

    def exchange(
        self, plan: RoutePlan, prefill: Upstream | None, endpoint: Endpoint, body: bytes
    ) -> Exchange:
        """The legs of a plan; `prefill` is the upstream of its prefill pod, where it has one.

        Raises BadRequest for a body that cannot be edited, or that the pods would not survive.
        """
        if prefill is None or plan.prefill is None:
            return exchange_for("plain", plan.mode, endpoint, body)
        protocol = self._protocol or protocol_of(prefill.engine, prefill.pod.bootstrap_port)
        prefiller = prefill.prefiller(plan.prefill.epoch)
        return exchange_for(protocol, plan.mode, endpoint, body, prefiller, self._draw)

    def _look(self) -> None:
        """Whether any decode pod cannot do without a prefill pod."""
        protocols = (
            {self._protocol}
            if self._protocol
            else {
                protocol_of(self._upstreams[pod_id].engine, None)
                for pod_id in self._decode
                if pod_id in self._upstreams
            }
        )
        self.must_split = True if protocols & NEEDS_PREFILL else None
