"""`calinix explain`: what it says of caches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calinix.cli import app

PODS = "upstreams: {single: {pods: [{id: a, url: 'http://a:1'}, {id: b, url: 'http://b:1'}]}}\n"


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """The command for a prompt of several blocks that was routed once before."""
    body, config = tmp_path / "body.json", tmp_path / "config.yaml"
    body.write_text(json.dumps({"messages": [{"role": "user", "content": "word " * 200}]}))
    config.write_text(PODS)
    return ["explain", str(body), "--after", str(body), "--config", str(config)]


def explained(*arguments: str) -> str:
    """Its output, on one line."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("strategy", ["roundRobin", "random", "leastLoad", "weightedPowerOfTwo"])
def test_who_does_not_look_at_caches_is_said_so(asked: list[str], strategy: str) -> None:
    """No number of cached blocks, as if it had decided anything: the strategy looks at none."""
    said = explained(*asked, "--strategy", strategy)
    assert f"full blocks; {strategy} does not look at caches" in said
    assert "believed cached" not in said


@pytest.mark.parametrize("strategy", ["predictive", "cacheAware", "cacheOnly"])
def test_who_looks_at_caches_says_what_is_there(asked: list[str], strategy: str) -> None:
    """The blocks that are believed cached, none of them where the pods are cold."""
    said = explained(*asked, "--strategy", strategy)
    assert " 0 believed cached" not in said
    assert "believed cached" in said
    assert "does not look" not in said
    cold = [one for one in asked if one != "--after"][:2] + asked[-2:]
    assert ", 0 believed cached" in explained(*cold, "--strategy", strategy)


def test_a_prompt_without_a_block_has_nothing_cached(asked: list[str]) -> None:
    """Nothing to look for is not the same as not looking."""
    Path(asked[1]).write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    said = explained(*asked, "--strategy", "cacheAware")
    assert "0 full blocks, 0 believed cached" in said
