"""A gateway with exact tokens, pods that have the same ones, and a gate before the processes."""

from __future__ import annotations

import os
import signal
from array import array
from pathlib import Path
from typing import Any

import msgspec

import kit
from calinix.app import App
from calinix.core.prompt import Endpoint
from calinix.edge.tokenizers import HfTokenizer
from fleets import merged
from gatewaykit import (
    CHAT,
    Script,
    Served,
    admin,
    answer,
    body_of,
    config_of,
    metrics,
    total,
    whole_answer,
)

COMPLETIONS = "/v1/completions"
LONG = "prefix cache, exactly. " * 40


class Gate:
    """Tokenising stands still while it is shut: the processes are stopped."""

    def __init__(self, app: App):
        assert app.gateway.tokens is not None
        self._prompts = app.gateway.tokens.prompts

    def shut(self) -> None:
        """Nothing is tokenised from now on."""
        for pid in self._prompts.pids:
            os.kill(pid, signal.SIGSTOP)

    def open(self) -> None:
        """All goes on."""
        for pid in self._prompts.pids:
            os.kill(pid, signal.SIGCONT)

    async def idle(self) -> None:
        """Waits until nothing is in hand."""
        await kit.until(lambda: not self._prompts.jobs, "all tokens are there")


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
    """A config for exact tokens, which are waited for."""
    tokenizing = {"processes": 1, "waitMs": 10_000, **tokenizing}
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
        for outcome in ("tokens", "late", "untold", "distrusted")
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
