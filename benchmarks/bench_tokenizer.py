"""What exact tokens cost: a conversation of 32k tokens that goes on, and prompts seen first.

    one new turn     a request whose conversation is known but for its last two messages
    first time       the same conversation when nothing of it is known: done by a thread
    step             the longest that the loop is busy with it at a time
    loop             how late the event loop is meanwhile (a timer that is due every ms)

`CPU` is processor time, of all threads. Whatever else runs on the machine only adds: of several
rounds the one with the least processor time is shown (all are in the JSON).

The tokenizer is a byte-level BPE trained on the spot on Python's own sources, with a template of
ChatML's form; `--folder` takes a model's folder instead.

    python benchmarks/bench_tokenizer.py [--json FILE] [--quick] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from calinix.config.tokens import Tokenizing
from calinix.core.prompt import Endpoint
from calinix.edge.prompt_tokens import Job, PromptTokenizer
from calinix.edge.tokenizers import HfTokenizer, tokenizer_of
from harness.machine import describe_machine, write_json
from harness.tables import new_console

TOKENS = 32_768
TURNS = 64
TICK_S = 0.001
SWITCH_S = 0.0005
TURN_LIMIT_MS = 2.0
LOOP_LIMIT_MS = 1.0
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{%- set last = namespace(at=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > last.at and m.reasoning_content is defined %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}
{%- endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def sources() -> list[str]:
    """Text that every machine with Python has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py"))[:120]]


def build_folder(folder: Path, texts: list[str]) -> None:
    """A tokenizer of 16,384 tokens and its template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=16_384,
        special_tokens=MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")


class Talk:
    """A conversation of TURNS messages over pieces of text, each of so many letters."""

    def __init__(self, rng: random.Random, text: str, chars: int):
        self._rng = rng
        self._text = text
        self.messages: list[dict[str, str]] = [{"role": "system", "content": self._piece(400)}]
        while len(self.messages) < TURNS:
            self.go_on(chars)

    def _piece(self, chars: int) -> str:
        start = self._rng.randrange(len(self._text) - chars)
        return f"{self._rng.random()} {self._text[start : start + chars]}"

    def go_on(self, chars: int = 600) -> None:
        """An answer and the next question."""
        self.messages += [
            {"role": "assistant", "content": self._piece(chars)},
            {"role": "user", "content": self._piece(chars)},
        ]

    def body(self) -> bytes:
        """The request."""
        return msgspec.json.encode({"model": "m", "messages": self.messages, "stream": True})


class Timed(PromptTokenizer):
    """Notes the processor time of each step that the loop does."""

    def __init__(self, tokenizer: HfTokenizer, loop: asyncio.AbstractEventLoop):
        super().__init__(tokenizer, loop, threads=2, cache_bytes=256 << 20)
        self.steps_s: list[float] = []

    def start(self, endpoint: Endpoint, body: bytes) -> bytes | Job | None:
        """The first step, perhaps the only one."""
        found: bytes | Job | None = self._timed(super().start, endpoint, body)
        return found

    def _go_on(self, *step: Any) -> None:
        self._timed(super()._go_on, *step)

    def _finish(self, *step: Any) -> None:
        self._timed(super()._finish, *step)

    def _timed(self, step: Callable[..., Any], *arguments: Any) -> Any:
        started_s = time.thread_time()
        try:
            return step(*arguments)
        finally:
            self.steps_s.append(time.thread_time() - started_s)


class Lateness:
    """A timer that notes how late it is called."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._due_s = 0.0
        self.late_s: list[float] = []
        self._handle = loop.call_soon(self._tick)

    def _tick(self) -> None:
        now = time.perf_counter()
        if self._due_s:
            self.late_s.append(now - self._due_s)
        self._due_s = now + TICK_S
        self._handle = self._loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """No more of it."""
        self._handle.cancel()


async def tokens_of(tokenizer: PromptTokenizer, body: bytes) -> tuple[bytes, bool]:
    """(ids, whether a thread had to do it)."""
    started = tokenizer.start(Endpoint.CHAT, body)
    if not isinstance(started, Job):
        assert started is not None
        return started, False
    done: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
    started.when_done = done.set_result
    ids = await done
    assert ids is not None
    return ids, started.encoded != (0, 0.0)


def summary(values_s: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(values_s)
    return {
        "p50_ms": statistics.median(ordered) * 1e3,
        "p99_ms": ordered[int(0.99 * (len(ordered) - 1))] * 1e3,
        "max_ms": ordered[-1] * 1e3,
    }


async def measure(tokenizer: HfTokenizer, text: str, conversations: int) -> dict[str, Any]:
    """One run over so many conversations."""
    loop = asyncio.get_running_loop()
    prompts = Timed(tokenizer, loop)
    rng = random.Random(5)
    for size in (50, 200, 800) * 20:
        talk = [{"role": "user", "content": f"{rng.random()}" + text[:size]}]
        await tokens_of(prompts, msgspec.json.encode({"messages": talk}))
    sample = tokenizer.whole(text[:200_000], add_special_tokens=False)
    chars = int(TOKENS * 200_000 / (len(sample) / 4) / TURNS)
    first_s, turn_s, turn_cpu_s, threads, counts = [], [], [], 0, []
    prompts.steps_s.clear()
    lateness = Lateness(loop)
    talks = []
    for _ in range(conversations):
        talk_ = Talk(rng, text, chars)
        body = talk_.body()
        await asyncio.sleep(0.01)
        started = time.perf_counter()
        await tokens_of(prompts, body)
        first_s.append(time.perf_counter() - started)
        talks.append(talk_)
    late_first = lateness.late_s
    lateness.late_s = []
    for talk_ in talks * 3:
        talk_.go_on()
        body = talk_.body()
        await asyncio.sleep(0.002)
        started, started_cpu = time.perf_counter(), time.process_time()
        ids, by_thread = await tokens_of(prompts, body)
        turn_s.append(time.perf_counter() - started)
        turn_cpu_s.append(time.process_time() - started_cpu)
        threads += by_thread
        counts.append(len(ids) // 4)
    late_turn = lateness.late_s
    lateness.stop()
    check = array("I", ids).tobytes() == ids
    prompts.close()
    return {
        "tokens": statistics.median(counts),
        "body_bytes": len(body),
        "one new turn": summary(turn_s),
        "one new turn, CPU": summary(turn_cpu_s),
        "turns by a thread": threads / len(turn_s),
        "first time": summary(first_s),
        "step, CPU": summary(prompts.steps_s),
        "loop, first time": summary(late_first),
        "loop, one new turn": summary(late_turn),
        "whole": check,
    }


def main() -> None:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    texts = sources()
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        if options.folder is None:
            build_folder(folder, texts)
        tokenizer = tokenizer_of(str(folder), Tokenizing())
    sys.setswitchinterval(SWITCH_S)
    # As the gateway has them (app.py).
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    rounds = [
        uvloop.run(measure(tokenizer, "".join(texts), 8 if options.quick else 24))
        for _ in range(2 if options.quick else 5)
    ]
    found = min(rounds, key=lambda one: one["one new turn, CPU"]["p50_ms"])
    console = new_console()
    table = Table("", "p50 ms", "p99 ms", "max ms", title=f"{found['tokens']:.0f} tokens")
    for name in (
        "one new turn", "one new turn, CPU", "first time", "step, CPU", "loop, one new turn",
        "loop, first time",
    ):  # fmt: skip
        row = found[name]
        table.add_row(name, *(f"{row[key]:.2f}" for key in ("p50_ms", "p99_ms", "max_ms")))
    console.print(table)
    console.print(f"turns that a thread did: {found['turns by a thread']:.0%}")
    turn, step = found["one new turn, CPU"]["p99_ms"], found["step, CPU"]["p99_ms"]
    late = found["loop, first time"]["p99_ms"]
    is_quiet = os.getloadavg()[0] < 1.5
    findings = [
        {"what": "32k tokens, one new turn, p99, ms of CPU", "figure": turn,
         "limit": TURN_LIMIT_MS, "holds": turn <= TURN_LIMIT_MS},
        {"what": "the loop is busy with it at a time, p99, ms of CPU", "figure": step,
         "limit": LOOP_LIMIT_MS, "holds": step <= LOOP_LIMIT_MS},
        {"what": "loop late by, p99, ms", "figure": late, "limit": LOOP_LIMIT_MS,
         "holds": late <= LOOP_LIMIT_MS if is_quiet else None},
    ]  # fmt: skip
    if options.json:
        write_json(
            options.json,
            {"machine": describe_machine(), **found, "rounds": rounds, "findings": findings},
        )
    print(json.dumps(findings, indent=1))


if __name__ == "__main__":
    main()
