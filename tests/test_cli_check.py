"""`calinix check`: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer
import yaml
from typer.testing import CliRunner

from calinix.cli_check import check, notes
from calinix.config import Config, effective, parse_config

GOOD = Path(__file__).parent / "data" / "config" / "good.yaml"
PODS = "upstreams: {single: {pods: [{id: p, url: 'http://p:1', apiKey: '${POD_KEY}'}]}}\n"

app = typer.Typer()
app.command()(check)


def run(*arguments: str, **environ: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of the command."""
    result = CliRunner().invoke(app, list(arguments), env=environ)
    return result.exit_code, result.stdout, result.stderr


def config(text: str = "") -> Config:
    """A good configuration with one pod in each group, and `text`."""
    return parse_config(
        text + "upstreams:\n"
        "  single: {pods: [{id: a, url: 'http://a:1'}]}\n"
        "  dispatch:\n"
        "    protocol: nixl\n"
        "    prefill: {pods: [{id: b, url: 'http://b:1'}]}\n"
        "    decode: {pods: [{id: c, url: 'http://c:1'}]}\n"
    )


def test_python_m_calinix_is_the_command() -> None:
    """Where the script is not on the path, `python -m calinix` does the same, exit codes too."""
    bad = GOOD.parent / "bad" / "duplicate_ids.yaml"
    result = subprocess.run(
        [sys.executable, "-m", "calinix", "check", str(bad)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert result.returncode == 2
    assert "duplicate_ids.yaml" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_good_file_is_printed_whole() -> None:
    """Exit 0 and the effective configuration on standard output, which is the same file again."""
    code, out, _ = run(str(GOOD))
    assert code == 0
    assert parse_config(out) == effective(parse_config(GOOD.read_bytes()))


def test_a_bad_file_gives_its_problems() -> None:
    """Exit 2, every problem on standard error, nothing on standard output."""
    code, out, err = run(str(GOOD.parent / "bad" / "duplicate_ids.yaml"))
    assert code == 2
    assert out == ""
    assert [line.split(": ")[1] for line in err.splitlines()] == [
        "upstreams.single.pods[1].id",
        "upstreams.dispatch.decode.pods[0].id",
    ]


def test_the_default_is_config_yaml_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument ./config.yaml is read; where there is none, that is said."""
    monkeypatch.chdir(tmp_path)
    code, _, err = run()
    assert code == 2
    said, _, smallest = err.partition("the smallest is ")
    assert said.startswith("config.yaml: cannot be read: No such file or directory; ")
    (tmp_path / "small.yaml").write_text(smallest)
    assert run("small.yaml")[0] == 0
    (tmp_path / "config.yaml").write_text(GOOD.read_text())
    assert run()[0] == 0


def test_keys_are_masked(tmp_path: Path) -> None:
    """A pod's key from the environment is used and never printed; without it the line is told."""
    path = tmp_path / "c.yaml"
    path.write_text(PODS)
    code, out, err = run(str(path), POD_KEY="hunter2")
    assert code == 0
    assert yaml.safe_load(out)["upstreams"]["single"]["pods"][0]["apiKey"] == "***"
    assert "hunter2" not in out + err
    code, _, err = run(str(path))
    assert code == 2
    assert f"{path}:1: upstreams.single.pods[0].apiKey: the environment variable POD_KEY" in err


def test_the_schema_is_json() -> None:
    """--schema prints the JSON Schema and reads no file."""
    code, out, _ = run("--schema", "/nowhere/config.yaml")
    assert code == 0
    assert json.loads(out)["$defs"]["Gateway"]["properties"]["port"]["default"] == 8080


def test_nothing_to_note() -> None:
    """A configuration with nothing special in it gives no notes."""
    assert notes(config(), compiled=True) == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("gateway: {tokenizer: words}\n", "gateway.tokenizer"),
        ("gateway: {sessionFromUser: true}\n", "gateway.sessionFromUser"),
        ("gateway: {workers: 64}\n", "gateway.workers is 64, and this machine has"),
        ("cacheRegistry: {enabled: false}\n", "cacheRegistry.enabled"),
        ("admin: {host: 0.0.0.0}\n", "admin.host"),
        ("gateway: {strategy: {single: {cache: 1}}}\n", "gateway.strategy.single has no effect"),
        (
            "gateway: {strategy: {name: cacheAware, predictive: {crowding: 1}}}\n",
            "gateway.strategy.predictive has no effect",
        ),
        (
            "gateway: {strategy: weightedRoundRobin}\ncontroller: {enabled: false}\n",
            "controller.enabled",
        ),
    ],
)
def test_what_is_allowed_but_worth_knowing(text: str, word: str) -> None:
    """Each unusual setting gives one note that names its key."""
    (note,) = notes(config(text), compiled=True)
    assert note.startswith(word)


def test_the_compiled_part_and_the_groups() -> None:
    """What is not compiled, a plain protocol and unverified pods are noted; no absent group is."""
    assert "compiled part" in notes(config(), compiled=False)[0]
    assert "pip install -e" in notes(config(), compiled=True, interpreted=True)[0]
    good = config()
    bare = msgspec.structs.replace(
        good.upstreams,
        single=None,
        tls=msgspec.structs.replace(good.upstreams.tls, verify=False),
    )
    found = notes(msgspec.structs.replace(good, upstreams=bare), compiled=True)
    assert [note.split(" ")[0] for note in found] == ["upstreams.tls.verify"]
    assert notes(parse_config(PODS, environ={"POD_KEY": "x"}), compiled=True) == []
    whole = parse_config(GOOD.read_bytes())
    assert whole.upstreams.dispatch is not None
    group = msgspec.structs.replace(whole.upstreams.dispatch, protocol="plain")
    upstreams = msgspec.structs.replace(whole.upstreams, dispatch=group)
    plain = notes(msgspec.structs.replace(whole, upstreams=upstreams), compiled=True)
    assert [note.split(" ")[0] for note in plain] == ["upstreams.dispatch.protocol"]


def test_notes_go_to_standard_error(tmp_path: Path) -> None:
    """What is printed can be saved as a file: notes are not in it."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "gateway: {tokenizer: words}\n"
        + GOOD.read_text()
        .replace("gateway:", "log:")
        .replace("port: 8080", "level: info")
        .replace("  strategy: cacheAware\n", "")
    )
    code, out, err = run(str(path))
    assert code == 0
    assert "note: gateway.tokenizer" in err
    assert "note" not in out


def test_colour_is_for_terminals() -> None:
    """On a terminal the configuration is highlighted; through a pipe it is plain text."""
    command = [
        sys.executable,
        "-c",
        "import typer, calinix.cli_check as c; typer.run(c.check)",
        str(GOOD),
    ]
    plain = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    main, side = pty.openpty()
    with subprocess.Popen(
        command, stdout=side, stderr=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(side)
        shown = b""
        while select.select([main], [], [], 60)[0]:
            try:
                piece = os.read(main, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
        assert process.wait(60) == 0
    os.close(main)
    assert b"\x1b[" in shown
    assert b"\x1b[" not in plain
