"""The admin port: pods, drain and resume, decisions and their outcome, metrics, the request log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import kit
from calinix.app import App, running_gateway
from calinix.config import parse_config
from calinix.sim.pod_model import PodFigures
from faultproxy import reserve_port
from fleets import fleet_of, gateway_of, merged
from gatewaykit import (
    CHAT,
    DONE,
    STREAM_HEAD,
    Served,
    admin,
    answer,
    chat_body,
    config_of,
    event,
    metrics,
    outcome,
    raw_pod,
    total,
)
from streams import ROUND_ROBIN, is_whole


async def ask(app: App, text: str = "Hi", **more: Any) -> kit.Reply:
    """One chat."""
    headers = {"x-request-id": text.replace(" ", "-")}
    body = chat_body(text, **{"max_tokens": 4, **more})
    return await kit.http(app.server.port, "POST", CHAT, body, headers)


@kit.on_loop
async def test_pods_as_the_router_knows_them() -> None:
    """One entry a pod of every role, with its state and its load as it is now."""
    async with fleet_of(single=1, dispatch=1) as fleet, gateway_of(fleet.config()) as app:
        await kit.until(lambda: len(app.router.usable_pods()) == 3, "all are up")
        assert (await ask(app, "One " * 200)).status == 200
        pods = {pod["id"]: pod for pod in (await admin(app, "/admin/pods"))["pods"]}
        assert {name: pod["role"] for name, pod in pods.items()} == {
            "single-1": "single",
            "prefill-1": "prefill",
            "decode-1": "decode",
        }
        one = pods["single-1"]
        assert one["url"] == fleet.proxies["single-1"].url
        assert one["state"] == "healthy"
        assert one["blocks"] > 0
        assert (one["inflight"], one["prefillTokens"], one["decodeTokens"]) == (0, 0, 0)
        assert [one[key] for key in ("draining", "ejected", "cooling", "silent")] == [False] * 4
        assert 0.0 <= one["heardAgeS"] < 10.0
        assert "lastHeardS" not in one


@kit.on_loop
async def test_pods_that_are_out_say_why() -> None:
    """A pod that answers probes badly and one that nobody listens for name their fault."""
    with reserve_port() as nobody:
        gone = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with raw_pod() as ill:
            ill.healthy = False
            config = config_of(p=ill)
            config["upstreams"]["single"]["pods"].append({"id": "gone", "url": gone})
            ports = {"gateway": {"host": "127.0.0.1", "port": 0}, "admin": {"port": 0}}
            text = yaml.safe_dump(merged(config, ports))
            async with running_gateway(parse_config(text)) as app:

                async def reasons() -> list[str]:
                    pods = (await admin(app, "/admin/pods"))["pods"]
                    assert [(pod["state"], pod["heardAgeS"]) for pod in pods] == [
                        ("starting", None)
                    ] * 2
                    return [pod["reason"] for pod in pods]

                async def are_told() -> bool:
                    return all("probe failed" in reason for reason in await reasons())

                await kit.until(are_told, "both were probed")
                of_ill, of_gone = await reasons()
    assert of_ill == "its probe failed: answered 503"
    assert "refused" in of_gone.lower()


@kit.on_loop
async def test_controllers_as_they_steer() -> None:
    """Each role's weights, trajectories and estimates, and that nobody else shares the pods."""
    async with fleet_of(single=2, dispatch=1) as fleet, gateway_of(fleet.config()) as app:
        await kit.until(lambda: len(app.router.usable_pods()) == 4, "all are up")
        assert (await ask(app, "One " * 200)).status == 200
        view: dict[str, Any] = {}

        async def is_fresh() -> bool:
            view.update(await admin(app, "/admin/controller"))
            return any(pool["steering"] == "fresh" for pool in view["pools"])

        await kit.until(is_fresh, "a step was taken")
        pools = {pool["role"]: pool for pool in view["pools"]}
        assert set(pools) == {"single", "prefill", "decode"}
        assert (pools["single"]["unit"], pools["decode"]["unit"]) == ("seconds", "requests")
        single = pools["single"]
        assert [pod["podId"] for pod in single["pods"]] == ["single-1", "single-2"]
        assert sum(pod["weight"] for pod in single["pods"]) == pytest.approx(2.0)
        for pod in single["pods"]:
            assert pod["usable"]
            assert len(pod["weightsAhead"]) == len(pod["queuesAhead"]) == 10
        assert (view["replicas"], view["replicasSyncS"]) == (0, None)
        assert any(name == "calinix_pod_weight" for name, _ in await metrics(app))


@kit.on_loop
async def test_drain_and_resume() -> None:
    """A drained pod ends what it has and gets nothing new, until it is resumed."""
    figures = PodFigures(token_delay_s=0.02)
    async with (
        fleet_of(single=2, figures=figures) as fleet,
        gateway_of(fleet.config(ROUND_ROBIN)) as app,
    ):
        await kit.until(lambda: len(app.router.usable_pods()) == 2, "both are up")
        body = chat_body("long", stream=True, max_tokens=20)
        running = [
            await kit.Exchange.send(app.server.port, kit.request_bytes("POST", CHAT, body))
            for _ in range(2)
        ]
        for exchange in running:
            await exchange.read_until(b"data:", times=2)
        path = "/admin/pods/single-1/drain"
        assert await admin(app, path, "POST") == {"id": "single-1", "draining": True}
        replies = [await ask(app, f"r-{number}") for number in range(3)]
        assert {reply.headers["x-calinix-target-pod-id"] for reply in replies} == {"single-2"}
        for exchange in running:
            assert is_whole(await exchange.reply())
        assert (await admin(app, "/admin/pods"))["pods"][0]["draining"]
        assert total(await metrics(app), "calinix_pod_draining", pod_id="single-1") == 1
        path = "/admin/pods/single-1/resume"
        assert await admin(app, path, "POST") == {"id": "single-1", "draining": False}
        replies = [await ask(app, f"s-{number}") for number in range(2)]
        assert {reply.headers["x-calinix-target-pod-id"] for reply in replies} == {
            "single-1",
            "single-2",
        }


@kit.on_loop
async def test_decisions_and_what_came_of_them() -> None:
    """The last ones, or one by its id: candidates, scores, the pick, and the true outcome."""
    async with (
        fleet_of(single=2, dispatch=1) as fleet,
        gateway_of(fleet.config({"gateway": {"strategy": "cacheAware"}})) as app,
    ):
        await kit.until(lambda: len(app.router.usable_pods()) == 4, "all are up")
        for number in range(3):
            assert (await ask(app, f"Prompt {number} " * 50, stream=True)).status == 200
        again = await ask(app, "Prompt 1 " * 50)
        found = await admin(app, f"/admin/decisions?request_id={again.headers['x-request-id']}")
        (decision,) = found["decisions"]
        assert decision["podId"] == again.headers["x-calinix-target-pod-id"]
        assert decision["predicted"]["cachedBlocks"] > 0
        (choice,) = decision["choices"]
        assert {candidate["podId"] for candidate in choice["candidates"]} == {
            "single-1",
            "single-2",
        }
        usage = again.json()["usage"]
        assert decision["outcome"]["status"] == 200
        assert decision["outcome"]["promptTokens"] == usage["prompt_tokens"]
        assert (
            decision["outcome"]["cachedTokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        )
        assert decision["outcome"]["outputTokens"] == 4
        assert decision["outcome"]["e2eSeconds"] > 0
        assert decision["outcome"]["e2eSeconds"] - 0.01 < decision["ageSeconds"] < 60.0
        two = (await admin(app, "/admin/decisions?last=2"))["decisions"]
        assert [one["requestId"] for one in two].count(again.headers["x-request-id"]) == 1
        assert len(two) == 2
        assert len((await admin(app, "/admin/decisions"))["decisions"]) == 4
        headers = {"x-calinix-mode": "dispatch", "x-request-id": "split"}
        await kit.http(app.server.port, "POST", CHAT, chat_body(stream=True, max_tokens=2), headers)
        found = await admin(app, "/admin/decisions?request_id=split")
        assert [one["role"] for one in found["decisions"][0]["choices"]] == ["prefill", "decode"]
        assert found["decisions"][0]["prefillPodId"] == "prefill-1"


@kit.on_loop
async def test_decisions_refuse_what_they_do_not_know() -> None:
    """A parameter that there is not is no answer to another question: 400, with those there are."""
    async with fleet_of(single=1) as fleet, gateway_of(fleet.config()) as app:
        assert app.admin is not None
        for query, param in (("limit=5", "limit"), ("last=5&pod=", "pod"), ("last=x", "last")):
            reply = await kit.http(app.admin.port, "GET", f"/admin/decisions?{query}")
            assert reply.status == 400
            assert reply.json()["error"]["param"] == param
        reply = await kit.http(app.admin.port, "GET", "/admin/decisions?limit=5")
        assert "last and request_id" in reply.json()["error"]["message"]


@kit.on_loop
async def test_what_the_admin_port_refuses() -> None:
    """Unknown paths name the known ones; unknown pods, ids and methods are told as such."""
    async with raw_pod() as pod, gateway_of(config_of(p=pod)) as app:
        assert app.admin is not None
        for method, path, status in [
            ("GET", "/", 404),
            ("GET", "/v1/models", 404),
            ("POST", "/admin/pods/none/drain", 404),
            ("POST", "/admin/pods/p/delete", 404),
            ("POST", "/admin/pods/p/q/drain", 404),
            ("GET", "/admin/decisions?request_id=none", 404),
            ("GET", "/admin/decisions?last=many", 400),
            ("GET", "/admin/decisions?last=-5", 200),
            ("GET", "/admin/decisions?last=99999999999", 200),
            ("HEAD", "/metrics", 200),
            ("GET", "/health", 200),
        ]:
            reply = await kit.http(app.admin.port, method, path)
            assert reply.status == status, path
        assert "/admin/decisions" in (await kit.http(app.admin.port, "GET", "/x")).body.decode()
        for method, path, allow in [
            ("POST", "/metrics", "GET, HEAD"),
            ("DELETE", "/admin/pods", "GET, HEAD"),
            ("GET", "/admin/pods/p/drain", "POST"),
        ]:
            reply = await kit.http(app.admin.port, method, path)
            assert (reply.status, reply.headers["allow"]) == (405, allow)
        large = await kit.http(app.admin.port, "POST", "/admin/pods/p/drain", bytes(100_000))
        assert large.status == 413
        assert not (await admin(app, "/admin/pods"))["pods"][0]["draining"]


@kit.on_loop
async def test_the_config_in_force() -> None:
    """/admin/config is the whole configuration as it runs, secrets masked."""
    async with raw_pod() as pod:
        config = config_of({"gateway": {"apiKeys": ["secret-1"]}},
                           p={"url": pod.url, "apiKey": "secret-2"})  # fmt: skip
        async with gateway_of(config) as app:
            assert app.admin is not None
            reply = await kit.http(app.admin.port, "GET", "/admin/config")
            shown = yaml.safe_load(reply.body)
            assert shown["gateway"]["strategy"]["name"] == "roundRobin"
            assert shown["gateway"]["timeouts"]["connectMs"] == 2000
            assert b"secret" not in reply.body
            assert parse_config(reply.body).upstreams.single is not None


@kit.on_loop
async def test_metrics_add_up(tmp_path: Path) -> None:
    """Each request is counted once, by what became of it; tokens are those that pods stated."""

    async def script(served: Served) -> None:
        if b'"stream":true' in served.request:
            usage = b'"usage":{"prompt_tokens":20,"completion_tokens":3,"total_tokens":23}'
            last = b"data: {%b}\n\n" % usage
            await served.say(STREAM_HEAD, event(1), event(2), b"%x\r\n%b\r\n" % (len(last), last))
            await served.say(DONE)
        elif b"fail" in served.request:
            await served.say(answer(b'{"error":1}', b"500 Oops"))
        elif b"break" in served.request:
            await asyncio.sleep(0.06)
            served.hang_up()
        else:
            details = b'"prompt_tokens_details":{"cached_tokens":16}'
            usage = b'{"prompt_tokens":30,"completion_tokens":5,"total_tokens":35,%b}' % details
            await served.say(answer(b'{"usage":%b}' % usage))

    log = tmp_path / "requests.log"
    extra = {"log": {"requests": True, "requestsFile": str(log)}}
    async with raw_pod(script) as pod, gateway_of(config_of(extra, p=pod)) as app:
        for number in range(4):
            assert (await ask(app, f"stream {number}", stream=True)).status == 200
        for number in range(3):
            assert (await ask(app, f"whole {number}")).status == 200
        assert (await ask(app, "fail")).status == 500
        assert (await ask(app, "break")).status == 502
        port = app.server.port
        assert (await kit.http(port, "POST", CHAT, b"{")).status == 400
        assert (await kit.http(port, "GET", CHAT)).status == 405
        assert (await kit.http(port, "GET", "/nowhere")).status == 404
        assert (await kit.http(port, "GET", "/health")).status == 200
        samples = await metrics(app)
    by_status = {
        status: total(samples, "calinix_requests_total", status=status)
        for status in ("200", "400", "404", "405", "500", "502")
    }
    assert by_status == {"200": 7, "400": 1, "404": 1, "405": 1, "500": 1, "502": 1}
    assert total(samples, "calinix_requests_total") == 12
    routed = {"mode": "single", "strategy": "roundRobin", "endpoint": CHAT}
    assert total(samples, "calinix_requests_total", **routed) == 9
    assert total(samples, "calinix_pod_requests_total", pod_id="p", role="single") == 9
    assert total(samples, "calinix_pod_failures_total", kind="server_error") == 1
    assert total(samples, "calinix_pod_failures_total") == 2
    assert total(samples, "calinix_request_ttft_seconds_count") == 4
    assert total(samples, "calinix_inter_token_seconds_count") == 4
    assert total(samples, "calinix_request_e2e_seconds_count") == 7
    assert total(samples, "calinix_decision_seconds_count") == 9
    assert total(samples, "calinix_prompt_tokens_total") == 4 * 20 + 3 * 30
    assert total(samples, "calinix_output_tokens_total") == 4 * 3 + 3 * 5
    assert total(samples, "calinix_cached_tokens_reported_total") == 3 * 16
    assert total(samples, "calinix_inflight_requests") == 0
    assert total(samples, "calinix_pod_healthy", pod_id="p") == 1
    check_log([json.loads(line) for line in log.read_text().splitlines()])


def check_log(lines: list[dict[str, Any]]) -> None:
    """The request log of the test above: a line for each request, true to what it was."""
    assert len(lines) == 12
    by_id = {line["requestId"]: line for line in lines}
    assert len(by_id) == 12
    streamed = by_id["stream-0"]
    assert streamed["status"] == 200
    assert (streamed["endpoint"], streamed["mode"], streamed["model"]) == (CHAT, "single", "mock")
    assert (streamed["strategy"], streamed["podId"]) == ("roundRobin", "p")
    assert (streamed["promptTokens"], streamed["outputTokens"]) == (20, 3)
    assert 0 < streamed["ttftUs"] <= streamed["e2eUs"] < 5_000_000
    assert 0 < streamed["decisionUs"] < 1_000_000
    assert streamed["bytesOut"] > 50
    assert "error" not in streamed
    assert by_id["whole-0"]["cachedTokens"] == 16
    assert "ttftUs" not in by_id["whole-0"]
    assert (by_id["fail"]["status"], by_id["fail"]["error"]) == (500, "server_error")
    assert (by_id["break"]["status"], by_id["break"]["error"]) == (502, "upstream_error")
    errors = sorted(line["error"] for line in lines if "podId" not in line)
    assert errors == ["invalid_request_error", "method_not_allowed", "unknown_path"]


@pytest.mark.parametrize("kept", [0, 3])
@kit.on_loop
async def test_the_ring_of_decisions_is_bounded(kept: int) -> None:
    """`decisionsKept`: so many, the latest; 0: none."""
    extra = {"gateway": {"decisionsKept": kept}}
    async with raw_pod() as pod, gateway_of(config_of(extra, p=pod)) as app:
        for number in range(5):
            assert (await ask(app, f"r {number}")).status == 200
        found = (await admin(app, "/admin/decisions"))["decisions"]
        assert {one["requestId"] for one in found} == {f"r-{n}" for n in range(5 - kept, 5)}
        if kept:
            assert (await outcome(app, "r-4"))["status"] == 200


@kit.on_loop
async def test_without_an_admin_port() -> None:
    """`admin.enabled: false`: nothing listens, and requests are served all the same."""
    async with raw_pod() as pod:
        ports = {"gateway": {"host": "127.0.0.1", "port": 0}, "admin": {"enabled": False}}
        text = yaml.safe_dump(merged(config_of(p=pod), ports))
        async with running_gateway(parse_config(text)) as app:
            await kit.until(app.router.ready, "it is ready")
            assert app.admin is None
            assert app.admin_url == ""
            assert (await ask(app)).status == 200


@pytest.mark.parametrize(
    ("headers", "get", "post"),
    [
        ({}, 200, 200),
        ({"host": "localhost:9090"}, 200, 200),
        ({"host": "calinix.localhost"}, 200, 200),
        ({"host": "127.0.0.1:9090"}, 200, 200),
        ({"host": "[::1]:9090"}, 200, 200),
        ({"host": "localhost:9090", "origin": "http://localhost:9090"}, 200, 200),
        ({"host": "rebound.example:9090"}, 403, 403),
        ({"host": "rebound.example:9090", "origin": "http://rebound.example:9090"}, 403, 403),
        ({"host": "127.0.0.1.rebound.example"}, 403, 403),
        ({"host": "localhost.example"}, 403, 403),
        ({"host": "localhost:9090", "origin": "https://elsewhere.example"}, 403, 403),
        ({"host": "localhost:9090", "origin": "http://localhost:3000"}, 403, 403),
        ({"host": "localhost:9090", "origin": "null"}, 403, 403),
    ],
)
@kit.on_loop
async def test_web_pages_of_others_are_kept_out(
    headers: dict[str, str], get: int, post: int
) -> None:
    """Neither a page's POST nor a name that was made to point here opens /admin to a browser."""
    async with raw_pod() as pod, gateway_of(config_of(p=pod)) as app:
        assert app.admin is not None
        port = app.admin.port
        assert (await kit.http(port, "GET", "/admin/config", None, headers)).status == get
        drained = await kit.http(port, "POST", "/admin/pods/p/drain", None, headers)
        assert drained.status == post
        assert (await admin(app, "/admin/pods"))["pods"][0]["draining"] == (post == 200)
        assert (await kit.http(port, "GET", "/metrics", None, headers)).status == 200
