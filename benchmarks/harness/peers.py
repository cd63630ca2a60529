"""The peers' programs: nginx from Debian, the routers from the Python package index.

Nothing of them enters the project's own environment: each router gets a venv under .peers/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.machine import ROOT, output_of
from harness.processes import BenchmarkError

PEERS = ROOT / ".peers"
NGINX_PACKAGES = ("nginx-light", "nginx")


class Router(msgspec.Struct, frozen=True):
    """A router's package, which has a program of the same name."""

    package: str
    least: str
    """The oldest version that is compared with."""


VLLM_ROUTER = Router("vllm-router", "0.1.17")
SMG = Router("smg", "1.13.0")
SGLANG_ROUTER = Router("sglang-router", "0.3.2")


def find_nginx() -> Path:
    """Path of nginx; installs Debian's package when it is missing and this is root."""
    found = _which("nginx")
    if found is None and _is_debian_root():
        _run("apt-get", "update", "-qq")
        for package in NGINX_PACKAGES:
            if _succeeds("apt-get", "install", "-y", "-qq", "--no-install-recommends", package):
                break
        found = _which("nginx")
    if found is None:
        raise BenchmarkError("no nginx here: install it (apt-get install nginx-light)")
    return found


def nginx_version(nginx: Path) -> str:
    """Like 1.22.1."""
    said = re.search(r"nginx/(\S+)", output_of(str(nginx), "-v"))
    return said.group(1) if said else "unknown"


def find_router(router: Router) -> Path:
    """Path of a router in its own venv, which is made when it is missing."""
    venv = PEERS / router.package
    program = venv / "bin" / router.package
    if not program.exists():
        _run(sys.executable, "-m", "venv", str(venv))
        wanted = f"{router.package}>={router.least}"
        _run(str(venv / "bin" / "pip"), "install", "--quiet", wanted)
    return program


def router_version(router: Router, program: Path) -> str:
    """As its package says."""
    code = f"from importlib.metadata import version; print(version('{router.package}'))"
    return output_of(str(program.with_name("python")), "-c", code) or "unknown"


def _which(name: str) -> Path | None:
    """Also looks where Debian keeps servers, which users' PATH may lack."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    return Path(found) if found else None


def _is_debian_root() -> bool:
    return shutil.which("apt-get") is not None and os.geteuid() == 0


def _succeeds(*command: str) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    return done.returncode == 0


def _run(*command: str) -> None:
    try:
        _checked(command)
    except subprocess.CalledProcessError as error:
        raise BenchmarkError(f"{' '.join(command)} failed:\n{error.stderr}") from error


def _checked(command: Sequence[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
