"""Bodies that are made to be costly to read: bounded in time and in memory."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from calinix.core.prompt import Endpoint, ParsedBody, read_body
from calinix.errors import PayloadTooLarge


def read(endpoint: Endpoint, **body: Any) -> ParsedBody:
    """Reads these fields."""
    return read_body(endpoint, msgspec.json.encode(body))


def test_many_unusual_messages_take_no_longer_each() -> None:
    """A body of messages that are not known here is no way to stop the process."""

    def seconds(count: int) -> float:
        body = b'{"messages":[' + b",".join([b'{"type":"x"}'] * count) + b"]}"
        began = time.process_time()
        read_body(Endpoint.CHAT, body)
        return time.process_time() - began

    few = min(seconds(1_000) for _ in range(3))
    assert seconds(20_000) < 100 * few


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[' + b",".join([b"{}"] * 400_000) + b"]}",
        b'{"messages":[{"content":[' + b",".join([b"{}"] * 400_000) + b"]}]}",
        b'{"messages":[],"prompt":[' + b",".join([b"[]"] * 400_000) + b"]}",
        b'{"messages":[],' + b'"":0,' * 2_000_000 + b'"x":0}',
    ],
    ids=["messages", "parts", "lists", "members"],
)
@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.OTHER_POST])
def test_small_values_without_end_are_refused(body: bytes, endpoint: Endpoint) -> None:
    """Decoded, they would be a hundred times as large as they came."""
    with pytest.raises(PayloadTooLarge):
        read_body(endpoint, body)


def test_long_texts_and_uploads_are_no_small_values() -> None:
    """A long prompt with its own braces, and an upload of any bytes, are read as ever."""
    text = "if (a[0]) { return b; }  // why: " * 60_000
    assert len(read(Endpoint.CHAT, messages=[{"role": "user", "content": text}]).prompt) > len(text)
    assert read_body(Endpoint.OTHER_POST, b"--x\r\n" + b"[{:" * 700_000) == ParsedBody()


@pytest.mark.parametrize("inputs", [[""] * 5, ["a", "", "bcd"], [[1], [2, 3], []]])
def test_all_inputs_but_the_first_are_load(inputs: list[Any]) -> None:
    """Texts count their characters, token ids four bytes each."""
    size = 1 if isinstance(inputs[0], str) else 4
    wanted = size * sum(len(one) for one in inputs[1:])
    assert read(Endpoint.COMPLETIONS, prompt=inputs).other_bytes == wanted
    assert read(Endpoint.COMPLETIONS, prompt=inputs).prompt_is_tokens == (size == 4)
