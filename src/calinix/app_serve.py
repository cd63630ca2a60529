"""`calinix serve`: one process that does all, or workers and their supervisor."""

from __future__ import annotations

from pathlib import Path

from calinix.app import serve_alone
from calinix.config import load_config
from calinix.telemetry import configure_logging


def serve(config_path: Path, journal: Path | None = None) -> None:
    """Runs a gateway until SIGTERM or SIGINT; `journal` goes before `log.journalFile`.

    Raises ConfigError, and SystemExit where a worker could not start.
    """
    config = load_config(config_path)
    configure_logging(config.log)
    if config.gateway.workers == 1:
        serve_alone(config, config_path, journal)
        return
    from calinix.app_workers import supervise  # noqa: PLC0415  one process needs none of it

    supervise(config, config_path, journal)
