"""Telemetry: operational logs, the request log and metrics."""

from calinix.telemetry.counters import PodSource, PodState
from calinix.telemetry.logs import configure_logging
from calinix.telemetry.metrics import Metrics
from calinix.telemetry.record import RequestRecord
from calinix.telemetry.request_log import RequestLog
from calinix.telemetry.telemetry import BATCH, Telemetry

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
