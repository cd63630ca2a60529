"""Telemetry: operational logs, the request log and metrics.

The request path pays for one append per request. Every BATCH records, and whenever the host calls
`flush`, one pass counts them and writes their lines.
"""

from __future__ import annotations

import time

from calinix.config import Config
from calinix.telemetry.counters import PodSource, PodState
from calinix.telemetry.logs import configure_logging
from calinix.telemetry.metrics import Metrics
from calinix.telemetry.record import RequestRecord
from calinix.telemetry.request_log import RequestLog

__all__ = [
    "BATCH",
    "Metrics",
    "PodSource",
    "PodState",
    "RequestLog",
    "RequestRecord",
    "Telemetry",
    "configure_logging",
]

BATCH = 64


class Telemetry:
    """What one process counts and writes. Raises ConfigError: the request log cannot be opened."""

    __slots__ = ("_pending", "log", "metrics")

    def __init__(self, config: Config, source: PodSource, build: dict[str, str] | None = None):
        self.metrics = Metrics(source, config.cache_registry.max_pods, build)
        self.log = RequestLog.open(config.log)
        if self.log is not None:
            log = self.log
            self.metrics.dropped_lines = lambda: log.dropped_lines
        self._pending: list[RequestRecord] = []

    def finish(self, record: RequestRecord) -> None:
        """A request has ended. The record belongs to telemetry from here on."""
        if not record.received_at:
            # Not round(): it takes five times as long, and nobody minds the last half unit.
            record.received_at = int(time.time() * 1e6 - record.e2e_us) / 1e6
        pending = self._pending
        pending.append(record)
        if len(pending) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Counts and writes what has gathered; call it every 0.5 s, and before a scrape."""
        records = self._pending
        if records:
            self._pending = []
            observe = self.metrics.observe
            for record in records:
                observe(record)
                record.trim()
            if self.log is not None:
                self.log.write(records)
        elif self.log is not None:
            self.log.flush()

    def close(self) -> None:
        """Writes the rest and closes the request log's file."""
        self.flush()
        if self.log is not None:
            self.log.close()
