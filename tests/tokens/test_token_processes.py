"""Processes that tokenise: what the loop does for them is counted, and what comes of their ends."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import structlog

import hfkit
import kit
from calinix.config.tokens import Tokenizing
from calinix.core.prompt import Endpoint
from calinix.edge import prompt_tokens, token_link
from calinix.edge.hf_folder import load_folder
from calinix.edge.prompt_tokens import Homes, PromptTokenizer, TokensLostError
from calinix.edge.token_frames import MAX_BODY_BYTES, Answer, frame
from calinix.edge.token_link import WRITE_BYTES, Job, TokenLink
from calinix.edge.tokenizers import HfTokenizer
from calinix.errors import ConfigError

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
HARD = kit.program(hfkit.ROOT / "benchmarks" / "harness" / "hard_prompts.py").hard_bodies


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family whose every text has ids."""
    return hfkit.make_folder(tmp_path_factory.mktemp("model"), "chatml")


def with_processes(
    folder: Path,
    use: Callable[[PromptTokenizer], Coroutine[Any, Any, None]],
    processes: int = 1,
) -> None:
    """Runs `use` in a loop, with a PromptTokenizer."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        prompts = PromptTokenizer(str(folder), Tokenizing(processes=processes), loop)
        try:
            await prompts.open()
            await use(prompts)
        finally:
            prompts.close()

    kit.run(main())


def body_of(text: str) -> bytes:
    """A completion's."""
    return json.dumps({"prompt": text}).encode()


# --- what the loop does --------------------------------------------------------------------------


def test_hard_prompts_cost_the_loop_no_more_than_a_few_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind of hard prompt: bounded writes, one answer a turn, bounded ids; ids are right.

    The same prompts as the benchmark's, smaller by far: the bounds are made smaller too.
    """
    monkeypatch.setattr(token_link, "WRITE_BYTES", 1000)
    writes: list[int] = []
    tokenizer = HfTokenizer(load_folder(str(folder)))

    async def use(prompts: PromptTokenizer) -> None:
        (link,) = prompts._links
        transport = link._transport

        class Counted:
            def writelines(self, views: list[memoryview]) -> None:
                writes.append(sum(map(len, views)))
                assert transport is not None
                transport.writelines(views)

            def abort(self) -> None:
                assert transport is not None
                transport.abort()

        link._transport = Counted()  # type: ignore[assignment]
        for name, body in HARD("Words, words. " * 30, scale=0.0015).items():
            writes.clear()
            ids = await prompts.ids_of(CHAT, body)
            assert ids == tokenizer.ids_of(CHAT, body), name
            assert sum(writes) == len(body) + 17
            assert max(writes) <= 1000
        assert prompts.jobs == 0

    with_processes(folder, use)


def test_the_gateway_loads_no_tokenizer(folder: Path) -> None:
    """Prompts are tokenised with none of the libraries in the process that asks."""
    code = f"""
import asyncio, sys
from calinix.config.tokens import Tokenizing
from calinix.core.prompt import Endpoint
from calinix.edge.prompt_tokens import PromptTokenizer
async def main():
    prompts = PromptTokenizer({str(folder)!r}, Tokenizing(processes=1), asyncio.get_running_loop())
    await prompts.open()
    print(len(await prompts.ids_of(Endpoint.COMPLETIONS, b'{{"prompt": "<|im_end|>"}}')))
    prompts.close()
asyncio.run(main())
print([name for name in ("tokenizers", "jinja2") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=60, text=True
    )
    assert done.stdout.split("\n")[:2] == ["4", "[]"]


def test_what_is_too_long_is_not_sent(folder: Path) -> None:
    """Bodies beyond MAX_BODY_BYTES have no ids; the longest that are sent do no harm."""

    async def use(prompts: PromptTokenizer) -> None:
        assert prompts.start(CHAT, b" " * (MAX_BODY_BYTES + 1), b"") is None
        assert await prompts.ids_of(CHAT, b" " * MAX_BODY_BYTES) is None
        assert prompts.jobs == 0

    with_processes(folder, use)


class FakeTransport:
    """What a link writes to, where there is no process."""

    def __init__(self) -> None:
        self.writes: list[int] = []

    def set_write_buffer_limits(self, high: int) -> None:
        """Of asyncio."""

    def writelines(self, views: list[memoryview]) -> None:
        """Of asyncio."""
        self.writes.append(sum(map(len, views)))

    def abort(self) -> None:
        """Of asyncio."""


def fed(link: TokenLink, data: bytes) -> None:
    """Gives a link what its process might say, all at once."""
    while data:
        room = link.get_buffer(-1)
        count = min(len(room), len(data))
        room[:count] = data[:count]
        link.buffer_updated(count)
        data = data[count:]


def test_many_answers_at_once_are_taken_one_a_turn() -> None:
    """Between any two answers that came together, whoever else waits for the loop has a turn."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        link = TokenLink(loop, lambda _: None)
        link.connection_made(FakeTransport())  # type: ignore[arg-type]
        seen: list[object] = []
        jobs = [link.ask(COMPLETIONS, b"x") for _ in range(20)]
        for number, job in enumerate(jobs):
            job.when_done = lambda _, number=number: seen.append(number)
        fed(link, b"".join(frame(Answer.TOKENS, n + 1, bytes(4 * n)) for n in range(20)))
        assert not seen
        while link.jobs:
            seen.append("turn")
            await asyncio.sleep(0)
        turns = [n for n, what in enumerate(seen) if what != "turn"]
        assert [seen[n] for n in turns] == list(range(20))
        assert all(seen[n - 1] == "turn" for n in turns)

    kit.run(main())


def test_questions_are_written_a_piece_a_turn() -> None:
    """However much is asked at once, a turn writes WRITE_BYTES, and nothing to a full socket."""

    async def main() -> None:
        link = TokenLink(asyncio.get_running_loop(), lambda _: None)
        transport = FakeTransport()
        link.connection_made(transport)  # type: ignore[arg-type]
        for _ in range(3):
            link.ask(COMPLETIONS, bytes(WRITE_BYTES))
        assert not transport.writes
        await asyncio.sleep(0)
        assert transport.writes == [WRITE_BYTES]
        link.pause_writing()
        written = len(transport.writes)
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(transport.writes) == written
        link.resume_writing()
        await asyncio.sleep(0)
        assert len(transport.writes) == written + 1
        await kit.until(lambda: sum(transport.writes) == 3 * (WRITE_BYTES + 17), "all is out")
        assert max(transport.writes) == WRITE_BYTES
        link.close()

    kit.run(main())


def test_prompts_in_hand_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With enough in hand, further prompts have no ids; when there is room again, they have."""
    monkeypatch.setattr(token_link, "MAX_JOBS", 4)
    monkeypatch.setattr(token_link, "MAX_BYTES", 1000)

    async def use(prompts: PromptTokenizer) -> None:
        (pid,) = prompts.pids
        os.kill(pid, signal.SIGSTOP)
        jobs = [prompts.start(COMPLETIONS, body_of(str(n)), b"") for n in range(6)]
        assert [job is not None for job in jobs] == [True] * 4 + [False] * 2
        with pytest.raises(TokensLostError):
            await prompts.ids_of(COMPLETIONS, body_of("x"))
        os.kill(pid, signal.SIGCONT)
        await kit.until(lambda: prompts.jobs == 0, "the ids of the four")
        assert await prompts.ids_of(COMPLETIONS, body_of("x")) is not None
        assert prompts.start(COMPLETIONS, body_of("x" * 1000), b"") is None

    with_processes(folder, use)


# --- who is asked --------------------------------------------------------------------------------


def test_a_conversation_stays_with_its_process(folder: Path) -> None:
    """Every turn of a conversation goes to the process that had the one before."""

    async def use(prompts: PromptTokenizer) -> None:
        rng = random.Random(3)
        talks = [rng.randbytes(400) for _ in range(4)]
        homes: list[set[int]] = [set() for _ in talks]
        for _ in range(6):
            for number, talk in enumerate(talks):
                before = [link.asked for link in prompts._links]
                prompts.start(COMPLETIONS, body_of("x"), talk)
                after = [link.asked for link in prompts._links]
                homes[number].add(0 if after[0] > before[0] else 1)
                await kit.until(lambda: prompts.jobs == 0, "it is done")
            talks = [talk + rng.randbytes(len(talk) // 3) for talk in talks]
        assert all(len(home) == 1 for home in homes)
        assert set.union(*homes) == {0, 1}

    with_processes(folder, use, processes=2)


@pytest.mark.parametrize(("processors", "processes"), [(1, 1), (2, 1), (3, 2), (64, 2)])
def test_a_processor_is_left_to_the_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, processors: int, processes: int
) -> None:
    """By default there are fewer processes than processors, and two are enough."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)

    async def main() -> None:
        prompts = PromptTokenizer(str(folder), Tokenizing(), asyncio.get_running_loop())
        assert len(prompts._links) == processes
        prompts.close()

    kit.run(main())


def test_homes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten; short prompts have none; of long ones, so much is read."""
    monkeypatch.setattr(prompt_tokens, "MAX_HOMES", 10)
    homes = Homes()
    for number in range(30):
        homes.keep(homes.keys(bytes([number]) * 300), number)
    assert len(homes) == 10
    assert homes.find(homes.keys(bytes([29]) * 300)) == 29
    assert homes.find(homes.keys(bytes([0]) * 300)) is None
    assert homes.keys(b"x" * 255) == ()
    long = random.Random(1).randbytes(200_000)
    assert homes.keys(long) == homes.keys(long[:65_536])
    # Grown by half: what was its longest beginning is still one of the two.
    assert set(homes.keys(long[:1500])) & set(homes.keys(long[:2200]))


# --- processes that end --------------------------------------------------------------------------


def test_a_process_that_ends_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had in hand is told to have no ids; another process follows."""
    monkeypatch.setattr(prompt_tokens, "_FIRST_RESTART_S", 0.01)

    async def use(prompts: PromptTokenizer) -> None:
        (pid,) = prompts.pids
        os.kill(pid, signal.SIGSTOP)
        jobs = [prompts.start(COMPLETIONS, body_of("x"), b"") for _ in range(3)]
        told: list[bytes | None] = []
        for job in jobs:
            assert isinstance(job, Job)
            job.when_done = told.append
        asked = asyncio.ensure_future(prompts.ids_of(COMPLETIONS, body_of("x")))
        await asyncio.sleep(0)
        with structlog.testing.capture_logs() as logs:
            os.kill(pid, signal.SIGKILL)
            await kit.until(lambda: len(told) == 3, "all are told")
            with pytest.raises(TokensLostError):
                await asked
            await kit.until(lambda: prompts.pids not in ([], [pid]), "there is another one")
        assert told == [None] * 3
        assert prompts.jobs == 0
        assert [line["event"] for line in logs] == ["tokenizing_process_lost"]
        assert await prompts.ids_of(COMPLETIONS, body_of("<|im_end|>")) == b"\2\0\0\0"

    with_processes(folder, use)


def test_a_process_that_says_nothing_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that a process never gets done with does not keep it for ever."""
    monkeypatch.setattr(prompt_tokens, "STUCK_S", 0.0)

    async def use(prompts: PromptTokenizer) -> None:
        (pid,) = prompts.pids
        os.kill(pid, signal.SIGSTOP)
        first = prompts.start(COMPLETIONS, body_of("x"), b"")
        await asyncio.sleep(0.01)
        prompts.start(COMPLETIONS, body_of("x"), b"")
        await kit.until(lambda: prompts.jobs == 0, "it is ended")
        assert first is not None
        assert first.lost

    with_processes(folder, use)


def test_a_folder_that_has_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot begin again is tried later, ever more seldom, and that is said."""
    monkeypatch.setattr(prompt_tokens, "_FIRST_RESTART_S", 0.01)
    there = folder / "tokenizer.json"
    away = folder / "away.json"

    async def use(prompts: PromptTokenizer) -> None:
        (pid,) = prompts.pids
        with structlog.testing.capture_logs() as logs:
            there.rename(away)
            try:
                os.kill(pid, signal.SIGKILL)
                await kit.until(
                    lambda: any("refused" in line["event"] for line in logs), "it is refused"
                )
            finally:
                away.rename(there)
            await kit.until(lambda: bool(prompts.pids), "it is there again")
        assert "tokenizer.json" in str(logs[1]["problems"])

    with_processes(folder, use)


@kit.on_loop
async def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    """The start fails with what is wrong, and leaves no process behind."""
    prompts = PromptTokenizer(str(tmp_path), Tokenizing(), asyncio.get_running_loop())
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await prompts.open()
    assert prompts.pids == []


@kit.on_loop
async def test_a_process_that_cannot_even_begin(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends before it has said anything fails the start as well."""
    monkeypatch.setattr(token_link, "_COMMAND", ("-c", "raise SystemExit(3)"))
    prompts = PromptTokenizer(str(folder), Tokenizing(processes=1), asyncio.get_running_loop())
    with pytest.raises(ConfigError, match="ended as it began"):
        await prompts.open()
    monkeypatch.setattr(token_link, "_COMMAND", ("-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(prompt_tokens, "_START_S", 0.05)
    prompts = PromptTokenizer(str(folder), Tokenizing(processes=1), asyncio.get_running_loop())
    with pytest.raises(ConfigError, match="not read within"):
        await prompts.open()
