"""`calinix explain`: where a request would go, and why, without sending it."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calinix.cli_tokens import IdsOf, exact_ids
from calinix.config import Config, Strategy, load_config
from calinix.config.policy import StrategyName
from calinix.core.events import Finished, ProbeSucceeded
from calinix.core.prompt import Endpoint, read_body
from calinix.core.requests import Mode, Refusal, RoutePlan, RouteRequest
from calinix.core.router import Router
from calinix.errors import BadRequest
from calinix.gateway.routes import RouteTable


def explain(
    request: Annotated[Path, typer.Argument(help="A request body as JSON; - is standard input.")],
    config: Annotated[Path, typer.Option(help="The YAML file.")] = Path("config.yaml"),
    after: Annotated[
        list[Path] | None,
        typer.Option(help="A body routed and answered before it; may be repeated, in order."),
    ] = None,
    path: Annotated[str, typer.Option(help="The path it is posted to.")] = "/v1/chat/completions",
    mode: Annotated[Mode | None, typer.Option(help="As x-calinix-mode.")] = None,
    session: Annotated[str | None, typer.Option(help="As x-calinix-session-key.")] = None,
    strategy: Annotated[
        StrategyName | None, typer.Option(help="In the place of gateway.strategy.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the decision as JSON.")] = False,
) -> None:
    """Say which pod a request would go to and why, without sending it.

    All pods are taken to be healthy, idle and cold; --after warms them up.

    What a running gateway decided is at its admin port: /admin/decisions?last=5

    For instance: calinix explain second.json --after first.json
    """
    loaded = _with_strategy(load_config(config), strategy)
    route = RouteTable(loaded.gateway.passthrough_paths).find(path)
    endpoint = route.endpoints.get("POST") if route is not None else None
    if endpoint is None:
        raise typer.BadParameter(f"POST {path} is not served", param_hint="--path")
    seed = loaded.gateway.seed
    router = Router(loaded, random.Random(0 if seed is None else seed))
    for pod in router.pods():
        router.observe(ProbeSucceeded(pod.id), 0.0)
    ids_of = exact_ids(loaded)
    for number, body in enumerate(after or []):
        plan = _route(router, body, f"after-{number + 1}", endpoint, mode, session, ids_of)
        if isinstance(plan, RoutePlan):
            router.observe(Finished(plan.lease_id, 200), 0.0)
    outcome = _route(router, request, "explained", endpoint, mode, session, ids_of)
    if isinstance(outcome, Refusal):
        typer.secho(f"refused ({outcome.reason.value}): {outcome.message}", err=True)
        raise typer.Exit(1)
    decision = outcome.to_dict()
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(decision), indent=2).decode())
    else:
        _show(decision)


def _with_strategy(config: Config, name: StrategyName | None) -> Config:
    """The same with another strategy; the settings of strategies stay as they are."""
    if name is None:
        return config
    known = config.gateway.strategy
    strategy = replace(known, name=name) if isinstance(known, Strategy) else name
    return replace(config, gateway=replace(config.gateway, strategy=strategy))


def _route(
    router: Router,
    path: Path,
    request_id: str,
    endpoint: Endpoint,
    mode: Mode | None,
    session: str | None,
    ids_of: IdsOf | None = None,
) -> RoutePlan | Refusal:
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        body = read_body(endpoint, raw)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    except BadRequest as error:
        hint = "; a body of another path needs --path" if error.param else ""
        raise typer.BadParameter(f"{path}: {error.message}{hint}") from None
    ids = None if ids_of is None or body.prompt_is_tokens else ids_of(endpoint, raw)
    return router.route(
        RouteRequest(
            request_id=request_id,
            mode=mode,
            work=endpoint.work,
            model=body.model,
            prompt=body.prompt if ids is None else ids,
            prompt_is_tokens=body.prompt_is_tokens or ids is not None,
            other_bytes=body.other_bytes,
            tenant=body.cache_salt,
            session_key=session or body.session_key,
            max_output_tokens=body.max_output_tokens,
            streamed=body.stream,
        ),
        0.0,
    )


def _looked(decision: dict[str, Any]) -> bool:
    """Whether pods were compared by what is believed cached there."""
    candidates = [one for choice in decision["choices"] for one in choice["candidates"]]
    return not candidates or any(one["cachedBlocks"] is not None for one in candidates)


def _show(decision: dict[str, Any]) -> None:
    console = Console()
    prompt, predicted = decision["prompt"], decision["predicted"]
    blocks = prompt["blocks"]
    believed = f", {predicted['cachedBlocks']} believed cached"
    if blocks and not _looked(decision):
        believed = f"; {decision['strategy']} does not look at caches"
    console.print(f"[bold]{decision['mode']}[/bold], strategy {decision['strategy']}")
    console.print(
        f"prompt: about {prompt['tokens']:.0f} tokens, {blocks} full block{'s' * (blocks != 1)}"
        f"{believed}"
    )
    if not blocks:
        console.print("[dim]shorter than one block (gateway.blockSize): nothing to match by[/dim]")
    for choice in decision["choices"]:
        names, in_seconds = list(choice["weights"]), choice["unit"] == "seconds"
        weighted = [f"{name} x{weight:g}" for name, weight in choice["weights"].items()]
        title = Text(f"{choice['role']}: {choice['picked']}", style="bold")
        heads = ["seconds", *names] if in_seconds else ["score", *weighted]
        table = Table("pod", *heads, "inflight", "blocks", title=title)
        digits = 3 if in_seconds else 2
        for candidate in choice["candidates"]:
            score = candidate["score"]
            cached = candidate["cachedBlocks"]
            table.add_row(
                candidate["podId"],
                "-" if score is None else f"{0.0 - score if in_seconds else score:.3f}",
                *(f"{candidate['scores'][name]:.{digits}f}" for name in names),
                str(candidate["inflight"]),
                "-" if cached is None else str(cached),
            )
        for dropped in choice["filtered"]:
            table.add_row(
                f"[dim]{dropped['podId']}[/dim]", f"[dim]filtered: {dropped['filter']}[/dim]"
            )
        console.print(table)
        if (other_s := choice["otherWaySeconds"]) is not None:
            other = "whole" if decision["prefillPodId"] else "by a prefill pod"
            console.print(f"[dim]{other}: {other_s:.3f} s[/dim]")
