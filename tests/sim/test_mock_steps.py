"""A mock pod whose answers share its steps: the simulator's pod on real sockets."""

from __future__ import annotations

import asyncio

import kit
from calinix.sim.mock_pod import MockPod
from calinix.sim.pod_model import PodFigures

STEPS = PodFigures(
    prefill_tokens_per_s=20_000.0, token_delay_s=0.005, sequence_s=0.005, chunk_tokens=64.0
)


async def streamed(port: int, text: str, tokens: int) -> tuple[float, int]:
    """(seconds from the first event to the last, events) of one streamed chat."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": tokens}
    exchange = await kit.Exchange.send(
        port, kit.request_bytes("POST", "/v1/chat/completions", body)
    )
    loop = asyncio.get_running_loop()
    await exchange.read_until(b"data:")
    begun = loop.time()
    await exchange.read_until(b"[DONE]")
    return loop.time() - begun, len((await exchange.reply()).events())


@kit.on_loop
async def test_every_token_comes_and_a_full_batch_is_slower() -> None:
    """Alone a token takes 10 ms; with three others 25 ms, for each of them; none is left out."""
    async with MockPod(figures=STEPS) as pod:
        alone_s, events = await streamed(pod.port, "Hi", 20)
        assert events == 1 + 20 + 1
        assert 0.18 < alone_s < 1.0
        four = await asyncio.gather(*(streamed(pod.port, f"Hi {n}", 20) for n in range(4)))
        assert [events for _, events in four] == [22] * 4
        assert all(took_s > 1.5 * 0.19 for took_s, _ in four)
        assert (pod.model.running, pod.model.blocks.used) == (0, 0)


@kit.on_loop
async def test_a_slow_fault_takes_hold_at_once() -> None:
    """Posted in the middle of an answer, it stretches the tokens that are still to come."""
    async with MockPod(figures=STEPS) as pod:
        task = asyncio.ensure_future(streamed(pod.port, "Hi", 30))
        await kit.until(lambda: pod.model.running == 1, "the answer is under way")
        await kit.http(pod.port, "POST", "/mock/faults", body={"kind": "slow", "factor": 4.0})
        took_s, events = await task
        assert events == 32
        assert took_s > 2 * 0.29
