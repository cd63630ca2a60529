"""TLS on both sides of `calinix serve`: the inference port's certificate, and https pods."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from signal import SIGHUP

import kit
from certificates import make_certificate, tls_end
from fleets import fleet_of, merged
from streams import chat, is_whole


@kit.on_loop
async def test_tls_to_clients_and_to_pods(tmp_path: Path) -> None:
    """A stream over TLS in and out; pods get their own key, and no plain client is served."""
    certificate, key = make_certificate(tmp_path, "gateway")
    pod_certificate, pod_key = make_certificate(tmp_path, "pod")
    trusting = ssl.create_default_context(cafile=str(certificate))
    async with (
        fleet_of(single=1) as fleet,
        tls_end(fleet.pods["single-1"].port, pod_certificate, pod_key) as pod_port,
    ):
        pod = {"id": "pod-1", "url": f"https://127.0.0.1:{pod_port}", "apiKey": "of-the-pod"}
        config = {
            "gateway": {"tls": {"certFile": str(certificate), "keyFile": str(key)}},
            "upstreams": {"tls": {"caFile": str(pod_certificate)}, "single": {"pods": [pod]}},
        }
        async with kit.Serve(tmp_path, config, tls=trusting) as served:
            exchange = await kit.Exchange.send(served.port, chat(max_tokens=9), tls=trusting)
            assert is_whole(await exchange.reply())
            (received,) = fleet.pods["single-1"].received
            assert received.headers["authorization"] == "Bearer of-the-pod"
            plain = await kit.Exchange.send(served.port, chat())
            assert not (await plain.reply()).complete


@kit.on_loop
async def test_a_pod_with_a_strange_certificate_is_not_trusted(tmp_path: Path) -> None:
    """A pod that its authority does not vouch for never becomes ready; with verify off it does."""
    certificate, key = make_certificate(tmp_path, "pod")
    other, _ = make_certificate(tmp_path, "other")
    async with (
        fleet_of(single=1) as fleet,
        tls_end(fleet.pods["single-1"].port, certificate, key) as pod_port,
    ):
        pods = {"single": {"pods": [{"id": "pod-1", "url": f"https://127.0.0.1:{pod_port}"}]}}
        config = {"upstreams": {"tls": {"caFile": str(other)}, **pods}}
        config = merged(config, {"health": {"intervalMs": 50}})
        served = kit.Serve(tmp_path, config)
        try:
            await served.ready(served.port, "/health")
            reply = await kit.http(served.port, "POST", "/v1/completions", {"prompt": "Hi"})
            assert reply.status == 503
            assert not fleet.pods["single-1"].received
        finally:
            await served.__aexit__()
        config = merged(config, {"upstreams": {"tls": {"caFile": None, "verify": False}}})
        async with kit.Serve(tmp_path, config) as served:
            reply = await kit.http(served.port, "POST", "/v1/completions", {"prompt": "Hi"})
            assert reply.status == 200


@kit.on_loop
async def test_load_takes_the_gateways_authority(tmp_path: Path) -> None:
    """`calinix load --ca-file` trusts the gateway's own authority; without it nothing is sent."""
    certificate, key = make_certificate(tmp_path, "gateway")
    async with (
        fleet_of(single=1) as fleet,
        tls_end(fleet.pods["single-1"].port, certificate, key) as port,
    ):
        for authorities, code, said in (
            (None, 1, "/v1/models"),
            (key, 2, "holds no PEM block of a certificate"),
            (certificate, 0, ""),
        ):
            more = [] if authorities is None else ["--ca-file", str(authorities)]
            command = ["load", f"https://127.0.0.1:{port}", "--requests", "3", *more]
            process = await asyncio.create_subprocess_exec(
                str(kit.CALINIX), *command, stderr=asyncio.subprocess.PIPE
            )
            _, err = await process.communicate()
            assert process.returncode == code, err
            assert said in err.decode()
            assert b"Traceback" not in err
        assert len(fleet.pods["single-1"].received) == 3


@kit.on_loop
async def test_a_renewed_certificate_is_taken_over(tmp_path: Path) -> None:
    """SIGHUP after a renewal: new handshakes see the new certificate."""
    certificate, key = make_certificate(tmp_path, "gateway")
    old = ssl.create_default_context(cafile=str(certificate))
    async with fleet_of(single=1) as fleet:
        tls = {"certFile": str(certificate), "keyFile": str(key)}
        config = fleet.config({"gateway": {"tls": tls}, "log": {"level": "info"}})
        async with kit.Serve(tmp_path, config, tls=old) as served:
            make_certificate(tmp_path, "gateway")
            new = ssl.create_default_context(cafile=str(certificate))
            served.send(SIGHUP)
            await kit.until(lambda: "reloaded" in served.output(), "the reload is done")
            exchange = await kit.Exchange.send(served.port, chat(), tls=new)
            assert is_whole(await exchange.reply())
