"""What a chat request becomes before a template sees it: facts of vLLM 0.32.0, one by one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from calinix.engines.vllm_chat import (
    MAX_MESSAGES,
    ChatRequest,
    UnusualError,
    conversation,
    read_chat,
    read_completion,
    tools,
    variables,
)


def read(**fields: Any) -> ChatRequest:
    """A request that can be read."""
    fields.setdefault("messages", [{"role": "user", "content": "hi"}])
    found = read_chat(json.dumps({"model": "m", **fields}).encode())
    assert found is not None
    return found


def told(*messages: dict[str, Any], as_parts: bool = False) -> list[dict[str, Any]]:
    """The messages as a template gets them."""
    return conversation(read(messages=list(messages)), as_parts=as_parts)


def part(text: str, **more: Any) -> dict[str, Any]:
    """A part that is text."""
    return {"type": "text", "text": text, **more}


def call(arguments: str, **more: Any) -> dict[str, Any]:
    """A tool call, its fields in a client's order."""
    function = {"name": "f", "arguments": arguments}
    return {"type": "function", "id": "c", "function": function, **more}


def test_texts_stay_texts() -> None:
    """Role and content pass; no content is an empty text; what is unknown is dropped."""
    assert told({"content": "a", "role": "user", "foo": 1}) == [{"role": "user", "content": "a"}]
    assert told({"role": "assistant", "content": None}) == [{"role": "assistant", "content": ""}]
    assert told({"role": "any", "content": "x", "name": "n", "task": "t"}) == [
        {"role": "any", "content": "x", "name": "n", "task": "t"}
    ]


def test_parts_are_flattened_with_line_breaks() -> None:
    """Text parts become one text, a line each; empty ones leave none."""
    content = [part("a"), part(""), {"type": "input_text", "text": "b"}]
    content += [{"type": "refusal", "refusal": "c"}, {"type": "thinking", "thinking": "d"}]
    assert told({"role": "user", "content": content}) == [{"role": "user", "content": "a\nb\nc\nd"}]
    assert told({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


def test_templates_that_read_parts_get_parts() -> None:
    """Texts become one part, parts keep fields of their own behind type and text, tools a text."""
    given = {"role": "user", "content": [part("a", x=1), part("")]}
    assert told({"role": "user", "content": "t"}, given, as_parts=True) == [
        {"role": "user", "content": [part("t")]},
        {"role": "user", "content": [part("a", x=1), part("")]},
    ]
    answer = {"role": "tool", "content": [part("a"), part("b")], "tool_call_id": "c"}
    assert told(answer, as_parts=True) == [{"role": "tool", "content": "a\nb", "tool_call_id": "c"}]


def test_tool_calls_have_objects_for_arguments() -> None:
    """Arguments are parsed, anything but an object is an empty one; fields get vLLM's order."""
    calls = [call('{"b": 1, "a": [1.0]}', index=0), call("[1]"), call("{bad"), call("")]
    (found,) = told({"role": "assistant", "content": "x", "tool_calls": calls})
    assert json.dumps(found["tool_calls"][0]) == json.dumps(
        {
            "id": "c",
            "function": {"arguments": {"b": 1, "a": [1.0]}, "name": "f"},
            "type": "function",
            "index": 0,
        }
    )
    assert [one["function"]["arguments"] for one in found["tool_calls"][1:]] == [{}, {}, {}]
    assert "tool_calls" not in told({"role": "assistant", "content": "x", "tool_calls": []})[0]
    assert "tool_calls" not in told({"role": "user", "content": "x", "tool_calls": calls})[0]


def test_reasoning_has_two_names() -> None:
    """`reasoning`, else `reasoning_content`, is given under both, of assistants alone."""
    asked: dict[str, Any] = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    assert told(asked)[0]["reasoning"] == told(asked)[0]["reasoning_content"] == "r"
    assert told({**asked, "reasoning": "s"})[0]["reasoning_content"] == "s"
    assert "reasoning" not in told({**asked, "role": "user"})[0]


def test_a_changing_line_of_system_texts_is_dropped() -> None:
    """The billing line that one client writes anew each time is no part of the prompt."""
    line = "x-anthropic-billing-header: 1"
    assert told({"role": "system", "content": f"{line}\nrest"})[0]["content"] == "rest"
    assert told({"role": "system", "content": line}, as_parts=True)[0]["content"] == []
    assert told({"role": "user", "content": line})[0]["content"] == line


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        {"role": "user", "content": 5},
        {"role": "user", "content": ["a"]},
        {"role": "user", "content": [{"text": "no type"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "user", "content": [part("a", image_url="u")]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "user", "content": "a", "name": 1},
        {"role": "assistant", "content": "a", "tool_calls": [{"id": "c", "type": "custom"}]},
        {"role": "assistant", "content": "a", "tool_calls": {"a": 1}},
        {"role": "assistant", "content": "a", "tool_calls": [call("[" * 100_000)]},
        {"role": "developer", "content": "a", "tools": [{}]},
    ],
)
def test_what_is_not_understood_is_not_guessed(message: dict[str, Any]) -> None:
    """Media, unknown parts and wrong types have no text here."""
    with pytest.raises(UnusualError):
        told(message)


def test_tools_in_the_engines_order() -> None:
    """Fields of tools get vLLM's order and defaults; unknown ones are dropped."""
    given = [
        {"function": {"parameters": {"z": 1}, "foo": 1, "name": "f"}, "type": "function", "x": 2},
        {"function": {"name": "g", "strict": True, "description": "d"}, "defer_loading": False},
    ]
    found = tools(read(tools=given))
    assert json.dumps(found) == json.dumps(
        [
            {
                "type": "function",
                "function": {"name": "f", "description": None, "parameters": {"z": 1}},
            },
            {
                "type": "function",
                "function": {
                    "name": "g",
                    "description": "d",
                    "parameters": None,
                    "strict": True,
                    "defer_loading": False,
                },
                "defer_loading": False,
            },
        ]
    )
    assert tools(read()) is None
    refused: list[list[dict[str, Any]]] = [
        [], [{"type": "custom"}], [{"function": {}}], [{"function": {"name": 1}}],
    ]  # fmt: skip
    for bad in refused:
        with pytest.raises(UnusualError):
            tools(read(tools=bad))


def test_variables_of_a_template() -> None:
    """The request's own fields go over its chat_template_kwargs, these over the engine's."""
    found = variables(
        read(
            chat_template_kwargs={"a": 1, "b": None, "add_generation_prompt": False},
            reasoning_effort="none",
            documents=[{"title": "t"}],
        ),
        {"a": 0, "b": 2, "c": 3},
    )
    assert found == {
        "a": 1,
        "b": 2,
        "c": 3,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "enable_thinking": False,
        "reasoning_effort": "none",
        "documents": [{"title": "t"}],
    }
    kept = variables(read(reasoning_effort="low", chat_template_kwargs={"enable_thinking": 0}), {})
    assert kept["enable_thinking"] == 0
    with pytest.raises(UnusualError):
        variables(read(chat_template_kwargs={"tokenize": True}), {})


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": "x"},
        {"messages": [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)},
        {"messages": [{}], "chat_template": "x"},
        {"messages": [{}], "truncate_prompt_tokens": 5},
        {"messages": [{}], "mm_processor_kwargs": {}},
        {"messages": [{}], "continue_final_message": True},
        {"messages": [{}], "add_generation_prompt": "yes"},
    ],
)
def test_requests_without_tokens(fields: dict[str, Any]) -> None:
    """What steers the prompt in ways that are not followed here has no tokens."""
    assert read_chat(json.dumps(fields).encode()) is None


def test_completions() -> None:
    """A prompt, or a list's first, with or without special tokens; nothing else."""
    assert read_completion(b'{"prompt": "a"}') == ("a", True)
    assert read_completion(b'{"prompt": ["a", "b"], "add_special_tokens": false}') == ("a", False)
    for body in (
        b'{"prompt": [1, 2]}',
        b'{"prompt": []}',
        b"{}",
        b"nonsense",
        b'{"prompt": "a", "truncate_prompt_tokens": 3}',
        b'{"prompt": "a", "prompt_embeds": "x"}',
    ):
        assert read_completion(body) is None
