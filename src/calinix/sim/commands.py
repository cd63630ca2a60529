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

An https gateway is verified against the system's authorities, or --ca-file.
"""


# The options of a mock pod.
_Role = Annotated[MockRole, typer.Option(help="What the pod is for.")]
_Dialect = Annotated[PodDialect, typer.Option(help="Which engine it speaks like.")]
_Connector = Annotated[
    ConnectorName, typer.Option(help="How vLLM's KV gets from a prefill pod to a decode pod.")
]
_BootstrapPort = Annotated[
    int, typer.Option(min=0, max=65535, help="Of a prefill pod (mooncake, sglang); 0: any.")
]
_Host = Annotated[str, typer.Option(help="Where it listens.")]
_Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")]
_Delay = Annotated[float, typer.Option(min=0, help="Seconds of every prefill.")]
_TokenDelay = Annotated[float, typer.Option(min=0, help="Seconds between two tokens.")]
_PrefillRate = Annotated[
    float | None, typer.Option(min=0.001, help="Uncached prompt tokens per second.")
]
_Parallel = Annotated[int, typer.Option(min=1, help="Prompts prefilled at once.")]
_BlockSize = Annotated[int, typer.Option(min=1, help="Tokens per KV block.")]
_KvCapacityTokens = Annotated[int, typer.Option(min=1, help="Tokens that its KV cache holds.")]
_Model = Annotated[str, typer.Option(help="The model's name.")]
_Lora = Annotated[list[str] | None, typer.Option(help="An adapter; may be repeated.")]
_MaxModelLen = Annotated[int, typer.Option(min=2, help="Context length, in tokens.")]
_AnswerTokens = Annotated[
    int, typer.Option(min=1, help="Tokens of an answer that the client does not bound.")
]
_KvFailurePolicy = Annotated[
    FailurePolicy, typer.Option(help="What a decode pod does with a handle that is not good.")
]
_ApiKey = Annotated[str | None, typer.Option(help="Asked for on /v1 paths.")]
_KvEvents = Annotated[
    str | None,
    typer.Option(help="Publish KV events: tcp://*:5557, or tcp://gateway:5557 to connect."),
]
_KvReplay = Annotated[str | None, typer.Option(help="Repeat them on request: tcp://*:5558.")]
_KvTopic = Annotated[str, typer.Option(help="Their topic: kv@POD@MODEL.")]
_KvDialect = Annotated[Dialect, typer.Option(help="maps as vLLM, arrays as SGLang and older vLLM.")]
_Faults = Annotated[str, typer.Option(help="Faults to begin with; see below.")]


def mock_pod_command(
    role: _Role = "single",
    dialect: _Dialect = "vllm",
    connector: _Connector = "nixl",
    bootstrap_port: _BootstrapPort = 0,
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    delay: _Delay = 0.0,
    token_delay: _TokenDelay = 0.0,
    prefill_rate: _PrefillRate = None,
    parallel: _Parallel = 1,
    block_size: _BlockSize = 16,
    kv_capacity_tokens: _KvCapacityTokens = 524_288,
    model: _Model = "mock",
    lora: _Lora = None,
    max_model_len: _MaxModelLen = 32_768,
    answer_tokens: _AnswerTokens = 64,
    kv_failure_policy: _KvFailurePolicy = "fail",
    api_key: _ApiKey = None,
    kv_events: _KvEvents = None,
    kv_replay: _KvReplay = None,
    kv_topic: _KvTopic = "",
    kv_dialect: _KvDialect = "maps",
    faults: _Faults = "",
) -> None:
    """Serve as an engine pod would, without a model: vLLM's API, prefix cache, P/D, faults.

    GET /mock/state shows what it received; POST /mock/faults takes faults as JSON.
    """
    wanted = _faults_of(faults)
    figures = PodFigures(
        delay_s=delay,
        token_delay_s=token_delay,
        prefill_tokens_per_s=prefill_rate,
        parallel=parallel,
        block_size=block_size,
        kv_capacity_tokens=max(kv_capacity_tokens, block_size),
    )
    events = None
    if kv_events is not None:
        events = KvEventsOptions(
            endpoint=kv_events, replay_endpoint=kv_replay, topic=kv_topic, dialect=kv_dialect
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
        kv_events=events,
    )
    _run_pod(pod, wanted)


def _faults_of(text: str) -> list[Fault]:
    try:
        return faults_from_text(text)
    except BadRequest as error:
        raise typer.BadParameter(error.message, param_hint="--faults") from None


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
    ca_file: Annotated[
        Path | None, typer.Option(help="Verify an https gateway against these authorities (PEM).")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one request.")] = 120.0,
    seed: Annotated[int, typer.Option(help="The same seed asks the same.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the figures there.")] = None,
) -> None:
    """Put a gateway under load and show latency, throughput, prefix hits and balance."""
    shape = Shape(
        model=model, prompt_tokens=prompt_tokens, shared_prefix=shared_prefix, prefixes=prefixes,
        turns=turns, turn_tokens=turn_tokens, max_tokens=max_tokens, stream=stream,
    )  # fmt: skip
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
        summary = _run_with_progress(console, url, shape, plan, seed, ca_file)
    except LoadError as error:
        typer.echo(f"{url}: {error}", err=True)
        raise typer.Exit(1) from None
    console.print(tables(summary))
    if json is not None:
        figures = {"url": url, "seed": seed, "shape": shape, "plan": plan, "summary": summary}
        write_json(json, figures)
    if summary.requests == sum(summary.errors.values()):
        raise typer.Exit(1)


def write_json(path: Path, record: object) -> None:
    """Writes a command's figures; where that cannot be, it says so and ends with 1."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    except OSError as error:
        typer.echo(f"cannot write: {error}", err=True)
        raise typer.Exit(1) from None


def _run_with_progress(
    console: Console, url: str, shape: Shape, plan: Plan, seed: int, ca_file: Path | None
) -> Summary:
    columns = (BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        total = plan.seconds if plan.requests is None else plan.requests
        task = progress.add_task("load", total=total, said="")

        def show(load: Load) -> None:
            failed = sum(one.error is not None for one in load.outcomes[-1000:])
            said = f"{load.done} done" + (f", {failed} of the last failed" if failed else "")
            reached = load.elapsed_s if plan.requests is None else load.done
            progress.update(task, completed=reached, said=said)

        authorities = None if ca_file is None else str(ca_file)
        return uvloop.run(
            run_load(url, shape, plan, seed=seed, ca_file=authorities, on_progress=show)
        )
