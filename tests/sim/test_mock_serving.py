"""How the mock pod serves: heads at once, tokens in time, queues, clients that leave or lag."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import kit
from calinix.sim.mock_pod import MockPod
from calinix.sim.pod_model import PodFigures

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat(text: str = "Hi", **more: Any) -> bytes:
    """A streamed chat request."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True, **more}
    return kit.request_bytes("POST", CHAT, body)


@kit.on_loop
async def test_a_streams_head_comes_long_before_its_first_token() -> None:
    """As in vLLM: status and headers are out while the prompt still waits."""
    async with MockPod(figures=PodFigures(delay_s=30.0)) as pod:
        exchange = await kit.Exchange.send(pod.port, chat(max_tokens=1))
        await exchange.read_until(b"\r\n\r\n")
        assert exchange.wire.startswith(b"HTTP/1.1 200 OK\r\n")
        assert exchange.wire.endswith(b"\r\n\r\n")
        assert pod.model.running == 1
        await exchange.leave()


@kit.on_loop
async def test_tokens_come_one_by_one_in_time() -> None:
    """Twenty tokens 20 ms apart take 380 ms, and do not come in one piece."""
    async with MockPod(figures=PodFigures(token_delay_s=0.02)) as pod:
        loop = asyncio.get_running_loop()
        exchange = await kit.Exchange.send(pod.port, chat(max_tokens=20))
        await exchange.read_until(b"data:")
        begun, reads = loop.time(), 0
        while b"[DONE]" not in exchange.wire:
            data = await exchange.reader.read(65536)
            assert data
            exchange.wire += data
            reads += 1
        assert 0.35 < loop.time() - begun < 10.0
        assert reads >= 10
        events = (await exchange.reply()).events()
        assert len(events) == 1 + 20 + 1


@kit.on_loop
async def test_prompts_queue_and_are_counted() -> None:
    """One prefill slot: three requests are one running and two waiting, served in order."""
    async with MockPod(figures=PodFigures(delay_s=0.15)) as pod:
        exchanges = [
            await kit.Exchange.send(pod.port, chat(f"{number}", max_tokens=1))
            for number in range(3)
        ]
        await kit.until(lambda: pod.model.running + pod.model.waiting == 3, "all three are there")
        state = (await kit.http(pod.port, "GET", "/mock/state")).json()
        assert (state["running"], state["waiting"]) == (1, 2)
        page = (await kit.http(pod.port, "GET", "/metrics")).body
        assert b'vllm:num_requests_waiting{engine="0",model_name="mock"} 2.0' in page
        assert (await kit.http(pod.port, "GET", "/load")).json() == {"server_load": 3}
        loop = asyncio.get_running_loop()
        ended = []
        for exchange in exchanges:
            assert (await exchange.reply()).complete
            ended.append(loop.time())
        assert ended == sorted(ended)
        assert ended[2] - ended[0] > 0.2
        assert pod.served == 3


@kit.on_loop
async def test_a_client_that_leaves_frees_its_slot() -> None:
    """Leaving in the prefill, in the queue and in the stream: all is free again, nothing served."""
    async with MockPod(figures=PodFigures(delay_s=30.0, token_delay_s=0.01)) as pod:
        first = await kit.Exchange.send(pod.port, chat("first"))
        await kit.until(lambda: pod.model.running == 1, "the first is in prefill")
        second = await kit.Exchange.send(pod.port, chat("second", stream=False))
        await kit.until(lambda: pod.model.waiting == 1, "the second waits")
        await second.leave()
        await kit.until(lambda: pod.model.waiting == 0, "the second is gone")
        await first.leave()
        await kit.until(lambda: pod.model.running == 0, "the first is gone")
        assert (pod.cancelled, pod.served, pod.model.blocks.used) == (2, 0, 0)

    async with MockPod(figures=PodFigures(token_delay_s=0.01)) as pod:
        third = await kit.Exchange.send(pod.port, chat(max_tokens=10_000))
        await third.read_until(b"data:", times=5)
        await third.leave()
        await kit.until(lambda: pod.model.running == 0, "the stream is gone")
        assert (pod.cancelled, pod.served, pod.model.blocks.used) == (1, 0, 0)
        assert 4 <= pod.model.counters.output_tokens < 1000


@kit.on_loop
async def test_a_slot_that_is_freed_goes_to_the_next() -> None:
    """The request behind one whose client left starts at once, not at that one's end."""
    async with MockPod(figures=PodFigures(prefill_tokens_per_s=100.0)) as pod:
        long = {"prompt": [7] * 30_000, "max_tokens": 1}
        stuck = await kit.Exchange.send(pod.port, kit.request_bytes("POST", TEXT, long))
        await kit.until(lambda: pod.model.running == 1, "five minutes of prefill begin")
        behind = await kit.Exchange.send(pod.port, chat("behind", max_tokens=1))
        await kit.until(lambda: pod.model.waiting == 1, "one waits")
        await stuck.leave()
        assert (await behind.reply()).complete
        assert (pod.served, pod.cancelled) == (1, 1)


@kit.on_loop
async def test_a_client_that_does_not_read_is_waited_for() -> None:
    """Tokens wait in the pod, not in its socket's buffer, and all of them arrive in the end."""
    tokens = 10_000
    async with MockPod() as pod:
        assert pod._server is not None
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        sock.connect(("127.0.0.1", pod.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=65_536)
        with contextlib.closing(writer):
            await kit.until(lambda: pod._server.connections == 1, "the pod has accepted")
            (connection,) = pod._server.open
            assert connection._transport is not None
            accepted = connection._transport.get_extra_info("socket")
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
            body = {"prompt": "x", "max_tokens": tokens, "stream": True}
            writer.write(kit.request_bytes("POST", TEXT, body))
            await kit.until(lambda: connection._blocked, "the pod sees that the client lags")
            assert connection._transport.get_write_buffer_size() < 500_000
            assert pod.served == 0
            wire = await reader.read()
        assert wire.count(b"data: {") == tokens
        assert wire.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert pod.served == 1


@kit.on_loop
async def test_what_was_received_can_be_read() -> None:
    """Tests see the last requests, headers and bodies, and counts by path; probes are not kept."""
    async with MockPod() as pod:
        await kit.http(pod.port, "GET", "/health")
        for number in range(70):
            headers = {"X-Calinix-Mode": "single", "authorization": "Bearer k"}
            await kit.http(
                pod.port, "POST", TEXT, {"prompt": f"{number}", "max_tokens": 1}, headers
            )
        await kit.http(pod.port, "POST", "/no/such/path", {})
        state = (await kit.http(pod.port, "GET", "/mock/state")).json()
    assert state["paths"] == {"/health": 1, TEXT: 70, "other": 1}
    assert state["served"] == 70
    assert len(state["requests"]) == 64
    last = state["requests"][-1]
    assert (last["path"], json.loads(last["body"])["prompt"]) == (TEXT, "69")
    assert last["headers"]["x-calinix-mode"] == "single"
    assert pod.received[-1].headers["authorization"] == "Bearer k"


@kit.on_loop
async def test_many_streams_share_one_timer() -> None:
    """Two hundred streams at once keep their pace and each gets its own text."""
    async with MockPod(figures=PodFigures(token_delay_s=0.01, parallel=200)) as pod:

        async def one(number: int) -> str:
            exchange = await kit.Exchange.send(pod.port, chat(f"number {number}", max_tokens=10))
            reply = await exchange.reply()
            assert reply.complete
            chunks = [json.loads(event) for event in reply.events()[:-1]]
            return "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)

        texts = await asyncio.gather(*(one(number) for number in range(200)))
        assert len(set(texts)) == 200
        assert pod.served == 200


@kit.on_loop
async def test_a_pod_comes_back_on_its_port_with_an_empty_cache() -> None:
    """stop() and start() are a restart: same address, new engine id, nothing cached."""
    pod = MockPod()
    await pod.start()
    port, engine = pod.port, pod.engine_id
    body = {"prompt": list(range(40)), "max_tokens": 1}
    await kit.http(port, "POST", TEXT, body)
    assert pod.model.blocks.cached > 0
    await pod.stop()
    await pod.start()
    assert (pod.port, pod.model.blocks.cached) == (port, 0)
    assert pod.engine_id != engine
    assert (await kit.http(port, "POST", TEXT, body)).status == 200
    reset = await kit.http(port, "POST", "/reset_prefix_cache", b"")
    assert (reset.status, pod.model.blocks.cached) == (200, 0)
    await pod.stop()
