"""Reading request bodies: what is found in them, and how wrong ones are refused."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from calinix.core.prompt import Endpoint, ParsedBody, read_body
from calinix.core.requests import Work
from calinix.errors import BadRequest

JSON_ENDPOINTS = [e for e in Endpoint if e not in (Endpoint.GET, Endpoint.OTHER_POST)]


def read(endpoint: Endpoint, **body: Any) -> ParsedBody:
    """Reads these fields."""
    return read_body(endpoint, msgspec.json.encode(body))


def chat(*messages: Any, **body: Any) -> bytes:
    """The prompt of a chat."""
    return read(Endpoint.CHAT, messages=list(messages), **body).prompt


def user(content: Any, **fields: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": content, **fields}


def refusal(endpoint: Endpoint, body: bytes) -> BadRequest:
    """How this body is refused."""
    with pytest.raises(BadRequest) as caught:
        read_body(endpoint, body)
    return caught.value


def test_chat_fields_are_found() -> None:
    """Everything that routing and the gateway need of a chat is read from it."""
    parsed = read(
        Endpoint.CHAT,
        model="m",
        messages=[user("hi")],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=5,
        max_completion_tokens=7,
        prompt_cache_key="key",
        user="me",
        cache_salt="salt",
        temperature=0.5,
    )
    assert parsed == ParsedBody(
        model="m",
        stream=True,
        include_usage=True,
        prompt=b"\xffuser\xfethi",
        max_output_tokens=7,
        session_key="key",
        user="me",
        cache_salt=b"salt",
    )


def test_a_body_that_says_little_gives_defaults() -> None:
    """Nothing but messages is needed in a chat."""
    assert read(Endpoint.CHAT, messages=[]) == ParsedBody()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("max_tokens", "16", 16), ("stream", "true", True), ("max_tokens", 16.0, 16)],
)
def test_what_engines_read_leniently_is_read_alike(
    field: str, value: object, expected: object
) -> None:
    """Engines take "16" for 16: such a body is not refused here."""
    parsed = read(Endpoint.CHAT, messages=[], **{field: value})
    assert expected in (parsed.max_output_tokens, parsed.stream)


def test_text_stays_text_where_it_looks_like_something_else() -> None:
    """Lenient reading never turns a prompt "null" or "5" into anything else."""
    assert chat(user("null")) == b"\xffuser\xfetnull"
    assert read(Endpoint.COMPLETIONS, prompt="5").prompt == b"5"
    assert read(Endpoint.COMPLETIONS, prompt=["null", "7"]).prompt == b"null"


def test_tools_come_first_and_whitespace_does_not_count() -> None:
    """Tools are rendered before the messages, and equal tools give equal bytes."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = chat(user("a"), tools=tools)
    assert with_tools.endswith(chat(user("a")))
    assert with_tools != chat(user("a"))
    spaced = b'{"messages":[{"role":"user","content":"a"}],"tools": ' + msgspec.json.format(
        msgspec.json.encode(tools), indent=4
    )
    assert read_body(Endpoint.CHAT, spaced + b"}").prompt == with_tools
    assert chat(user("a"), tools=[]) == chat(user("a"), tools=None) == chat(user("a"))


def test_a_string_is_one_text_part() -> None:
    """A content as string and as single text part is the same prompt; two parts are not one."""
    part = {"type": "text", "text": "hello"}
    hinted = {**part, "cache_control": {"type": "ephemeral"}}
    assert chat(user("hello")) == chat(user([part])) == chat(user([hinted]))
    halves = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert chat(user(halves)) != chat(user("hello"))


def test_media_enter_by_digest() -> None:
    """Different images give different keys, equal ones equal keys, and no image is copied."""

    def picture(data: str) -> bytes:
        url = {"url": f"data:image/png;base64,{data}"}
        return chat(user([{"type": "image_url", "image_url": url}, {"type": "text", "text": "?"}]))

    assert picture("A" * 100_000) == picture("A" * 100_000)
    assert picture("A" * 100_000) != picture("A" * 99_999 + "B")
    assert len(picture("A" * 100_000)) < 2000
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    assert chat(user([sound])) != chat(user([]))


def test_parts_of_unknown_kinds_are_kept_apart() -> None:
    """A kind that is not known here still makes a key of its own."""
    one, other = ({"type": "hologram", "hologram": value} for value in ("a", "b"))
    assert chat(user([one])) != chat(user([other])) != chat(user([]))
    assert chat(user("x"), user([one])).startswith(chat(user("x")))


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "n"},
        {"tool_call_id": "t"},
        {"reasoning_content": "r"},
        {"reasoning": "r"},
        {"refusal": "no"},
        {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"function_call": {"name": "f"}},
        {"audio": {"id": "a"}},
    ],
)
def test_every_field_that_is_rendered_is_in_the_key(fields: dict[str, Any]) -> None:
    """Messages that differ in one field that templates render differ in their key."""
    assert chat(user("a", **fields)) != chat(user("a"))


def test_responses_and_chat_agree() -> None:
    """Instructions and a plain input are a system and a user message."""
    parsed = read(
        Endpoint.RESPONSES,
        model="m",
        instructions="be nice",
        input="hi",
        max_output_tokens=9,
        previous_response_id="resp_1",
    )
    assert parsed.prompt == chat({"role": "system", "content": "be nice"}, user("hi"))
    assert parsed.max_output_tokens == 9
    assert parsed.previous_response_id == "resp_1"
    listed = read(
        Endpoint.RESPONSES, input=[user([{"type": "input_text", "text": "hi"}], type="message")]
    )
    assert listed.prompt == chat(user("hi"))


def test_items_of_responses_are_in_the_key() -> None:
    """Calls and their outputs are told apart; items of unknown kinds too."""
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    output = {"type": "function_call_output", "call_id": "c", "output": "42"}
    other = {"type": "web_search_call", "id": "w", "action": {"query": "q"}}
    keys = {
        read(Endpoint.RESPONSES, input=[user("a"), *items]).prompt
        for items in (
            [], [call], [call, output], [call, {**output, "output": "43"}], [other],
            [{**other, "id": "x"}], [{**call, "arguments": "[]"}],
        )
    }  # fmt: skip
    assert len(keys) == 7


def test_anthropic_messages_are_read() -> None:
    """`system`, blocks, tool use and results, metadata's user."""
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}]}
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 3,
        "system": [{"type": "text", "text": "be nice"}],
        "messages": [user("hi"), {"role": "assistant", "content": [use]}, user([result])],
        "metadata": {"user_id": "u"},
    }
    parsed = read(Endpoint.MESSAGES, **body)
    assert parsed.user == "u"
    assert parsed.max_output_tokens == 3
    assert parsed.prompt.startswith(chat({"role": "system", "content": "be nice"}, user("hi")))
    changed = {**result, "content": [{"type": "text", "text": "2"}]}
    messages = [user("hi"), {"role": "assistant", "content": [use]}, user([changed])]
    other = read(Endpoint.MESSAGES, **{**body, "messages": messages})
    assert other.prompt != parsed.prompt
    image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    assert len(read(Endpoint.MESSAGES, messages=[user([image])]).prompt) > 100


def test_completions_prompts() -> None:
    """Strings, token ids, and lists of either by their first element; the rest counts as load."""
    token_bytes = array("I", [1, 2, 70000]).tobytes()
    assert read(Endpoint.COMPLETIONS, prompt="abc").prompt == b"abc"
    tokens = read(Endpoint.COMPLETIONS, prompt=[1, 2, 70000])
    assert (tokens.prompt, tokens.prompt_is_tokens, tokens.other_bytes) == (token_bytes, True, 0)
    texts = read(Endpoint.COMPLETIONS, prompt=["abc", "de", "f"])
    assert (texts.prompt, texts.prompt_is_tokens, texts.other_bytes) == (b"abc", False, 3)
    batch = read(Endpoint.COMPLETIONS, prompt=[[1, 2, 70000], [5]])
    assert (batch.prompt, batch.prompt_is_tokens, batch.other_bytes) == (token_bytes, True, 4)


@pytest.mark.parametrize("prompt", [[], [1, "a"], ["a", [1]], [-1], [2**32], [[-1]], [[1], "a"]])
def test_token_ids_that_are_none(prompt: object) -> None:
    """Empty and mixed lists and ids out of range are refused, and the field is named."""
    error = refusal(Endpoint.COMPLETIONS, msgspec.json.encode({"prompt": prompt}))
    assert error.param == "prompt"


def test_embeddings_count_all_inputs_and_leave_no_prompt() -> None:
    """Pooling work has a size and no key."""
    parsed = read(Endpoint.EMBEDDINGS, model="m", input=["abc", "de"])
    assert (parsed.prompt, parsed.other_bytes) == (b"", 5)
    assert read(Endpoint.EMBEDDINGS, input=[[1, 2], [3]]).other_bytes == 12
    rerank = read(Endpoint.POOLING_LIKE, model="m", query="abc", documents=["d" * 100, "e" * 50])
    assert rerank.model == "m"
    assert 150 <= rerank.other_bytes <= 175
    assert rerank.prompt == b""


@pytest.mark.parametrize(
    ("endpoint", "work"),
    [
        (Endpoint.CHAT, Work.GENERATE),
        (Endpoint.MESSAGES, Work.GENERATE),
        (Endpoint.EMBEDDINGS, Work.POOLING),
        (Endpoint.POOLING_LIKE, Work.POOLING),
        (Endpoint.OTHER_POST, Work.MEAN),
        (Endpoint.GET, Work.NONE),
    ],
)
def test_how_each_endpoint_counts(endpoint: Endpoint, work: Work) -> None:
    """Each kind of request counts as its kind of load."""
    assert endpoint.work is work


@pytest.mark.parametrize("endpoint", JSON_ENDPOINTS)
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe{\x00}\x00", b'{"model":"\xff"}',
        b'{"model":"\\ud800"}', b'{"model": 1 "x"}', b"\xef\xbb\xbf{}", b"{" + b'"a":{' * 100_000,
        b'{"x":' + b"[" * 100_000, b'{"messages":[' + b'{"content":[' * 50_000,
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(endpoint: Endpoint, body: bytes) -> None:
    """Malformed, truncated, mis-encoded or absurdly nested bodies are 400, never a crash."""
    error = refusal(endpoint, body)
    assert error.status == 400
    assert error.message


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (Endpoint.CHAT, b"{}", "messages"),
        (Endpoint.CHAT, b'{"messages":null}', "messages"),
        (Endpoint.CHAT, b'{"messages":{}}', "messages"),
        (Endpoint.CHAT, b'{"messages":[{"role":5}]}', "messages[0].role"),
        (Endpoint.CHAT, b'{"messages":[{"role":"u"},{"content":7}]}', "messages[1].content"),
        (Endpoint.CHAT, b'{"messages":[{"content":[7]}]}', "messages[0].content[0]"),
        (Endpoint.CHAT, b'{"messages":[],"max_tokens":"many"}', "max_tokens"),
        (Endpoint.CHAT, b'{"messages":[],"stream":{}}', "stream"),
        (Endpoint.CHAT, b'{"messages":[],"model":[]}', "model"),
        (Endpoint.COMPLETIONS, b"{}", "prompt"),
        (Endpoint.COMPLETIONS, b'{"prompt":{}}', "prompt"),
        (Endpoint.COMPLETIONS, b'{"prompt":[true]}', "prompt[0]"),
        (Endpoint.RESPONSES, b"{}", "input"),
        (Endpoint.MESSAGES, b"{}", "messages"),
        (Endpoint.MESSAGES, b'{"messages":[],"system":5}', "system"),
        (Endpoint.EMBEDDINGS, b"{}", "input"),
        (Endpoint.EMBEDDINGS, b'{"input":5}', "input"),
    ],
)
def test_a_wrong_field_is_named(endpoint: Endpoint, body: bytes, param: str) -> None:
    """The refusal says which field is missing or wrong, in the message and as `param`."""
    error = refusal(endpoint, body)
    assert error.param == param
    assert param in error.message


def test_invalid_utf8_in_tools_is_refused() -> None:
    """The separators cannot be smuggled in through a part that is taken over as JSON."""
    refusal(Endpoint.CHAT, b'{"messages":[],"tools":[{"name":"\xff"}]}')
    refusal(Endpoint.CHAT, b'{"messages":[{"role":"a","tool_calls":["\xfe"]}]}')


@pytest.mark.parametrize("endpoint", [e for e in Endpoint if e is not Endpoint.GET])
@pytest.mark.parametrize(
    "field",
    [
        b'"kv_transfer_params":{}', b'"kv_transfer_params":null', b'"ec_transfer_params":1',
        b'"bootstrap_room":1', b'"bootstrap_host":"h"', b'"bootstrap_anything":0',
        b'"vllm_xargs":{"kv_transfer_params":{}}', b'"vllm_xargs":{"bootstrap_room":3}',
        rb'"kv\u005ftransfer_params":{}', rb'"\u0062ootstrap_new":{}',
        rb'"vllm_xargs":{"k\u0076_transfer_params":{}}',
        rb'"\u0076llm_xargs":{"ec_transfer_params":{}}',
        b'"kv_transfer_params":{},"kv_transfer_params":null',
    ],
)  # fmt: skip
def test_transfer_fields_are_seen(endpoint: Endpoint, field: bytes) -> None:
    """However a client writes a transfer field, it is noticed."""
    needed = b'"messages":[],"prompt":"","input":"",'
    assert read_body(endpoint, b"{" + needed + field + b"}").has_transfer_fields
    assert read_body(endpoint, b"{" + needed + b'"foo":1,' + field + b"}").has_transfer_fields


@pytest.mark.parametrize("endpoint", [e for e in Endpoint if e is not Endpoint.GET])
def test_other_fields_are_no_transfer_fields(endpoint: Endpoint) -> None:
    """Fields that only look alike, and other members of vllm_xargs, are left alone."""
    body = b'{"messages":[],"prompt":"kv_transfer_params","input":"","vllm_xargs":{"a":1},"x":{}}'
    assert not read_body(endpoint, body).has_transfer_fields
    nested = b'{"messages":[],"prompt":"","input":"","y":{"kv_transfer_params":{}}}'
    assert not read_body(endpoint, nested).has_transfer_fields


def test_uploads_pass_unread() -> None:
    """A POST that is no JSON is nobody's mistake."""
    assert read_body(Endpoint.OTHER_POST, b"--boundary\r\n{") == ParsedBody()
    assert read_body(Endpoint.OTHER_POST, b"") == ParsedBody()
    assert read_body(Endpoint.GET, b"anything") == ParsedBody()


@pytest.mark.parametrize("text", ['{"kv_transfer_params":{}}', ' {"model":"m"', '\n{"model":"m",}'])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be", "utf-8-sig"])
def test_what_an_engine_may_read_must_be_readable_here(text: str, encoding: str) -> None:
    """JSON in an encoding that engines guess, but that is not read here, is refused."""
    refusal(Endpoint.OTHER_POST, text.encode(encoding))


def test_other_posts_tell_what_they_can() -> None:
    """A JSON body of an unknown kind still has a model, and its types are the pod's affair."""
    parsed = read(Endpoint.OTHER_POST, model="m", stream=True, user="u", messages=5)
    assert (parsed.model, parsed.stream, parsed.user) == ("m", True, "u")
    assert read(Endpoint.OTHER_POST, model=5).model == ""


def test_a_session_key_is_never_read_from_text() -> None:
    """`"user":` or a cache key inside a prompt is text."""
    parsed = read(Endpoint.CHAT, messages=[user('{"user":"x","prompt_cache_key":"y"}')])
    assert parsed.user is None
    assert parsed.session_key is None
