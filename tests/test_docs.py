"""The documents are true: their YAML loads, their commands run, their tables match the source.

A fenced block marked `yaml` is a whole config or a part of one; `console run` and `python run` are
executed against a gateway and two mock pods. Expected output may hold `...` for anything.

Run as a program, this file renews the module table of docs/architecture.md.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import kit
from calinix.config import Config, load_config
from faultproxy import reserve_port
from fleets import fleet_of, gateway_of

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "calinix"
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
MODULES = re.compile(r"(<!-- modules -->\n)(.*?)(<!-- /modules -->)", re.DOTALL)
SOME_PODS = "\nupstreams: {single: {pods: [{id: pod-1, url: 'http://pod-1:8000'}]}}\n"

# What the examples use of curl, so that the documents run where there is none.
CURL = """#!{python}
import argparse, http.client, urllib.parse
p = argparse.ArgumentParser()
p.add_argument("url")
p.add_argument("-s", action="store_true")
p.add_argument("-N", action="store_true")
p.add_argument("-H", action="append", default=[])
p.add_argument("-d")
p.add_argument("-D")
p.add_argument("-o")
p.add_argument("-X")
a = p.parse_args()
u = urllib.parse.urlsplit(a.url)
c = http.client.HTTPConnection(u.netloc, timeout=20)
path = u.path + ("?" + u.query if u.query else "")
headers = dict(h.split(": ", 1) for h in a.H)
c.request(a.X or ("POST" if a.d else "GET"), path, a.d, headers)
r = c.getresponse()
if a.D == "-":
    print("HTTP/1.1", r.status, r.reason)
    for name, value in r.getheaders():
        print(name + ": " + value)
    print()
body = r.read().decode()
c.close()
if a.o is None:
    print(body)
"""


class Block(NamedTuple):
    """A fenced block: where it stands, what follows the fence, its lines."""

    where: str
    info: str
    text: str


def blocks() -> Iterator[Block]:
    """All fenced blocks of all documents."""
    for path in sorted(DOCUMENTS):
        text = path.read_text("utf-8")
        for match in re.finditer(r"^```(\S[^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 1
            yield Block(f"{path.relative_to(ROOT)}:{line}", match[1].strip(), match[2])


BLOCKS = list(blocks())


def named(block: Block | Path) -> str:
    """Test id."""
    return block.where if isinstance(block, Block) else block.name


def load(text: str, folder: Path) -> Config:
    """Loads what a reader may copy, once the files and keys that it names are there."""
    for name in re.findall(r"/etc/calinix/(\S+)", text):
        (folder / name).touch()
    path = folder / "config.yaml"
    path.write_text(text.replace("/etc/calinix/", f"{folder}/"))
    with pytest.MonkeyPatch.context() as environment:
        for name in re.findall(r"\$\{(\w+)\}", text):
            environment.setenv(name, f"value-of-{name.lower()}")
        return load_config(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=named)
def test_examples_load(path: Path, tmp_path: Path) -> None:
    """Every file in examples/ is a config that serve would take."""
    assert load(path.read_text("utf-8"), tmp_path).upstreams


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.info == "yaml"], ids=named)
def test_yaml_in_documents_loads(block: Block, tmp_path: Path) -> None:
    """YAML that a reader may copy is accepted; a part without pods is, once pods are added."""
    assert load(block.text + ("" if "upstreams:" in block.text else SOME_PODS), tmp_path).upstreams


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.info == "yaml alerts"], ids=named)
def test_alert_rules_speak_of_metrics_that_are_there(block: Block) -> None:
    """Alert rules are YAML, and each names only metrics that the metrics table lists."""
    listed = set(re.findall(r"^\| `(calinix_\w+)`", operations(), re.MULTILINE))
    rules = [rule for group in yaml.safe_load(block.text)["groups"] for rule in group["rules"]]
    assert rules
    for rule in rules:
        used = set(re.findall(r"calinix_\w+", rule["expr"]))
        assert used
        assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} <= listed


def operations() -> str:
    """The text of docs/operations.md."""
    return (ROOT / "docs" / "operations.md").read_text("utf-8")


@kit.on_loop
async def test_metrics_table_is_what_a_scrape_shows() -> None:
    """The table lists every metric of Calinix with its kind, and no other."""
    rows = re.findall(r"^\| `(calinix_\w+)` \| (\w+) \|", operations(), re.MULTILINE)
    log = {"log": {"requests": True, "requestsFile": os.devnull}}
    async with fleet_of(single=1) as fleet, gateway_of(fleet.config(log)) as gateway:
        assert gateway.admin
        text = (await kit.http(gateway.admin.port, "GET", "/metrics")).body.decode()
    assert sorted(rows) == sorted(re.findall(r"^# TYPE (calinix_\w+) (\w+)", text, re.MULTILINE))


def run_block(block: Block, ports: dict[str, int], folder: Path) -> None:
    """Runs what the block says, ports replaced, and compares what it shows."""
    text = re.sub(
        r"localhost:(\d+)", lambda m: f"localhost:{ports.get(m[1], int(m[1]))}", block.text
    )
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONWARNINGS": "error"}
    if block.info.startswith("python"):
        steps = [([sys.executable, "-c", text], "...")]
    else:
        steps = []
        for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = step.partition("\n")
            steps.append((["bash", "-c", command], expected))
    assert steps, block.where
    for command, expected in steps:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        shown = "\n".join(line.rstrip() for line in (done.stdout + done.stderr).split("\n"))
        pattern = re.escape(expected.strip()).replace(r"\.\.\.", ".*")
        assert re.fullmatch(pattern, shown.strip(), re.DOTALL), (
            f"{block.where}: {command[-1]}\n--- expected\n{expected}\n--- shown\n{shown}"
        )
        if block.info.startswith("python"):
            assert done.returncode == 0, done.stderr


def test_runnable_blocks_run(tmp_path: Path) -> None:
    """Every block marked `run` works as shown, in order, against one gateway and two mock pods."""
    runnable = [b for b in BLOCKS if b.info.endswith(" run")]
    assert runnable
    curl = tmp_path / "curl"
    curl.write_text(CURL.format(python=sys.executable))
    curl.chmod(0o755)

    async def main() -> None:
        with reserve_port() as one, reserve_port() as two:
            pods = [one.getsockname()[1], two.getsockname()[1]]
            group = [
                {"id": f"pod-{n}", "url": f"http://127.0.0.1:{port}"}
                for n, port in enumerate(pods, 1)
            ]
            config = {"upstreams": {"single": {"pods": group}}}
            (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
            arguments = [("mock-pod", "--role", "single", "--port", str(port)) for port in pods]
            async with (
                kit.Process(tmp_path, *arguments[0]) as first,
                kit.Process(tmp_path, *arguments[1]) as second,
            ):
                await first.ready(pods[0], "/health")
                await second.ready(pods[1], "/health")
                async with kit.Serve(tmp_path, config) as gateway:
                    ports = {"8080": gateway.port, "9090": gateway.admin_port}
                    for block in runnable:
                        await asyncio.to_thread(run_block, block, ports, tmp_path)

    kit.run(main(), timeout_s=110)


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link points to a file that is there."""
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text("utf-8"))
    lost = [link for link in links if not (path.parent / link).exists()]
    assert not lost


def module_table() -> str:
    """One line per module, from the modules' own first lines."""
    lines = ["| module | what it holds |", "|---|---|"]
    for path in sorted(SRC.rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            first = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n\n")[0]
            lines.append(f"| {path.relative_to(SRC)} | {' '.join(first.split())} |")
    return "\n".join(lines) + "\n"


def test_every_module_is_in_the_architecture() -> None:
    """The module table lists the modules that are there; to renew it run this file."""
    found = MODULES.search((ROOT / "docs" / "architecture.md").read_text("utf-8"))
    assert found
    listed = set(re.findall(r"^\| (\S+\.py) \|", found[2], re.MULTILINE))
    there = set(re.findall(r"^\| (\S+\.py) \|", module_table(), re.MULTILINE))
    assert listed == there, "renew it: .venv/bin/python tests/test_docs.py"


if __name__ == "__main__":
    document = ROOT / "docs" / "architecture.md"
    table = module_table()
    document.write_text(MODULES.sub(lambda m: m[1] + table + m[3], document.read_text("utf-8")))
