"""Real vLLM pods behind the gateway: those of benchmarks/real_engines.py, or ones started by hand.

CALINIX_ENGINE_VENV names a venv with vLLM for the former; `make test-engine` builds one.
VLLM_PODS=URL,URL names unified pods, started with --enable-prompt-tokens-details;
VLLM_PD_PODS=PREFILL_URL,DECODE_URL a pair over a shared-storage connector (protocol `plain`).
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from checks.figures import findings
from harness.acceptance import Context, Row, not_run, row
from harness.contenders import calinix_contender, new_setup, started
from harness.processes import BenchmarkError
from realpods.install import VARIABLE, find_python

HOW = "needs real pods: set VLLM_PODS=URL,URL"
HOW_PD = "needs a real pair: set VLLM_PD_PODS=PREFILL_URL,DECODE_URL"
GROUPS, ROUNDS = 8, 4
SHARE = 0.9
ANSWER_TIMEOUT_S = 120.0


class _Answer(msgspec.Struct, frozen=True):
    text: str
    cached_tokens: int
    pod: str


def correctness(context: Context) -> list[Row]:
    """What the gateway knows of real pods is what they hold (benchmarks/real_engines.py)."""
    what = "real vLLM: predicted cached tokens are the engine's own"
    try:
        python = find_python()
    except BenchmarkError as error:
        return [not_run(what, str(error))]
    if python is None:
        return [
            not_run(what, f"no vLLM here: make test-engine builds a venv, {VARIABLE} names one")
        ]
    return findings("real_engines")(context)


def shared_prefixes(context: Context) -> list[Row]:
    """Prompts of one prefix land on one pod, and the pod itself says that it had the prefix."""
    urls = _urls("VLLM_PODS")
    what = "real vLLM: repeats of a prefix"
    if len(urls) < 2:
        return [not_run(what, HOW)]
    pods = [{"id": f"pod-{number}", "url": url} for number, url in enumerate(urls)]
    repeats = same_pod = cached = 0
    homes: dict[int, str] = {}
    for port in _gateway(context, {"single": {"pods": pods}}):
        model = _model(port)
        for turn in range(ROUNDS):
            for group in range(GROUPS):
                answer = _ask(port, model, f"{_prefix(group)} Question {turn}.")
                if turn:
                    repeats += 1
                    same_pod += answer.pod == homes[group]
                    cached += answer.cached_tokens > 0
                homes[group] = answer.pod
    figures = f"{same_pod} of {repeats} on the same pod, {cached} with cached_tokens"
    return [row(what, min(same_pod, cached) >= SHARE * repeats, figures)]


def prefill_and_decode(context: Context) -> list[Row]:
    """A pair answers what its decode pod alone would answer."""
    urls = _urls("VLLM_PD_PODS")
    what = "real vLLM: prefill and decode apart"
    if len(urls) != 2:
        return [not_run(what, HOW_PD)]
    pods = {
        role: {"pods": [{"id": f"{role}-0", "url": url}]}
        for role, url in zip(("prefill", "decode"), urls, strict=True)
    }
    decode = urlsplit(urls[1]).port or 80
    right = 0
    for port in _gateway(context, {"dispatch": pods | {"protocol": "plain"}}):
        model = _model(port)
        for group in range(GROUPS):
            prompt = f"{_prefix(group)} Go on."
            right += _ask(port, model, prompt).text == _ask(decode, model, prompt).text
    return [row(what, right == GROUPS, f"{right} of {GROUPS} answers are equal")]


def _urls(variable: str) -> list[str]:
    return [url.strip() for url in os.environ.get(variable, "").split(",") if url.strip()]


def _gateway(context: Context, upstreams: dict[str, object]) -> Iterator[int]:
    """The port of a gateway over these pods, which lives for the one turn of the loop."""
    calinix = Path(sys.executable).with_name("calinix")
    contender = calinix_contender(str(calinix), upstreams=upstreams)
    setup = new_setup([], context.scratch / "engines")
    with started(context.children, contender, setup, None):
        yield setup.port


def _prefix(group: int) -> str:
    return " ".join(f"Topic {group} has fact {number}." for number in range(40))


def _model(port: int) -> str:
    return str(_request(port, "GET", "/v1/models")[0]["data"][0]["id"])


def _ask(port: int, model: str, prompt: str) -> _Answer:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
    answer, headers = _request(port, "POST", "/v1/chat/completions", msgspec.json.encode(body))
    details = answer.get("usage", {}).get("prompt_tokens_details") or {}
    return _Answer(
        text=str(answer["choices"][0]["message"]["content"]),
        cached_tokens=int(details.get("cached_tokens") or 0),
        pod=headers.get("x-calinix-target-pod-id", ""),
    )


def _request(
    port: int, method: str, path: str, body: bytes | None = None
) -> tuple[dict[str, Any], http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise BenchmarkError(f"{method} {path}: {response.status} {text[:200]!r}")
        return msgspec.json.decode(text, type=dict[str, Any]), response.headers
    finally:
        connection.close()
