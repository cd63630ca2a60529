"""What the figures were taken on: form of the package, Python, its GIL, machine."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from calinix import __version__
from calinix.core import router
from calinix.core.kv import COMPILED


class Setting(msgspec.Struct, frozen=True):
    """The head of every result."""

    taken: str
    """When, UTC."""
    calinix: str
    form: str
    """`compiled`, `interpreted`, or what of it is which."""
    python: str
    numpy: str
    gil: bool
    """Whether one thread runs at a time, as in ordinary builds of Python."""
    cpu: str
    cores: int
    """That this process may use."""
    system: str


def setting() -> Setting:
    """Of this process."""
    return Setting(
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        calinix=__version__,
        form=form_of(compiled_path=_is_extension(router.__file__), compiled_index=COMPILED),
        python=platform.python_version(),
        numpy=np.__version__,
        gil=has_gil(),
        cpu=cpu_model(),
        cores=_cores(),
        system=platform.platform(),
    )


def form_of(*, compiled_path: bool, compiled_index: bool) -> str:
    """In words. An installation compiles both; an editable one runs the request path as it is."""
    if compiled_path and compiled_index:
        return "compiled"
    if not compiled_path and not compiled_index:
        return "interpreted"
    part = "request path" if compiled_path else "index"
    return f"interpreted, but for the {part}"


def has_gil() -> bool:
    """False on a free-threaded Python that runs without it."""
    enabled = getattr(sys, "_is_gil_enabled", None)
    return True if enabled is None else bool(enabled())


def _is_extension(file: str | None) -> bool:
    return file is not None and not file.endswith(".py")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    """As the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
