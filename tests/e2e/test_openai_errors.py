"""What clients get when something is wrong with them, their keys, their mode, or all pods."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

import kit
from clients import MODEL, MODES, client_of, serving, user
from fleets import fleet_of, gateway_of


@MODES
@kit.on_loop
async def test_bad_parameters_are_the_pods_own_400(mode: str, tmp_path: Path) -> None:
    """What the pod refuses reaches the client as it is, streamed or not, and harms no pod."""
    async with serving(tmp_path, mode) as stand:
        for stream in (False, True):
            for _ in range(6):  # more often than a pod may fail in a row
                with pytest.raises(openai.BadRequestError) as caught:
                    await stand.client.chat.completions.create(
                        model=MODEL,
                        messages=user("Hi"),
                        stream=stream,
                        extra_body={"temperature": "hot"},
                    )
                assert caught.value.body
                assert "temperature" in str(caught.value)
        answer = await stand.client.chat.completions.create(
            model=MODEL, messages=user("Hi"), max_tokens=1
        )
        assert answer.choices


@MODES
@kit.on_loop
async def test_an_unknown_model_is_a_404(mode: str, tmp_path: Path) -> None:
    """A model that no pod serves: the pod's 404."""
    async with serving(tmp_path, mode) as stand:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await stand.client.chat.completions.create(model="nope", messages=user("Hi"))


@kit.on_loop
async def test_a_model_outside_the_configured_ones_is_the_gateways_404(tmp_path: Path) -> None:
    """Where the pods' models are configured, the gateway refuses others without asking a pod."""
    async with fleet_of(single=1) as fleet:
        config = fleet.config()
        config["upstreams"]["single"]["pods"][0]["models"] = [MODEL]
        async with kit.Serve(tmp_path, config) as served, client_of(served.port) as client:
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="nope", messages=user("Hi"))
            assert fleet.posts("single-1") == 0


BAD = {
    "no json": (b"{", 400),
    "not an object": (b"[]", 400),
    "empty": (b"", 400),
    "not utf-8": (b'{"model":"\xff"}', 400),
    "messages are no list": (b'{"model":"mock","messages":7}', 400),
}


@pytest.mark.parametrize("name", BAD)
@kit.on_loop
async def test_bad_bodies_are_a_400_in_openais_shape(name: str, tmp_path: Path) -> None:
    """Bodies that cannot be understood are refused with a true status and an error object."""
    body, status = BAD[name]
    async with fleet_of(single=1) as fleet, gateway_of(fleet.config()) as gateway:
        path = "/v1/chat/completions"
        reply = await kit.http(gateway.server.port, "POST", path, body)
        assert reply.status == status
        assert reply.json()["error"]["message"]


@kit.on_loop
async def test_keys(tmp_path: Path) -> None:
    """Without one of the gateway's keys: 401. With it: served, and no pod ever sees it."""
    async with fleet_of(single=1) as fleet:
        extra = {"gateway": {"apiKeys": ["secret-of-a-client"]}}
        config = fleet.config(extra)
        config["upstreams"]["single"]["pods"][0]["apiKey"] = "secret-of-a-pod"
        async with kit.Serve(tmp_path, config) as served:
            async with client_of(served.port, key="wrong") as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model=MODEL, messages=user("Hi"))
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            assert fleet.posts("single-1") == 0
            async with client_of(served.port, key="secret-of-a-client") as client:
                raw = await client.chat.completions.with_raw_response.create(
                    model=MODEL, messages=user("Hi"), max_tokens=1
                )
                assert raw.parse().choices
                assert "secret" not in str(raw.headers)
            seen = b"".join(bytes(link.up) for link in fleet.proxies["single-1"].links)
            assert b"secret-of-a-client" not in seen
            assert b"authorization: Bearer secret-of-a-pod" in seen
        assert "secret" not in served.output()


@kit.on_loop
async def test_no_pod_is_a_503(tmp_path: Path) -> None:
    """No pod is up: 503 with Retry-After, and /ready says the same."""
    async with fleet_of(single=1) as fleet:
        quick = {"intervalMs": 50, "timeoutMs": 200, "unhealthyThreshold": 1}
        async with gateway_of(fleet.config({"health": quick})) as gateway:
            port = gateway.server.port
            fleet.proxies["single-1"].refuse()
            fleet.proxies["single-1"].cut()

            async def not_ready() -> bool:
                return (await kit.http(port, "GET", "/ready")).status == 503

            await kit.until(not_ready, "/ready says that no pod is up")
            async with client_of(port) as client:
                with pytest.raises(openai.InternalServerError) as caught:
                    await client.chat.completions.create(model=MODEL, messages=user("Hi"))
            assert caught.value.status_code == 503
            assert int(caught.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("header", ["both", ""], ids=["unknown", "empty"])
@kit.on_loop
async def test_an_unknown_mode_is_a_400(header: str) -> None:
    """x-calinix-mode is one of two words."""
    async with (
        fleet_of(single=1) as fleet,
        gateway_of(fleet.config()) as gateway,
        client_of(gateway.server.port, mode=header) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="mode"):
            await client.chat.completions.create(model=MODEL, messages=user("Hi"))


@kit.on_loop
async def test_a_mode_without_pods_is_a_400() -> None:
    """A mode whose group is not configured cannot be asked for."""
    async with (
        fleet_of(single=1) as fleet,
        gateway_of(fleet.config()) as gateway,
        client_of(gateway.server.port, mode="dispatch") as client,
    ):
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=MODEL, messages=user("Hi"))
