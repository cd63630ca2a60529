"""The command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from calinix import __version__
from calinix.cli_bench import BENCH_NOTES, bench
from calinix.cli_check import check
from calinix.cli_demo import demo
from calinix.cli_explain import explain
from calinix.cli_replay import replay
from calinix.cli_simulate import SIMULATE_NOTES, simulate
from calinix.errors import ConfigError
from calinix.sim.commands import LOAD_NOTES, MOCK_POD_NOTES, load_command, mock_pod_command

app = typer.Typer(
    name="calinix",
    help="The load balancer for LLM inference pods that knows which pod holds a prompt's prefix.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="New here: calinix demo. Then write config.yaml, calinix check, calinix serve.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"calinix {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The load balancer for LLM inference pods that knows which pod holds a prompt's prefix."""
    del version


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="The YAML file.")] = Path("config.yaml"),
    journal: Annotated[
        Path | None,
        typer.Option(
            help="Keep a journal there for `calinix replay`; holds prompts. With several workers "
            "each keeps its own: FILE-0, FILE-1 and so on."
        ),
    ] = None,
) -> None:
    """Run the gateway.

    Inference on gateway.port (8080), metrics and admin JSON on 127.0.0.1:9090 (admin.port).

    Logs go to standard error, one JSON line per request to standard output.

    SIGTERM and Ctrl-C drain: streams under way finish, for at most gateway.timeouts.drainMs.

    SIGHUP reads the file again; `calinix check` says beforehand whether it is good.
    """
    from calinix.app_serve import serve as run  # noqa: PLC0415  other commands need none of it

    run(config, journal)


app.command("check")(check)
app.command("demo")(demo)
app.command("explain")(explain)
app.command("replay")(replay)
app.command("simulate", epilog=SIMULATE_NOTES)(simulate)
app.command("bench", epilog=BENCH_NOTES)(bench)
app.command("mock-pod", epilog=MOCK_POD_NOTES)(mock_pod_command)
app.command("load", epilog=LOAD_NOTES)(load_command)


def main() -> None:
    """Entry point: errors that a user can mend are lines on stderr, not tracebacks."""
    try:
        app()
    except ConfigError as error:
        for problem in error.problems:
            typer.secho(problem, err=True, fg="red" if sys.stderr.isatty() else None)
        sys.exit(2)


if __name__ == "__main__":
    main()
