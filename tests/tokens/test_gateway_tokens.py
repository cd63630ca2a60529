"""Exact tokens in a gateway over real sockets: in time and late."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
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
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's tokenizer."""
    return hfkit.make_folder(tmp_path_factory.mktemp("model"), "chatml")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HfTokenizer:
    """The same, as a pod has it."""
    return HfTokenizer(load_folder(str(folder)))


# --- in time -------------------------------------------------------------------------------------


@kit.on_loop
async def test_a_conversation_goes_by_its_tokens(folder: Path, tokenizer: HfTokenizer) -> None:
    """Sizes are exact, and the next turn finds every full block of the one before, not one more."""
    async with (
        raw_pod(pod_with(tokenizer)) as pod,
        gateway_of(of_tokens(folder, {"p": pod})) as app,
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
        assert await outcomes(app) == {"tokens": 2}
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
async def test_a_prompt_is_known_by_its_bytes_too(folder: Path, tokenizer: HfTokenizer) -> None:
    """What was routed by its tokens is found when the next turn's are late."""
    async with (
        raw_pod(pod_with(tokenizer)) as pod,
        gateway_of(of_tokens(folder, {"p": pod})) as app,
    ):
        body = chat(LONG)
        decision = await ask(app, body)
        assert decision["prompt"]["tokens"] == len(ids(tokenizer, body)) // 4
        assert await outcomes(app) == {"tokens": 1}
        assert app.gateway.tokens is not None
        app.gateway.tokens._wait_s = 0.0
        gate = Gate(app)
        gate.shut()
        late = await ask(app, {**body, "messages": [*body["messages"], *chat("more")["messages"]]})
        assert late["predicted"]["cachedBlocks"] > 5


@pytest.mark.parametrize(("most", "known"), [(65_536, True), (8, False)])
def test_late_tokens_do_not_hold_up_a_request(
    folder: Path, tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch, most: int, known: bool
) -> None:
    """After waitMs a prompt goes by its bytes; its tokens are known later, unless too many."""
    monkeypatch.setattr("calinix.gateway.tokens.MAX_LATE_TOKENS", most)
    held = asyncio.Event()

    async def slow(served: Served) -> None:
        await held.wait()
        await whole_answer(served)

    async def main() -> None:
        async with (
            raw_pod(pod_with(tokenizer, slow)) as pod,
            gateway_of(of_tokens(folder, {"p": pod}, waitMs=20)) as app,
        ):
            await checked(app, "p")
            body = chat(LONG)
            gate = Gate(app)
            gate.shut()
            first = asyncio.ensure_future(ask(app, body))
            await kit.until(lambda: app.router.open_leases() == 1, "it is routed")
            tokens = app.gateway.tokens
            assert tokens is not None
            assert tokens.prompts.jobs == 1
            gate.open()
            await gate.idle()
            held.set()
            decision = await first
            count = len(ids(tokenizer, body)) // 4
            assert decision["prompt"]["tokens"] != count
            tokens._wait_s = 10.0
            again = await ask(app, body)
            assert again["predicted"]["cachedTokens"] == (count - 1) // 16 * 16 * known
            assert await outcomes(app) == {"late": 1, "tokens": 1}

    kit.run(main())


@kit.on_loop
async def test_no_wait_at_all(folder: Path, tokenizer: HfTokenizer) -> None:
    """With waitMs 0 nobody waits for tokens."""
    async with (
        raw_pod(pod_with(tokenizer)) as pod,
        gateway_of(of_tokens(folder, {"p": pod}, waitMs=0)) as app,
    ):
        Gate(app).shut()
        await ask(app, chat(LONG))
        assert await outcomes(app) == {"late": 1}


@kit.on_loop
async def test_without_a_process_prompts_go_by_their_bytes(
    folder: Path, tokenizer: HfTokenizer
) -> None:
    """A process that ends holds nobody up, and neither does one that is not there."""
    async with (
        raw_pod(pod_with(tokenizer)) as pod,
        gateway_of(of_tokens(folder, {"p": pod})) as app,
    ):
        await checked(app, "p")
        assert app.gateway.tokens is not None
        (pid,) = app.gateway.tokens.prompts.pids
        Gate(app).shut()
        asked = asyncio.ensure_future(ask(app, chat(LONG)))
        await kit.until(lambda: len(app.gateway.flights) == 1, "it waits")
        os.kill(pid, signal.SIGKILL)
        assert (await asked)["predicted"]["cachedBlocks"] == 0
        assert (await ask(app, chat(LONG)))["predicted"]["cachedBlocks"] > 5
        assert await outcomes(app) == {"untold": 2}


@kit.on_loop
async def test_a_client_that_leaves_before_its_tokens_come(
    folder: Path, tokenizer: HfTokenizer
) -> None:
    """Its request is never sent, its end is written down, and the tokens are for nobody."""
    async with (
        raw_pod(pod_with(tokenizer)) as pod,
        gateway_of(of_tokens(folder, {"p": pod})) as app,
    ):
        await checked(app, "p")
        before = len(pod.requests)
        gate = Gate(app)
        gate.shut()
        exchange = await kit.Exchange.send(
            app.server.port, kit.request_bytes("POST", CHAT, chat(LONG))
        )
        await kit.until(lambda: len(app.gateway.flights) == 1, "it waits")
        await exchange.leave()
        await kit.until(lambda: not app.gateway.flights, "the client is gone")
        gate.open()
        await gate.idle()
        assert len(pod.requests) == before
        samples = await metrics(app)
        assert total(samples, "calinix_client_disconnects_total") == 1


@kit.on_loop
async def test_tokens_that_come_while_a_request_waits_for_a_pod(
    folder: Path, tokenizer: HfTokenizer
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
            gate = Gate(app)
            await gate.idle()
            gate.shut()
            second = asyncio.ensure_future(ask(app, chat(LONG)))
            await kit.until(lambda: len(app.gateway.waiting) == 1, "the second one waits")
            gate.open()
            await gate.idle()
            held.set()
            await first
            decision = await second
            assert decision["prompt"]["tokens"] == len(ids(tokenizer, chat(LONG))) // 4


@pytest.mark.parametrize("processes", [1, 2])
def test_processes(folder: Path, tokenizer: HfTokenizer, processes: int) -> None:
    """There are so many, and prompts are shared out between them."""

    async def main() -> None:
        async with (
            raw_pod(pod_with(tokenizer)) as pod,
            gateway_of(of_tokens(folder, {"p": pod}, processes=processes)) as app,
        ):
            await checked(app, "p")
            gate = Gate(app)
            gate.shut()
            asked = [asyncio.ensure_future(ask(app, chat(f"{n}" + LONG))) for n in range(4)]
            assert app.gateway.tokens is not None
            prompts = app.gateway.tokens.prompts
            await kit.until(lambda: prompts.jobs == 4, "all are in hand")
            assert len(prompts.pids) == processes
            assert [link.jobs for link in prompts._links] == [4 // processes] * processes
            gate.open()
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
