"""What is sent again and what never is: only what its pod cannot have begun, once, elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator

import pytest

import kit
from fleets import gateway_of, merged
from gatewaykit import (
    CHAT,
    KEEP,
    STREAM_HEAD,
    Connection,
    RawPod,
    Script,
    Served,
    admin,
    answer,
    body_of,
    chat_body,
    config_of,
    dispatch_of,
    event,
    fields_of,
    metrics,
    outcome,
    raw_pod,
    total,
    whole_answer,
)

PASSIVE = {"health": {"passive": {"enabled": True, "failures": 3}}}
NOWHERE = "http://127.0.0.1:9"


def says(status: bytes, body: bytes = b'{"error":"busy"}', headers: bytes = b"") -> Script:
    """A script: always this."""

    async def script(served: Served) -> None:
        await served.say(answer(body, status, b"x-pod: said\r\n" + headers))

    return script


async def hang_up(served: Served) -> None:
    """A script: closes without an answer."""
    served.hang_up()


def after_the_first(script: Script) -> Script:
    """A script: each connection's first request is answered, the next one meets `script`."""
    seen: set[asyncio.StreamWriter] = set()

    async def both(served: Served) -> None:
        known = served.writer in seen
        seen.add(served.writer)
        await (script if known else whole_answer)(served)

    return both


async def ask(port: int, stream: bool = False, request_id: str = "r-1") -> kit.Reply:
    """One chat."""
    headers = {"x-request-id": request_id}
    return await kit.http(port, "POST", CHAT, chat_body(stream=stream), headers)


async def warm(port: int, *pods: RawPod) -> None:
    """Each pod has a kept connection that has carried a request."""
    for _ in pods:
        assert (await ask(port)).status == 200
    for pod in pods:
        assert len(pod.requests) == 1
        pod.requests.clear()


@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"503 Service Unavailable"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@kit.on_loop
async def test_back_pressure_goes_elsewhere_once(status: bytes, stream: bool) -> None:
    """A refusal is sent to another pod, with the same body, id and trace; the client sees one."""
    async with (
        raw_pod(says(status)) as busy,
        raw_pod() as free,
        gateway_of(config_of(PASSIVE, a_busy=busy, free=free)) as app,
    ):
        replies = [await ask(app.server.port, stream, f"r-{n}") for n in range(6)]
        assert [reply.status for reply in replies] == [200] * 6
        targets = {reply.headers["x-calinix-target-pod-id"] for reply in replies}
        assert targets == {"free"}
        assert len(free.requests) == 6
        first, second = busy.requests[0], free.requests[0]
        assert body_of(first) == body_of(second)
        before, after = dict(fields_of(first)), dict(fields_of(second))
        assert before.pop("x-calinix-target-pod-id") == "a_busy"
        assert after.pop("x-calinix-target-pod-id") == "free"
        before.pop("host"), after.pop("host")
        assert before == after
        assert before["x-request-id"] == "r-0"
        samples = await metrics(app)
        sent_again = total(samples, "calinix_retries_total", reason="refused")
        assert sent_again == len(busy.requests) >= 1
        views = {pod["id"]: pod for pod in (await admin(app, "/admin/pods"))["pods"]}
        assert views["a_busy"]["cooling"]
        assert views["a_busy"]["failuresInRow"] == 0


@pytest.mark.parametrize("status", [429, 503])
@kit.on_loop
async def test_back_pressure_without_another_pod_is_passed_on(status: int) -> None:
    """The pod's own refusal reaches the client: status, headers, body; the pod is not ill."""
    script = says(b"%d Busy" % status, headers=b"retry-after: 7\r\n")
    async with raw_pod(script) as pod, gateway_of(config_of(PASSIVE, p=pod)) as app:
        for number in range(5):
            reply = await ask(app.server.port, stream=number % 2 == 0)
            assert (reply.status, reply.body) == (status, b'{"error":"busy"}')
            assert reply.headers["retry-after"] == "7"
            assert reply.headers["x-pod"] == "said"
            assert reply.complete
        assert len(pod.requests) == 5
        assert app.router.ready()


@kit.on_loop
async def test_no_request_meets_more_than_two_pods() -> None:
    """Whatever refuses it, a request goes to two pods at most, and the second answer counts."""
    busy = says(b"503 Service Unavailable")
    async with raw_pod(busy) as one, raw_pod(busy) as two, raw_pod(busy) as three:
        pods = (one, two, three)
        async with gateway_of(config_of(one=one, two=two, three=three)) as app:
            for number in range(1, 7):
                reply = await ask(app.server.port)
                assert reply.status == 503
                assert reply.headers["x-pod"] == "said"
                assert sum(len(pod.requests) for pod in pods) == 2 * number


@kit.on_loop
async def test_a_pod_that_nobody_listens_at() -> None:
    """A refused connection is sent elsewhere; without another pod it is a 502 that says so."""
    async with raw_pod() as pod, raw_pod() as dead:
        config = config_of(dead=dead, p=pod)
        async with gateway_of(config) as app:
            await kit.until(lambda: len(app.router.usable_pods()) == 2, "both pods are up")
            app.gateway.upstreams["dead"].client.close()
            app.gateway.upstreams["dead"].client._port = 9
            for number in range(4):
                assert (await ask(app.server.port, request_id=f"r-{number}")).status == 200
            assert len(pod.requests) == 4
            # Each was refused by the dead one first: a retry takes the other's turn.
            assert total(await metrics(app), "calinix_retries_total", reason="connect") == 4
            assert total(await metrics(app), "calinix_pod_failures_total", pod_id="dead") == 4
            pod.requests.clear()
            app.gateway.upstreams["p"].client.close()
            app.gateway.upstreams["p"].client._port = 9
            reply = await ask(app.server.port, request_id="lost")
            assert reply.status == 502
            assert reply.json()["error"]["type"] == "upstream_error"
            assert (await outcome(app, "lost"))["failure"] == "connect"
            assert not pod.requests


@kit.on_loop
async def test_without_retries() -> None:
    """`retries: 0`: what fails, fails, though another pod would do."""
    busy = says(b"503 Service Unavailable")
    extra = {"gateway": {"retries": 0}}
    async with (
        raw_pod(busy) as one,
        raw_pod() as two,
        gateway_of(config_of(extra, a=one, b=two)) as app,
    ):
        statuses = [(await ask(app.server.port)).status for _ in range(2)]
        assert sorted(statuses) == [200, 503]
        assert total(await metrics(app), "calinix_retries_total") == 0


@kit.on_loop
async def test_a_kept_connection_that_the_pod_had_closed() -> None:
    """Closed as the request came: sent elsewhere, and it is no fault of the pod."""
    async with (
        raw_pod(after_the_first(hang_up)) as one,
        raw_pod() as two,
        gateway_of(config_of(PASSIVE, a=one, b=two)) as app,
    ):
        await warm(app.server.port, one, two)
        for _ in range(12):
            assert (await ask(app.server.port)).status == 200
        views = {pod["id"]: pod for pod in (await admin(app, "/admin/pods"))["pods"]}
        assert views["a"]["state"] == "healthy"
        assert views["a"]["failuresInRow"] == 0
        assert total(await metrics(app), "calinix_retries_total", reason="closed") >= 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@kit.on_loop
async def test_a_closed_connection_to_the_only_pod(stream: bool) -> None:
    """With no other pod the same one is asked again, on a new connection."""
    async with (
        raw_pod(after_the_first(hang_up)) as pod,
        gateway_of(config_of(PASSIVE, p=pod)) as app,
    ):
        await warm(app.server.port, pod)
        for _ in range(6):
            assert (await ask(app.server.port, stream)).status == 200
        # Every second one met a closed connection first.
        assert len(pod.requests) == 12


async def late_hang_up(served: Served) -> None:
    """A script: closes without an answer, after a while."""
    await asyncio.sleep(0.12)
    served.hang_up()


async def half_a_head(served: Served) -> None:
    """A script: breaks off in the head."""
    await served.say(b"HTTP/1.1 200 OK\r\ncontent-")
    served.hang_up()


async def no_http(served: Served) -> None:
    """A script: what is not HTTP."""
    await served.say(b"220 ready\r\n")


async def head_alone(served: Served) -> None:
    """A script: a stream's head, then the end, before any event."""
    await served.say(STREAM_HEAD)
    served.hang_up()


async def short_body(served: Served) -> None:
    """A script: a head that promises a body, then the end."""
    await served.say(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n")
    served.hang_up()


BEGUN = {
    "closed-new": hang_up,
    "closed-late": after_the_first(late_hang_up),
    "half-a-head": half_a_head,
    "no-http": no_http,
    "head-alone": head_alone,
    "short-body": short_body,
}


@pytest.mark.parametrize("name", BEGUN)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@kit.on_loop
async def test_what_may_have_begun_is_never_sent_again(name: str, stream: bool) -> None:
    """A pod that took the request and broke: 502, one POST, though another pod is idle."""
    async with (
        raw_pod(BEGUN[name]) as bad,
        raw_pod() as idle,
        gateway_of(config_of(a_bad=bad, idle=idle)) as app,
    ):
        if name == "closed-late":
            await warm(app.server.port, bad, idle)
        replies = [await ask(app.server.port, stream, f"r-{n}") for n in range(4)]
        lost = [reply for reply in replies if reply.status != 200]
        # After a late close there is a new connection, whose first request is answered.
        count = 1 if name == "closed-late" else 2
        assert [reply.status for reply in lost] == [502] * count
        assert all(reply.json()["error"]["type"] == "upstream_error" for reply in lost)
        assert all(reply.headers["x-calinix-target-pod-id"] == "a_bad" for reply in lost)
        assert (len(bad.requests), len(idle.requests)) == (2, 2)


@pytest.mark.parametrize("status", [500, 502, 504, 400, 404, 422])
@kit.on_loop
async def test_a_pods_own_errors_are_passed_on(status: int) -> None:
    """Other errors may have cost the pod work: they reach the client as they are, unrepeated."""
    async with (
        raw_pod(says(b"%d Said" % status)) as bad,
        raw_pod() as idle,
        gateway_of(config_of(a_bad=bad, idle=idle)) as app,
    ):
        replies = [await ask(app.server.port, stream=n < 2) for n in range(4)]
        assert sorted(reply.status for reply in replies) == sorted([200, 200, status, status])
        for reply in replies:
            if reply.status == status:
                assert reply.body == b'{"error":"busy"}'
        assert (len(bad.requests), len(idle.requests)) == (2, 2)


@kit.on_loop
async def test_a_whole_body_that_breaks_is_cut_off() -> None:
    """Bytes were passed on: the client's connection ends short of its length, once and for all."""

    async def script(served: Served) -> None:
        await served.say(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n01234", pause_s=0.02)
        served.hang_up()

    async with raw_pod(script) as bad, gateway_of(config_of(p=bad)) as app:
        for stream in (False, True):
            reply = await ask(app.server.port, stream=stream)
            # Also where a stream was asked for: an event would not fit into the stated length.
            assert (reply.status, reply.body, reply.complete) == (200, b"01234", False)
        assert len(bad.requests) == 2


@kit.on_loop
async def test_a_stream_that_is_no_event_stream_gets_no_event() -> None:
    """A broken answer of another type is cut off: an event would be read as its content."""

    async def script(served: Served) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ntransfer-encoding: chunked\r\n\r\n"
        await served.say(head + b"4\r\nRIFF\r\n", pause_s=0.02)
        served.hang_up()

    async with raw_pod(script) as bad, gateway_of(config_of(p=bad)) as app:
        path = "/v1/audio/speech"
        reply = await kit.http(app.server.port, "POST", path, {"stream": True, "input": "x"})
        assert (reply.status, reply.body, reply.complete) == (200, b"RIFF", False)


@pytest.mark.parametrize(
    ("path", "kind"), [(CHAT, "data: "), ("/v1/messages", "event: error\ndata: ")]
)
@kit.on_loop
async def test_a_broken_event_stream_says_so(path: str, kind: str) -> None:
    """An error event in the API's own shape, whole even if the pod broke off inside an event."""

    async def script(served: Served) -> None:
        await served.say(STREAM_HEAD, event(1), b'8\r\ndata: {"\r\n', pause_s=0.02)
        served.hang_up()

    async with raw_pod(script) as bad, gateway_of(config_of(p=bad)) as app:
        reply = await kit.http(app.server.port, "POST", path, chat_body(stream=True, max_tokens=9))
        *_, torn, last = reply.body.decode().removesuffix("\n\n").split("\n\n")
        assert torn == 'data: {"'
        assert last.startswith(kind + "{")
        assert '"upstream_error"' in last
        assert not reply.complete
        assert b"[DONE]" not in reply.body


@contextlib.contextmanager
def no_sockets() -> Iterator[None]:
    """This process can open no file and no socket."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("dispatch", [False, True], ids=["single", "dispatch"])
@kit.on_loop
async def test_the_gateways_own_want_of_sockets_is_no_pods_fault(dispatch: bool) -> None:
    """Clients are told to come back; no pod is judged by it or loses its cache."""
    extra = merged(PASSIVE, {"health": {"intervalMs": 20}})
    async with raw_pod() as one, raw_pod() as other:
        if dispatch:
            config = dispatch_of({"p": one}, {"d": other}, extra)
        else:
            config = config_of(extra, p=one, d=other)
        async with gateway_of(config) as app:
            before = (await admin(app, "/admin/pods"))["pods"]
            health = kit.request_bytes("GET", "/health", headers=KEEP)
            client = await Connection.send(app.server.port, health)
            assert (await client.next_reply()).status == 200
            with no_sockets():
                for _ in range(5):
                    client.writer.write(kit.request_bytes("POST", CHAT, chat_body(), KEEP))
                    reply = await client.next_reply()
                    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
                    await asyncio.sleep(0.03)
            await client.leave()
            after = (await admin(app, "/admin/pods"))["pods"]
            for field in ("epoch", "state", "failuresInRow"):
                assert [pod[field] for pod in after] == [pod[field] for pod in before]
            assert (await ask(app.server.port)).status == 200
            assert app.router.open_leases() == 0
