"""The commands `calinix mock-pod` and `calinix load`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from calinix.engines.kv_events import Dialect
from calinix.errors import BadRequest, ConfigError
from calinix.sim.load_report import Summary, tables
from calinix.sim.load_traffic import Shape
from calinix.sim.loadgen import Load, LoadError, Plan, run_load
from calinix.sim.mock_faults import Fault, faults_from_text
from calinix.sim.mock_kv_events import KvEventsOptions
from calinix.sim.mock_pod import ConnectorName, MockPod, MockRole, PodDialect
from calinix.sim.mock_transfer import FailurePolicy
from calinix.sim.pod_model import PodFigures

MOCK_POD_NOTES = """\
By default it answers at once. Like a small GPU: --prefill-rate 8000 --token-delay 0.02

Faults: refuse, hang, hangAfterHeaders, reset:chunks=N, cut, garbage, status:status=N,
slow:factor=X

Each may have count=N requests, forS=X seconds and everywhere=true (probes too).

For instance: --faults 'status:status=503,count=2;slow:factor=4'
"""
LOAD_NOTES = """\
Chats of five turns, four new ones a second: --rate 4 --turns 5 --seconds 30

An https gateway is verified against the system's authorities, or $SSL_CERT_FILE.
"""


def mock_pod_command(
    role: Annotated[MockRole, typer.Option(help="What the pod is for.")] = "single",
    dialect: Annotated[PodDialect, typer.Option(help="Which engine it speaks like.")] = "vllm",
    connector: Annotated[
        ConnectorName, typer.Option(help="How vLLM's KV gets from a prefill pod to a decode pod.")
    ] = "nixl",
    bootstrap_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of a prefill pod (mooncake, sglang); 0: any.")
    ] = 0,
    host: Annotated[str, typer.Option(help="Where it listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    delay: Annotated[float, typer.Option(min=0, help="Seconds of every prefill.")] = 0.0,
    token_delay: Annotated[float, typer.Option(min=0, help="Seconds between two tokens.")] = 0.0,
    prefill_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Uncached prompt tokens per second.")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Prompts prefilled at once.")] = 1,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16,
    kv_capacity_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that its KV cache holds.")
    ] = 524_288,
    model: Annotated[str, typer.Option(help="The model's name.")] = "mock",
    lora: Annotated[list[str] | None, typer.Option(help="An adapter; may be repeated.")] = None,
    max_model_len: Annotated[int, typer.Option(min=2, help="Context length, in tokens.")] = 32_768,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer that the client does not bound.")
    ] = 64,
    kv_failure_policy: Annotated[
        FailurePolicy, typer.Option(help="What a decode pod does with a handle that is not good.")
    ] = "fail",
    api_key: Annotated[str | None, typer.Option(help="Asked for on /v1 paths.")] = None,
    kv_events: Annotated[
        str | None,
        typer.Option(help="Publish KV events: tcp://*:5557, or tcp://gateway:5557 to connect."),
    ] = None,
    kv_replay: Annotated[
        str | None, typer.Option(help="Repeat them on request: tcp://*:5558.")
    ] = None,
    kv_topic: Annotated[str, typer.Option(help="Their topic: kv@POD@MODEL.")] = "",
    kv_dialect: Annotated[
        Dialect, typer.Option(help="maps as vLLM, arrays as SGLang and older vLLM.")
    ] = "maps",
    faults: Annotated[str, typer.Option(help="Faults to begin with; see below.")] = "",
) -> None:
    """Serve as an engine pod would, without a model: vLLM's API, prefix cache, P/D, faults.

    GET /mock/state shows what it received; POST /mock/faults takes faults as JSON.
    """
    try:
        wanted = faults_from_text(faults)
    except BadRequest as error:
        raise typer.BadParameter(error.message, param_hint="--faults") from None
    figures = PodFigures(
        delay_s=delay,
        token_delay_s=token_delay,
        prefill_tokens_per_s=prefill_rate,
        parallel=parallel,
        block_size=block_size,
        kv_capacity_tokens=max(kv_capacity_tokens, block_size),
    )
    pod = MockPod(
        role=role,
        dialect=dialect,
        connector=connector,
        bootstrap_port=bootstrap_port,
        figures=figures,
        model=model,
        loras=tuple(lora or ()),
        max_model_len=max_model_len,
        answer_tokens=answer_tokens,
        failure_policy=kv_failure_policy,
        api_key=api_key,
        host=host,
        port=port,
        kv_events=None
        if kv_events is None
        else KvEventsOptions(
            endpoint=kv_events, replay_endpoint=kv_replay, topic=kv_topic, dialect=kv_dialect
        ),
    )
    _run_pod(pod, wanted)


def _run_pod(pod: MockPod, faults: list[Fault]) -> None:
    try:
        uvloop.run(_serve(pod, faults))
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"cannot serve on {pod.host}:{pod.port}: {error}; choose a --port", err=True)
        raise typer.Exit(1) from None


async def _serve(pod: MockPod, faults: list[Fault]) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stopped.set)
    async with pod:
        pod.add_faults(faults)
        where = f", bootstrap port {pod.connector.port}" if pod.connector.port else ""
        typer.echo(f"mock {pod.role} pod of {pod.reader.models[0]} on {pod.url}{where}")
        await stopped.wait()


def load_command(
    url: Annotated[str, typer.Argument(help="The gateway, or a pod.")] = "http://127.0.0.1:8080",
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many; 200 when --seconds is not given.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0.01, help="For how long.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Sessions at the same time.")] = 16,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="New sessions per second, as a Poisson process, instead."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of a first prompt.")] = 256,
    shared_prefix: Annotated[
        float, typer.Option(min=0, max=1, help="Share of it that other sessions have too.")
    ] = 0.8,
    prefixes: Annotated[int, typer.Option(min=1, help="Different shared prefixes.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Requests of one session.")] = 1,
    turn_tokens: Annotated[int, typer.Option(min=1, help="Length of later questions.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer.")] = 64,
    stream: Annotated[bool, typer.Option(help="Ask for event streams.")] = True,
    mode: Annotated[
        Literal["single", "dispatch"] | None, typer.Option(help="x-calinix-mode.")
    ] = None,
    model: Annotated[str, typer.Option(help="By default the first that is served.")] = "",
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one request.")] = 120.0,
    seed: Annotated[int, typer.Option(help="The same seed asks the same.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the figures there.")] = None,
) -> None:
    """Put a gateway under load and show latency, throughput, prefix hits and balance."""
    shape = Shape(
        model=model,
        prompt_tokens=prompt_tokens,
        shared_prefix=shared_prefix,
        prefixes=prefixes,
        turns=turns,
        turn_tokens=turn_tokens,
        max_tokens=max_tokens,
        stream=stream,
    )
    plan = Plan(
        requests=200 if requests is None and seconds is None else requests,
        seconds=seconds,
        concurrency=concurrency,
        rate_per_s=rate,
        timeout_s=timeout,
        mode=mode,
        api_key=api_key,
    )
    console = Console()
    try:
        summary = _run_with_progress(console, url, shape, plan, seed)
    except LoadError as error:
        typer.echo(f"{url}: {error}", err=True)
        raise typer.Exit(1) from None
    console.print(tables(summary))
    if json is not None:
        _write(json, {"url": url, "seed": seed, "shape": shape, "plan": plan, "summary": summary})
    if summary.requests == sum(summary.errors.values()):
        raise typer.Exit(1)


def _write(path: Path, record: dict[str, object]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def _run_with_progress(console: Console, url: str, shape: Shape, plan: Plan, seed: int) -> Summary:
    columns = (BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        total = plan.seconds if plan.requests is None else plan.requests
        task = progress.add_task("load", total=total, said="")

        def show(load: Load) -> None:
            failed = sum(one.error is not None for one in load.outcomes[-1000:])
            said = f"{load.done} done" + (f", {failed} of the last failed" if failed else "")
            reached = load.elapsed_s if plan.requests is None else load.done
            progress.update(task, completed=reached, said=said)

        return uvloop.run(run_load(url, shape, plan, seed=seed, on_progress=show))
