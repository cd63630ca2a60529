"""What becomes of finished requests: they are counted, and their lines are written.

The request path pays for one append per request. Every BATCH records, and whenever the host calls
`flush`, one pass counts them and adds their lines to the log. A batch is small: whoever comes next
waits for it.
"""

from __future__ import annotations

import time
from typing import Final

from calinix.config import Config
from calinix.telemetry.counters import Counters, PodSource
from calinix.telemetry.metrics import Metrics
from calinix.telemetry.record import RequestRecord
from calinix.telemetry.request_log import MAX_FIELD_CHARS, LogLine, RequestLog

BATCH: Final = 8


class Telemetry:
    """What one process counts and writes. Raises ConfigError: the request log cannot be opened."""

    __slots__ = ("_pending", "counters", "log", "metrics")

    def __init__(self, config: Config, source: PodSource, build: dict[str, str] | None = None):
        self.counters = Counters(source, config.cache_registry.max_pods)
        self.metrics = Metrics(self.counters, build)
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
            self._count()

    def flush(self) -> None:
        """Counts and writes what has gathered; call it every 0.5 s, and before a scrape."""
        if self._pending:
            self._count()
        if self.log is not None:
            self.log.flush()

    def _count(self) -> None:
        records = self._pending
        self._pending = []
        counters = self.counters
        for record in records:
            counters.observe(record)
        if self.log is not None:
            self.log.write([log_line(record) for record in records])

    def reopen(self) -> None:
        """Opens the request log's file anew, for rotation; what has ended goes to the old one."""
        self.flush()
        if self.log is not None:
            self.log.reopen()

    def close(self) -> None:
        """Writes the rest and closes the request log's file."""
        self.flush()
        if self.log is not None:
            self.log.close()


def log_line(record: RequestRecord) -> LogLine:
    """The record as it is written. What a client chose may be of any length: it is cut."""
    request_id, model, error = record.request_id, record.model, record.error
    return LogLine(
        request_id if len(request_id) <= MAX_FIELD_CHARS else request_id[:MAX_FIELD_CHARS],
        record.endpoint,
        record.mode,
        record.strategy,
        model if len(model) <= MAX_FIELD_CHARS else model[:MAX_FIELD_CHARS],
        record.status,
        record.pod_id,
        record.prefill_pod_id,
        record.received_at,
        record.ttft_us,
        record.itl_us,
        record.e2e_us,
        record.decision_us,
        record.prompt_blocks,
        record.cached_blocks,
        record.predicted_cached_tokens,
        record.prompt_tokens,
        record.cached_tokens,
        record.output_tokens,
        record.chunks,
        record.retries,
        record.retry_reason,
        error if len(error) <= MAX_FIELD_CHARS else error[:MAX_FIELD_CHARS],
        record.bytes_out,
    )
