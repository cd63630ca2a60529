"""Usage that the client did not ask for: asked in the body, cut out of the stream byte by byte."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.engines.hidden_usage import MAX_HELD_BYTES, UsageCut, ask_for_usage

SAMPLES = Path(__file__).parent.parent / "data" / "samples"
TOKEN = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
NULL = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"}}],"usage":null}\n\n'
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
SPACED = b'data: {"usage": {"prompt_tokens": 9}, "choices" : [ ]}\r\n\r\n'
DONE = b"data: [DONE]\n\n"
FILTERED = b'data: {"choices":[],"prompt_filter_results":[]}\n\n'
SAYS_SO = TOKEN % rb"\"choices\":[],\"usage\":{}"
KEPT = (
    TOKEN % b"hi",
    NULL,
    FILTERED,
    SAYS_SO,
    b": ping\n\n",
    b"\n",
    b'event: x\ndata: {"choices":[],"usage":{}}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":9}\n\n',
    b'data: {"choices":[],"usage":null}\r\n\r\n',
    TOKEN % (b"x" * (MAX_HELD_BYTES + 1)),
    DONE,
)


def body_of(sample: str) -> bytes:
    """The body of a recorded answer."""
    return (SAMPLES / f"{sample}.http").read_bytes().partition(b"\r\n\r\n")[2]


def cut(text: bytes, places: list[int]) -> tuple[bytes, int]:
    """(what is passed on of `text` in these pieces, how many chunks were taken out)."""
    usage_cut = UsageCut()
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    pairs = list(itertools.pairwise(bounds))
    passed = b"".join(
        usage_cut.feed(text[a:b], n == len(pairs) - 1) for n, (a, b) in enumerate(pairs)
    )
    return passed, usage_cut.cut


PLACES = st.lists(st.integers(0, 1_000_000), max_size=30)


@given(
    events=st.lists(st.sampled_from([*KEPT, USAGE, SPACED]), max_size=12),
    tail=st.sampled_from([b"", b"data: {", b"dat", USAGE[:20], b"data: [DONE]"]),
    places=PLACES,
)
def test_only_usage_chunks_go_wherever_the_bytes_are_cut(
    events: list[bytes], tail: bytes, places: list[int]
) -> None:
    """What is passed on is the stream without its usage chunks, to the byte, for every split."""
    text = b"".join(events) + tail
    kept = b"".join(event for event in events if event not in (USAGE, SPACED)) + tail
    passed, count = cut(text, places)
    assert passed == kept
    assert count == sum(event in (USAGE, SPACED) for event in events)


@given(
    sample=st.sampled_from(["chat_stream", "completion_stream", "chat_stream_continuous"]),
    places=PLACES,
)
def test_recorded_streams_lose_their_usage_chunk_alone(sample: str, places: list[int]) -> None:
    """Of vLLM's own streams one event goes; the marker and continuous usage stay."""
    text = body_of(sample)
    events = text.split(b"\n\n")
    usage = next(event for event in events if b'"choices":[]' in event)
    assert cut(text, places) == (text.replace(usage + b"\n\n", b""), 1)


def test_a_stream_without_usage_passes_as_it_came() -> None:
    """Whole events are handed back as the same object: nothing is copied."""
    text = body_of("chat_stream_nousage").rstrip(b"\n") + b"\n\n"
    usage_cut = UsageCut()
    assert usage_cut.feed(text, False) is text
    assert usage_cut.feed(b"", True) == b""


def test_whole_events_are_never_held_back() -> None:
    """A token is passed on in the read that completes its event, and a giant event as it comes."""
    usage_cut = UsageCut()
    token = TOKEN % b"hi"
    assert usage_cut.feed(token + USAGE[:9], False) == token
    assert usage_cut.feed(USAGE[9:] + token, False) == token
    giant = TOKEN % (b"x" * MAX_HELD_BYTES)
    assert usage_cut.feed(giant[:-9], False) == giant[:-9]


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (b'{"model":"m","stream":true}', {"include_usage": True}),
        (b'{"stream":true} ', {"include_usage": True}),
        (b'{"stream":true,"stream_options":null}', {"include_usage": True}),
        (b'{"stream_options":{}}', {"include_usage": True}),
        (b'{"stream_options":{"include_usage":false,"x":1}}', {"include_usage": True, "x": 1}),
        (b'{"stream\\u005foptions":{"include_usage":null}}', {"include_usage": True}),
        (b'{"user":"\\u0041","stream":true}', {"include_usage": True}),
        (
            b'{"stream_options":{"continuous_usage_stats":false}}',
            {"include_usage": True, "continuous_usage_stats": False},
        ),
    ],
)
def test_usage_is_asked_for(body: bytes, options: dict[str, object]) -> None:
    """Whatever the client wrote in the options, the pod finds include_usage, and once."""
    asked = ask_for_usage(body)
    assert asked is not None
    assert msgspec.json.decode(asked)["stream_options"] == options
    assert asked.count(b"options") == 1


def test_other_values_keep_their_bytes() -> None:
    """Numbers and texts go to the pod as the client wrote them."""
    body = b'{"temperature": 1.50, "messages":[ {"content":"a\\/b"} ],"stream_options":{}, "n":1e0}'
    asked = ask_for_usage(body)
    assert asked is not None
    for part in (b"1.50", b'[ {"content":"a\\/b"} ]', b"1e0"):
        assert part in asked


@pytest.mark.parametrize(
    "options",
    [b'{"continuous_usage_stats":true}', b'"yes"', b"[1]", b'{"continuous_usage_stats":1}'],
)
def test_what_is_left_alone(options: bytes) -> None:
    """Continuous usage would change with it, and what is no object is the engine's to refuse."""
    assert ask_for_usage(b'{"stream":true,"stream_options":%b}' % options) is None
