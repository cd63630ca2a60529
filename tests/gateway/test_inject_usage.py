"""`gateway.injectUsage`: pods tell the usage of every stream, clients see what they asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import kit
from fleets import gateway_of
from gatewaykit import (
    CHAT,
    JSON,
    STREAM_HEAD,
    Served,
    answer,
    body_of,
    chat_body,
    chunk,
    config_of,
    outcome,
    raw_pod,
)

ON = {"gateway": {"injectUsage": True}}
SAMPLES = Path(__file__).parent.parent / "data" / "samples"
ASKED = {"include_usage": True}


def recorded(name: str) -> bytes:
    """The body of a recorded stream."""
    return (SAMPLES / f"{name}.http").read_bytes().partition(b"\r\n\r\n")[2].rstrip(b"\n") + b"\n\n"


def without_usage(body: bytes) -> bytes:
    """A recorded stream as a client sees it that did not ask."""
    usage = next(event for event in body.split(b"\n\n") if b'"choices":[]' in event)
    return body.replace(usage + b"\n\n", b"")


class Engine:
    """A script: the recorded stream, in pieces of so many bytes; with usage only where asked."""

    def __init__(self, name: str, size: int):
        self.stream = recorded(name)
        self.size = size
        self.options: list[Any] = []

    async def __call__(self, served: Served) -> None:
        """One request."""
        body = msgspec.json.decode(body_of(served.request))
        options = body.get("stream_options")
        self.options.append(options)
        shown = self.stream if options == ASKED else without_usage(self.stream)
        pieces = [shown[n : n + self.size] for n in range(0, len(shown), self.size)]
        await served.say(STREAM_HEAD, *[chunk(piece) for piece in pieces], b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, "chat_stream"), ("/v1/completions", "completion_stream")]
)
@kit.on_loop
async def test_the_extra_chunk_is_seen_here_and_nowhere_else(path: str, name: str) -> None:
    """The client's stream is the pod's without the chunk, to the byte; the plan knows the hit."""
    engine = Engine(name, 177)
    body = chat_body(stream=True) | ({"prompt": "Hello"} if "chat" not in path else {})
    async with raw_pod(engine) as pod, gateway_of(config_of(ON, a=pod)) as app:
        reply = await kit.http(app.server.port, "POST", path, body)
        assert reply.complete
        assert reply.body == without_usage(engine.stream)
        assert engine.options == [ASKED]
        found = await outcome(app, reply.headers["x-request-id"])
        assert found["promptTokens"] in (2, 27)
        assert found["cachedTokens"] == 0


@kit.on_loop
async def test_clients_that_ask_get_what_they_asked_for() -> None:
    """With include_usage of their own, or with none wanted anywhere, nothing is touched."""
    engine = Engine("chat_stream", 4096)
    async with raw_pod(engine) as pod:
        async with gateway_of(config_of(ON, a=pod)) as app:
            body = chat_body(stream=True, stream_options=ASKED)
            reply = await kit.http(app.server.port, "POST", CHAT, body)
            assert reply.body == engine.stream
            body = chat_body(stream=True, stream_options={"continuous_usage_stats": True})
            await kit.http(app.server.port, "POST", CHAT, body)
            await kit.http(app.server.port, "POST", CHAT, chat_body())
        async with gateway_of(config_of(a=pod)) as app:
            await kit.http(app.server.port, "POST", CHAT, chat_body(stream=True))
    assert engine.options == [ASKED, {"continuous_usage_stats": True}, None, None]


@kit.on_loop
async def test_answers_that_are_no_streams_pass_as_they_are() -> None:
    """An error, or a whole answer to a streamed request, keeps its bytes, usage included."""
    said = b'{"choices":[],"usage":{"prompt_tokens":9}}'

    async def whole(served: Served) -> None:
        await served.say(answer(said))

    async def refused(served: Served) -> None:
        await served.say(answer(said, b"400 Bad Request", JSON))

    for script, status in ((whole, 200), (refused, 400)):
        async with raw_pod(script) as pod, gateway_of(config_of(ON, a=pod)) as app:
            reply = await kit.http(app.server.port, "POST", CHAT, chat_body(stream=True))
            assert (reply.status, reply.body) == (status, said)
            assert reply.headers["content-length"] == str(len(said))


@kit.on_loop
async def test_a_stream_of_a_stated_length_loses_its_chunk_too() -> None:
    """The answer is then sent in chunks: its length is another one."""
    body = recorded("chat_stream")

    async def script(served: Served) -> None:
        await served.say(answer(body, headers=b"content-type: text/event-stream\r\n"))

    async with raw_pod(script) as pod, gateway_of(config_of(ON, a=pod)) as app:
        reply = await kit.http(app.server.port, "POST", CHAT, chat_body(stream=True))
        assert reply.complete
        assert reply.body == without_usage(body)


@kit.on_loop
async def test_a_stream_that_breaks_in_its_first_event_has_a_true_status() -> None:
    """What is held back was not sent: the failure is a 502, and no half event."""

    async def script(served: Served) -> None:
        await served.say(STREAM_HEAD, chunk(b'data: {"choi'), pause_s=0.05)
        served.hang_up()

    async with raw_pod(script) as pod, gateway_of(config_of(ON, a=pod)) as app:
        reply = await kit.http(app.server.port, "POST", CHAT, chat_body(stream=True))
        assert reply.status == 502
        assert b"choi" not in reply.body


@kit.on_loop
async def test_tokens_are_not_held_up() -> None:
    """A whole event reaches the client although the next one has only begun."""

    async def script(served: Served) -> None:
        await served.say(STREAM_HEAD, chunk(b'data: {"choices":[{}]}\n\ndata: {"ch'))
        await served.left()

    async with raw_pod(script) as pod, gateway_of(config_of(ON, a=pod)) as app:
        data = kit.request_bytes("POST", CHAT, chat_body(stream=True))
        exchange = await kit.Exchange.send(app.server.port, data)
        await exchange.read_until(b'data: {"choices":[{}]}\n\n')
        assert b'"ch\r\n' not in exchange.wire
        await exchange.leave()
