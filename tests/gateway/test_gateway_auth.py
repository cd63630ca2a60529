"""Keys: who may ask the gateway, and whose key goes where."""

from __future__ import annotations

import hashlib

import kit
from calinix.gateway.server import ApiKeys
from fleets import gateway_of
from gatewaykit import CHAT, Served, answer, config_of, fields_of, raw_pod

KEYS = {"gateway": {"apiKeys": ["key-one", "key-two"], "passthroughPaths": ["/custom"]}}
HELLO = {"model": "mock", "messages": [{"role": "user", "content": "Hello"}]}
GOOD = [
    {"authorization": "Bearer key-one"},
    {"authorization": "bearer  key-two "},
    {"x-api-key": "key-two"},
    {"authorization": "Basic a2V5", "x-api-key": "key-one"},
]
BAD: list[dict[str, str]] = [
    {},
    {"authorization": "Bearer key-three"},
    {"authorization": "Bearer key-on"},
    {"authorization": "Bearer key-onee"},
    {"authorization": "Bearer KEY-ONE"},
    {"authorization": "Bearer "},
    {"authorization": "Bearer"},
    {"authorization": "key-one"},
    {"authorization": "Basic key-one"},
    {"x-api-key": "Bearer key-one"},
    {"x-api-key": ""},
    {"authorization": "Bearer key-three", "x-api-key": "key-one"},
    {"cookie": "key-one"},
    {"api-key": "key-one"},
]


@kit.on_loop
async def test_only_with_a_key() -> None:
    """Bearer or x-api-key with one of the keys; all else is a 401 in OpenAI's shape, unasked."""
    async with raw_pod() as pod, gateway_of(config_of(KEYS, p=pod)) as app:
        for headers in BAD:
            reply = await kit.http(app.server.port, "POST", CHAT, HELLO, headers)
            assert reply.status == 401, headers
            error = reply.json()["error"]
            assert error["code"] == "invalid_api_key"
            assert error["type"] == "authentication_error"
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.headers["x-request-id"]
        assert not pod.requests
        for headers in GOOD:
            reply = await kit.http(app.server.port, "POST", CHAT, HELLO, headers)
            assert reply.status == 200, headers
        assert len(pod.requests) == len(GOOD)


@kit.on_loop
async def test_what_needs_a_key() -> None:
    """Every path that leads to a pod does; whether the gateway lives and is ready, anyone asks."""
    async with raw_pod() as pod, gateway_of(config_of(KEYS, p=pod)) as app:
        port = app.server.port
        for method, path, status in [
            ("GET", "/v1/models", 401),
            ("GET", "/v1/models/mock", 401),
            ("POST", "/v1/messages", 401),
            ("GET", "/v1/responses/resp_1", 401),
            ("GET", "/custom", 401),
            ("PUT", CHAT, 401),
            ("GET", "/health", 200),
            ("GET", "/ready", 200),
            ("GET", "/nowhere", 404),
        ]:
            assert (await kit.http(port, method, path)).status == status, path
        assert not pod.requests
        key = {"authorization": "Bearer key-one"}
        assert (await kit.http(port, "GET", "/v1/models", None, key)).status == 200


def test_keys_are_compared_by_digest() -> None:
    """No key is kept, so how long a comparison takes says nothing of one."""
    keys = ApiKeys(("key-one", "schlüssel"))
    kept = {name: getattr(keys, name) for name in dir(keys) if not name.startswith("__")}
    assert kept.pop("_digests") == {
        hashlib.sha256(key.encode()).digest() for key in ("key-one", "schlüssel")
    }
    assert all(map(callable, kept.values()))


@kit.on_loop
async def test_whose_key_goes_where() -> None:
    """The pod gets its own key and never the client's; the client never sees the pod's."""
    async with raw_pod() as pod:
        config = config_of(KEYS, p={"url": pod.url, "apiKey": "key-of-the-pod"})
        async with gateway_of(config) as app:
            assert app.admin is not None
            seen = b""
            for headers in (*GOOD, {**GOOD[0], "cookie": "key-one", "api-key": "key-one"}):
                seen += (await kit.http(app.server.port, "POST", CHAT, HELLO, headers)).wire
            headers = {"x-api-key": "key-one"}
            seen += (await kit.http(app.server.port, "GET", "/v1/models", None, headers)).wire
            for path in ("/metrics", "/admin/pods", "/admin/decisions", "/admin/config"):
                seen += (await kit.http(app.admin.port, "GET", path)).wire
            assert b"key-of-the-pod" not in seen
            assert b"key-one" not in seen.replace(b"'***'", b"")
        for request in (*pod.requests, *pod.probes):
            assert ("authorization", "Bearer key-of-the-pod") in fields_of(request)
            assert b"key-one" not in request
            assert b"key-two" not in request


@kit.on_loop
async def test_forward_authorization() -> None:
    """If asked for: to pods without a key of their own, and the authorization header alone."""
    async with raw_pod() as keyed, raw_pod() as keyless:
        config = config_of(
            {"gateway": {"forwardAuthorization": True}},
            keyed={"url": keyed.url, "apiKey": "key-of-the-pod"},
            keyless=keyless,
        )
        async with gateway_of(config) as app:
            headers = {"authorization": "Bearer mine", "x-api-key": "mine", "cookie": "mine"}
            for _ in range(2):
                assert (await kit.http(app.server.port, "POST", CHAT, HELLO, headers)).status == 200
            assert (await kit.http(app.server.port, "POST", CHAT, HELLO)).status == 200
            assert (await kit.http(app.server.port, "POST", CHAT, HELLO)).status == 200
        sent = [dict(fields_of(request)) for request in keyless.requests]
        assert [head.get("authorization") for head in sent] == ["Bearer mine", None]
        assert not any("cookie" in head or "x-api-key" in head for head in sent)
        assert len(keyed.requests) == 2
        for request in keyed.requests:
            assert dict(fields_of(request))["authorization"] == "Bearer key-of-the-pod"
            assert b"mine" not in request


@kit.on_loop
async def test_without_forwarding_no_credentials_pass() -> None:
    """By default a client's authorization ends at the gateway, also where no key is asked for."""
    async with raw_pod() as pod, gateway_of(config_of(p=pod)) as app:
        headers = {"authorization": "Bearer mine"}
        assert (await kit.http(app.server.port, "POST", CHAT, HELLO, headers)).status == 200
        assert b"mine" not in pod.requests[0]


@kit.on_loop
async def test_a_pod_that_refuses_its_key() -> None:
    """The pod's own 401 is passed on with its body; it is no sign of illness."""

    async def refuse(served: Served) -> None:
        await served.say(answer(b'{"error":"Unauthorized"}', status=b"401 Unauthorized"))

    async with raw_pod(refuse) as pod, gateway_of(config_of(p=pod)) as app:
        for _ in range(8):
            reply = await kit.http(app.server.port, "POST", CHAT, HELLO)
            assert (reply.status, reply.body) == (401, b'{"error":"Unauthorized"}')
        assert app.router.ready()
