"""`calinix demo`: mock pods, the gateway and some load in one process, live in the terminal."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import Annotated, Any

import msgspec
import typer
import uvloop
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from calinix.app import App, running_gateway
from calinix.config import Config, Log, parse_config
from calinix.core.requests import RoutePlan
from calinix.edge.http_client import PodClient
from calinix.sim.load_report import Outcome, Summary, times_of
from calinix.sim.load_traffic import Shape, Traffic
from calinix.sim.loadgen import Load, Plan
from calinix.sim.mock_pod import MockPod, MockRole
from calinix.sim.pod_model import PodFigures
from calinix.telemetry import configure_logging

_REFRESH_S = 0.25
_RECENT = 6
_BAR_WIDTH = 12
_READY_S = 5.0
_ROLES: tuple[MockRole, ...] = ("single", "prefill", "decode")

# A small pod: 20 ms and 4,000 tokens a second to prefill, 100 tokens a second and answer.
_FIGURES = PodFigures(
    delay_s=0.02, prefill_tokens_per_s=4000.0, token_delay_s=0.01, kv_capacity_tokens=200_000
)
_SHAPE = Shape(
    model="mock", prompt_tokens=400, shared_prefix=0.8, prefixes=6, turns=3, max_tokens=24
)


def demo(
    seconds: Annotated[float, typer.Option(min=1, help="For how long.")] = 20.0,
    rate: Annotated[
        float, typer.Option(min=0.1, help="New conversations per second, in each mode.")
    ] = 3.0,
) -> None:
    """Watch Calinix route: 2 unified, 2 prefill and 2 decode mock pods under some load.

    Everything runs in this process on free ports of 127.0.0.1 and ends with it.

    Ctrl-C ends it early.
    """
    configure_logging(Log(level="error"))
    uvloop.run(_demo(Console(), seconds, rate))


async def _demo(console: Console, seconds: float, rate_per_s: float) -> None:
    async with AsyncExitStack() as stack:
        pods = {
            f"{role}-{number}": await stack.enter_async_context(
                MockPod(role=role, figures=_FIGURES)
            )
            for role in _ROLES
            for number in (1, 2)
        }
        app = await stack.enter_async_context(running_gateway(_config(pods)))
        await _until_ready(app, len(pods))
        loop = asyncio.get_running_loop()
        client = PodClient(app.base_url, loop, connect_timeout_s=2.0)
        stack.callback(client.close)
        loads = {
            mode: Load(
                client,
                Traffic(_SHAPE, seed),
                Plan(requests=None, seconds=seconds, rate_per_s=rate_per_s, mode=mode),
            )
            for seed, mode in enumerate(("single", "dispatch"))
        }
        stack.callback(loop.remove_signal_handler, signal.SIGINT)
        loop.add_signal_handler(signal.SIGINT, _stop, loads)
        summaries = await _run(console, app, loads, seconds)
        console.print(_closing(app, summaries))


def _stop(loads: dict[str, Load]) -> None:
    for load in loads.values():
        load.stop()


async def _run(
    console: Console, app: App, loads: dict[str, Load], seconds: float
) -> dict[str, Summary]:
    running = [asyncio.ensure_future(load.run()) for load in loads.values()]
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while not all(task.done() for task in running):
                live.update(_view(app, loads, seconds), refresh=True)
                await asyncio.wait(running, timeout=_REFRESH_S, return_when="ALL_COMPLETED")
    else:
        console.print(f"{seconds:g} s of load on {app.base_url} ...")
    results = await asyncio.gather(*running)
    console.print(_view(app, loads, seconds))
    return dict(zip(loads, results, strict=True))


async def _until_ready(app: App, pods: int) -> None:
    """The pods are probed at once; this waits for the verdicts."""
    async with asyncio.timeout(_READY_S):
        while len(app.router.usable_pods()) < pods:  # noqa: ASYNC110  the router is pure
            await asyncio.sleep(0.01)


def _config(pods: dict[str, MockPod]) -> Config:
    def group(role: str) -> list[dict[str, Any]]:
        return [{"id": name, "url": pod.url} for name, pod in pods.items() if name.startswith(role)]

    config = {
        "gateway": {"host": "127.0.0.1", "port": 0},
        "admin": {"port": 0},
        "log": {"requests": False},
        "upstreams": {
            "single": {"pods": group("single")},
            "dispatch": {
                "protocol": "nixl",
                "prefill": {"pods": group("prefill")},
                "decode": {"pods": group("decode")},
            },
        },
    }
    # JSON is YAML: the demo's configuration takes the same road as a file.
    return parse_config(msgspec.json.encode(config).decode(), "demo")


def _view(app: App, loads: dict[str, Load], seconds: float) -> RenderableType:
    elapsed_s = min(max(load.elapsed_s for load in loads.values()), seconds)
    outcomes = [one for load in loads.values() for one in load.outcomes]
    head = Text.assemble(
        ("calinix demo  ", "bold"),
        f"{elapsed_s:.0f} of {seconds:g} s\ngateway {app.base_url}   admin {app.admin_url}",
    )
    return Group(head, _figures(loads), _pods(app, outcomes), _decisions(app))


def _figures(loads: dict[str, Load]) -> Table:
    table = Table("mode", "done", "failed", "TTFT p50", "TTFT p99", "prompt tokens from cache")
    for mode, load in loads.items():
        good = [one for one in load.outcomes if one.error is None]
        ttft = times_of([one.first_token_s - one.started_s for one in good if one.first_token_s])
        prompt = sum(one.prompt_tokens for one in good)
        cached = sum(one.cached_tokens or 0 for one in good)
        failed = load.done - len(good)
        table.add_row(
            mode,
            str(load.done),
            f"[red]{failed}[/red]" if failed else "0",
            f"{ttft.p50_ms:.0f} ms" if ttft else "-",
            f"{ttft.p99_ms:.0f} ms" if ttft else "-",
            f"{cached / prompt:.0%}" if prompt else "-",
        )
    return table


def _pods(app: App, outcomes: list[Outcome]) -> Table:
    table = Table("pod", "state", "inflight", "answers", "blocks known")
    answers: dict[str, int] = {}
    for one in outcomes:
        if one.pod is not None:
            answers[one.pod] = answers.get(one.pod, 0) + 1
    for pod in app.router.pods():
        bar = "█" * min(pod.inflight, _BAR_WIDTH)
        done = str(answers.get(pod.id, 0)) if pod.role != "prefill" else "-"
        table.add_row(pod.id, pod.state, f"{pod.inflight:3d} {bar:<{_BAR_WIDTH}}", done,
                      str(pod.blocks))  # fmt: skip
    return table


def _decisions(app: App) -> Table:
    table = Table("request", "went to", "because", title="Last decisions", title_justify="left")
    for plan in app.router.decisions.last(_RECENT):
        table.add_row(plan.request_id, _where(plan), _why(plan))
    return table


def _where(plan: RoutePlan) -> str:
    return f"{plan.prefill.id} > {plan.pod.id}" if plan.prefill is not None else plan.pod.id


def _why(plan: RoutePlan) -> str:
    """The first choice in a line: what the winner had, and who came second."""
    choice = plan.to_dict()["choices"][0]
    candidates = {one["podId"]: one for one in choice["candidates"]}
    scores: dict[str, float] = candidates[choice["picked"]]["scores"]
    in_seconds = choice["unit"] == "seconds"
    terms = ", ".join(
        f"{name} {score * 1e3:.0f} ms" if in_seconds else f"{name} {score:.2f}"
        for name, score in scores.items()
    )
    second = f"; then {choice['runnerUp']}" if choice["runnerUp"] else ""
    return f"{plan.cached_blocks}/{plan.prompt_blocks} blocks there; {terms}{second}"


def _closing(app: App, summaries: dict[str, Summary]) -> RenderableType:
    lines = [Text("")]
    for mode, summary in summaries.items():
        hits = summary.cached_token_ratio or 0.0
        routed = summary.cache_hit_ratio or 0.0
        lines.append(
            Text(
                f"{mode}: {summary.requests} requests, {sum(summary.errors.values())} failed; "
                f"{routed:.0%} went where their prefix was, "
                f"the pods took {hits:.0%} of all prompt tokens from cache"
            )
        )
    lines.append(Text(f"leases left open: {app.router.open_leases()}"))
    lines.append(Text("Next: write config.yaml (see README), then `calinix serve`."))
    return Group(*lines)
