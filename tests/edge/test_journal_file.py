"""The file of a journal: what is in it, what is not, its bounds and its faults."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from calinix.cli import app
from calinix.config import Health, PodConfig, Strategy
from calinix.core import events
from calinix.core.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    Failed,
    Failure,
    Finished,
    FirstToken,
    PeerFacts,
    PodAdded,
    PodCapacity,
    PodDraining,
    PodFacts,
    PodHeard,
    PodRemoved,
    PodRestarted,
    PrefillDone,
    ProbeFailed,
    ProbeSucceeded,
    PromptTokens,
    ReplicaFacts,
    ReplicaGone,
    ResponseStored,
    RoleFacts,
    RulesChanged,
    StrategyChanged,
)
from calinix.core.recorded import RecordedRouter
from calinix.core.requests import RoutePlan, RouteRequest
from calinix.edge.journal import Asked, Journal, JournalError, JournalReader, Observed
from calinix.errors import ConfigError
from journals import recorded, replayed, with_journal
from routing import make_config, request


def test_every_field_of_a_request_is_written() -> None:
    """What a RouteRequest holds and what the journal keeps of it are the same fields."""
    request = RouteRequest(request_id="r")
    fields = {name for name in dir(request) if not name.startswith("_")}
    assert set(Asked.__struct_fields__) == fields - {"once_more"}


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


STORED = '{"type":"BlocksStored","pod_id":"single-0","parent":null,"blocks":[%s]}'


@pytest.mark.parametrize(
    "line",
    [
        '{"call":"route"}',
        '{"call":"observe","atS":1.0,"event":{}}',
        '{"call":"observe","atS":1.0,"event":' + STORED % "-1" + "}",
        '{"call":"observe","atS":1.0,"event":' + STORED % 2**64 + "}",
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    """The number of the line is in the error."""
    path = tmp_path / "journal.jsonl"
    recorded(path, 0)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line]) + "\n")
    with pytest.raises(JournalError, match=":2:"):
        replayed(path)


@pytest.mark.parametrize(
    ("was", "damaged"), [('"port":8080', '"port":"x"'), ('"maxPods":256', '"maxPods":1')]
)
def test_a_damaged_configuration_is_told(tmp_path: Path, was: str, damaged: str) -> None:
    """A first line whose configuration cannot be: an error that says so, and an end with 2."""
    path = tmp_path / "journal.jsonl"
    recorded(path, 0)
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, damaged, 1))
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 2
    assert "journal.jsonl:1: " in result.output


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


EVERY_EVENT: tuple[Event, ...] = (
    PodAdded(PodConfig(id="p", url="http://p:1", models=("a", "b")), "decode"),
    PodRemoved("p"),
    PodDraining("p", draining=True),
    StrategyChanged(Strategy(name="predictive")),
    RulesChanged(Health(interval_ms=5), "dispatch"),
    ProbeSucceeded("p"),
    ProbeFailed("p", refused=True),
    PodHeard("p"),
    PodRestarted("p"),
    PodCapacity("p", 2**40),
    BlocksStored("p", 2**64 - 1, (1, 2**64 - 1)),
    BlocksRemoved("p", (3,)),
    BlocksCleared("p"),
    ResponseStored("resp_1", "p"),
    PromptTokens(7, "m", b"\x00\xff", b"\x01\x00\x00\x00"),
    PrefillDone(1, transferred=True),
    FirstToken(2),
    Finished(3, 200, 10, None, 5),
    Failed(4, "prefill", Failure.TIMEOUT, 504),
    ReplicaFacts("r", (PodFacts("p", 1.5),), (RoleFacts("single", 1.0, 0.1),), 1.0, 0.2, 4),
    ReplicaGone("r"),
    PeerFacts("r", ("p", "", "q"), b"\x06\x02\x00\xff"),
)


def test_every_kind_of_event_can_be_written(tmp_path: Path) -> None:
    """Whatever may enter a router comes out of its journal as it was."""
    kinds = {kind for kind in vars(events).values() if getattr(kind, "__bases__", 0) == (Event,)}
    assert {type(event) for event in EVERY_EVENT} == kinds
    path = tmp_path / "journal.jsonl"
    opened = Journal.open(with_journal(make_config(1), path))
    assert opened is not None
    journal, _ = opened
    for number, event in enumerate(EVERY_EVENT):
        journal.observed(event, number / 3)
    journal.close()
    reader = JournalReader(path)
    lines = list(reader)
    reader.close()
    assert [line.event for line in lines if isinstance(line, Observed)] == list(EVERY_EVENT)
    assert [line.at_s for line in lines] == [n / 3 for n in range(len(EVERY_EVENT))]
