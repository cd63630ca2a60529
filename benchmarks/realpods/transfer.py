"""Prefill and decode on two real pods: the answers are a unified pod's, and attacks do no harm."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from harness.processes import BenchmarkError
from realpods.agreement import read_answer
from realpods.gateway import Front
from realpods.traffic import WORDS
from realpods.vllm_pods import MODEL, PodSpec, call, is_healthy, metric, new_spec, quiet_port

SEED = 3
PROMPTS, ANSWER_TOKENS = 12, 24
NIXL_TIMEOUT_S = 60.0
ATTACK_TIMEOUT_S, DEATH_TIMEOUT_S = 5.0, 20.0
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
HANDLE = {"do_remote_prefill": True, "do_remote_decode": False}
ATTACKS: dict[str, dict[str, object]] = {
    "incomplete handle": {"kv_transfer_params": HANDLE},
    "made-up handle": {
        "kv_transfer_params": HANDLE
        | {
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": "00000000-0000-0000-0000-000000000000",
            "remote_request_id": "nobody",
            "remote_host": "127.0.0.1",
            "remote_port": 9,
            "tp_size": 1,
        }
    },
    "prefill's marker": {"kv_transfer_params": {"do_remote_decode": True}},
    "wrong type": {"kv_transfer_params": [1, "two"]},
    "inside vllm_xargs": {"vllm_xargs": {"kv_transfer_params": HANDLE}},
    "bootstrap room": {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9, "bootstrap_room": 7},
}


class Transferred(msgspec.Struct, frozen=True):
    """What came of a pair of pods."""

    protocol: str
    prompts: int
    equal: int
    """Answers that are the unified pod's, token for token."""
    apart: int
    """Answers in whose making both pods had a part."""
    moved_tokens: float
    """By how much the decode pod's external_kv_transfer grew."""
    prompt_tokens: int
    attacks: dict[str, str]
    """What came of each client that sent fields of the transfer itself."""
    alive: bool
    """Both pods, after all attacks; and the decode pod's next answer is right."""
    differences: list[str]
    unguarded: str = ""
    """What the first attack does to the decode pod itself, without the gateway before it."""


def example_pair(blocks: int, store: Path) -> tuple[PodSpec, PodSpec]:
    """Two pods that share KV in files (ExampleConnector)."""
    transfer: dict[str, object] = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }
    return new_spec("prefill", blocks, transfer), new_spec("decode", blocks, transfer)


def nixl_pair(blocks: int, nixl: Path) -> tuple[PodSpec, PodSpec]:
    """Two pods that move KV over NIXL; `nixl` is the folder that has it."""
    specs = []
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        transfer: dict[str, object] = {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"num_threads": 0, "kv_lease_duration": 120},
        }
        environment = {
            "PYTHONPATH": str(nixl),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(quiet_port()),
            "UCX_TLS": "tcp,self,posix,sysv,cma",
            "UCX_NET_DEVICES": "lo",
        }
        specs.append(new_spec(name, blocks, transfer, environment))
    return specs[0], specs[1]


def bodies() -> list[dict[str, object]]:
    """What is asked of both: chats and texts, streamed and whole, of very different lengths."""
    draw = random.Random(SEED)
    made: list[dict[str, object]] = []
    for number in range(PROMPTS):
        words = " ".join(draw.choices(WORDS, k=20 + 12 * number))
        body: dict[str, object] = {
            "model": MODEL,
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if number % 3 == 2:
            body["prompt"] = words
        else:
            body["messages"] = [{"role": "user", "content": words}]
        if number % 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        made.append(body)
    return made


def answers_of(port: int) -> list[list[int]]:
    """A unified pod's own answers to `bodies`, as token ids."""
    answers = []
    for body in bodies():
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        answer = call(port, "POST", path, body)
        if answer.status != 200:
            raise BenchmarkError(f"the unified pod: {answer.status} {answer.body[:300]!r}")
        answers.append(token_ids(answer.body))
    return answers


def token_ids(body: bytes) -> list[int]:
    """The ids of an answer's tokens, whole or streamed, as `return_token_ids` brings them."""
    if body.startswith(b"data:"):
        lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
        parts = [json.loads(line) for line in lines if line != b"[DONE]"]
    else:
        parts = [json.loads(body)]
    return [
        token
        for part in parts
        for choice in part.get("choices", ())
        for token in choice.get("token_ids") or ()
    ]


def check_pair(
    front: Front,
    protocol: str,
    pods: tuple[PodSpec, PodSpec],
    expected: list[list[int]],
    say: Callable[[str], None],
) -> Transferred:
    """Asks the pair what the unified pod was asked, then attacks it."""
    decode = pods[1]
    before = metric(decode.port, BY_SOURCE, source="external_kv_transfer")
    equal = apart = prompt_tokens = 0
    differences = []
    for number, (body, right) in enumerate(zip(bodies(), expected, strict=True)):
        answer = front.complete(body, f"{protocol}-{number}")
        if answer.status != 200:
            differences.append(f"{number}: {answer.status} {answer.body[:200]!r}")
            continue
        got = token_ids(answer.body)
        equal += got == right
        apart += "x-calinix-prefill-pod-id" in answer.headers
        prompt_tokens += read_answer(answer.body)[1]
        if got != right:
            differences.append(f"{number}: {got} instead of {right}")
        say(f"{protocol}: prompt {number + 1} of {len(expected)}")
    moved = metric(decode.port, BY_SOURCE, source="external_kv_transfer") - before
    attacks = {}
    for name, fields in ATTACKS.items():
        say(f"{protocol}: attack, {name}")
        attacks[name] = _attack(front, fields)
    alive = all(is_healthy(pod.port) for pod in pods)
    last = front.complete(bodies()[0], f"{protocol}-last") if alive else None
    alive = last is not None and last.status == 200 and token_ids(last.body) == expected[0]
    return Transferred(
        protocol=protocol,
        prompts=len(expected),
        equal=equal,
        apart=apart,
        moved_tokens=moved,
        prompt_tokens=prompt_tokens,
        attacks=attacks,
        alive=alive,
        differences=differences,
    )


def attack_directly(decode: PodSpec) -> str:
    """Sends the incomplete handle to the pod itself, and leaves: what a gateway guards against."""
    words = " ".join(random.Random(SEED).choices(WORDS, k=200))
    body = {"model": MODEL, "messages": [{"role": "user", "content": words}]}
    with contextlib.suppress(OSError, http.client.HTTPException):
        call(
            decode.port,
            "POST",
            "/v1/chat/completions",
            body | ATTACKS["incomplete handle"],
            timeout_s=ATTACK_TIMEOUT_S,
        )
    began = time.monotonic()
    while time.monotonic() - began < DEATH_TIMEOUT_S:
        if not is_healthy(decode.port):
            return "the decode pod dies of it"
        time.sleep(0.5)
    return f"the decode pod lives {DEATH_TIMEOUT_S:g} s later"


def _attack(front: Front, fields: dict[str, object]) -> str:
    """Two clients with these fields: one waits for its answer, one leaves at once."""
    words = " ".join(random.Random(str(fields)).choices(WORDS, k=120))
    body = {
        "model": MODEL,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": words}],
    } | fields
    headers = {"x-data-parallel-rank": "7"}
    with contextlib.suppress(OSError, http.client.HTTPException):
        call(front.port, "POST", "/v1/chat/completions", body, headers, timeout_s=0.05)
    try:
        answer = call(
            front.port, "POST", "/v1/chat/completions", body, headers, timeout_s=NIXL_TIMEOUT_S
        )
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {error!r}"
    return str(answer.status)
