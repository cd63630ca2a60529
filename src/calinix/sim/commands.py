"""The commands `calinix mock-pod` and `calinix load`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Annotated

import typer
import uvloop

from calinix.errors import BadRequest
from calinix.sim.mock_faults import Fault, faults_from_text
from calinix.sim.mock_pod import FailurePolicy, MockPod, MockRole
from calinix.sim.pod_model import PodFigures


def mock_pod_command(
    role: Annotated[MockRole, typer.Option(help="What the pod is for.")] = "single",
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
    faults: Annotated[
        str, typer.Option(help="For instance 'status:status=503,count=2;slow:factor=4'.")
    ] = "",
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
        figures=figures,
        model=model,
        loras=tuple(lora or ()),
        max_model_len=max_model_len,
        answer_tokens=answer_tokens,
        failure_policy=kv_failure_policy,
        api_key=api_key,
        host=host,
        port=port,
    )
    try:
        uvloop.run(_serve(pod, wanted))
    except OSError as error:
        typer.echo(f"cannot serve on {host}:{port}: {error}", err=True)
        raise typer.Exit(1) from None


async def _serve(pod: MockPod, faults: list[Fault]) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stopped.set)
    async with pod:
        pod.add_faults(faults)
        typer.echo(f"mock {pod.role} pod of {pod.reader.models[0]} on {pod.url}")
        await stopped.wait()
