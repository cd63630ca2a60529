"""The proxies that are measured side by side, and how each one is started.

All of them balance over the same mock pods with their own defaults, and each that writes one line
a request writes it to a file, buffered. nginx makes no decision: it is the floor.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import yaml

from harness import peers
from harness.machine import free_port, output_of
from harness.processes import Child, Children, wait_ready

DIRECT = "direct"
CALINIX = "calinix"
NGINX = "nginx"
ROUND_ROBIN = "vllm-router round_robin"
CACHE_AWARE = "vllm-router cache_aware"
ALL = (CALINIX, NGINX, ROUND_ROBIN, CACHE_AWARE)
KEEPALIVE_REQUESTS = 100_000_000
"""nginx closes a connection after 1000 requests by default, which no other contender does."""


class Setup(msgspec.Struct, frozen=True):
    """What a proxy is started with: its ports, the pods' ports, a folder of its own."""

    port: int
    admin_port: int
    pod_ports: tuple[int, ...]
    folder: Path


class Contender(msgspec.Struct, frozen=True):
    """A proxy: `command` writes what it needs into the folder and gives the command line."""

    name: str
    version: str
    how: str
    ready_path: str
    command: Callable[[Setup], list[str]]


def new_setup(pod_ports: list[int], folder: Path) -> Setup:
    """Free ports, and the folder made."""
    folder.mkdir(parents=True, exist_ok=True)
    return Setup(free_port(), free_port(), tuple(pod_ports), folder)


@contextlib.contextmanager
def started(
    children: Children, contender: Contender, setup: Setup, core: int | None
) -> Iterator[Child]:
    """The proxy, ready, for the time of a `with` block."""
    log = setup.folder / f"{contender.name.replace(' ', '-')}.log"
    with children.running(contender.command(setup), log, core) as child:
        wait_ready(child, setup.port, contender.ready_path)
        yield child


def choose(names: list[str], calinix: str) -> list[Contender]:
    """The contenders of these names, their programs found or installed."""
    makers: dict[str, Callable[[], Contender]] = {
        CALINIX: lambda: calinix_contender(calinix),
        NGINX: _nginx,
        ROUND_ROBIN: lambda: _vllm_router("round_robin"),
        CACHE_AWARE: lambda: _vllm_router("cache_aware"),
    }
    return [makers[name]() for name in names]


# ---- nginx

_NGINX = """\
daemon off;
worker_processes 1;
{user}pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 8192; }}
http {{
  access_log {folder}/access.log combined buffer=64k flush=5s;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  keepalive_requests {keepalive_requests};
  client_max_body_size 64m;
  client_body_buffer_size 256k;
  upstream pods {{
{servers}
    keepalive 256;
    keepalive_requests {keepalive_requests};
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://pods;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


def _nginx() -> Contender:
    program = peers.find_nginx()

    def command(setup: Setup) -> list[str]:
        config = setup.folder / "nginx.conf"
        servers = "\n".join(f"    server 127.0.0.1:{port};" for port in setup.pod_ports)
        config.write_text(
            _NGINX.format(
                folder=setup.folder,
                port=setup.port,
                servers=servers,
                keepalive_requests=KEEPALIVE_REQUESTS,
                # Its workers would else be another user, who cannot write into our folder.
                user="user root root;\n" if os.geteuid() == 0 else "",
            )
        )
        error_log = str(setup.folder / "error.log")
        return [str(program), "-p", str(setup.folder), "-c", str(config), "-e", error_log]

    return Contender(
        NGINX,
        peers.nginx_version(program),
        "one worker, upstream keepalive, proxy_buffering off, access_log buffer=64k, "
        "bodies kept in memory, no limit on requests a connection",
        "/health",
        command,
    )


# ---- vllm-router


def _vllm_router(policy: str) -> Contender:
    program = peers.find_vllm_router()

    def command(setup: Setup) -> list[str]:
        urls = [f"http://127.0.0.1:{port}" for port in setup.pod_ports]
        line = [str(program), "--host", "127.0.0.1", "--port", str(setup.port)]
        line += ["--policy", policy, "--worker-urls", *urls]
        return [*line, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(setup.admin_port)]

    return Contender(
        f"vllm-router {policy}",
        peers.vllm_router_version(program),
        f"--policy {policy}, else its defaults (which write no line a request)",
        "/health",
        command,
    )


# ---- calinix


def calinix_config(setup: Setup, **more: object) -> dict[str, object]:
    """The config of the measured gateway: defaults, so every feature that is on for users is on."""
    pods = [
        {"id": f"pod-{number}", "url": f"http://127.0.0.1:{port}"}
        for number, port in enumerate(setup.pod_ports)
    ]
    config: dict[str, object] = {
        "version": 1,
        "gateway": {"host": "127.0.0.1", "port": setup.port, "strategy": "cacheAware"},
        "upstreams": {"single": {"pods": pods}},
        "admin": {"port": setup.admin_port},
        "log": {"requests": True, "requestsFile": str(setup.folder / "requests.log")},
    }
    return config | more


def calinix_contender(program: str, **more: object) -> Contender:
    """The gateway; `program` is its command line without `serve CONFIG`, `more` adds to config."""
    line = shlex.split(program)

    def command(setup: Setup) -> list[str]:
        path = setup.folder / "config.yaml"
        path.write_text(yaml.safe_dump(calinix_config(setup, **more), sort_keys=False))
        return [*line, "serve", str(path)]

    return Contender(
        CALINIX,
        output_of(*line, "--version").removeprefix("calinix ") or "unknown",
        "strategy cacheAware, admin port on, a log line a request, else defaults",
        "/ready",
        command,
    )
