"""Prompt keys: different conversations never share one, and growing ones keep their beginning."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from calinix.core.prompt import Endpoint, read_body
from calinix.errors import BadRequest

TEXT = st.text(
    alphabet=st.characters(blacklist_categories=["Cs"]) | st.sampled_from('þÿtpnj\\"{}[]:,'),
    max_size=12,
)
NAMES = st.sampled_from(["system", "user", "assistant", "tool", "x", ""]) | TEXT
PART = st.one_of(
    TEXT.map(lambda text: {"type": "text", "text": text}),
    TEXT.map(lambda url: {"type": "image_url", "image_url": {"url": url}}),
    TEXT.map(lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}),
    TEXT.map(lambda text: {"type": "refusal", "refusal": text}),
    st.tuples(TEXT, TEXT).map(lambda t: {"type": "custom" + t[0], "v": t[1]}),
)
CALL = st.tuples(TEXT, TEXT).map(
    lambda t: {"id": t[0], "type": "function", "function": {"name": t[1], "arguments": "{}"}}
)
MESSAGE = st.fixed_dictionaries(
    {"role": NAMES, "content": TEXT | st.lists(PART, min_size=1, max_size=3)},
    optional={
        "name": TEXT,
        "tool_call_id": TEXT,
        "reasoning_content": TEXT,
        "tool_calls": st.lists(CALL, min_size=1, max_size=2),
    },
)
CHAT = st.lists(MESSAGE, max_size=4)
TOOLS = st.none() | st.lists(TEXT.map(lambda name: {"function": {"name": name}}), min_size=1)


def key(messages: list[dict[str, Any]], tools: Any = None) -> bytes:
    """The canonical bytes of a chat."""
    body = {"messages": messages, **({"tools": tools} if tools else {})}
    return read_body(Endpoint.CHAT, msgspec.json.encode(body)).prompt


def normal(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with every lone text part written as a string."""
    result = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
            content = content[0]["text"]
        result.append({**message, "content": content})
    return result


@given(CHAT, CHAT, TOOLS, TOOLS)
def test_keys_are_injective(
    one: list[dict[str, Any]], other: list[dict[str, Any]], tools: Any, more_tools: Any
) -> None:
    """Two conversations have the same key only if they are the same."""
    same = normal(one) == normal(other) and (tools or None) == (more_tools or None)
    assert (key(one, tools) == key(other, more_tools)) is same


@given(CHAT, CHAT, TOOLS)
def test_keys_are_prefix_preserving(
    before: list[dict[str, Any]], after: list[dict[str, Any]], tools: Any
) -> None:
    """A conversation that goes on begins with the bytes that it had before."""
    assert key(before + after, tools).startswith(key(before, tools))


@given(TEXT, TEXT)
def test_text_that_grows_keeps_its_beginning(text: str, more: str) -> None:
    """So does a last message that is written on."""
    grown = key([{"role": "user", "content": text + more}])
    assert grown.startswith(key([{"role": "user", "content": text}]))


@given(st.binary(max_size=60), st.sampled_from(list(Endpoint)))
def test_no_bytes_crash_the_reader(body: bytes, endpoint: Endpoint) -> None:
    """Whatever arrives is read or refused as a bad request."""
    with contextlib.suppress(BadRequest):
        assert isinstance(read_body(endpoint, body).prompt, bytes)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["role", "content", "type", "text", "messages", "input", "prompt", "tools", "system",
             "model", "stream", "max_tokens", "vllm_xargs", "source", "metadata", "output"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["messages", "input", "prompt", "system", "tools"]), _JSON))
def test_no_json_crashes_the_reader(body: dict[str, Any]) -> None:
    """Whatever types the known fields have, the body is read or refused as a bad request."""
    octets = msgspec.json.encode(body)
    for endpoint in Endpoint:
        with contextlib.suppress(BadRequest):
            assert isinstance(read_body(endpoint, octets).prompt, bytes)
