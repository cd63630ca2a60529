"""Bodies whose long texts are lifted out before they are decoded: nothing changes but the time."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.core import canonical, kv
from calinix.core.prompt import Endpoint, ParsedBody, read_body
from calinix.errors import BadRequest

ENDPOINTS = [Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES]
PIECES = ["a", "word ", "\n", '"', "\\", "é", "€", "\U0001f600", "\x00", "\x1f", "/", "x" * 40]
short_texts = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
long_texts = st.builds(
    lambda text, times: (text or "plain text") * times, short_texts, st.integers(100, 900)
)
texts = st.one_of(short_texts, long_texts)
contents = st.one_of(
    texts,
    st.lists(st.builds(lambda text: {"type": "text", "text": text}, texts), max_size=3),
    st.builds(lambda url: [{"type": "image_url", "image_url": {"url": url}}], texts),
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": contents},
        optional={
            "name": texts,
            "tool_calls": st.builds(lambda text: [{"id": "1", "function": text}], texts),
        },
    ),
    max_size=4,
)
bodies = st.fixed_dictionaries(
    {"messages": messages},
    optional={
        "model": texts,
        "prompt": texts,
        "input": texts,
        "max_tokens": st.integers(1, 9),
        "user": texts,
        "prompt_cache_key": texts,
        "tools": st.builds(lambda text: [{"type": "function", "function": text}], texts),
        "kv_transfer_params": texts,
        "something": texts,
    },
)


def outcome(endpoint: Endpoint, body: bytes) -> ParsedBody | str:
    """What reading gives, an error as its text."""
    try:
        return read_body(endpoint, body)
    except BadRequest as error:
        return str(error)


def same_without_lifting(endpoint: Endpoint, body: bytes) -> ParsedBody | str:
    """The outcome, which has to be the one of decoding the body as it came."""
    found = outcome(endpoint, body)
    with patch.object(canonical, "lifted", lambda raw: (raw, {})):
        assert outcome(endpoint, body) == found
    return found


@given(st.sampled_from(ENDPOINTS), bodies, st.booleans())
def test_reading_is_the_same(endpoint: Endpoint, body: dict[str, Any], ascii_only: bool) -> None:
    """Wherever long texts stand, and however they are escaped, a body reads the same."""
    same_without_lifting(endpoint, json.dumps(body, ensure_ascii=ascii_only).encode())


@given(
    st.sampled_from(ENDPOINTS),
    bodies,
    st.floats(0, 1),
    st.sampled_from([b"\\", b'"', b"\xff", b"\x01", b"\\ud800", b"\\uDE00", b"\\u12", b"\\x", b""]),
    st.booleans(),
)
def test_damaged_bodies_are_refused_the_same(
    endpoint: Endpoint, body: dict[str, Any], where: float, damage: bytes, cut: bool
) -> None:
    """Wrong escapes, wrong UTF-8 and missing ends are told as if nothing had been lifted."""
    octets = json.dumps(body).encode()
    at = int(where * len(octets))
    same_without_lifting(endpoint, octets[:at] + damage + (b"" if cut else octets[at:]))


@pytest.mark.parametrize(
    "text",
    [
        "plain " * 1000,
        "line\n" * 1000,
        "é" * 2000,
        "\U0001f600" * 1000,
        'quote " and \\ slash ' * 300,
        "ends in a backslash\\" * 300,
    ],
)
def test_long_texts_are_lifted(text: str) -> None:
    """A long text is taken out, decoded, and stands in the prompt, wherever it begins."""
    for pad in range(12):
        value = "p" * pad + text
        body = json.dumps({"messages": [{"role": "user", "content": value}]}).encode()
        if kv.COMPILED:
            short, found = canonical.lifted(body)
            assert [*found.values()] == [value.encode()]
            assert len(short) < 150
        parsed = same_without_lifting(Endpoint.CHAT, body)
        assert isinstance(parsed, ParsedBody)
        assert parsed.prompt.endswith(value.encode())
