"""`calinix check`: whether a configuration is good, what it amounts to, what to know of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.syntax import Syntax

from calinix.cli_tokens import token_notes
from calinix.config import Config, Strategy, effective, expanded, json_schema, load_config
from calinix.core.kv import COMPILED
from calinix.edge.kv_settings import clears_only
from calinix.errors import ConfigError
from calinix.gateway import proxy
from calinix.gateway.upstreams import pods_by_role

DEFAULT_CONFIG = Path("./config.yaml")

UNWEIGHTED = {"weightedRoundRobin": "roundRobin", "weightedPowerOfTwo": "powerOfTwo"}
"""What strategies are where the controller weighs nothing."""


def check(
    config: Annotated[Path, typer.Argument(help="The YAML file.")] = DEFAULT_CONFIG,
    *,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of the file instead.")
    ] = False,
) -> None:
    """Check a configuration, and print it with every default filled in.

    Exit code 2, and the problems on standard error, when it cannot be used.
    """
    if schema:
        text = msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode()
        _show(text, "json")
        return
    try:
        loaded = load_config(config)
        further = token_notes(loaded)
    except ConfigError as error:
        for problem in error.problems:
            typer.secho(problem, err=True, fg="red" if sys.stderr.isatty() else None)
        raise typer.Exit(2) from None
    _show(expanded(loaded).rstrip("\n"), "yaml")
    interpreted = (proxy.__file__ or "").endswith(".py")
    for note in notes(loaded, compiled=COMPILED, interpreted=interpreted) + further:
        typer.secho(f"note: {note}", err=True, fg="yellow" if sys.stderr.isatty() else None)


def notes(config: Config, *, compiled: bool, interpreted: bool = False) -> list[str]:
    """What is allowed but worth knowing, one line each."""
    gateway, upstreams = config.gateway, config.upstreams
    found = []
    if not compiled:
        found.append("the compiled part is not built: decisions take several times longer")
    if interpreted:
        found.append(
            "the request path is not compiled (no compiler, or pip install -e): twice the CPU"
        )
    if upstreams.dispatch is not None and upstreams.dispatch.protocol == "plain":
        found.append("upstreams.dispatch.protocol is plain: only for engines that share a KV store")
    cores = os.cpu_count() or 1
    if gateway.workers > cores:
        found.append(f"gateway.workers is {gateway.workers}, and this machine has {cores} cores")
    if gateway.workers > 1 and sys.platform != "linux":
        found.append("gateway.workers: only Linux deals connections out evenly")
    if gateway.tokenizer == "words":
        found.append("gateway.tokenizer is words: slower than bytes, which is the default")
    found += _strategy_notes(config)
    found += _kv_notes(config)
    if not config.cache_registry.enabled:
        found.append("cacheRegistry.enabled is false: no prompt is ever believed cached")
    if config.admin.enabled and not _is_loopback(config.admin.host):
        found.append(f"admin.host is {config.admin.host}: whoever reaches it can drain pods")
    if gateway.session_from_user:
        found.append("gateway.sessionFromUser: one `user` for all requests sends all to one pod")
    if not upstreams.tls.verify:
        found.append("upstreams.tls.verify is false: any certificate of a pod is accepted")
    return found


def _strategy_notes(config: Config) -> list[str]:
    """Settings that the chosen strategy does not read."""
    strategy, plain = effective(config).gateway.strategy, Strategy()
    assert isinstance(strategy, Strategy)
    found = []
    for owner, keys in (
        ("cacheAware", ("single", "prefill", "decode", "imbalance")),
        ("predictive", ("predictive",)),
    ):
        if strategy.name != owner:
            found += [
                f"gateway.strategy.{key} has no effect: {owner} reads it, and gateway.strategy "
                f"is {strategy.name}"
                for key in keys
                if getattr(strategy, key) != getattr(plain, key)
            ]
    if strategy.name in UNWEIGHTED and not config.controller.enabled:
        found.append(
            f"controller.enabled is false: {strategy.name} is then {UNWEIGHTED[strategy.name]}"
        )
    return found


def _kv_notes(config: Config) -> list[str]:
    """What KV events can tell here, and what is lost of them."""
    bound = config.kv_events.bind is not None
    fed = [
        pod
        for _, pod in pods_by_role(config).values()
        if bound or pod.kv_events.endpoint is not None
    ]
    if not fed:
        return []
    found = []
    if clears_only(config):
        found.append(
            f"kvEvents with gateway.tokenizer {config.gateway.tokenizer}: events can only clear "
            "a cache; hf, or kvEvents.apply: blocks for clients that send token ids, uses them all"
        )
    deaf = [pod.id for pod in fed if pod.kv_events.replay_endpoint is None]
    if deaf:
        found.append(
            f"kvEvents without replayEndpoint ({', '.join(deaf[:3])}{', ...' * (len(deaf) > 3)}): "
            "what was published before the start, or is lost, stays unknown"
        )
    return found


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _show(text: str, language: str) -> None:
    """To standard output, in colour for people only."""
    if sys.stdout.isatty():
        Console().print(Syntax(text, language, background_color="default", word_wrap=True))
    else:
        typer.echo(text)
