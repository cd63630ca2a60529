"""The journal of a Router's calls, and what comes of it in a fresh Router."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs
from typer.testing import CliRunner

from calinix.cli import app
from calinix.config import Config, Log, PodConfig, Strategy
from calinix.core.events import (
    BlocksStored,
    Failed,
    Failure,
    Finished,
    FirstToken,
    PodAdded,
    PodRestarted,
    ProbeFailed,
    ProbeSucceeded,
    StrategyChanged,
)
from calinix.core.recorded import RecordedRouter
from calinix.core.requests import RoutePlan, RouteRequest, Work
from calinix.edge.journal import Asked, Journal, JournalError, JournalReader
from calinix.errors import ConfigError
from calinix.sim.journal_replay import Replay, Replayed
from routing import make_config, request, text


def with_journal(config: Config, path: Path, **log: Any) -> Config:
    """The config, with a journal there."""
    return replace(config, log=Log(journal_file=str(path), **log))


def recorded(path: Path, calls: int = 200, seed: int = 1, **settings: Any) -> RecordedRouter:
    """A router that lived through so many arbitrary calls, and wrote its journal there."""
    log = settings.pop("log", {})
    config = with_journal(make_config(3, 3, 3, **settings), path, **log)
    opened = Journal.open(config)
    assert opened is not None
    journal, rng = opened
    router = RecordedRouter(config, rng, journal)
    live(router, random.Random(seed), calls)
    journal.close()
    return router


def live(router: RecordedRouter, rng: random.Random, calls: int) -> None:
    """Arbitrary requests and facts."""
    pods = [pod.id for pod in router.pods()]
    for pod in pods:
        router.observe(ProbeSucceeded(pod), 0.0)
    leases: list[int] = []
    for number in range(calls):
        now = 1.0 + number * 0.1
        kind = rng.randrange(10)
        if kind < 5:
            plan = router.route(
                request(
                    text(rng.randrange(8), rng.randrange(3)),
                    request_id=f"r-{number}",
                    mode=rng.choice(["single", "dispatch", None]),
                    work=rng.choice(list(Work)),
                    streamed=rng.random() < 0.5,
                    session_key=rng.choice([None, "a", "b"]),
                    avoid=rng.choice([0, 1]),
                    tenant=rng.choice([b"", b"\xff\x00"]),
                ),
                now,
            )
            if isinstance(plan, RoutePlan):
                leases.append(plan.lease_id)
        elif kind < 8 and leases:
            lease = rng.choice(leases)
            router.observe(FirstToken(lease), now)
            end = rng.choice([Finished(lease, 200, 100, 10, 20), Failed(lease, "single", FAILURE)])
            router.observe(end, now + 0.05)
        elif kind < 9:
            pod = rng.choice(pods)
            fact = rng.choice([ProbeFailed(pod), PodRestarted(pod), ProbeSucceeded(pod)])
            router.observe(fact, now)
        else:
            router.tick(now)


FAILURE = Failure.SERVER_ERROR


def replayed(path: Path, strategy: Strategy | None = None) -> Replayed:
    """The journal, played to its end."""
    reader = JournalReader(path)
    try:
        return Replay(reader, strategy).run()
    finally:
        reader.close()


STRATEGIES = ("roundRobin", "powerOfTwo", "cacheAware")


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


def test_every_field_of_a_request_is_written() -> None:
    """What a RouteRequest holds and what the journal keeps of it are the same fields."""
    assert set(Asked.__struct_fields__) == set(RouteRequest.__slots__)


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
    assert "would have sent 25.0%" in " ".join(result.output.split())


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


def test_an_unknown_strategy_is_refused(tmp_path: Path) -> None:
    """The command names those that there are."""
    path = tmp_path / "journal.jsonl"
    recorded(path, 5)
    result = CliRunner().invoke(app, ["replay", str(path), "--strategy", "best"])
    assert result.exit_code == 2
    assert "roundRobin" in result.output


def test_no_secret_is_written_and_nobody_else_may_read(tmp_path: Path) -> None:
    """Keys of the config and of added pods are left out; the file is its owner's."""
    path = tmp_path / "journal.jsonl"
    key = "sk-of-a-pod"
    pods = (PodConfig(id="one", url="http://one:1", api_key=key),)
    config = with_journal(make_config(pods, api_keys=("sk-of-the-gateway",)), path)
    opened = Journal.open(config)
    assert opened is not None
    journal, rng = opened
    router = RecordedRouter(config, rng, journal)
    router.observe(PodAdded(PodConfig(id="two", url="http://two:1", api_key=key), "single"), 1.0)
    journal.close()
    assert "sk-of" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert replayed(path).calls == 1


def test_a_journal_is_bounded(tmp_path: Path) -> None:
    """At log.journalMaxBytes it ends, says so, and what it holds can be replayed."""
    path = tmp_path / "journal.jsonl"
    with capture_logs() as logs:
        router = recorded(path, log={"journal_max_bytes": 20_000})
    assert path.stat().st_size < 20_100
    assert [line["event"] for line in logs] == ["journal_full"]
    assert isinstance(router.route(request(), 99.0), RoutePlan)
    found = replayed(path)
    assert found.ending == "full"
    assert found.holds
    assert found.routes > 10


def test_a_full_disk_ends_the_journal_only() -> None:
    """What cannot be written is a warning; the router goes on."""
    with capture_logs() as logs:
        journal = Journal(os.open("/dev/full", os.O_WRONLY), make_config(1), 1, 10_000)
        router = RecordedRouter(make_config(1), random.Random(1), journal)
        router.observe(ProbeSucceeded("single-0"), 0.0)
        router.tick(1.0)
        assert isinstance(router.route(request(), 2.0), RoutePlan)
        journal.close()
    assert [line["event"] for line in logs] == ["journal_off"]


def test_the_journal_before_is_kept(tmp_path: Path) -> None:
    """The next process does not overwrite it: it goes on with `.1` behind its name."""
    path = tmp_path / "journal.jsonl"
    recorded(path, 50)
    before = path.read_bytes()
    recorded(path, 10)
    assert Path(f"{path}.1").read_bytes() == before
    assert replayed(path).holds


@pytest.mark.parametrize("name", ["", "no/such/folder"])
def test_where_no_file_can_be_the_gateway_does_not_start(tmp_path: Path, name: str) -> None:
    """A folder of that name, or none to put it into: a ConfigError that names the key."""
    with pytest.raises(ConfigError, match=r"log\.journalFile"):
        Journal.open(with_journal(make_config(1), tmp_path / name))


def test_without_the_key_there_is_none() -> None:
    """No journal is the default."""
    assert Journal.open(make_config(1)) is None


def test_a_process_that_died_leaves_a_readable_journal(tmp_path: Path) -> None:
    """The last line may be cut off anywhere: everything before it is replayed."""
    path = tmp_path / "journal.jsonl"
    recorded(path)
    data = path.read_bytes()
    for cut in (data.rindex(b"\n", 0, -1) + 1, len(data) * 2 // 3):
        path.write_bytes(data[:cut])
        found = replayed(path)
        assert found.ending is None
        assert found.holds


@pytest.mark.parametrize(
    "data", [b"", b"nonsense\n", b'{"call":"tick","atS":1.0}\n', b"\xff\xfe\n"]
)
def test_what_is_no_journal_is_refused(tmp_path: Path, data: bytes) -> None:
    """The error names the file, and the command ends with 2."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"journal\.jsonl"):
        JournalReader(path)
    assert CliRunner().invoke(app, ["replay", str(path)]).exit_code == 2


@pytest.mark.parametrize("line", ['{"call":"route"}', '{"call":"observe","atS":1.0,"event":{}}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    """The number of the line is in the error."""
    path = tmp_path / "journal.jsonl"
    recorded(path, 0)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line]) + "\n")
    with pytest.raises(JournalError, match=":2:"):
        replayed(path)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    """A journal of a later format is not read as if it were one of this."""
    path = tmp_path / "journal.jsonl"
    recorded(path, 0)
    path.write_text(path.read_text().replace('"format":1', '"format":2'))
    with pytest.raises(JournalError, match="format 2"):
        JournalReader(path)


def test_texts_and_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    """Lone surrogates, NULs, bytes and 64-bit hashes survive the file."""
    path = tmp_path / "journal.jsonl"
    config = with_journal(make_config(2), path)
    opened = Journal.open(config)
    assert opened is not None
    journal, rng = opened
    router = RecordedRouter(config, rng, journal)
    events = [ProbeSucceeded("single-0"), BlocksStored("single-0", None, (2**64 - 1, 1))]
    for event in events:
        router.observe(event, 0.1)
    asked = request(b"\x00\xff", session_key="\ud800", model="\x0061", request_id="\x00zz")
    router.route(asked, 1 / 3)
    journal.close()
    reader = JournalReader(path)
    first, second, route = list(reader)
    reader.close()
    assert [first.event, second.event] == events  # type: ignore[union-attr]
    assert route.at_s == 1 / 3
    assert route.request == Asked(  # type: ignore[union-attr]
        "\x00zz", prompt=b"\x00\xff", session_key="\ud800", model="\x0061", streamed=True
    )
