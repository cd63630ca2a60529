"""The paths of the inference port over real sockets: what is answered here, what goes to a pod."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import kit
from calinix.core.events import PodDraining
from fleets import fleet_of, gateway_of
from gatewaykit import (
    CHAT,
    KEEP,
    Connection,
    Served,
    admin,
    answer,
    body_of,
    config_of,
    fields_of,
    never,
    outcome,
    raw_pod,
)
from streams import RARE_PROBES, ROUND_ROBIN


async def head_only(served: Served) -> None:
    """A script: what GET would say; to HEAD without the body."""
    whole = answer(b"0123456789", headers=b"content-type: text/plain\r\nx-pod: yes\r\n")
    is_head = served.request.startswith(b"HEAD ")
    await served.say(whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if is_head else whole)


@kit.on_loop
async def test_paths_that_pass_and_methods_that_do_not() -> None:
    """A served path takes its own methods; the others are a 405 that names them, unasked."""
    extra = {"gateway": {"passthroughPaths": ["/custom"]}}
    async with raw_pod() as pod, gateway_of(config_of(extra, p=pod)) as app:
        port = app.server.port
        for method, path, allow in [
            ("GET", CHAT, "POST"),
            ("HEAD", CHAT, "POST"),
            ("OPTIONS", "/v1/embeddings", "POST"),
            ("PUT", "/custom", "GET, HEAD, POST"),
            ("POST", "/v1/responses/resp_1", "DELETE, GET"),
            ("GET", "/v1/responses/resp_1/cancel", "POST"),
            ("POST", "/v1/models", "GET, HEAD"),
            ("DELETE", "/v1/models/mock", "GET, HEAD"),
            ("POST", "/health", "GET, HEAD"),
            ("DELETE", "/ready", "GET, HEAD"),
        ]:
            reply = await kit.http(port, method, path)
            assert (reply.status, reply.headers["allow"]) == (405, allow), path
            assert reply.headers["x-request-id"]
        for path in (
            "/",
            "/custom/more",
            "/reset_prefix_cache",
            "/sleep",
            "/metrics",
            "/mock/state",
        ):
            for method in ("GET", "POST", "DELETE"):
                reply = await kit.http(port, method, path, {"x-request-id": "mine"})
                assert reply.status == 404
                assert reply.json()["error"]["code"] == "unknown_path"
        assert not pod.requests


@kit.on_loop
async def test_the_target_reaches_the_pod_as_it_came() -> None:
    """Query and spelling are kept; of an absolute target only what follows the host."""
    extra = {"gateway": {"passthroughPaths": ["/custom"]}}
    async with raw_pod() as pod, gateway_of(config_of(extra, p=pod)) as app:
        for target in (
            "/custom?a=1&b=%20x&a=2",
            "/custom?",
            "http://elsewhere.example/custom?q=1",
            "HTTP://elsewhere.example:81/custom",
        ):
            assert (await kit.http(app.server.port, "GET", target)).status == 200
        assert [request.split(b" ", 2)[1] for request in pod.requests] == [
            b"/custom?a=1&b=%20x&a=2",
            b"/custom?",
            b"/custom?q=1",
            b"/custom",
        ]
        host = f"127.0.0.1:{pod.port}"
        assert all(("host", host) in fields_of(request) for request in pod.requests)


@kit.on_loop
async def test_head_requests() -> None:
    """HEAD asks the pod with HEAD, and its head alone comes back, length included."""
    extra = {"gateway": {"passthroughPaths": ["/custom"]}}
    async with raw_pod(head_only) as pod, gateway_of(config_of(extra, p=pod)) as app:
        port = app.server.port
        client = await Connection.send(port, kit.request_bytes("HEAD", "/custom", None, KEEP))
        await client.read_until(b"\r\n\r\n")
        head = bytes(client.wire)
        assert b"content-length: 10\r\n" in head
        assert b"x-pod: yes\r\n" in head
        assert b"x-calinix-target-pod-id: p\r\n" in head
        client.wire.clear()
        client.writer.write(kit.request_bytes("GET", "/custom", None, KEEP))
        reply = await client.next_reply()
        assert reply.body == b"0123456789"
        await client.leave()
        assert [request.split(b" ")[0] for request in pod.requests] == [b"HEAD", b"GET"]
        for path in ("/health", "/ready", "/v1/models", "/v1/models/mock"):
            reply = await kit.http(port, "HEAD", path)
            assert reply.status == 200
            assert reply.body == b""
            assert int(reply.headers["content-length"]) > 0


@kit.on_loop
async def test_models_are_merged_and_seldom_asked_for() -> None:
    """Each model once with every field that its pod states; the pods are asked once meanwhile."""
    async with raw_pod() as one, raw_pod() as two, raw_pod() as bad, raw_pod() as worse:
        one.models = b'{"data":[{"id":"mock","object":"model","max_model_len":8192,"x":{"y":[1]}}]}'
        two.models = b'{"data":[{"id":"other","root":"z"},{"id":"mock","x":"second"}],"more":1}'
        bad.models = b'{"data":[{"name":"no id"}]}'
        worse.models = b'{"data":[{"id":"\xff"}]}'
        config = config_of(
            one={"url": one.url, "apiKey": "k"},
            two=two,
            bad=bad,
            worse=worse,
            dead="http://127.0.0.1:9",
        )
        async with gateway_of(config) as app:
            port = app.server.port
            await kit.until(lambda: len(app.router.usable_pods()) == 4, "four pods are up")
            replies = await asyncio.gather(*(kit.http(port, "GET", "/v1/models") for _ in range(9)))
            for reply in replies:
                merged: dict[str, Any] = reply.json()
                assert merged["object"] == "list"
                assert {model["id"]: model for model in merged["data"]} == {
                    "mock": {
                        "id": "mock", "object": "model", "max_model_len": 8192, "x": {"y": [1]},
                    },
                    "other": {"id": "other", "root": "z"},
                }  # fmt: skip
            single = await kit.http(port, "GET", "/v1/models/other")
            assert single.json() == {"id": "other", "root": "z"}
            missing = await kit.http(port, "GET", "/v1/models/none")
            assert missing.status == 404
            assert missing.json()["error"]["code"] == "model_not_found"
            for pod in (one, two, bad, worse):
                assert len(pod.requests) == 1
            assert ("authorization", "Bearer k") in fields_of(one.requests[0])


@kit.on_loop
async def test_models_with_slashes_in_their_names() -> None:
    """`/v1/models/{id}` finds an id with slashes in it, also as OpenAI's client writes it."""
    async with raw_pod() as pod, gateway_of(config_of(p=pod)) as app:
        pod.models = b'{"data":[{"id":"meta-llama/Llama-3.1-8B"}]}'
        for name in ("meta-llama/Llama-3.1-8B", "meta-llama%2FLlama-3.1-8B"):
            reply = await kit.http(app.server.port, "GET", f"/v1/models/{name}")
            assert reply.json()["id"] == "meta-llama/Llama-3.1-8B"


@kit.on_loop
async def test_one_pods_broken_text_does_not_break_the_list() -> None:
    """A list that is not UTF-8, even in a field that nobody reads, counts as none."""
    async with raw_pod() as one, raw_pod() as other, gateway_of(config_of(p=one, q=other)) as app:
        one.models = b'{"data":[{"id":"good"}]}'
        other.models = b'{"data":[{"id":"bad","owned_by":"\xff"}]}'
        await kit.until(lambda: len(app.router.usable_pods()) == 2, "both are up")
        reply = await kit.http(app.server.port, "GET", "/v1/models")
        assert [model["id"] for model in reply.json()["data"]] == ["good"]


@kit.on_loop
async def test_models_of_pods_that_come_are_told_soon() -> None:
    """Draining pods are not asked; while nothing is known it is a 503, and not for seconds."""
    async with raw_pod() as good, raw_pod() as odd:
        odd.models = b'{"data":' + b"[" * 100_000
        async with gateway_of(config_of(good=good, odd=odd)) as app:
            app.gateway.observe(PodDraining("good", draining=True))
            reply = await kit.http(app.server.port, "GET", "/v1/models")
            assert reply.status == 503
            assert int(reply.headers["retry-after"]) >= 1
            assert not good.requests
            app.gateway.observe(PodDraining("good", draining=False))

            async def told() -> bool:
                return (await kit.http(app.server.port, "GET", "/v1/models")).status == 200

            await kit.until(told, "the models of the pod that is back", timeout_s=2.0)


@kit.on_loop
async def test_health_and_ready() -> None:
    """The process is healthy without any pod; it is ready when a pod is, and not in a drain."""
    async with raw_pod() as pod:
        config = config_of({"health": {"intervalMs": 20, "unhealthyThreshold": 1}}, p=pod)
        async with gateway_of(config) as app:
            port = app.server.port
            assert (await kit.http(port, "GET", "/health")).json() == {"status": "ok"}
            assert (await kit.http(port, "GET", "/ping")).status == 200
            pod.healthy = False
            await kit.until(lambda: not app.router.ready(), "the pod is out")
            reply = await kit.http(port, "GET", "/ready")
            assert reply.status == 503
            assert reply.json()["error"]["code"] == "not_ready"
            assert reply.headers["retry-after"] == "1"
            assert (await kit.http(port, "GET", "/health")).status == 200
            pod.healthy = True
            await kit.until(app.router.ready, "the pod is back")
            assert (await kit.http(port, "GET", "/ready")).status == 200
            app.gateway.draining = True
            assert "draining" in (await kit.http(port, "GET", "/ready")).json()["error"]["message"]


@kit.on_loop
async def test_stored_responses_stay_on_their_pod() -> None:
    """What names a stored answer, streamed or not, goes to the pod that made it."""
    async with fleet_of(single=3) as fleet, gateway_of(fleet.config(ROUND_ROBIN)) as app:
        port = app.server.port
        for stream in (False, True):
            body: dict[str, Any] = {"model": "mock", "input": "Hi", "max_output_tokens": 2}
            made = await kit.http(port, "POST", "/v1/responses", body | {"stream": stream})
            target = made.headers["x-calinix-target-pod-id"]
            text = made.body.decode()
            response_id = text[text.index('"resp_') + 1 :].split('"', 1)[0]
            for method, path, status in [
                ("GET", f"/v1/responses/{response_id}", 200),
                ("POST", f"/v1/responses/{response_id}/cancel", 400),
                ("GET", f"/v1/responses/{response_id}?include[]=x", 200),
            ]:
                reply = await kit.http(port, method, path)
                assert reply.status == status
                assert reply.headers["x-calinix-target-pod-id"] == target
            for _ in range(4):
                further = body | {"previous_response_id": response_id}
                reply = await kit.http(port, "POST", "/v1/responses", further)
                assert reply.status == 200
                assert reply.headers["x-calinix-target-pod-id"] == target
        unknown = await kit.http(port, "GET", "/v1/responses/resp_unknown")
        assert unknown.status == 404


@kit.on_loop
async def test_the_pod_of_a_stored_response_is_gone() -> None:
    """No other pod has it: 503 that says so, rather than another pod's 404."""
    async with fleet_of(single=2) as fleet, gateway_of(fleet.config(ROUND_ROBIN)) as app:
        body = {"model": "mock", "input": "Hi", "max_output_tokens": 2}
        made = await kit.http(app.server.port, "POST", "/v1/responses", body)
        target = made.headers["x-calinix-target-pod-id"]
        app.gateway.observe(PodDraining(target, draining=True))
        reply = await kit.http(app.server.port, "GET", f"/v1/responses/{made.json()['id']}")
        assert reply.status == 503
        assert target in reply.json()["error"]["message"]


@kit.on_loop
async def test_anthropic_messages() -> None:
    """Messages have their own prompt: the same one is a hit, another system text is none."""
    body: dict[str, Any] = {
        "model": "mock",
        "max_tokens": 3,
        "system": "You are terse. " * 30,
        "messages": [{"role": "user", "content": "Explain it. " * 30}],
    }
    cache_only = {"gateway": {"strategy": "cacheOnly"}, **RARE_PROBES}
    async with fleet_of(single=2) as fleet, gateway_of(fleet.config(cache_only)) as app:
        port = app.server.port
        first = await kit.http(port, "POST", "/v1/messages", body)
        assert first.status == 200
        assert first.json()["type"] == "message"
        assert first.headers["x-calinix-cache-hit"] == "false"
        again = await kit.http(port, "POST", "/v1/messages", body | {"stream": True})
        assert again.headers["x-calinix-cache-hit"] == "true"
        assert int(again.headers["x-calinix-cache-prefix-depth"]) >= 4
        assert again.headers["x-calinix-target-pod-id"] == first.headers["x-calinix-target-pod-id"]
        assert b"message_stop" in again.body
        other = await kit.http(port, "POST", "/v1/messages", body | {"system": "Be verbose. " * 40})
        assert other.headers["x-calinix-cache-hit"] == "false"
        bad = await kit.http(port, "POST", "/v1/messages", {"model": "mock"})
        assert bad.status == 400
        assert bad.json()["error"]["param"] == "messages"
        count = await kit.http(port, "POST", "/v1/messages/count_tokens", body)
        assert count.json()["input_tokens"] > 50


POOLING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": ["one text " * 40, "two"]}),
    ("/v1/rerank", {"query": "which", "documents": ["a " * 200, "b"]}),
    ("/v2/rerank", {"query": "which", "documents": ["a " * 200, "b"]}),
    ("/score", {"text_1": "which", "text_2": ["a " * 200, "b"]}),
    ("/classify", {"input": "text " * 80}),
    ("/pooling", {"input": "text " * 80}),
]


@pytest.mark.parametrize(("path", "body"), POOLING, ids=[path for path, _ in POOLING])
@kit.on_loop
async def test_pooling_counts_as_load_and_leaves_no_entries(
    path: str, body: dict[str, Any]
) -> None:
    """Inputs are prefill load while they are under way; the cache is neither asked nor filled."""
    async with raw_pod(never) as hung, fleet_of(single=1) as fleet:
        config = fleet.config(ROUND_ROBIN)
        config["upstreams"]["single"]["pods"].append({"id": "hung", "url": hung.url})
        async with gateway_of(config) as app:
            await kit.until(lambda: len(app.router.usable_pods()) == 2, "both pods are up")
            app.gateway.observe(PodDraining("hung", draining=True))
            reply = await kit.http(app.server.port, "POST", path, {"model": "mock", **body})
            assert reply.status == 200
            assert reply.headers["x-calinix-cache-prefix-depth"] == "0"
            app.gateway.observe(PodDraining("hung", draining=False))
            app.gateway.observe(PodDraining("single-1", draining=True))
            data = kit.request_bytes("POST", path, {"model": "mock", **body})
            waiting = await kit.Exchange.send(app.server.port, data)
            await kit.until(lambda: bool(hung.requests), "the pod is asked")
            (view,) = (p for p in (await admin(app, "/admin/pods"))["pods"] if p["id"] == "hung")
            assert view["inflight"] == 1
            assert view["prefillTokens"] >= 60
            assert view["decodeTokens"] == 0
            await waiting.leave()
            await kit.until(lambda: not app.gateway.flights, "the request is over")
            for pod in app.router.pods():
                assert pod.blocks == 0


@kit.on_loop
async def test_other_posts_count_as_a_mean_request() -> None:
    """A body that is not understood passes byte for byte, of any type, and counts as load."""
    form = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n\x00\xff\r\n--b--\r\n'
    async with raw_pod(never) as pod, gateway_of(config_of(p=pod)) as app:
        headers = {"content-type": "multipart/form-data; boundary=b", "x-request-id": "upload"}
        path = "/v1/audio/transcriptions"
        data = kit.request_bytes("POST", path, form, headers)
        client = await kit.Exchange.send(app.server.port, data)
        await kit.until(lambda: bool(pod.requests), "the pod is asked")
        assert body_of(pod.requests[0]) == form
        assert ("content-type", headers["content-type"]) in fields_of(pod.requests[0])
        (view,) = (await admin(app, "/admin/pods"))["pods"]
        assert view["inflight"] == 1
        assert view["decodeTokens"] > 0
        await client.leave()
        await kit.until(lambda: not app.gateway.flights, "the request is over")
        assert (await outcome(app, "upload"))["failure"] == "cancelled"
