"""What the figures were taken on, and which cores may be used."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from calinix.bench.setting import cpu_model

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


class Cores(msgspec.Struct, frozen=True):
    """The proxy's core, and the one of the load generator and the mock pods."""

    proxy: int | None
    others: int | None
    warning: str = ""


def choose_cores() -> Cores:
    """Two cores of those this process may run on; without them the figures are weak, and say so."""
    if not hasattr(os, "sched_getaffinity") or shutil.which("taskset") is None:
        return Cores(None, None, "processes cannot be pinned to cores here (no taskset)")
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        return Cores(None, None, "only one core: the proxy shares it with the load generator")
    return Cores(allowed[0], allowed[1])


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def output_of(*command: str) -> str:
    """What a command says, both streams; empty when it cannot be run."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr).strip()


def describe_machine() -> dict[str, object]:
    """Machine, system and commit, for the head of a results file."""
    return {
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
        "uncommittedChanges": bool(output_of("git", "status", "--porcelain", "--", "src")),
    }


def write_json(path: Path, results: object) -> None:
    """Writes results for people and programs: indented, ending in a newline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
