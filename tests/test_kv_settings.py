"""What the configuration says of KV events: addresses that cannot be, and what is worth knowing."""

from __future__ import annotations

import pytest

from calinix.cli_check import notes
from calinix.config import parse_config
from calinix.errors import ConfigError

POD = "upstreams: {single: {pods: [{id: p, url: 'http://p:1', kvEvents: {%s}}]}}\n"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (POD % "endpoint: 'http://p:5557'", "kvEvents.endpoint", "expected tcp://host:port or"),
        (POD % "endpoint: 'tcp://p'", "kvEvents.endpoint", "expected tcp://host:port or"),
        (POD % "replayEndpoint: 'tcp://p:5'", "kvEvents.replayEndpoint", "found neither"),
        (POD % "endpoint: 'tcp://*:5557'", "kvEvents.endpoint", "expected the pod's address"),
        (POD % "endpoint: 'ipc://x', ranks: 2", "kvEvents.endpoint", "expected tcp for ranks"),
        (POD % "endpoint: 'tcp://p:65535', ranks: 2", "kvEvents.endpoint", "up to 65535 for 2"),
        (POD % "endpoint: 'tcp://p:99999'", "kvEvents.endpoint", "up to 65535 for 1 ranks"),
        (POD % "ranks: 65", "kvEvents.ranks", "from 1 to 64"),
        ("kvEvents: {bind: 'tcp://*:0'}\n" + POD % "ranks: 2", "kvEvents.bind", "for 2 ranks"),
        ("kvEvents: {bind: 'ipc://x'}\n" + POD % "ranks: 2", "kvEvents.bind", "tcp for ranks"),
        (
            "gateway: {workers: 2}\nkvEvents: {bind: 'ipc://x'}\n" + POD % "ranks: 1",
            "kvEvents.bind",
            "expected none with gateway.workers: 2",
        ),
    ],
)
def test_addresses_that_cannot_be(text: str, where: str, what: str) -> None:
    """Each is told with its key and what was expected."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    (problem,) = caught.value.problems
    assert where in problem
    assert what in problem


def notes_of(text: str) -> list[str]:
    """What check has to say of KV events."""
    found = notes(parse_config(text), compiled=True)
    return [note for note in found if note.startswith("kvEvents")]


def test_check_says_what_events_cannot_do() -> None:
    """That text keys can only be cleared, and that without replays the past stays unknown."""
    assert notes_of(POD % "") == []
    text = POD % "endpoint: 'tcp://p:5557'"
    clears, deaf = notes_of(text)
    assert "gateway.tokenizer bytes: events can only clear" in clears
    assert "without replayEndpoint (p)" in deaf
    assert len(notes_of("kvEvents: {apply: blocks}\n" + text)) == 1
    assert len(notes_of("gateway: {tokenizer: words}\n" + text)) == 2
    both = POD % "endpoint: 'tcp://p:5557', replayEndpoint: 'tcp://p:5558'"
    assert notes_of("kvEvents: {apply: blocks}\n" + both) == []
    assert len(notes_of("kvEvents: {bind: 'tcp://*:5557', apply: blocks}\n" + POD % "")) == 1
