"""Exact tokens in a gateway over real sockets: in time, late, checked against pods, distrusted."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

import hfkit
import kit
from calinix.app import App
from calinix.core.prompt import Endpoint
from calinix.edge.hf_folder import load_folder
from calinix.edge.tokenizers import HfTokenizer
from calinix.errors import ConfigError
from fleets import gateway_of, merged
from gatewaykit import (
    CHAT,
    QUIET,
    Script,
    Served,
    admin,
    answer,
    body_of,
    config_of,
    metrics,
    raw_pod,
    total,
    whole_answer,
)

COMPLETIONS = "/v1/completions"
LONG = "prefix cache, exactly. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's tokenizer."""
    return hfkit.make_folder(tmp_path_factory.mktemp("model"), "chatml")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HfTokenizer:
    """The same, as a pod has it."""
    return HfTokenizer(load_folder(str(folder)))


class Gate:
    """Tokenising waits here while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open = threading.Event()
        self.open.set()
        self.waiting = 0
        encode = HfTokenizer.encode

        def wait(one: HfTokenizer, pieces: list[str]) -> list[bytes]:
            self.waiting += 1
            assert self.open.wait(30)
            self.waiting -= 1
            return encode(one, pieces)

        monkeypatch.setattr(HfTokenizer, "encode", wait)
        # Whatever has to be tokenised goes to a thread.
        monkeypatch.setattr("calinix.edge.prompt_tokens.LOOP_BUDGET_S", 0.0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate that is open, until a test shuts it."""
    found = Gate(monkeypatch)
    yield found
    found.open.set()


def pod_with(tokenizer: HfTokenizer, serve: Script = whole_answer) -> Script:
    """A pod's script: /tokenize as an engine answers it, all else by `serve`."""

    async def script(served: Served) -> None:
        if not served.request.startswith(b"POST /tokenize "):
            await serve(served)
            return
        body = body_of(served.request)
        endpoint = Endpoint.CHAT if b"messages" in body else Endpoint.COMPLETIONS
        ids = tokenizer.ids_of(endpoint, body)
        tokens = list(array("I", ids or b""))
        await served.say(answer(msgspec.json.encode({"count": len(tokens), "tokens": tokens})))

    return script


def of_tokens(folder: Path, pods: dict[str, Any], **tokenizing: Any) -> dict[str, Any]:
    """A config for exact tokens."""
    gateway = {"tokenizer": f"hf:{folder}", "tokenizing": tokenizing, "strategy": "cacheAware"}
    return merged(config_of(**pods), {"gateway": gateway, "sessions": {"maxSessions": 0}})


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """A chat of users and assistants in turn."""
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return {"model": "m", "messages": messages, **more}


async def ask(app: App, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    """One request that is served; the decision about it."""
    reply = await kit.http(app.server.port, "POST", path, body)
    assert reply.status == 200, reply
    request_id = reply.headers["x-calinix-request-id"]
    found = await admin(app, f"/admin/decisions?request_id={request_id}")
    decision: dict[str, Any] = found["decisions"][0]
    return decision


async def outcomes(app: App) -> dict[str, int]:
    """Prompts by what became of their tokens; those that there are."""
    name = "calinix_prompt_tokens_made_total"
    found = await metrics(app)
    counts = {
        outcome: int(total(found, name, outcome=outcome))
        for outcome in ("tokens", "waited", "late", "untold", "distrusted")
    }
    return {outcome: count for outcome, count in counts.items() if count}


async def agreement(app: App, pod: str, kind: str) -> float | None:
    """The gauge of a pod; None: it is not there."""
    name, labels = "calinix_pod_tokens_agree", {"pod_id": pod, "kind": kind}
    found = [v for (n, has), v in (await metrics(app)).items()
             if n == name and labels.items() <= dict(has).items()]  # fmt: skip
    return found[0] if found else None


async def checked(app: App, *pods: str) -> None:
    """Waits until these pods have been compared with."""
    assert app.gateway.tokens is not None
    verdicts = app.gateway.tokens.verdicts
    await kit.until(lambda: verdicts.keys() >= set(pods), f"{pods} are checked")


def ids(tokenizer: HfTokenizer, body: dict[str, Any]) -> bytes:
    """A chat's ids."""
    found = tokenizer.ids_of(Endpoint.CHAT, msgspec.json.encode(body))
    assert found is not None
    return found


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


# --- trust ---------------------------------------------------------------------------------------


@kit.on_loop
async def test_pods_with_other_tokens_are_not_believed(
    folder: Path, tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    """Prompts for models of a pod that differs go by their bytes, until it agrees again."""
    other = HfTokenizer(load_folder(str(hfkit.make_folder(tmp_path, "chatml"))), template="{{ 1 }}")
    now = [other]

    async def turncoat(served: Served) -> None:
        await pod_with(now[0])(served)

    async with raw_pod(pod_with(tokenizer)) as good, raw_pod(turncoat) as bad:
        pods = {
            "good": {"url": good.url, "models": ["m", "both"]},
            "bad": {"url": bad.url, "models": ["x", "both"]},
        }
        with structlog.testing.capture_logs() as logs:
            async with gateway_of(of_tokens(folder, pods, checkMs=30)) as app:
                await checked(app, "good", "bad")
                assert await agreement(app, "bad", "chat") == 0
                assert await agreement(app, "bad", "completions") == 1
                for model, outcome in (
                    ("m", "tokens"),
                    ("x", "distrusted"),
                    ("both", "distrusted"),
                ):
                    before = (await outcomes(app)).get(outcome, 0)
                    await ask(app, {**chat(LONG), "model": model})
                    assert (await outcomes(app))[outcome] == before + 1
                await ask(app, {"model": "x", "prompt": LONG}, COMPLETIONS)
                assert (await outcomes(app)) == {"tokens": 2, "distrusted": 2}
                now[0] = tokenizer

                async def agrees() -> bool:
                    return await agreement(app, "bad", "chat") == 1

                await kit.until(agrees, "it agrees again")
                await ask(app, {**chat(LONG), "model": "x"})
                assert (await outcomes(app))["tokens"] == 3
        told = [line for line in logs if line["event"] == "tokens_differ"]
        assert [line["pod"] for line in told] == ["bad"]
        assert told[0]["log_level"] == "warning"
        assert "token 0" in told[0]["where"]
        assert {line["pod"] for line in logs if line["event"] == "tokens_agree"} == {"good", "bad"}


@kit.on_loop
async def test_a_pod_with_another_vocabulary(folder: Path, tmp_path: Path) -> None:
    """Where the ids of plain texts differ, chats are not believed either."""
    other = HfTokenizer(
        load_folder(str(hfkit.make_folder(tmp_path, "llama"))), template=hfkit.CHATML
    )
    async with (
        raw_pod(pod_with(other)) as pod,
        gateway_of(of_tokens(folder, {"p": pod})) as app,
    ):
        await checked(app, "p")
        await ask(app, chat(LONG))
        await ask(app, {"model": "m", "prompt": LONG}, COMPLETIONS)
        assert await outcomes(app) == {"distrusted": 2}
        assert await agreement(app, "p", "completions") == 0


@kit.on_loop
async def test_pods_that_do_not_tell(folder: Path, tokenizer: HfTokenizer) -> None:
    """A pod without /tokenize is believed to have these tokens, and that is said once."""

    async def silent(served: Served) -> None:
        if served.request.startswith(b"POST /tokenize "):
            await served.say(answer(b'{"detail":"Not Found"}', status=b"404 Not Found"))
        else:
            await whole_answer(served)

    with structlog.testing.capture_logs() as logs:
        async with (
            raw_pod(silent) as pod,
            gateway_of(of_tokens(folder, {"p": pod}, checkMs=1)) as app,
        ):
            await checked(app, "p")
            assert await agreement(app, "p", "chat") is None
            await ask(app, chat(LONG))
            assert await outcomes(app) == {"tokens": 1}
    assert [line["pod"] for line in logs if line["event"] == "tokens_unchecked"] == ["p"]


@kit.on_loop
async def test_pods_that_are_not_up_yet(
    folder: Path, tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod is asked again until it answers; nonsense and 5xx are no verdict on its tokens."""
    monkeypatch.setattr("calinix.edge.token_check._FIRST_RETRY_S", 0.01)
    answers = [answer(b"{}", status=b"500 Oops"), answer(b"nonsense"), answer(b'{"tokens": "x"}')]

    async def starting(served: Served) -> None:
        if answers and served.request.startswith(b"POST /tokenize "):
            await served.say(answers.pop(0))
        else:
            await pod_with(tokenizer)(served)

    async with (
        raw_pod(starting) as pod,
        gateway_of(of_tokens(folder, {"p": {"url": pod.url, "apiKey": "secret"}})) as app,
    ):
        await checked(app, "p")
        assert await agreement(app, "p", "chat") == 1
        asked = [r for r in pod.requests if r.startswith(b"POST /tokenize ")]
        assert all(b"authorization: Bearer secret\r\n" in request for request in asked)


@kit.on_loop
async def test_pods_that_come_and_go_are_checked(folder: Path, tokenizer: HfTokenizer) -> None:
    """A removed pod's verdict goes with it; a new pod has its own."""
    async with (
        raw_pod(pod_with(tokenizer)) as one,
        raw_pod(pod_with(tokenizer)) as two,
        gateway_of(of_tokens(folder, {"one": one})) as app,
    ):
        await checked(app, "one")
        upstreams = app.gateway.upstreams
        pod = next(iter(upstreams)).pod
        upstreams.remove("one")
        assert app.gateway.tokens is not None
        assert not app.gateway.tokens.verdicts
        upstreams.add(msgspec.structs.replace(pod, id="two", url=two.url))
        await checked(app, "two")
        assert app.gateway.tokens.checks.trusts(Endpoint.CHAT, "m")


# --- what cannot be ------------------------------------------------------------------------------


@kit.on_loop
async def test_a_folder_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    """A gateway does not start with a tokenizer that is none, and says which file it is."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        async with gateway_of(merged(of_tokens(tmp_path, {"p": "http://127.0.0.1:1"}), QUIET)):
            pass


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the libraries are missing, the error names what to install."""
    for name in list(sys.modules):
        if name.startswith(("calinix.edge.tokenizers", "calinix.edge.chat_template")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"calinix\[hf\]"):
        importlib.import_module("calinix.edge.tokenizers")
