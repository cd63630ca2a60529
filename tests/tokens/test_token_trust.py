"""Whose tokens are believed: pods that agree, differ, do not tell, come and go; what cannot be."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import structlog

import hfkit
import kit
from calinix.cli_tokens import token_notes
from calinix.config import parse_config
from calinix.core.prompt import Endpoint
from calinix.edge.hf_folder import load_folder
from calinix.edge.tokenizers import HfTokenizer
from calinix.errors import ConfigError
from fleets import gateway_of
from gatewaykit import Served, answer, raw_pod, whole_answer
from tokenkit import (
    COMPLETIONS,
    LONG,
    agreement,
    ask,
    chat,
    checked,
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
        async with gateway_of(of_tokens(tmp_path, {"p": "http://127.0.0.1:1"})):
            pass


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the libraries are missing, the error names what to install."""
    for name in list(sys.modules):
        if name.startswith(("calinix.edge.tokenizers", "calinix.edge.chat_template")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"calinix\[hf\]"):
        importlib.import_module("calinix.edge.tokenizers")


def test_check_loads_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    """`calinix check` says what is wrong in a folder, or what to know of it."""
    pods = "upstreams: {single: {pods: [{id: p, url: 'http://p:1'}]}}\n"

    def found(tokenizer: str, more: str = "") -> list[str]:
        return token_notes(parse_config(f"gateway: {{tokenizer: {tokenizer}{more}}}\n" + pods))

    assert found(f"hf:{folder}") == []
    assert found("bytes") == []
    assert "no effect" in found("bytes", ", tokenizing: {processes: 3}")[0]
    other = hfkit.make_folder(tmp_path, "chatml")
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}", "utf-8")
    assert "from the start" in found(f"hf:{other}")[0]
    (other / "chat_template.jinja").unlink()
    assert "no chat template" in found(f"hf:{other}")[0]
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        found(f"hf:{other}")


def test_explain_goes_by_tokens(folder: Path, tokenizer: HfTokenizer, tmp_path: Path) -> None:
    """`calinix explain` routes by the engine's tokens, as the gateway would."""
    (tmp_path / "config.yaml").write_text(
        f"gateway: {{tokenizer: 'hf:{folder}'}}\n"
        "upstreams: {single: {pods: [{id: p, url: 'http://p:1'}]}}\n"
    )
    body = msgspec.json.encode(chat(LONG))
    (tmp_path / "body.json").write_bytes(body)
    output = subprocess.run(
        [kit.CALINIX, "explain", "body.json", "--after", "body.json", "--json"],
        cwd=tmp_path, capture_output=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    decision = msgspec.json.decode(output)
    tokens = len(tokenizer.ids_of(Endpoint.CHAT, body) or b"") // 4
    assert decision["prompt"]["tokens"] == tokens
    assert decision["predicted"]["cachedTokens"] == (tokens - 1) // 16 * 16
