"""The load generator: the traffic that it makes, what it measures, and its command."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import kit
from calinix.sim.commands import load_command, mock_pod_command
from calinix.sim.load_report import Outcome, jain_index, summarise, tables, times_of
from calinix.sim.load_traffic import Shape, Traffic
from calinix.sim.loadgen import LoadError, Plan, run_load
from calinix.sim.mock_faults import Fault
from calinix.sim.mock_pod import MockPod
from calinix.sim.pod_model import PodFigures

CLI = typer.Typer()
CLI.command("load")(load_command)
CLI.command("mock-pod")(mock_pod_command)


def bodies(traffic: Traffic, count: int) -> list[dict[str, Any]]:
    """The first requests of so many sessions."""
    return [json.loads(traffic.session().body()) for _ in range(count)]


def test_traffic_is_the_same_for_the_same_seed() -> None:
    """Two runs with one seed ask the same; another seed asks something else."""
    shape = Shape(model="m", prompt_tokens=40)
    assert bodies(Traffic(shape, 1), 9) == bodies(Traffic(shape, 1), 9)
    assert bodies(Traffic(shape, 1), 9) != bodies(Traffic(shape, 2), 9)


def test_prompts_share_what_they_are_told_to() -> None:
    """Of 100 words 80 are one of three prefixes, and the whole prompts all differ."""
    shape = Shape(model="m", prompt_tokens=100, shared_prefix=0.8, prefixes=3)
    prompts = [body["messages"][0]["content"].split() for body in bodies(Traffic(shape, 7), 60)]
    assert {len(prompt) for prompt in prompts} == {100}
    assert len({tuple(prompt[:80]) for prompt in prompts}) == 3
    assert len({tuple(prompt) for prompt in prompts}) == 60


def test_sessions_carry_on() -> None:
    """Each turn repeats what was said, answers included, and adds a question."""
    session = Traffic(Shape(model="m", turns=3, turn_tokens=5), 1).session()
    first = json.loads(session.body())
    session.answered("well")
    second = json.loads(session.body())["messages"]
    assert second[:1] == first["messages"]
    assert second[1] == {"role": "assistant", "content": "well"}
    assert len(second[2]["content"].split()) == 5
    assert not session.over
    session.answered("so")
    session.answered("it is")
    assert session.over


def test_figures_of_a_summary() -> None:
    """Means, percentiles, ratios and fairness are those of the outcomes; failures are apart."""
    good = [
        Outcome(
            started_s=0.0,
            first_token_s=0.1 * n,
            ended_s=1.0,
            status=200,
            prompt_tokens=100,
            output_tokens=10,
            cached_tokens=50 * (n % 2),
            pod=f"pod-{n % 2}",
            cache_hit=n % 4 == 0,
        )
        for n in range(1, 9)
    ]
    bad = [Outcome(started_s=0.0, first_token_s=None, ended_s=9.0, status=500, error="status 500")]
    summary = summarise(good + bad, [0.01, 0.03], 2.0)
    assert (summary.requests, summary.requests_per_s, summary.output_tokens_per_s) == (9, 4.0, 40.0)
    assert summary.ttft is not None
    assert summary.ttft.mean_ms == pytest.approx(450)
    assert summary.itl is not None
    assert summary.itl.mean_ms == pytest.approx(20)
    assert summary.e2e is not None
    assert summary.e2e.p99_ms == 1000
    assert summary.errors == {"status 500": 1}
    assert (summary.cache_hit_ratio, summary.cached_token_ratio) == (0.25, 0.25)
    assert (summary.pods, summary.jain_index) == ({"pod-0": 4, "pod-1": 4}, 1.0)


def test_fairness() -> None:
    """All on one of four pods is a quarter; nothing at all has no fairness."""
    assert jain_index([9, 0, 0, 0]) == 0.25
    assert jain_index([]) is None
    assert times_of([]) is None


@pytest.mark.parametrize("stream", [True, False])
@kit.on_loop
async def test_a_closed_loop(stream: bool) -> None:
    """Forty requests, eight at a time: all answered, all counted, prefixes hit, times true."""
    figures = PodFigures(delay_s=0.004, token_delay_s=0.012, parallel=8)
    async with MockPod(figures=figures) as pod:
        shape = Shape(model="", prompt_tokens=100, prefixes=2, max_tokens=5, stream=stream)
        summary = await run_load(pod.url + "/v1", shape, Plan(requests=40, concurrency=8))
        assert (summary.requests, summary.errors) == (40, {})
        assert pod.served == 40
        assert summary.output_tokens_per_s == pytest.approx(200 / summary.seconds)
        assert summary.cached_token_ratio is not None
        assert 0.5 < summary.cached_token_ratio < 0.8
        assert summary.e2e is not None
        assert summary.e2e.p50_ms > 50
        assert (summary.ttft is not None) == (summary.itl is not None) == stream
        if summary.itl is not None:
            # Tokens that come in the read of the first one have no gap: on a busy machine many.
            assert 40 < summary.itl.count <= 40 * 4
            assert 8 < summary.itl.mean_ms < 60
        names = {one.headers["x-calinix-session-key"] for one in pod.received}
        assert len(names) == 40


@kit.on_loop
async def test_several_turns_repeat_the_answers() -> None:
    """The pod's own words come back to it, so later turns hit what it generated."""
    async with MockPod() as pod:
        shape = Shape(model="mock", prompt_tokens=64, turns=3, max_tokens=32, shared_prefix=0)
        summary = await run_load(pod.url, shape, Plan(requests=30, concurrency=2))
        assert (summary.requests, summary.errors) == (30, {})
        sessions = Counter(one.headers["x-calinix-session-key"] for one in pod.received)
        assert set(sessions.values()) == {3}
        assert summary.cached_token_ratio is not None
        assert summary.cached_token_ratio > 0.5


@kit.on_loop
async def test_an_open_loop() -> None:
    """Arrivals do not wait for answers: at 200/s for half a second many are under way at once."""
    async with MockPod(figures=PodFigures(delay_s=0.2, parallel=1000)) as pod:
        shape = Shape(model="mock", prompt_tokens=8, max_tokens=1)
        plan = Plan(requests=None, seconds=0.5, rate_per_s=200.0, mode="single", api_key="k")
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, pod.model.running)
                await asyncio.sleep(0.01)

        watcher = asyncio.create_task(watch())
        summary = await run_load(pod.url, shape, plan)
        watcher.cancel()
        assert summary.errors == {}
        assert 60 < summary.requests < 160  # 100 on average: four deviations below
        assert most > 10
        assert pod.received[0].headers["x-calinix-mode"] == "single"
        assert pod.received[0].headers["authorization"] == "Bearer k"


FAULTS = {
    "status 503": Fault(kind="status", status=503),
    "connection broken": Fault(kind="reset", chunks=3),
    "connection closed": Fault(kind="reset"),
    "timeout": Fault(kind="hang"),
}


@pytest.mark.parametrize("kind", FAULTS)
@kit.on_loop
async def test_failures_are_named(kind: str) -> None:
    """Each way to fail has its name, and none of them is counted as throughput."""
    async with MockPod() as pod:
        pod.add_faults([FAULTS[kind]])
        shape = Shape(model="mock", max_tokens=8)
        plan = Plan(requests=6, concurrency=3, timeout_s=0.2)
        summary = await run_load(pod.url, shape, plan)
        assert summary.errors == {kind: 6}
        assert (summary.requests, summary.requests_per_s, summary.e2e) == (6, 0.0, None)


@kit.on_loop
async def test_an_error_inside_a_stream_is_a_failure() -> None:
    """A 200 whose stream says that the engine failed has not succeeded."""
    async with MockPod(role="decode") as pod:
        original = pod.reader.chat

        def chat(body: dict[str, Any]) -> Any:
            """Every request comes with a handle that nobody issued."""
            wanted = original(body)
            wanted.transfer = {
                "do_remote_prefill": True,
                "remote_block_ids": [[1]],
                "remote_engine_id": "e",
                "remote_request_id": "r",
                "remote_host": "127.0.0.1",
                "remote_port": pod.port,
                "remote_num_tokens": 1,
            }
            return wanted

        pod.reader.chat = chat  # type: ignore[method-assign]
        summary = await run_load(pod.url, Shape(model="mock"), Plan(requests=2, concurrency=1))
        assert summary.errors == {"error inside a stream": 2}


@kit.on_loop
async def test_a_target_that_is_not_there() -> None:
    """Nobody listens, or no model is listed: one clear error."""
    pod = MockPod()
    async with pod:
        pod.add_faults([Fault(kind="status", status=500, everywhere=True)])
        with pytest.raises(LoadError, match="answered 500"):
            await run_load(pod.url, Shape(model=""), Plan())
    with pytest.raises(LoadError, match="/v1/models"):
        await run_load(pod.url, Shape(model=""), Plan())


def test_the_commands(tmp_path: Path) -> None:
    """`mock-pod` says where it serves and ends on SIGTERM; `load` shows tables and writes JSON."""
    code = (
        "import typer; from calinix.sim.commands import mock_pod_command as m;"
        "a = typer.Typer(); a.command()(m); a()"
    )

    async def serve() -> None:
        arguments = ("--port", "0", "--role", "single", "--faults", "slow:factor=1.5")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode()
        found = re.search(r"mock single pod of mock on (http://\S+)", said)
        assert found, said
        figures = tmp_path / "figures.json"
        command = [
            "load",
            found[1],
            "--requests",
            "12",
            "--max-tokens",
            "4",
            "--json",
            str(figures),
        ]
        result = await asyncio.to_thread(CliRunner().invoke, CLI, command)
        assert result.exit_code == 0, result.output
        for word in ("TTFT", "throughput", "prefix hits"):
            assert word in result.output
        record = json.loads(figures.read_text())
        assert record["summary"]["requests"] == 12
        assert record["shape"]["max_tokens"] == 4
        process.terminate()
        assert await process.wait() == 0

    asyncio.run(serve())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["load", "http://127.0.0.1:1", "--requests", "1"], 1, "127.0.0.1:1"),
        (["mock-pod", "--faults", "explode"], 2, "not a fault"),
        (["mock-pod", "--role", "router"], 2, "--role"),
        (["load", "--shared-prefix", "2"], 2, "--shared-prefix"),
    ],
)
def test_commands_say_what_is_wrong(arguments: list[str], code: int, said: str) -> None:
    """A target that is not there, and options that make no sense, are one message each."""
    result = CliRunner().invoke(CLI, arguments)
    assert result.exit_code == code
    assert said in result.output
    assert "Traceback" not in result.output


def test_tables_show_failures() -> None:
    """What failed is in the tables that people read."""
    bad = Outcome(started_s=0.0, first_token_s=None, ended_s=1.0, status=0, error="timeout")
    summary = summarise([bad], [], 1.0, not_sent=3)
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as captured:
        console.print(tables(summary))
    assert "timeout" in captured.get()
    assert "not sent" in captured.get()
