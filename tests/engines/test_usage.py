"""Reading what engines say at the end of an answer, and counting events as they pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.engines import usage as usage_module
from calinix.engines.sse import EventCounter
from calinix.engines.usage import TAIL_BYTES, Usage, read_usage

SAMPLES = Path(__file__).parent.parent / "data/samples"


def body_of(name: str) -> bytes:
    """The body of a captured answer."""
    return (SAMPLES / f"{name}.http").read_bytes().partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("chat", Usage(41, 8, 0)),
        ("chat_stream", Usage(27, 6, 0)),
        ("chat_stream_continuous", Usage(15, 4, 0)),
        ("chat_stream_nousage", None),
        ("completion", Usage(9, 8, 0)),
        ("completion_stream", Usage(2, 4, 0)),
        ("completion_tokenids", Usage(4, 3, 0)),
        ("err_badjson", None),
        ("models", None),
    ],
)
def test_real_answers(name: str, usage: Usage | None) -> None:
    """Whole bodies and streams of a real pod, cut to the tail that is kept."""
    assert read_usage(body_of(name)[-TAIL_BYTES:]) == usage


@pytest.mark.parametrize(
    ("text", "usage"),
    [
        (
            {
                "input_tokens": 10,
                "input_tokens_details": {"cached_tokens": 4, "cached_tokens_per_turn": [4]},
                "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 13,
            },
            Usage(10, 3, 4),
        ),
        (
            {
                "input_tokens": 6,
                "output_tokens": 3,
                "cache_read_input_tokens": 32,
                "cache_creation_input_tokens": 16,
            },
            Usage(54, 3, 32),
        ),
        ({"input_tokens": 6, "output_tokens": 3}, Usage(6, 3, None)),
        ({"prompt_tokens": 5, "total_tokens": 5}, Usage(5, None, None)),
        (
            {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": None},
            Usage(5, 1, None),
        ),
    ],
)
def test_other_dialects(text: dict[str, object], usage: Usage) -> None:
    """Responses, Anthropic's messages (whose input leaves out the cache) and embeddings."""
    assert read_usage(json.dumps({"usage": text, "user": None}).encode()) == usage


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'"usage"',
        b'"usage":',
        b'"usage":null}',
        b'"usage":{"prompt_tokens":1',
        b'"usage":{"prompt_tokens":"x"}',
        b'"usage":{}',
        b'"usage":{"prompt_tokens":-1,"completion_tokens":1}',
        b'"usage":{"prompt_tokens":100000001,"completion_tokens":1}',
        b'"usage":{"prompt_tokens":1,"completion_tokens":1' + b"0" * 400 + b"}",
        b'"text":"usage","x":{"prompt_tokens":1}',
        b'{"content":"\\"usage\\":{\\"prompt_tokens\\":1}"}',
    ],
)
def test_no_usage(tail: bytes) -> None:
    """Missing, cut off, null, ill-typed, empty, impossible or only spoken of: None."""
    assert read_usage(tail) is None


def test_the_last_usage_counts() -> None:
    """Continuous usage repeats itself; a null after it does not hide it."""
    tail = (
        b'data: {"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
        b'data: {"usage" : {"prompt_tokens":3,"completion_tokens":2}}\n\n'
        b'data: {"usage":null}\n\ndata: [DONE]\n\n'
    )
    assert read_usage(tail) == Usage(3, 2, None)


_number = st.none() | st.integers(-1, 10**9) | st.sampled_from([0, 7, 99_999_999, 1.5, True, "x"])
_details = st.dictionaries(
    st.sampled_from(["cached_tokens", "audio_tokens", "prompt_tokens_details", "\u00e9"]),
    _number,
    max_size=2,
)
_named = st.sampled_from(
    [
        "prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens",
        "cache_read_input_tokens", "cache_creation_input_tokens", "cached_tokens",
        "prompt_tokens_details", "input_tokens_details", "completion_tokens_details", 'a"b',
    ]
)  # fmt: skip
_usages = st.dictionaries(_named, _number | _details, max_size=6)


@given(
    st.lists(_usages | st.none(), max_size=2),
    st.sampled_from([(",", ":"), (", ", ": "), (",  ", ":"), (" ,", ":\n")]),
    st.booleans(),
    st.integers(0, 12),
)
def test_the_compiled_form_reads_what_the_decoder_reads(
    usages: list[dict[str, object] | None], spaces: tuple[str, str], is_ascii: bool, cut: int
) -> None:
    """Whatever the object holds and however it is cut: the same counts as by a JSON decoder."""
    text = "".join(
        json.dumps({"id": 1, "usage": one}, separators=spaces, ensure_ascii=is_ascii)
        for one in usages
    )
    tail = text.encode()[: len(text.encode()) - cut]
    assert read_usage(tail) == usage_module._read_any(tail)


@given(st.lists(st.sampled_from([b'"usage":{', b'"prompt_tokens":', b"1", b",", b"}", b'"', b"{"])))
def test_pieces_of_usage_are_read_alike(pieces: list[bytes]) -> None:
    """No bytes lead the compiled form astray."""
    tail = b"".join(pieces)
    assert read_usage(tail) == usage_module._read_any(tail)


@given(st.text(max_size=200))
def test_generated_text_cannot_forge_usage(text: str) -> None:
    """Whatever a model says inside a JSON string, the engine's own numbers are read."""
    said = text + '"usage":{"prompt_tokens":999}' + text
    honest = {"usage": {"prompt_tokens": 1, "completion_tokens": 2}, "extra": {"text": said}}
    assert read_usage(json.dumps(honest).encode()) == Usage(1, 2, None)


@pytest.mark.parametrize(
    ("name", "events"), [("chat_stream", 8), ("chat_stream_nousage", 5), ("completion_stream", 5)]
)
def test_real_streams_are_counted_however_cut(name: str, events: int) -> None:
    """At every cut and byte by byte: the same events, the end marker seen once and not counted."""
    stream = body_of(name)
    cuts = [[stream[:at], stream[at:]] for at in range(len(stream) + 1)]
    for pieces in [*cuts, [stream[i : i + 1] for i in range(len(stream))]]:
        counter = EventCounter()
        for piece in pieces:
            counter.feed(piece)
        assert (counter.events, counter.done) == (events, True)


def test_an_end_that_never_came_is_not_seen() -> None:
    """A stream cut off before its marker is not done, and text that names the marker is not it."""
    counter = EventCounter()
    assert counter.feed(b'data: {"text":"[DONE]"}\n\n: ping\n\nevent: x\r\ndata: {}\r\n\r\n') == 2
    assert not counter.done


@given(
    st.lists(st.sampled_from([b"data: {}\n\n", b"event: a\ndata: 1\n\n", b": c\n\n"])), st.data()
)
def test_counting_is_independent_of_cuts(events: list[bytes], data: st.DataObject) -> None:
    """Any stream cut anywhere counts like the whole stream."""
    stream = b"".join(events) + b"data: [DONE]\n\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    counter = EventCounter()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        counter.feed(stream[start:end])
    assert counter.events == sum(b"data" in event for event in events)
    assert counter.done
