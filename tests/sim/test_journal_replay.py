"""What comes of a journal in a fresh Router, with the same strategy and with another."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from calinix.cli import app
from calinix.config import PodConfig, Strategy, StrategyName
from calinix.core.events import (
    Finished,
    FirstToken,
    ProbeSucceeded,
    StrategyChanged,
)
from calinix.core.recorded import RecordedRouter
from calinix.core.requests import RoutePlan
from calinix.edge.journal import Journal, JournalReader
from calinix.sim.journal_replay import Replay, Replayed
from journals import recorded, replayed, with_journal
from routing import make_config, request

STRATEGIES = get_args(StrategyName)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(STRATEGIES))
def test_a_journal_gives_equal_plans(
    tmp_path_factory: pytest.TempPathFactory, seed: int, strategy: str
) -> None:
    """Whatever a router lived through: a fresh one repeats every plan from the file."""
    path = tmp_path_factory.mktemp("journals") / "journal.jsonl"
    recorded(path, 120, seed, strategy=strategy)
    found = replayed(path)
    assert found.routes > 20
    assert found.holds, found.differences
    assert found.recorded == found.replayed
    assert found.ending == "stopped"


def test_what_does_not_come_out_again_is_told(tmp_path: Path) -> None:
    """A plan recorded otherwise is a difference, shown with both; the command ends with 1."""
    path = tmp_path / "journal.jsonl"
    recorded(path)
    lines = path.read_text().splitlines()
    place = next(n for n, line in enumerate(lines) if '"lease":3' in line)
    line = msgspec.json.decode(lines[place])
    was, line["outcome"]["pod"] = line["outcome"]["pod"], "elsewhere"
    lines[place] = msgspec.json.encode(line).decode()
    path.write_text("\n".join(lines) + "\n")
    found = replayed(path)
    assert (found.routes - found.equal, len(found.differences)) == (1, 1)
    assert found.differences[0].recorded.pod == "elsewhere"
    assert found.differences[0].replayed.pod == was
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 1
    assert f"pod elsewhere -> {was}" in " ".join(result.output.split())


def test_the_command_says_that_all_are_equal(tmp_path: Path) -> None:
    """`calinix replay` ends with 0 and writes what it found as JSON."""
    path, out = tmp_path / "journal.jsonl", tmp_path / "found.json"
    recorded(path)
    result = CliRunner().invoke(app, ["replay", str(path), "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "all equal" in result.output
    found = msgspec.json.decode(out.read_bytes(), type=Replayed)
    assert found.equal == found.routes > 0


def test_another_strategy_says_what_it_would_have_picked(tmp_path: Path) -> None:
    """With roundRobin: a journal of one hot prompt, which cacheOnly kept on one pod, is spread."""
    path = tmp_path / "journal.jsonl"
    config = with_journal(make_config(4, strategy="cacheOnly"), path)
    opened = Journal.open(config)
    assert opened is not None
    journal, rng = opened
    router = RecordedRouter(config, rng, journal)
    for pod in router.pods():
        router.observe(ProbeSucceeded(pod.id), 0.0)
    for number in range(40):
        plan = router.route(request(5), 1.0 + number)
        assert isinstance(plan, RoutePlan)
        router.observe(FirstToken(plan.lease_id), 1.2 + number)
        router.observe(Finished(plan.lease_id, 200), 1.5 + number)
    # Neither a reload of that time nor a refusal of that time stands in the other one's way.
    router.observe(StrategyChanged(Strategy(name="random")), 50.0)
    journal.close()
    found = replayed(path, Strategy(name="roundRobin"))
    assert max(found.recorded.pods.values()) == 40
    assert found.replayed.pods == dict.fromkeys((f"single-{n}" for n in range(4)), 10)
    assert found.same_pod == 10
    assert found.replayed.cached_token_ratio < found.recorded.cached_token_ratio
    result = CliRunner().invoke(app, ["replay", str(path), "--strategy", "roundRobin"])
    assert result.exit_code == 0
    said = " ".join(result.output.split())
    assert "would have sent 25.0%" in said
    # A mean TTFT of each stands there, and invites to compare them.
    assert "This does not tell what would be gained: for that, use calinix simulate." in said


def test_what_was_refused_then_holds_nothing_now(tmp_path: Path) -> None:
    """A request that only the other strategy would have taken is not open for ever."""
    path = tmp_path / "journal.jsonl"
    pods = (PodConfig(id="one", url="http://one:1", max_conns=1),)
    config = with_journal(make_config(pods), path)
    opened = Journal.open(config)
    assert opened is not None
    journal, rng = opened
    router = RecordedRouter(config, rng, journal)
    router.observe(ProbeSucceeded("one"), 0.0)
    for _ in range(2):
        router.route(request(2), 1.0)
    journal.close()
    lines = [line for line in path.read_text().splitlines() if '"lease":1' not in line]
    path.write_text("\n".join(lines) + "\n")
    reader = JournalReader(path)
    replay = Replay(reader)
    assert not replay.run().holds
    reader.close()
    assert replay.router.open_leases() == 0


def test_figures_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    """The command says why, and ends with 1, without a traceback."""
    path = tmp_path / "journal.jsonl"
    recorded(path, 5)
    result = CliRunner().invoke(app, ["replay", str(path), "--json", str(tmp_path / "no" / "f")])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "cannot write" in result.output


def test_journals_of_several_workers_are_named(tmp_path: Path) -> None:
    """Where FILE is not there but FILE-0 and others are: those, in order, and nothing like them."""
    path = tmp_path / "w[1].jsonl"
    result = CliRunner().invoke(app, ["replay", str(path)], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert "No such file or directory" in result.output
    assert "workers" not in result.output
    for name in ("-10", "-2", "-0", "-0.1", "-x"):
        (tmp_path / f"{path.name}{name}").touch()
    result = CliRunner().invoke(app, ["replay", str(path)], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    names = ", ".join(f"{path}-{number}" for number in (0, 2, 10))
    assert f"written by several workers: replay each of {names} " in result.output


def test_serve_says_where_several_workers_write() -> None:
    """`serve --help` names the files that `replay` is to be given then."""
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    assert "FILE-0, FILE-1" in result.output


def test_an_unknown_strategy_is_refused(tmp_path: Path) -> None:
    """The command names those that there are."""
    path = tmp_path / "journal.jsonl"
    recorded(path, 5)
    result = CliRunner().invoke(app, ["replay", str(path), "--strategy", "best"])
    assert result.exit_code == 2
    assert "roundRobin" in result.output
