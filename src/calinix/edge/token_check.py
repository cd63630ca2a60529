"""Whether token ids made here are the pods' own: asked of each pod's /tokenize, and again later.

What is compared are a few texts and chats with all that tokenizers and templates differ in. Where
a pod's ids differ, prompts for its models go by their bytes until they agree again.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
import structlog

from calinix.config import PodConfig
from calinix.core.prompt import Endpoint
from calinix.edge.http_client import FetchError, PodClient, fetch
from calinix.edge.prompt_tokens import TokensLostError

log = structlog.get_logger()

Agreement = Literal["same", "different", "unknown"]
Kind = Literal["completions", "chat"]

_TIMEOUT_S = 10.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 10.0
_MAX_MODELS = 1024
_TEXT = (
    "Hello, world!  naïve façade 中文 Ωμέγα 😀\n\n"
    "\tdef f(x):\n        return 1234567 + x  # don't\r\n"
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks <something> up & says 'it'",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"what": "pods", "n": 2}'},
}


def _says(role: str, content: object, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_TALK = [_says("user", _TEXT), _says("assistant", "Yes. " + _TEXT), _says("user", " and? ")]
_PROBES: tuple[tuple[Kind, dict[str, Any]], ...] = (
    ("completions", {"prompt": _TEXT}),
    ("completions", {"prompt": _TEXT, "add_special_tokens": False}),
    ("chat", {"messages": [_says("user", "hi")]}),
    ("chat", {"messages": _TALK}),
    ("chat", {"messages": [_says("system", "Be brief.\n"), *_TALK]}),
    ("chat", {"messages": _TALK, "add_generation_prompt": False}),
    (
        "chat",
        {
            "messages": [
                _says("user", [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}])
            ]
        },
    ),
    (
        "chat",
        {
            "messages": [
                _says("user", "Which?"),
                _says("assistant", "", tool_calls=[_CALL]),
                _says("tool", "two", tool_call_id="call00001"),
            ],
            "tools": [_TOOL],
        },
    ),
)
_ENDPOINTS: dict[Kind, Endpoint] = {
    "completions": Endpoint.COMPLETIONS,
    "chat": Endpoint.CHAT,
}


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Verdict(msgspec.Struct, frozen=True):
    """What comparing with one pod has shown."""

    completions: Agreement = "unknown"
    chat: Agreement = "unknown"
    first: str = ""
    """The first text, or chat, with other ids; empty where there is none."""

    def of(self, kind: Kind) -> Agreement:
        """That of a kind; templates do not help where texts already have other ids."""
        if self.completions == "different":
            return "different"
        return self.completions if kind == "completions" else self.chat


class TokenChecks:
    """One check per pod, repeated; and whom to trust."""

    def __init__(
        self,
        ids_of: Callable[[Endpoint, bytes], Awaitable[bytes | None]],
        loop: asyncio.AbstractEventLoop,
        check_s: float,
        jitter: Callable[[], float],
    ):
        """`ids_of`: the ids of a request's prompt, little-endian u32; None: there are none.

        It may raise TokensLostError: not now.
        """
        self._ids_of = ids_of
        self._loop = loop
        self._check_s = check_s
        self._jitter = jitter
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pods: dict[str, PodConfig] = {}
        self._trusted: dict[tuple[Endpoint, str], bool] = {}
        self.verdicts: dict[str, Verdict] = {}
        """By pod id; a pod that has not answered yet has none."""

    def add(self, pod: PodConfig, client: PodClient) -> None:
        """Begins to check a pod."""
        self.remove(pod.id)
        self._pods[pod.id] = pod
        self._tasks[pod.id] = self._loop.create_task(self._run(pod, client))

    def remove(self, pod_id: str) -> None:
        """Checks it no more, and forgets what was found."""
        task = self._tasks.pop(pod_id, None)
        if task is not None:
            task.cancel()
        self._pods.pop(pod_id, None)
        if self.verdicts.pop(pod_id, None) is not None:
            self._trusted.clear()

    def stop(self) -> None:
        """Ends all checks."""
        for pod_id in list(self._tasks):
            self.remove(pod_id)

    def trusts(self, endpoint: Endpoint, model: str) -> bool:
        """Whether ids made here may stand for a prompt: no pod of the model is known to differ."""
        key = (endpoint, model)
        found = self._trusted.get(key)
        if found is None:
            if len(self._trusted) >= _MAX_MODELS:
                self._trusted.clear()
            kind: Kind = "chat" if endpoint is Endpoint.CHAT else "completions"
            found = self._trusted[key] = not any(
                verdict.of(kind) == "different" and self._serves(pod_id, model)
                for pod_id, verdict in self.verdicts.items()
            )
        return found

    def _serves(self, pod_id: str, model: str) -> bool:
        models = self._pods[pod_id].models
        return not models or model in models

    async def _run(self, pod: PodConfig, client: PodClient) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            verdict = await self._compare(pod, client)
            if verdict is not None and verdict.first:
                # A template may tell the day, and the day may have changed in between.
                verdict = await self._compare(pod, client)
            if verdict is None:
                wait_s, retry_s = retry_s, min(2.0 * retry_s, _LAST_RETRY_S)
            else:
                self._take(pod, verdict)
                wait_s, retry_s = self._check_s, _FIRST_RETRY_S
            await asyncio.sleep(wait_s * (0.9 + 0.2 * self._jitter()))

    def _take(self, pod: PodConfig, verdict: Verdict) -> None:
        """Acts on what was found, and says so where it is news."""
        before = self.verdicts.get(pod.id)
        self.verdicts[pod.id] = verdict
        self._trusted.clear()
        if before == verdict:
            return
        if verdict.first:
            log.warning(
                "tokens_differ",
                pod=pod.id,
                url=pod.url,
                where=verdict.first,
                models=list(pod.models) or "any",
                hint="its models' prompts go by their bytes; is this the pod's own tokenizer"
                " and chat template?",
            )
        elif "unknown" in (verdict.completions, verdict.chat):
            log.warning(
                "tokens_unchecked",
                pod=pod.id,
                url=pod.url,
                completions=verdict.completions,
                chat=verdict.chat,
                hint="it has no /tokenize that answers; its tokens are believed to be these",
            )
        else:
            log.info("tokens_agree", pod=pod.id)

    async def _compare(self, pod: PodConfig, client: PodClient) -> Verdict | None:
        """Asks the pod; None: it cannot be reached, or ours are not to be had now."""
        found: dict[Kind, Agreement] = {"completions": "unknown", "chat": "unknown"}
        first = ""
        for kind, probe in _PROBES:
            body = dict(probe, model=pod.models[0]) if pod.models else probe
            raw = msgspec.json.encode(body)
            try:
                ours = await self._ids_of(_ENDPOINTS[kind], raw)
                if ours is None:
                    continue
                theirs = await _ask(pod, client, raw)
            except (FetchError, TokensLostError):
                return None
            if theirs is None:
                continue
            if theirs == list(array("I", ours)):
                if found[kind] == "unknown":
                    found[kind] = "same"
            else:
                found[kind] = "different"
                first = first or _difference(kind, probe, list(array("I", ours)), theirs)
        return Verdict(found["completions"], found["chat"], first)


async def _ask(pod: PodConfig, client: PodClient, body: bytes) -> list[int] | None:
    """The pod's ids; None: it does not tell. Raises FetchError."""
    headers = [(b"content-type", b"application/json")]
    if pod.api_key:
        headers.append((b"authorization", b"Bearer " + pod.api_key.encode()))
    head, answer = await fetch(client, "POST", "/tokenize", headers, body, timeout_s=_TIMEOUT_S)
    if head.status >= 500:
        raise FetchError(None, f"answered {head.status}")
    if head.status != 200:
        return None
    try:
        return msgspec.json.decode(answer, type=_Tokens).tokens
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _difference(kind: Kind, probe: dict[str, Any], ours: list[int], theirs: list[int]) -> str:
    """Where the ids part, for people."""
    pairs = zip(ours, theirs, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    what = ", ".join(["messages" if name == "messages" else name for name in probe])
    return (
        f"{kind} ({what}): token {place} is {theirs[place : place + 1]} there and"
        f" {ours[place : place + 1]} here; {len(theirs)} and {len(ours)} in all"
    )
