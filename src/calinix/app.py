"""The composition root: the only place that constructs. Starts, reloads and drains a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import structlog
import uvloop
from msgspec.structs import replace

from calinix.app_process import allow_sockets, settle_memory
from calinix.config import Config, Limits, load_config
from calinix.config import Gateway as GatewayConfig
from calinix.config.tokens import hf_path
from calinix.core.kv import COMPILED
from calinix.core.recorded import RecordedRouter
from calinix.core.router import Router
from calinix.edge.health import Prober
from calinix.edge.http_server import HttpServer
from calinix.edge.identify import Identity
from calinix.edge.journal import Journal
from calinix.edge.kv_feed import KvFeed
from calinix.edge.prompt_tokens import PromptTokenizer
from calinix.edge.scraper import Scraper
from calinix.edge.tls import client_ssl_context, server_ssl_context
from calinix.edge.token_check import TokenChecks
from calinix.errors import ConfigError
from calinix.gateway.admin import AdminHandler
from calinix.gateway.server import Gateway
from calinix.gateway.tokens import ExactTokens
from calinix.gateway.upstreams import Upstream, Upstreams, pods_by_role
from calinix.telemetry import Telemetry

log = structlog.get_logger()

_ADMIN_BODY_BYTES = 65_536

# What a running process cannot take over from a new file.
_FIXED_SECTIONS = ("cache_registry", "kv_events", "scrape", "sessions", "admin", "log")
_FIXED_GATEWAY_KEYS = (
    "host", "port", "tokenizer", "tokenizing", "block_size", "deterministic", "seed",
    "decisions_kept", "workers",
)  # fmt: skip


class App:
    """One gateway process: its two ports, its probes, its signals."""

    def __init__(
        self, config: Config, config_path: Path | None = None, journal: Path | None = None
    ):
        self.config = config
        self.config_path = config_path
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._journal: Journal | None = None
        self.router = self._new_router(config, journal)
        # Apart, since probes draw at any time: `seed` would not repeat what the router draws.
        self._jitter = random.Random()
        self.telemetry = Telemetry(config, self.router)
        upstreams = Upstreams(config, loop, _pod_tls(config))
        self.gateway = Gateway(config, self.router, self.telemetry, upstreams, loop)
        self._probes: dict[str, asyncio.Task[None]] = {}
        self.kv_feed = KvFeed(config, loop, self.gateway.observe, self.router.epoch)
        self.gateway.kv_views = self.kv_feed.views
        self.telemetry.metrics.kv_views = self.kv_feed.views
        self.scraper = self.gateway.scraper = self._new_scraper(config)
        self.telemetry.metrics.engine_figures = self.scraper.figures
        self.telemetry.metrics.calibrations = lambda: {
            pod.id: pod.calibration for pod in self.router.pods()
        }
        self.telemetry.metrics.steering = lambda: self.router.steering(loop.time())
        self.gateway.tokens = self.telemetry.metrics.tokens = self._exact_tokens(config)
        self._tls = server_ssl_context(config.gateway.tls) if config.gateway.tls else None
        self.server = HttpServer(self.gateway, loop, config.gateway.limits, config.gateway.timeouts)
        self.admin: HttpServer | None = None

    def _exact_tokens(self, config: Config) -> ExactTokens | None:
        """For prompts that go by the engine's own tokens."""
        path = hf_path(config.gateway.tokenizer)
        if path is None:
            return None
        settings = config.gateway.tokenizing
        prompts = PromptTokenizer(path, settings, self._loop)
        checks = TokenChecks(
            prompts.ids_of, self._loop, settings.check_ms / 1e3, self._jitter.random
        )
        return ExactTokens(prompts, checks, self._loop, settings.wait_ms / 1e3)

    def _new_scraper(self, config: Config) -> Scraper:
        """Where tokens are hashed, engines' blocks had better be as long as ours."""
        by_tokens = hf_path(config.gateway.tokenizer) or config.kv_events.apply == "blocks"
        return Scraper(
            config.scrape,
            self._loop,
            self.gateway.observe,
            self.router.epoch,
            self._jitter.random,
            config.cache_registry.token_block_size if by_tokens else None,
        )

    def _new_router(self, config: Config, journal: Path | None) -> Router:
        opened = Journal.open(config, journal)
        if opened is None:
            # No secret depends on these numbers: they only spread load.
            return Router(config, random.Random(config.gateway.seed))
        self._journal, rng = opened
        return RecordedRouter(config, rng, self._journal)

    @property
    def base_url(self) -> str:
        """Where clients reach it."""
        scheme = "https" if self._tls else "http"
        return f"{scheme}://{_dialable(self.config.gateway.host)}:{self.server.port}"

    @property
    def admin_url(self) -> str:
        """Where metrics and admin JSON are; empty when the admin port is off."""
        if self.admin is None:
            return ""
        return f"http://{_dialable(self.config.admin.host)}:{self.admin.port}"

    async def start(self) -> None:
        """Opens the ports and starts the probes.

        Raises ConfigError: a port is taken, or the tokenizer cannot be used.
        """
        config = self.config
        if self.gateway.tokens is not None:
            await self.gateway.tokens.open()
        upstreams = self.gateway.upstreams
        upstreams.on_added = self._start_pod
        upstreams.on_removed = self._stop_pod
        for _, pod in pods_by_role(config).values():
            upstreams.add(pod)
        self.kv_feed.start()
        if config.admin.enabled:
            self.admin = HttpServer(
                AdminHandler(self.gateway),
                self._loop,
                admin_limits(config),
                config.gateway.timeouts,
            )
        await self._open_ports()
        self.gateway.start()
        self._say_serving()

    def _say_serving(self) -> None:
        log.info(
            "serving",
            host=self.config.gateway.host,
            port=self.server.port,
            admin_port=self.admin.port if self.admin else None,
            pods=len(self._probes),
            compiled=COMPILED,
        )

    async def _open_ports(self) -> None:
        gateway, admin = self.config.gateway, self.config.admin
        if self.admin is not None:
            await listen(self.admin, admin.host, admin.port, "admin.port", None)
        await listen(self.server, gateway.host, gateway.port, "gateway.port", self._tls)

    def _start_pod(self, upstream: Upstream) -> None:
        self._start_probe(upstream)
        self.kv_feed.add(upstream.pod, upstream.client)
        self.scraper.add(upstream.pod, upstream.client)
        if self.gateway.tokens is not None:
            self.gateway.tokens.checks.add(upstream.pod, upstream.client)

    def _stop_pod(self, pod_id: str) -> None:
        self._stop_probe(pod_id)
        self.kv_feed.remove(pod_id)
        self.scraper.remove(pod_id)
        if self.gateway.tokens is not None:
            self.gateway.tokens.checks.remove(pod_id)

    def _start_probe(self, upstream: Upstream) -> None:
        prober = Prober(
            upstream.pod,
            upstream.client,
            self.config.health,
            self.gateway.observe,
            self._jitter.random,
            self._identified_of(upstream.pod.id),
        )
        self._probes[upstream.pod.id] = self._loop.create_task(prober.run())

    def _identified_of(self, pod_id: str) -> Callable[[str, Identity], None] | None:
        """Who is told what a pod is; None where it does not matter."""
        dispatch = self.gateway.dispatch
        return dispatch.identified if pod_id in dispatch.asked_pods else None

    def _stop_probe(self, pod_id: str) -> None:
        task = self._probes.pop(pod_id, None)
        if task is not None:
            task.cancel()

    def reload(self) -> None:
        """Reads the file again; a bad one is reported and changes nothing. Opens the log anew."""
        self.telemetry.reopen()
        if self.config_path is None or self.gateway.draining:
            return
        try:
            config, pod_tls = reloadable(load_config(self.config_path), self.config)
            if self._tls is not None and config.gateway.tls is not None:
                # New handshakes take the renewed certificate; running connections are untouched.
                tls = config.gateway.tls
                self._tls.load_cert_chain(tls.cert_file, tls.key_file)
        except (ConfigError, OSError, ssl.SSLError) as error:
            log.error("reload_refused", problems=str(error).splitlines())
            return
        probes_change = config.health != self.config.health
        asked = self.gateway.dispatch.asked_pods
        self.config = config
        self.gateway.upstreams.adopt(config, pod_tls)
        self.gateway.reload(config)
        self.server.adopt(config.gateway.limits, config.gateway.timeouts)
        if self.admin is not None:
            self.admin.adopt(admin_limits(config), config.gateway.timeouts)
        if probes_change or self.gateway.dispatch.asked_pods != asked:
            for upstream in self.gateway.upstreams:
                self._stop_probe(upstream.pod.id)
                self._start_probe(upstream)
        log.info("reloaded", pods=len(self._probes))

    async def stop(self, drain_s: float | None = None) -> None:
        """No new connections; what is under way ends, at the latest after `drain_s`."""
        self.gateway.draining = True
        if drain_s is None:
            drain_s = self.config.gateway.timeouts.drain_ms / 1e3
        log.info("draining", inflight=len(self.gateway.flights), limit_s=drain_s)
        await self.server.drain(drain_s)
        for pod_id in list(self._probes):
            self._stop_probe(pod_id)
        self.gateway.upstreams.close()
        self.kv_feed.stop()
        self.scraper.stop()
        if self.admin is not None:
            await self.admin.drain(1.0)
        self.gateway.stop()
        if self.gateway.tokens is not None:
            self.gateway.tokens.close()
        if self._journal is not None:
            self._journal.close()
        self.telemetry.close()
        log.info("stopped")


def _dialable(host: str) -> str:
    """An address to connect to, for an address to listen on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{host}]" if ":" in host else host


def _pod_tls(config: Config) -> ssl.SSLContext | None:
    pods = pods_by_role(config).values()
    if any(pod.url.startswith("https://") for _, pod in pods):
        return client_ssl_context(config.upstreams.tls)
    return None


async def listen(
    server: HttpServer, host: str, port: int, key: str, tls: ssl.SSLContext | None
) -> None:
    """Opens the port that `key` names. Raises ConfigError where that cannot be done."""
    try:
        await server.start(host, port, ssl=tls)
    except OSError as error:
        raise ConfigError(
            [f"{key}: cannot listen on {host}:{port}: {error.strerror or error}; choose another"]
        ) from error


def admin_limits(config: Config) -> Limits:
    """Nobody has a long body to send to the admin port."""
    limits = config.gateway.limits
    return replace(limits, body_bytes=min(limits.body_bytes, _ADMIN_BODY_BYTES))


def _key(struct: type[Config | GatewayConfig], name: str) -> str:
    """The key in the file of a struct's field."""
    return dict(zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True))[name]


def reloadable(new: Config, running: Config) -> tuple[Config, ssl.SSLContext | None]:
    """What of `new` a process that runs by `running` may take over, and the pods' TLS.

    Says what it has to ignore. Raises ConfigError, OSError, ssl.SSLError: nothing of it.
    """
    config, ignored = _with_fixed_keys(new, running)
    pod_tls = _pod_tls(config)
    if running.gateway.tls is not None and config.gateway.tls is not None:
        server_ssl_context(config.gateway.tls)
    for key in ignored:
        log.warning("reload_ignores", key=key, hint="takes effect at the next start")
    return config, pod_tls


def _with_fixed_keys(new: Config, running: Config) -> tuple[Config, list[str]]:
    """`new` with the running values of what cannot change, and the keys that this ignores.

    Raises ConfigError where the running process has no room for the new pods.
    """
    ignored = []
    keep: dict[str, object] = {}
    for name in _FIXED_GATEWAY_KEYS:
        value = keep[name] = getattr(running.gateway, name)
        if getattr(new.gateway, name) != value:
            ignored.append(f"gateway.{_key(GatewayConfig, name)}")
    if (new.gateway.tls is None) != (running.gateway.tls is None):
        # A port does not begin or cease to speak TLS; another certificate is taken over.
        keep["tls"] = running.gateway.tls
        ignored.append("gateway.tls")
    sections = {name: getattr(running, name) for name in _FIXED_SECTIONS}
    ignored += [
        _key(Config, name) for name, value in sections.items() if getattr(new, name) != value
    ]
    max_pods, pods = running.cache_registry.max_pods, len(pods_by_role(new))
    if pods > max_pods:
        raise ConfigError(
            [f"{pods} pods: this process has room for cacheRegistry.maxPods: {max_pods}; restart"]
        )
    return replace(new, gateway=replace(new.gateway, **keep), **sections), ignored


@contextlib.asynccontextmanager
async def running_gateway(config: Config, config_path: Path | None = None) -> AsyncIterator[App]:
    """A gateway in this process for as long as the block runs: for tests, demos and notebooks."""
    app = App(config, config_path)
    try:
        await app.start()
        yield app
    finally:
        await app.stop()


async def _serve(config: Config, config_path: Path, journal: Path | None) -> None:
    app = App(config, config_path, journal)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, app.reload)
    await app.start()
    settle_memory()
    await stop.wait()
    # A second signal does not wait for the drain.
    hurry = loop.create_task(app.stop())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, hurry.cancel)
    try:
        await hurry
    except asyncio.CancelledError:
        await app.stop(drain_s=0.0)


def serve_alone(config: Config, config_path: Path, journal: Path | None = None) -> None:
    """Runs a gateway in this process until SIGTERM or SIGINT; `journal` goes before the file's.

    Raises ConfigError.
    """
    allow_sockets()
    uvloop.run(_serve(config, config_path, journal))
