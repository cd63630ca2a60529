"""The proxies that are measured side by side, and how each one is started.

All of them balance over the same mock pods with their own defaults, and each that writes one line
a request writes it to a file, buffered. nginx makes no decision: it is the floor.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
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
SMG = "smg cache_aware"
SGLANG_ROUTER = "sglang-router cache_aware"
ROUND_ROBIN_PAIRS = "vllm-router P/D round_robin"
CACHE_AWARE_PAIRS = "vllm-router P/D cache_aware"
SMG_PAIRS = "smg P/D cache_aware"
SGLANG_ROUTER_PAIRS = "sglang-router P/D cache_aware"
SHORT_LIST = (CALINIX, NGINX, ROUND_ROBIN, CACHE_AWARE)
"""Whom the request path is compared with while working on it."""
UNIFIED, NIXL, SGLANG = "", "nixl", "sglang"
"""How KV gets from a prefill pod to a decode pod; unified pods are both."""
BOOTSTRAP_PORT = 8998
"""Of SGLang's prefill pods. Nobody listens there: mock pods have no KV to move."""
KEEPALIVE_REQUESTS = 100_000_000
"""nginx closes a connection after 1000 requests by default, which no other contender does."""


class Setup(msgspec.Struct, frozen=True):
    """What a proxy is started with: its ports, the pods' ports, a folder of its own.

    Where KV is handed on, the first half of the pods are for prefill.
    """

    port: int
    admin_port: int
    pod_ports: tuple[int, ...]
    folder: Path
    handoff: str = UNIFIED

    @property
    def urls(self) -> list[str]:
        """Of all pods."""
        return [f"http://127.0.0.1:{port}" for port in self.pod_ports]

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """The urls of the prefill pods, and those of the decode pods."""
        half = len(self.pod_ports) // 2
        return self.urls[:half], self.urls[half:]


class Contender(msgspec.Struct, frozen=True):
    """A proxy: `command` writes what it needs into the folder and gives the command line."""

    name: str
    version: str
    how: str
    ready_path: str
    command: Callable[[Setup], list[str]]
    handoffs: tuple[str, ...] = (UNIFIED,)


def new_setup(pod_ports: list[int], folder: Path, handoff: str = UNIFIED) -> Setup:
    """Free ports, and the folder made."""
    folder.mkdir(parents=True, exist_ok=True)
    return Setup(free_port(), free_port(), tuple(pod_ports), folder, handoff)


@contextlib.contextmanager
def started(
    children: Children, contender: Contender, setup: Setup, core: int | None
) -> Iterator[Child]:
    """The proxy, ready, for the time of a `with` block."""
    log = setup.folder / f"{contender.name.replace(' ', '-').replace('/', '')}.log"
    with children.running(contender.command(setup), log, core) as child:
        wait_ready(child, setup.port, contender.ready_path)
        yield child


def choose(names: list[str], calinix: str) -> list[Contender]:
    """The contenders of these names, their programs found or installed."""
    return [MAKERS[name](calinix) for name in names]


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


# ---- the routers


def _router(
    router: peers.Router,
    name: str,
    begin: Sequence[str] = (),
    policy: str = "cache_aware",
    handoff: str = UNIFIED,
    ready_path: str = "/readiness",
) -> Contender:
    """A router of the field: they have a common ancestor, and nearly the same command line."""
    program = peers.find_router(router)

    def command(setup: Setup) -> list[str]:
        line = [str(program), *begin, "--host", "127.0.0.1", "--port", str(setup.port)]
        line += ["--policy", policy]
        line += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(setup.admin_port)]
        if not handoff:
            return [*line, "--worker-urls", *setup.urls]
        prefill, decode = setup.pairs
        port = [str(BOOTSTRAP_PORT)] if handoff == SGLANG else []
        for url in prefill:
            line += ["--prefill", url, *port]
        for url in decode:
            line += ["--decode", url]
        return line

    pods = f"{handoff} pairs, " if handoff else ""
    options = " ".join(begin[1:] if begin[:1] == ("launch",) else begin)
    return Contender(
        name,
        peers.router_version(router, program),
        f"{pods}--policy {policy}{' ' if options else ''}{options}, else its defaults "
        "(which write no line a request)",
        ready_path,
        command,
        (handoff,),
    )


def vllm_router(policy: str) -> Contender:
    """vllm-router over unified pods."""
    return _router(peers.VLLM_ROUTER, f"vllm-router {policy}", policy=policy, ready_path="/health")


def _vllm_router_pairs(policy: str) -> Contender:
    return _router(
        peers.VLLM_ROUTER,
        f"vllm-router P/D {policy}",
        ("--vllm-pd-disaggregation",),
        policy,
        NIXL,
        "/health",
    )


QUIET = ("launch", "--log-level", "warn")
PAIRS = ("launch", "--pd-disaggregation", "--log-level", "warn")


# ---- calinix


def _group(urls: Sequence[str], name: str, **more: object) -> dict[str, object]:
    pods = [{"id": f"{name}-{number}", "url": url, **more} for number, url in enumerate(urls)]
    return {"pods": pods}


def _upstreams(setup: Setup) -> dict[str, object]:
    if not setup.handoff:
        return {"single": _group(setup.urls, "pod")}
    prefill, decode = setup.pairs
    port = {"bootstrapPort": BOOTSTRAP_PORT} if setup.handoff == SGLANG else {}
    return {
        "dispatch": {
            "protocol": setup.handoff,
            "prefill": _group(prefill, "prefill", **port),
            "decode": _group(decode, "decode"),
        }
    }


def calinix_config(setup: Setup, strategy: str, **more: object) -> dict[str, object]:
    """The config of the measured gateway: defaults, so every feature that is on for users is on."""
    config: dict[str, object] = {
        "version": 1,
        "gateway": {"host": "127.0.0.1", "port": setup.port, "strategy": strategy},
        "upstreams": _upstreams(setup),
        "admin": {"port": setup.admin_port},
        "log": {"requests": True, "requestsFile": str(setup.folder / "requests.log")},
    }
    return config | more


def calinix_contender(program: str, strategy: str = "cacheAware", **more: object) -> Contender:
    """The gateway; `program` is its command line without `serve CONFIG`, `more` adds to config."""
    line = shlex.split(program)

    def command(setup: Setup) -> list[str]:
        path = setup.folder / "config.yaml"
        path.write_text(yaml.safe_dump(calinix_config(setup, strategy, **more), sort_keys=False))
        return [*line, "serve", str(path)]

    return Contender(
        CALINIX,
        output_of(*line, "--version").removeprefix("calinix ") or "unknown",
        f"strategy {strategy}, admin port on, a log line a request, else defaults",
        "/ready",
        command,
        (UNIFIED, NIXL, SGLANG),
    )


MAKERS: dict[str, Callable[[str], Contender]] = {
    CALINIX: calinix_contender,
    NGINX: lambda _: _nginx(),
    ROUND_ROBIN: lambda _: vllm_router("round_robin"),
    CACHE_AWARE: lambda _: vllm_router("cache_aware"),
    SMG: lambda _: _router(peers.SMG, SMG, QUIET),
    SGLANG_ROUTER: lambda _: _router(peers.SGLANG_ROUTER, SGLANG_ROUTER, QUIET),
    ROUND_ROBIN_PAIRS: lambda _: _vllm_router_pairs("round_robin"),
    CACHE_AWARE_PAIRS: lambda _: _vllm_router_pairs("cache_aware"),
    SMG_PAIRS: lambda _: _router(peers.SMG, SMG_PAIRS, PAIRS, handoff=SGLANG),
    SGLANG_ROUTER_PAIRS: lambda _: _router(
        peers.SGLANG_ROUTER, SGLANG_ROUTER_PAIRS, PAIRS, handoff=SGLANG
    ),
}
ALL = tuple(MAKERS)
