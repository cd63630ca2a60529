"""Prompts' ids in the loop: at once, in two steps or by a thread, and always the same."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from array import array
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import hfkit
from calinix.core.prompt import Endpoint
from calinix.edge import prompt_tokens
from calinix.edge.hf_folder import load_folder
from calinix.edge.prompt_tokens import Job, PromptTokenizer
from calinix.edge.tokenizers import MAX_PIECE_CHARS, HfTokenizer
from calinix.engines.vllm_chat import read_chat
from kit import run, until

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
FOREVER_S = 1e9


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    """The family whose every text has ids."""
    folder = hfkit.make_folder(tmp_path_factory.mktemp("chatml"), "chatml")
    return HfTokenizer(load_folder(str(folder)))


def with_prompts(
    tokenizer: HfTokenizer,
    use: Callable[[PromptTokenizer], Coroutine[Any, Any, None]],
    *,
    budget_s: float = FOREVER_S,
    cache_bytes: int = 1 << 20,
    threads: int = 2,
) -> None:
    """Runs `use` in a loop, with a PromptTokenizer."""

    async def main() -> None:
        prompts = PromptTokenizer(
            tokenizer,
            asyncio.get_running_loop(),
            threads=threads,
            cache_bytes=cache_bytes,
            budget_s=budget_s,
        )
        try:
            await use(prompts)
        finally:
            prompts.close()

    run(main())


async def ids_of(prompts: PromptTokenizer, endpoint: Endpoint, body: object) -> bytes | None:
    """The ids, whoever finds them."""
    started = prompts.start(endpoint, json.dumps(body).encode())
    if not isinstance(started, Job):
        return started
    found: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
    started.when_done = found.set_result
    return await found


def whole(tokenizer: HfTokenizer, body: dict[str, Any]) -> bytes:
    """The ids of a body's text at once."""
    if "prompt" in body:
        return tokenizer.whole(
            body["prompt"], add_special_tokens=body.get("add_special_tokens", True)
        )
    request = read_chat(json.dumps(body).encode())
    assert request is not None
    return tokenizer.whole(
        tokenizer.chat_text(request), add_special_tokens=request.add_special_tokens
    )


@pytest.mark.parametrize("budget_s", [FOREVER_S, 0.0, 4e-5])
def test_ids_are_the_same_wherever_they_come_from(tokenizer: HfTokenizer, budget_s: float) -> None:
    """Random conversations, one turn more each time, with a small memory: the ids of the whole."""

    async def use(prompts: PromptTokenizer) -> None:
        rng = random.Random(7)
        for _ in range(25):
            chat = hfkit.chat(rng)
            for turns in range(1, len(chat["messages"]) + 1):
                body = {**chat, "messages": chat["messages"][:turns]}
                assert await ids_of(prompts, CHAT, body) == whole(tokenizer, body)
            completion = hfkit.completion(rng)
            assert await ids_of(prompts, COMPLETIONS, completion) == whole(tokenizer, completion)
        assert prompts.jobs == 0
        assert prompts.cache_bytes <= 20_000

    with_prompts(tokenizer, use, budget_s=budget_s, cache_bytes=20_000)


def test_a_known_conversation_needs_no_thread(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long conversation is a job once; with one turn more, only the new pieces are tokenised."""
    encoded: list[str] = []
    encode = tokenizer.encode

    def listen(pieces: list[str]) -> list[bytes]:
        encoded.extend(pieces)
        return encode(pieces)

    monkeypatch.setattr(tokenizer, "encode", listen)

    async def use(prompts: PromptTokenizer) -> None:
        talk = [
            {"role": role, "content": f"{number} " + "prefix cache " * 400}
            for number in range(5)
            for role in ("user", "assistant")
        ]
        # Above what the loop may do, by far; writing it is quick.
        first = prompts.start(CHAT, json.dumps({"messages": talk}).encode())
        assert isinstance(first, Job)
        await ids_of(prompts, CHAT, {"messages": talk[:1]})
        await until(lambda: prompts.jobs == 0, "the first turn's ids")
        encoded.clear()
        talk.append({"role": "user", "content": "next"})
        second = prompts.start(CHAT, json.dumps({"messages": talk}).encode())
        assert isinstance(second, bytes)
        assert encoded == ["<|im_start|>user\nnext<|im_end|>\n"]

    with_prompts(tokenizer, use, budget_s=0.005)


def test_what_is_too_much_for_one_step_is_two(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing and tokenising that are each short enough have a turn of the loop each; no thread."""
    used: set[str] = set()
    encode = tokenizer.encode

    def listen(pieces: list[str]) -> list[bytes]:
        used.add(threading.current_thread().name)
        return encode(pieces)

    monkeypatch.setattr(tokenizer, "encode", listen)

    async def use(prompts: PromptTokenizer) -> None:
        times = iter(x / 30 for x in range(100))
        monkeypatch.setattr(time, "thread_time", lambda: next(times))
        prompts._write.value = 0.05 / 30_000
        prompts._encode.value = 0.05 / 1000
        body = {"messages": [{"role": "user", "content": "x" * 900}]}
        job = prompts.start(CHAT, json.dumps(body).encode())
        assert isinstance(job, Job)
        done = asyncio.get_running_loop().create_future()
        job.when_done = done.set_result
        assert await done == whole(tokenizer, body)
        assert job.pieces
        assert prompts.jobs == 0

    with_prompts(tokenizer, use, budget_s=0.12)
    assert used == {threading.main_thread().name}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}),
        (CHAT, {"messages": [{"role": 1}]}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": []}),
        (COMPLETIONS, {"prompt": [1, 2]}),
        (Endpoint.MESSAGES, {"messages": [{"role": "user", "content": "a"}]}),
        (Endpoint.RESPONSES, {"input": "a"}),
        (COMPLETIONS, {"prompt": "x" * (MAX_PIECE_CHARS + 1)}),
        (COMPLETIONS, {"prompt": "x" * prompt_tokens.MAX_BODY_BYTES}),
    ],
)
def test_prompts_without_ids(tokenizer: HfTokenizer, endpoint: Endpoint, body: object) -> None:
    """Media, other APIs and what is too long have none, in the loop and in threads."""

    async def use(prompts: PromptTokenizer) -> None:
        assert await ids_of(prompts, endpoint, body) is None
        assert prompts.jobs == 0

    with_prompts(tokenizer, use)
    with_prompts(tokenizer, use, budget_s=0.0)


def test_what_took_long_to_read_is_written_by_a_thread(
    tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat in thousands of parts is small in letters; that reading it took long tells of them."""
    used = set()
    write = tokenizer.chat_text

    def listen(request: Any) -> str:
        used.add(threading.current_thread() is threading.main_thread())
        return write(request)

    async def use(prompts: PromptTokenizer) -> None:
        for parts, read_s in ((1, 0.001), (6000, 0.05)):
            content = [{"type": "text", "text": "y"}] * parts
            body = {"messages": [{"role": "user", "content": content}]}
            expected = whole(tokenizer, body)
            with monkeypatch.context() as patch:
                patch.setattr(tokenizer, "chat_text", listen)
                times = iter(read_s * n for n in range(100))
                patch.setattr(time, "thread_time", lambda times=times: next(times))
                prompts._write.value = 0.0
                used.clear()
                assert await ids_of(prompts, CHAT, body) == expected
            assert used == {parts == 1}

    with_prompts(tokenizer, use, budget_s=0.1)


def test_jobs_are_bounded(tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With enough in hand, further prompts have no ids; when there is room again, they have."""
    monkeypatch.setattr(prompt_tokens, "MAX_WAITING_PER_THREAD", 4)
    gate = threading.Event()
    encode = tokenizer.encode

    def wait(pieces: list[str]) -> list[bytes]:
        assert gate.wait(30)
        return encode(pieces)

    monkeypatch.setattr(tokenizer, "encode", wait)

    async def use(prompts: PromptTokenizer) -> None:
        bodies = [b'{"prompt": "%d"}' % number for number in range(6)]
        started = [prompts.start(COMPLETIONS, body) for body in bodies]
        assert [isinstance(one, Job) for one in started] == [True] * 4 + [False] * 2
        assert started[4:] == [None, None]
        gate.set()
        await until(lambda: prompts.jobs == 0, "the ids of the four")
        assert await ids_of(prompts, COMPLETIONS, {"prompt": "5"}) is not None

    with_prompts(tokenizer, use, budget_s=0.0, threads=1)


def test_what_is_learned_decides(tokenizer: HfTokenizer) -> None:
    """Prompts that turn out to be quick are done at once, whatever was believed at first."""

    async def use(prompts: PromptTokenizer) -> None:
        prompts._write.value = 1.0
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert isinstance(prompts.start(CHAT, json.dumps(body).encode()), Job)
        for _ in range(100):
            await ids_of(prompts, CHAT, body)
        assert isinstance(prompts.start(CHAT, json.dumps(body).encode()), bytes)

    with_prompts(tokenizer, use, budget_s=0.05)


def test_ids_are_little_endian(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    """Four bytes an id, the least one first."""

    async def use(prompts: PromptTokenizer) -> None:
        found = prompts.start(COMPLETIONS, b'{"prompt": "<|im_start|>ab"}')
        assert isinstance(found, bytes)
        assert found[:4] == b"\1\0\0\0"
        assert len(array("I", found)) == len(found) // 4

    with_prompts(tokenizer, use)
