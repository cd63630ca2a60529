"""Start and stop of the gateway, TLS on its port and to its pods, reloads at their edges."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml
from test_reload import Held, Process, serving, whole

import kit
from calinix.app import App, running_gateway
from calinix.config import load_config
from calinix.core.events import ProbeSucceeded
from calinix.errors import ConfigError
from certificates import make_certificate, tls_end
from fleets import merged
from gatewaykit import (
    CHAT,
    KEEP,
    Connection,
    Served,
    answer,
    black_hole,
    chat_body,
    config_of,
    raw_pod,
)

PORTS = {"gateway": {"host": "127.0.0.1", "port": 0}, "admin": {"port": 0}}


@contextlib.asynccontextmanager
async def app_of(folder: Path, config: dict[str, Any]) -> AsyncIterator[tuple[App, Path]]:
    """A gateway in this loop that has its config from a file, and that file."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(merged(config, PORTS)))
    async with running_gateway(load_config(path), path) as app:
        await kit.until(app.router.ready, "it is ready")
        yield app, path


def reload(app: App, path: Path, config: dict[str, Any]) -> list[Any]:
    """Another file; what the log says of it."""
    path.write_text(yaml.safe_dump(merged(config, PORTS)))
    with structlog.testing.capture_logs() as lines:
        app.reload()
    return lines


async def ask(port: int, tls: ssl.SSLContext | None = None, **more: Any) -> kit.Reply:
    """One chat."""
    return await kit.http(port, "POST", CHAT, chat_body(**more), tls=tls)


@kit.on_loop
async def test_sigterm_lets_everybody_end(tmp_path: Path) -> None:
    """Streams end whole, who waits is served, idle connections close, nobody new; exit 0."""
    held = Held()
    async with raw_pod(held.script) as pod:
        entry = {"url": pod.url, "maxConns": 1}
        async with serving(tmp_path, config_of(p=entry)) as served:
            stream = await served.stream()
            data = kit.request_bytes("POST", CHAT, chat_body(), KEEP)
            waiting = await Connection.send(served.port, data)
            idle = await Connection.send(
                served.port, kit.request_bytes("GET", "/health", None, KEEP)
            )
            assert (await idle.next_reply()).status == 200
            served.send(signal.SIGTERM)
            assert await idle.reader.read() == b""
            await idle.leave()
            with pytest.raises(OSError):  # noqa: PT011  refused or reset
                await served.ask()
            held.open.set()
            assert (await whole(stream)).headers["connection"] == "close"
            reply = await waiting.next_reply()
            assert (reply.status, reply.headers["connection"]) == (200, "close")
            await waiting.leave()
            assert await served.ended(timeout_s=5.0) == 0
            assert served.logged("draining")[0]["inflight"] == 2
            assert served.logged("stopped")


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@kit.on_loop
async def test_a_second_signal_hurries(tmp_path: Path, first: signal.Signals) -> None:
    """It does not wait for what is under way, and still writes its log to the end; exit 0."""
    log = tmp_path / "requests.log"
    extra = {"log": {"requests": True, "requestsFile": str(log)}}
    async with raw_pod(Held().script) as pod:
        config = merged(config_of(p=pod), {"log": {"level": "info", "format": "json"}})
        async with Process(tmp_path, merged(config, extra)) as served:
            assert (await served.ask()).status == 200
            stream = await served.stream()
            served.send(first)
            await kit.until(lambda: bool(served.logged("draining")), "the drain has begun")
            served.send(signal.SIGTERM)
            assert await served.ended(timeout_s=5.0) == 0, served.output()
            assert not (await stream.reply()).complete
            assert served.logged("stopped")
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            assert [line.get("error") for line in lines] == [None, "client_left"]
            assert "Traceback" not in served.output()


@kit.on_loop
async def test_it_does_not_start_with_a_bad_file(tmp_path: Path) -> None:
    """Exit 2 and lines that name the file; no traceback."""
    async with contextlib.AsyncExitStack() as stack:
        processes = []
        for number, text in enumerate(("", "gateway: {port: 99999}\n", "upstreams: [\n")):
            path = tmp_path / f"bad-{number}.yaml"
            path.write_text(text)
            process = kit.Process(tmp_path, "serve", path)
            processes.append(await stack.enter_async_context(process))
        for number, process in enumerate(processes):
            assert await process.ended() == 2
            assert f"bad-{number}.yaml" in process.output()
            assert "Traceback" not in process.output()


@kit.on_loop
async def test_a_taken_port_leaves_nothing_behind(tmp_path: Path) -> None:
    """In a process that goes on, no probe runs and no port listens after a failed start."""
    async with raw_pod() as pod, app_of(tmp_path, config_of(p=pod)) as (first, path):
        taken = {"gateway": {"port": first.server.port}}
        path.write_text(yaml.safe_dump(merged(merged(config_of(p=pod), PORTS), taken)))
        with pytest.raises(ConfigError, match=f"gateway.port: .*{first.server.port}"):
            async with running_gateway(load_config(path)):
                pass
        assert (await ask(first.server.port)).status == 200


@kit.on_loop
async def test_connect_ms_changes_for_known_pods(tmp_path: Path) -> None:
    """A reload's connectMs holds for the pods that stay, not only for new ones."""
    with black_hole() as hole:
        async with raw_pod() as pod:

            def config(connect_ms: int) -> dict[str, Any]:
                extra = {"gateway": {"timeouts": {"connectMs": connect_ms}}}
                return config_of(extra, hole=hole, p=pod)

            async with app_of(tmp_path, config(30_000)) as (app, path):
                reload(app, path, config(200))
                app.gateway.observe(ProbeSucceeded("hole"))
                async with asyncio.timeout(2.0):
                    replies = [await ask(app.server.port) for _ in range(2)]
                assert [reply.status for reply in replies] == [200, 200]


@kit.on_loop
async def test_slots_that_streams_still_hold(tmp_path: Path) -> None:
    """No room for a new pod while a removed one streams: it is told, and a later reload adds it."""
    held = Held()
    small = {"cacheRegistry": {"maxPods": 1}}
    async with (
        raw_pod(held.script) as a,
        raw_pod(held.script) as b,
        app_of(tmp_path, config_of(small, a=a)) as (app, path),
    ):
        data = kit.request_bytes("POST", CHAT, chat_body(stream=True))
        stream = await kit.Exchange.send(app.server.port, data)
        await stream.read_until(b'{"n":1}')
        lines = reload(app, path, config_of(small, b=b))
        assert [line["pod"] for line in lines if line["event"] == "pod_not_added"] == ["b"]
        assert (await ask(app.server.port)).status == 503
        held.open.set()
        await whole(stream)
        lines = reload(app, path, config_of(small, b=b))
        assert not [line for line in lines if line["event"] == "pod_not_added"]
        await kit.until(app.router.ready, "b is up")
        assert (await ask(app.server.port)).status == 200
        assert len(b.requests) == 1


@kit.on_loop
async def test_no_reload_in_a_drain(tmp_path: Path) -> None:
    """Who is told to stop does not begin anything new."""
    async with raw_pod() as pod, app_of(tmp_path, config_of(p=pod)) as (app, path):
        app.gateway.draining = True
        assert reload(app, path, config_of(q=pod)) == []
        assert [view.id for view in app.router.pods()] == ["p"]


@kit.on_loop
async def test_renewed_certificates(tmp_path: Path) -> None:
    """New handshakes get the new certificate, streams run on; a bad one changes nothing."""
    held = Held()
    certificate, key = make_certificate(tmp_path, "gateway")
    old = ssl.create_default_context(cafile=str(certificate))
    tls = {"gateway": {"tls": {"certFile": str(certificate), "keyFile": str(key)}}}
    async with raw_pod(held.script) as pod:
        config = config_of(tls, p=pod)
        async with app_of(tmp_path, config) as (app, path):
            port = app.server.port
            assert app.base_url == f"https://127.0.0.1:{port}"
            data = kit.request_bytes("POST", CHAT, chat_body(stream=True))
            stream = await kit.Exchange.send(port, data, tls=old)
            await stream.read_until(b'{"n":1}')
            good = certificate.read_bytes()
            certificate.write_text("no certificate")
            (line,) = reload(app, path, config)
            assert line["event"] == "reload_refused"
            assert "gateway.crt" in line["problems"][0]
            other, _ = make_certificate(tmp_path, "other")
            certificate.write_bytes(other.read_bytes())  # not of this key
            assert reload(app, path, config)[0]["event"] == "reload_refused"
            certificate.write_bytes(good)
            assert (await ask(port, old)).status == 200
            make_certificate(tmp_path, "gateway")
            assert reload(app, path, config)[-1]["event"] == "reloaded"
            new = ssl.create_default_context(cafile=str(certificate))
            assert (await ask(port, new)).status == 200
            with pytest.raises(ssl.SSLCertVerificationError):
                await ask(port, old)
            lines = reload(app, path, config_of(p=pod))
            assert [line["key"] for line in lines if line["event"] == "reload_ignores"] == [
                "gateway.tls"
            ]
            assert (await ask(port, new)).status == 200
            held.open.set()
            await whole(stream)


@kit.on_loop
async def test_pods_over_tls(tmp_path: Path) -> None:
    """An unknown authority keeps a pod out; naming it by a reload, or trusting all, lets it in."""
    certificate, key = make_certificate(tmp_path, "pod")
    stranger, _ = make_certificate(tmp_path, "stranger")
    async with raw_pod() as pod, raw_pod() as plain, tls_end(pod.port, certificate, key) as port:

        def config(**tls: Any) -> dict[str, Any]:
            extra = {"upstreams": {"tls": tls}, "health": {"intervalMs": 30}}
            return config_of(extra, plain=plain, tls=f"https://127.0.0.1:{port}")

        async with app_of(tmp_path, config(caFile=str(stranger))) as (app, path):

            def is_up() -> bool:
                return "tls" in app.router.usable_pods()

            await asyncio.sleep(0.2)
            assert not is_up()
            assert not pod.probes
            reload(app, path, config(caFile=str(certificate)))
            await kit.until(is_up, "the pod is trusted")
            replies = [await ask(app.server.port) for _ in range(2)]
            assert [reply.status for reply in replies] == [200, 200]
            assert len(pod.requests) == 1
        async with app_of(tmp_path, config(verify=False)) as (app, path):
            await kit.until(is_up, "nobody is asked for a certificate")


@kit.on_loop
async def test_a_slow_start_is_waited_for(tmp_path: Path) -> None:
    """A pod that comes up late is found within moments, though probes are a minute apart."""
    async with raw_pod() as pod:
        pod.healthy = False
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(merged(config_of(p=pod), PORTS)))
        async with running_gateway(load_config(path), path) as app:
            await kit.until(lambda: len(pod.probes) >= 2, "it is probed")
            assert (await ask(app.server.port)).status == 503
            pod.healthy = True
            await kit.until(app.router.ready, "it is found", timeout_s=1.0)
            assert (await ask(app.server.port)).status == 200


@pytest.mark.parametrize(
    ("status", "good"),
    [(b"200 OK", True), (b"204 No Content", True), (b"302 Found", False), (b"404 No", False)],
)
@kit.on_loop
async def test_what_a_probe_takes_for_good(status: bytes, good: bool, tmp_path: Path) -> None:
    """2xx, and nothing else; a pod that answers badly is not taken for one that is gone."""

    async def script(served: Served) -> None:
        await served.say(answer(b"", status))

    extra = {"health": {"endpoint": "/probe", "intervalMs": 20, "unhealthyThreshold": 2}}
    async with raw_pod(script) as pod:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(merged(config_of(extra, p=pod), PORTS)))
        async with running_gateway(load_config(path), path) as app:
            epoch = app.router.pods()[0].epoch
            await kit.until(lambda: len(pod.requests) >= 4, "it is probed")
            assert app.router.ready() is good
            assert app.router.pods()[0].epoch == epoch
