"""Exact tokens in a gateway over real sockets: in time and late."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

import hfkit
import kit
from calinix.edge.hf_folder import load_folder
from calinix.edge.tokenizers import HfTokenizer
from fleets import gateway_of
from gatewaykit import CHAT, Served, metrics, raw_pod, total, whole_answer
from tokenkit import (
    COMPLETIONS,
    LONG,
    Gate,
    agreement,
    ask,
    chat,
    checked,
    ids,
    of_tokens,
    outcomes,
    pod_with,
    verdicts,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's tokenizer."""
    return hfkit.make_folder(tmp_path_factory.mktemp("model"), "chatml")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HfTokenizer:
    """The same, as a pod has it."""
    return HfTokenizer(load_folder(str(folder)))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate that is open, until a test shuts it."""
    found = Gate(monkeypatch)
    yield found
    found.open.set()


# --- in time -------------------------------------------------------------------------------------


@kit.on_loop
async def test_a_conversation_goes_by_its_tokens(folder: Path, tokenizer: HfTokenizer) -> None:
    """Sizes are exact, and the next turn finds every full block of the one before, not one more."""
    async with (
        raw_pod(pod_with(tokenizer)) as pod,
        gateway_of(of_tokens(folder, {"p": pod}, waitMs=10_000)) as app,
    ):
        first, second = chat(LONG), chat(LONG, "Yes.", "And then?")
        decision = await ask(app, first)
        assert decision["prompt"]["tokens"] == len(ids(tokenizer, first)) // 4
        again = await ask(app, second)
        ours, theirs = ids(tokenizer, first), ids(tokenizer, second)
        assert theirs.startswith(ours)
        assert again["predicted"]["cachedTokens"] == len(ours) // 4 // 16 * 16
        await checked(app, "p")
        assert await agreement(app, "p", "chat") == await agreement(app, "p", "completions") == 1
        assert await verdicts(app) == {"tokens": 2}
        assert total(await metrics(app), "calinix_token_cache_bytes") > 0


@kit.on_loop
async def test_token_ids_and_texts_meet(folder: Path, tokenizer: HfTokenizer) -> None:
    """Token ids find what the same text has left, of their own tenant and model alone."""
    async with (
        raw_pod(pod_with(tokenizer)) as pod,
        gateway_of(of_tokens(folder, {"p": pod})) as app,
    ):
        prompt = list(array("I", tokenizer.whole(LONG, add_special_tokens=True)))
        salted = {"model": "m", "cache_salt": "t"}
        await ask(app, {**salted, "prompt": LONG}, COMPLETIONS)
        same = await ask(app, {**salted, "prompt": prompt}, COMPLETIONS)
        assert same["predicted"]["cachedTokens"] == (len(prompt) - 1) // 16 * 16
        for other in ({"model": "m"}, {**salted, "model": "n"}):
            found = await ask(app, {**other, "prompt": prompt}, COMPLETIONS)
            assert found["predicted"]["cachedTokens"] == 0


@kit.on_loop
async def test_what_has_no_tokens_goes_by_its_bytes(folder: Path, tokenizer: HfTokenizer) -> None:
    """Media and other APIs are routed as with `bytes`, and find themselves again."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    media = chat(LONG)
    media["messages"][0]["content"] = [{"type": "text", "text": LONG}, image]
    responses = {"model": "m", "input": "other " + LONG}
    async with (
        raw_pod(pod_with(tokenizer)) as pod,
        gateway_of(of_tokens(folder, {"p": pod})) as app,
    ):
        for path, body in ((CHAT, media), ("/v1/responses", responses)):
            assert (await ask(app, body, path))["predicted"]["cachedBlocks"] == 0
            assert (await ask(app, body, path))["predicted"]["cachedBlocks"] > 5
        assert await outcomes(app) == {"untold": 4}


# --- late ----------------------------------------------------------------------------------------


@kit.on_loop
async def test_a_thread_that_is_in_time_is_waited_for(
    folder: Path, tokenizer: HfTokenizer, gate: Gate
) -> None:
    """What a thread tokenises within waitMs is routed by its tokens, and known by its bytes too."""
    config = of_tokens(folder, {}, waitMs=10_000)
    async with raw_pod(pod_with(tokenizer)) as pod:
        config["upstreams"]["single"]["pods"] = [{"id": "p", "url": pod.url}]
        async with gateway_of(config) as app:
            body = chat(LONG)
            decision = await ask(app, body)
            assert decision["prompt"]["tokens"] == len(ids(tokenizer, body)) // 4
            assert await outcomes(app) == {"waited": 1}
            # The day after, when threads are late:
            assert app.gateway.tokens is not None
            app.gateway.tokens._wait_s = 0.0
            gate.open.clear()
            late = await ask(
                app, {**body, "messages": [*body["messages"], *chat("more")["messages"]]}
            )
            assert late["predicted"]["cachedBlocks"] > 5
            gate.open.set()


@kit.on_loop
async def test_late_tokens_do_not_hold_up_a_request(
    folder: Path, tokenizer: HfTokenizer, gate: Gate
) -> None:
    """After waitMs a prompt goes by its bytes; its tokens, when they come, are known as well."""
    held = asyncio.Event()

    async def slow(served: Served) -> None:
        await held.wait()
        await whole_answer(served)

    async with (
        raw_pod(pod_with(tokenizer, slow)) as pod,
        gateway_of(of_tokens(folder, {"p": pod}, waitMs=20)) as app,
    ):
        body = chat(LONG)
        gate.open.clear()
        first = asyncio.ensure_future(ask(app, body))
        await kit.until(lambda: app.router.open_leases() == 1, "it is routed")
        assert gate.waiting == 1
        gate.open.set()
        tokens = app.gateway.tokens
        assert tokens is not None
        await kit.until(lambda: not tokens.prompts.jobs, "its tokens are there")
        held.set()
        decision = await first
        assert decision["prompt"]["tokens"] != len(ids(tokenizer, body)) // 4
        tokens._wait_s = 10.0
        again = await ask(app, body)
        assert again["predicted"]["cachedTokens"] == (len(ids(tokenizer, body)) // 4 - 1) // 16 * 16
        assert await outcomes(app) == {"late": 1, "waited": 1}


@kit.on_loop
async def test_no_wait_at_all(folder: Path, tokenizer: HfTokenizer, gate: Gate) -> None:
    """With waitMs 0 nobody waits for a thread."""
    async with (
        raw_pod(pod_with(tokenizer)) as pod,
        gateway_of(of_tokens(folder, {"p": pod}, waitMs=0)) as app,
    ):
        gate.open.clear()
        await ask(app, chat(LONG))
        assert await outcomes(app) == {"late": 1}
        gate.open.set()


@kit.on_loop
async def test_a_client_that_leaves_before_its_tokens_come(
    folder: Path, tokenizer: HfTokenizer, gate: Gate
) -> None:
    """Its request is never sent, its end is written down, and the tokens are for nobody."""
    async with (
        raw_pod(pod_with(tokenizer)) as pod,
        gateway_of(of_tokens(folder, {"p": pod}, waitMs=10_000)) as app,
    ):
        await checked(app, "p")
        before = len(pod.requests)
        gate.open.clear()
        exchange = await kit.Exchange.send(
            app.server.port, kit.request_bytes("POST", CHAT, chat(LONG))
        )
        await kit.until(lambda: gate.waiting == 1, "a thread has it")
        assert len(app.gateway.flights) == 1
        await exchange.leave()
        await kit.until(lambda: not app.gateway.flights, "the client is gone")
        gate.open.set()
        assert app.gateway.tokens is not None
        tokens = app.gateway.tokens.prompts
        await kit.until(lambda: not tokens.jobs, "the thread is done")
        assert len(pod.requests) == before
        samples = await metrics(app)
        assert total(samples, "calinix_client_disconnects_total") == 1


@kit.on_loop
async def test_tokens_that_come_while_a_request_waits_for_a_pod(
    folder: Path, tokenizer: HfTokenizer, gate: Gate
) -> None:
    """A request in the wait queue is routed by its tokens once they are there."""
    held = asyncio.Event()

    async def slow(served: Served) -> None:
        await held.wait()
        await whole_answer(served)

    async with raw_pod(pod_with(tokenizer, slow)) as pod:
        config = of_tokens(folder, {"p": {"url": pod.url, "maxConns": 1}}, waitMs=5)
        async with gateway_of(config) as app:
            first = asyncio.ensure_future(ask(app, chat("first")))
            await kit.until(lambda: app.router.open_leases() == 1, "the pod is full")
            gate.open.clear()
            second = asyncio.ensure_future(ask(app, chat(LONG)))
            await kit.until(lambda: len(app.gateway.waiting) == 1, "the second one waits")
            gate.open.set()
            assert app.gateway.tokens is not None
            tokens = app.gateway.tokens.prompts
            await kit.until(lambda: not tokens.jobs, "its tokens are there")
            held.set()
            await first
            decision = await second
            assert decision["prompt"]["tokens"] == len(ids(tokenizer, chat(LONG))) // 4


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(folder: Path, tokenizer: HfTokenizer, gate: Gate, threads: int) -> None:
    """So many prompts are tokenised at the same time, the others behind them."""

    async def main() -> None:
        async with (
            raw_pod(pod_with(tokenizer)) as pod,
            gateway_of(of_tokens(folder, {"p": pod}, waitMs=10_000, threads=threads)) as app,
        ):
            gate.open.clear()
            asked = [asyncio.ensure_future(ask(app, chat(f"{n}" + LONG))) for n in range(3)]
            tokens = app.gateway.tokens
            assert tokens is not None
            await kit.until(lambda: tokens.prompts.jobs == 3, "all are in hand")
            await kit.until(lambda: gate.waiting == threads, "as many as there are threads")
            await asyncio.sleep(0.02)
            assert gate.waiting == threads
            gate.open.set()
            await asyncio.gather(*asked)

    kit.run(main())


@pytest.mark.parametrize(("cache_bytes", "keeps"), [(1, False), (1_000_000, True)])
def test_cache_bytes(folder: Path, tokenizer: HfTokenizer, cache_bytes: int, keeps: bool) -> None:
    """What is remembered of conversations is within cacheBytes."""

    async def main() -> None:
        async with (
            raw_pod(pod_with(tokenizer)) as pod,
            gateway_of(of_tokens(folder, {"p": pod}, cacheBytes=cache_bytes)) as app,
        ):
            await ask(app, chat(LONG))
            kept = total(await metrics(app), "calinix_token_cache_bytes")
            assert bool(kept) is keeps
            assert kept <= cache_bytes

    kit.run(main())
