"""Active probes: asks each pod's health endpoint and tells the router what it heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from calinix.config import Health, PodConfig
from calinix.core.events import Event, ProbeFailed, ProbeSucceeded
from calinix.edge.http_client import FetchError, PodClient, UpstreamFailure, fetch
from calinix.edge.identify import Identity, identify

log = structlog.get_logger()

_FIRST_VERDICT_INTERVAL_S = 0.2
"""A pod is asked this often until it has once answered: start-up should not wait a period."""
_QUICK_PROBES = 25
"""After so many in vain the pause doubles each time, up to the configured interval: a pod that
is not there is no start-up any more."""


def pause_s(in_vain: int) -> float:
    """Seconds before the next probe of a pod that has never answered any of so many."""
    doublings = min(max(0, in_vain - _QUICK_PROBES), 20)
    return _FIRST_VERDICT_INTERVAL_S * float(2**doublings)


class Prober:
    """Probes one pod until cancelled. `identified` is told what it is, before it gets work.

    It is asked once, and again after a failed probe: what comes back may be another engine.
    """

    def __init__(
        self,
        pod: PodConfig,
        client: PodClient,
        health: Health,
        observe: Callable[[Event], None],
        jitter: Callable[[], float],
        identified: Callable[[str, Identity], None] | None = None,
    ):
        self._pod = pod
        self._client = client
        self._observe = observe
        self._jitter = jitter
        self._identified = identified
        self._is_known = identified is None
        self._failing: object = None
        self.health = health

    async def run(self) -> None:
        """Probes for ever; each round is bounded by `timeoutMs`."""
        answered = False
        in_vain = 0
        while True:
            event = await self._probe()
            if not isinstance(event, ProbeSucceeded):
                self._is_known = self._identified is None
            elif not self._is_known:
                await self._identify()
            answered = answered or isinstance(event, ProbeSucceeded)
            if event is not None:
                self._observe(event)
            interval_s = self.health.interval_ms / 1e3
            if not answered:
                in_vain += 1
                interval_s = min(interval_s, pause_s(in_vain))
            # Jitter keeps the probes of many pods from falling on one moment.
            await asyncio.sleep(interval_s * (0.9 + 0.2 * self._jitter()))

    async def _identify(self) -> None:
        timeout_s = self.health.timeout_ms / 1e3
        found = await identify(self._client, self._pod.api_key, timeout_s=timeout_s)
        if found is not None and self._identified is not None:
            self._is_known = True
            self._identified(self._pod.id, found)

    async def _probe(self) -> Event | None:
        """What was heard; None where the pod could not be asked for want of a socket."""
        key = self._pod.api_key
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        try:
            head, _ = await fetch(
                self._client,
                "GET",
                self.health.endpoint,
                headers,
                timeout_s=self.health.timeout_ms / 1e3,
            )
        except FetchError as error:
            self._say(error.failure or "time-out", str(error))
            if error.failure is UpstreamFailure.NO_SOCKET:
                return None
            refused = error.failure is UpstreamFailure.CONNECT
            return ProbeFailed(self._pod.id, refused=refused, reason=str(error))
        if 200 <= head.status < 300:
            self._failing = None
            return ProbeSucceeded(self._pod.id)
        reason = f"answered {head.status}"
        self._say(head.status, reason)
        return ProbeFailed(self._pod.id, reason=reason)

    def _say(self, kind: object, reason: str) -> None:
        """Logs a failed probe, once for all that fail alike in a row."""
        if kind != self._failing:
            self._failing = kind
            url = self._pod.url + self.health.endpoint
            log.warning("probe_failed", pod=self._pod.id, url=url, reason=reason)
