"""What exact tokens cost: a conversation of 32k tokens that goes on, and what is hard to tokenise.

    one new turn   a request whose conversation is known but for its last two messages, until its
                   ids are there: time, and processor time of the gateway's loop and of the
                   processes together
    first time     the same conversation when nothing of it is known
    step           the loop's processor time for it, at a time
    hard prompts   one of each kind: harness/hard_prompts.py, nothing remembered
    turn           the longest turn of a loop that never rests, while prompts are tokenised, and
                   for as long again while none is: what else runs on the machine is in both

Every round of a hard prompt gives one longest turn of each sort. A turn that the prompt causes is
there in every round, what the machine causes is not: so the median over rounds is judged, and the
difference to the idle loop's. The most that was ever seen is shown beside it.

The tokenizer is a byte-level BPE trained on the spot on Python's own sources, with a template of
ChatML's form; `--folder` takes a model's folder instead.

    python benchmarks/bench_tokenizer.py [--json FILE] [--quick] [--folder FOLDER]

`--threads` gives the hard prompts to two threads of the loop's own process instead, only to show
why that is not how it is done: the interpreter is held for as long as one of their steps takes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.table import Table

from calinix.bench.results import Finding
from calinix.config.tokens import Tokenizing
from calinix.core.prompt import Endpoint
from calinix.edge.prompt_desk import PromptDesk
from calinix.edge.prompt_tokens import PromptTokenizer
from calinix.edge.token_frames import MAX_BODY_BYTES
from calinix.edge.token_link import Job, TokenLink
from calinix.edge.tokenizers import tokenizer_of
from harness.hard_prompts import hard_bodies
from harness.machine import describe_machine, write_json
from harness.tables import new_console
from harness.tiny_model import TURNS, Talk, build_folder, sources

TOKENS = 32_768
AT_ONCE = 64
ROUNDS = 7
SWITCH_S = 0.0005
TURN_LIMIT_MS = 2.0
LOOP_LIMIT_MS = 1.0
PERCENTILES = ("p50_ms", "p99_ms", "max_ms")


class TimedLink(TokenLink):
    """Notes the processor time of each step that the loop does."""

    steps_s: list[float]

    def _write(self) -> None:
        self._timed(super()._write)

    def buffer_updated(self, nbytes: int) -> None:
        """Of asyncio."""
        self._timed(super().buffer_updated, nbytes)

    def _deliver(self) -> None:
        self._timed(super()._deliver)

    def _timed(self, step: Callable[..., Any], *arguments: Any) -> None:
        started_s = time.thread_time()
        step(*arguments)
        self.steps_s.append(time.thread_time() - started_s)


class Timed(PromptTokenizer):
    """Likewise, of the steps of all links and of its own."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop, cache_bytes: int):
        self.steps_s: list[float] = []
        super().__init__(str(path), Tokenizing(cache_bytes=cache_bytes), loop)

    def _new_link(self) -> TokenLink:
        link = TimedLink(self._loop, self._lost)
        link.steps_s = self.steps_s
        return link

    def start(self, endpoint: Endpoint, body: bytes, prompt: bytes) -> Job | None:
        """The first step."""
        started_s = time.thread_time()
        job = super().start(endpoint, body, prompt)
        self.steps_s.append(time.thread_time() - started_s)
        return job

    def processes_s(self) -> float:
        """Processor time of the processes so far."""
        # Linux' number of the clock that runs with a process.
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self.pids)


class Threads:
    """The same in threads of this process: what it would cost the loop."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop):
        self._tokenizer = tokenizer_of(str(path), Tokenizing())
        self._loop = loop
        self._threads = ThreadPoolExecutor(2)
        self.steps_s = [0.0]

    async def open(self) -> None:
        """As soon as they can, threads give the interpreter back."""
        sys.setswitchinterval(SWITCH_S)

    def start(self, endpoint: Endpoint, body: bytes, prompt: bytes) -> Job | None:  # noqa: ARG002
        """Has a thread do it."""
        if len(body) > MAX_BODY_BYTES:
            return None
        job = Job(len(body))
        ended = self._loop.run_in_executor(self._threads, self._ids, endpoint, body)
        ended.add_done_callback(lambda done: job.end(done.result()))
        return job

    def _ids(self, endpoint: Endpoint, body: bytes) -> bytes | None:
        desk = PromptDesk(self._tokenizer, 1)
        desk.take(1, endpoint, body)
        while (found := desk.step()) is None:
            pass
        return found[1]

    def close(self) -> None:
        """No more of it."""
        self._threads.shutdown()


class Turns:
    """The longest turn of a loop that never rests."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._last_s = time.perf_counter()
        self.longest_s = 0.0
        self._handle = loop.call_soon(self._turn)

    def _turn(self) -> None:
        now = time.perf_counter()
        self.longest_s = max(self.longest_s, now - self._last_s)
        self._last_s = now
        self._handle = self._loop.call_soon(self._turn)

    def taken_s(self) -> float:
        """The longest one since this was last asked."""
        found, self.longest_s = self.longest_s, 0.0
        return found

    def stop(self) -> None:
        """No more of it."""
        self._handle.cancel()


def beginning(body: bytes) -> bytes:
    """What a conversation is known by, as in the gateway: what stays the same when it goes on."""
    return body[: body.rindex(b"]")]


async def tokenised(
    tokenizer: PromptTokenizer | Threads, bodies: Sequence[bytes], known_by: Sequence[bytes]
) -> list[int]:
    """Has prompts tokenised, all at once; how many ids each has."""
    loop = asyncio.get_running_loop()
    ends = []
    for body, prompt in zip(bodies, known_by, strict=True):
        done: asyncio.Future[bytes | None] = loop.create_future()
        ends.append(done)
        # Requests come one a turn; what they bring may come together.
        await asyncio.sleep(0)
        job = tokenizer.start(Endpoint.CHAT, body, prompt)
        if job is None:
            done.set_result(None)
        else:
            job.when_done = done.set_result
    return [len(ids or b"") // 4 for ids in await asyncio.gather(*ends)]


def summary(values_s: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(values_s)
    found = (statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1])
    return dict(zip(PERCENTILES, (value * 1e3 for value in found), strict=True))


async def conversations(path: Path, text: str, chars: int, count: int) -> dict[str, Any]:
    """So many conversations of so many letters a message: first, and with one turn more each."""
    prompts = Timed(path, asyncio.get_running_loop(), 256 << 20)
    await prompts.open()
    rng = random.Random(5)
    first_s, turn_s, cpu_s, tokens = [], [], [], []
    talks = [Talk(rng, text, chars) for _ in range(count)]
    prompts.steps_s.clear()
    for talk in talks:
        body = talk.body()
        known_by = beginning(body)
        started = time.perf_counter()
        await tokenised(prompts, [body], [known_by])
        first_s.append(time.perf_counter() - started)
    for talk in talks * 3:
        talk.go_on()
        body = talk.body()
        known_by = beginning(body)
        await asyncio.sleep(0.002)
        steps, started_cpu, started = (
            len(prompts.steps_s),
            prompts.processes_s(),
            time.perf_counter(),
        )
        tokens += await tokenised(prompts, [body], [known_by])
        turn_s.append(time.perf_counter() - started)
        cpu_s.append(prompts.processes_s() - started_cpu + sum(prompts.steps_s[steps:]))
    prompts.close()
    return {
        "tokens": statistics.median(tokens),
        "body_bytes": len(body),
        "one new turn": summary(turn_s),
        "one new turn, CPU": summary(cpu_s),
        "first time": summary(first_s),
        "step, CPU": summary(prompts.steps_s),
    }


async def hard(
    path: Path, kinds: dict[str, list[bytes]], rounds: int, in_threads: bool
) -> list[dict[str, Any]]:
    """Every kind of hard prompts, in so many rounds."""
    loop = asyncio.get_running_loop()
    prompts = Threads(path, loop) if in_threads else Timed(path, loop, 1)
    await prompts.open()
    turns = Turns(loop)
    found = []
    for kind, bodies in kinds.items():
        steps_s, busy_s, idle_s, took_s = [], [], [], []
        known_by = [beginning(body) for body in bodies]
        for _ in range(rounds):
            await asyncio.sleep(0.02)
            turns.taken_s()
            prompts.steps_s[:] = [0.0]
            started = time.perf_counter()
            tokens = await tokenised(prompts, bodies, known_by)
            took_s.append(time.perf_counter() - started)
            busy_s.append(turns.taken_s())
            steps_s.append(max(prompts.steps_s))
            await asyncio.sleep(took_s[-1])
            idle_s.append(turns.taken_s())
        found.append(
            {
                "kind": kind,
                "body_bytes": sum(map(len, bodies)),
                "tokens": sum(tokens),
                "took_ms": statistics.median(took_s) * 1e3,
                "step_ms": statistics.median(steps_s) * 1e3,
                "step_max_ms": max(steps_s) * 1e3,
                "turn_ms": statistics.median(busy_s) * 1e3,
                "turn_max_ms": max(busy_s) * 1e3,
                "idle_ms": statistics.median(idle_s) * 1e3,
                "idle_max_ms": max(idle_s) * 1e3,
            }
        )
    turns.stop()
    prompts.close()
    return found


def judged(found: dict[str, Any], kinds: list[dict[str, Any]]) -> list[Finding]:
    """The bars."""
    turn = found["one new turn, CPU"]["p99_ms"]
    step = max([found["step, CPU"]["p99_ms"], *(one["step_ms"] for one in kinds)])
    late = max(one["turn_ms"] - one["idle_ms"] for one in kinds)
    is_noisy = statistics.median(one["idle_max_ms"] for one in kinds) > LOOP_LIMIT_MS
    bars = (
        ("32k tokens, one new turn, p99, CPU", turn, TURN_LIMIT_MS, False),
        ("the loop is busy with any prompt at a time, CPU", step, LOOP_LIMIT_MS, False),
        ("the loop is later than when idle by, hard prompts", late, LOOP_LIMIT_MS, is_noisy),
    )
    return [
        Finding(
            what, f"{figure:.2f} ms", f"<= {limit:g} ms",
            True if figure <= limit else None if noisy else False,
        )
        for what, figure, limit, noisy in bars
    ]  # fmt: skip


def show(found: dict[str, Any], kinds: list[dict[str, Any]], findings: list[Finding]) -> None:
    """Tables."""
    console = new_console()
    table = Table("", "p50 ms", "p99 ms", "max ms", title=f"{found['tokens']:.0f} tokens")
    for name in ("one new turn", "one new turn, CPU", "first time", "step, CPU"):
        table.add_row(name, *(f"{found[name][key]:.2f}" for key in PERCENTILES))
    console.print(table)
    columns = {"took ms": "took_ms", "step": "step_ms", "(max)": "step_max_ms",
               "turn": "turn_ms", "(max) ": "turn_max_ms", "idle": "idle_ms",
               "(max)  ": "idle_max_ms"}  # fmt: skip
    table = Table("hard prompts", "bytes", "tokens", *columns, title="medians of rounds, ms")
    for one in kinds:
        figures = (f"{one[key]:.2f}" for key in columns.values())
        table.add_row(one["kind"], f"{one['body_bytes']:,}", f"{one['tokens']:,}", *figures)
    console.print(table)
    print(json.dumps(msgspec.to_builtins(findings), indent=1))


def main() -> None:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--threads", action="store_true")
    options = parser.parse_args()
    texts = sources()
    text = "".join(texts)
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        if options.folder is None:
            build_folder(folder, texts)
        sample = tokenizer_of(str(folder), Tokenizing()).whole(
            text[:200_000], add_special_tokens=False
        )
        # It goes on by two turns, in the mean, until it is measured.
        chars = int(TOKENS * 200_000 / (len(sample) / 4) / (TURNS + 2))
        rng = random.Random(7)
        kinds = {kind: [body] for kind, body in hard_bodies(text).items()}
        kinds["many at once"] = [Talk(rng, text, 100).body() for _ in range(AT_ONCE)]
        # As the gateway has them (app.py).
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 100)
        # Whatever else runs on the machine only adds.
        found = min(
            (
                uvloop.run(conversations(folder, text, chars, 8 if options.quick else 24))
                for _ in range(1 if options.quick else 5)
            ),
            key=lambda one: one["one new turn, CPU"]["p99_ms"],
        )
        hard_found = uvloop.run(
            hard(folder, kinds, 2 if options.quick else ROUNDS, options.threads)
        )
    findings = judged(found, hard_found)
    show(found, hard_found, findings)
    if options.json:
        write_json(
            options.json,
            {
                "machine": describe_machine(), **found, "hard prompts": hard_found,
                "findings": findings,
            },
        )  # fmt: skip


if __name__ == "__main__":
    main()
