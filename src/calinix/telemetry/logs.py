"""Operational logs: structlog, to standard error, for people on a terminal or as JSON lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog
from structlog.typing import Processor

from calinix.config import Log

MAX_FIELD_CHARS = 1024
MAX_TRACEBACK_CHARS = 16_384


def configure_logging(config: Log, stream: TextIO | None = None) -> None:
    """Sets up structlog, and the standard library's logging (asyncio's) to look the same.

    May be called again. A stream that can no longer be written to loses lines, and raises nothing.
    """
    out = sys.stderr if stream is None else stream
    terminal = out.isatty()
    as_json = config.format == "json" or (config.format == "auto" and not terminal)
    level = logging.getLevelNamesMapping()[config.level.upper()]
    shared: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    last: list[Processor]
    if as_json:
        last = [structlog.processors.format_exc_info, _bounded, structlog.processors.JSONRenderer()]
    else:
        # No locals in tracebacks: they hold prompts and keys.
        last = [
            _bounded,
            _printable,
            structlog.dev.ConsoleRenderer(
                colors=terminal, exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _Lines(out),
        cache_logger_on_first_use=False,
    )
    _bridge(out, level, shared, last)


def _bridge(out: TextIO, level: int, shared: list[Processor], last: list[Processor]) -> None:
    """The standard library's records go through the same processors to the same stream."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _Bridge)]:
        root.removeHandler(handler)
    handler = _Bridge(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root.addHandler(handler)
    root.setLevel(max(level, logging.INFO))


class _Bridge(logging.StreamHandler[TextIO]):
    """Writes like _Lines; `logging` would print a traceback for every line it cannot write."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        del record


class _Lines:
    """A logger that writes whole lines and gives up silently: there is nowhere to complain."""

    def __init__(self, out: TextIO):
        self._out = out

    def msg(self, message: str) -> None:
        try:
            self._out.write(message + "\n")
            self._out.flush()
        except (OSError, ValueError):
            pass

    debug = info = warning = error = critical = exception = log = fatal = warn = failure = err = msg


def _bounded(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Cuts long texts: a field may hold what a client or a pod sent."""
    for key, value in event.items():
        if isinstance(value, str):
            limit = MAX_TRACEBACK_CHARS if key in ("exception", "stack") else MAX_FIELD_CHARS
            if len(value) > limit:
                event[key] = value[:limit] + "..."
    return event


def _printable(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escapes what would steer a terminal or forge a second line."""
    for key, value in event.items():
        if isinstance(value, str) and key not in ("exception", "stack"):
            event[key] = value if value.isprintable() else repr(value)[1:-1]
    return event
