"""What vLLM hands to a model's chat template: a chat request's messages, tools and variables.

The engine does not pass a client's JSON on as it is. It flattens lists of content parts, unless
the template reads parts itself; it turns the arguments of tool calls into objects; it drops what
it does not know. Where its tokens are to be foretold, the same has to be done here. What is not
surely understood (media, unknown parts, a template of the client's own) gives None, never a guess.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

Message = dict[str, Any]

MAX_MESSAGES = 8192

_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a part that is text -> the field that holds it."""
_PART_FIELDS = frozenset(
    {
        "type", "text", "refusal", "thinking", "closed", "prompt_cache_breakpoint", "name",
        "detail", "uuid",
    }
)  # fmt: skip
"""Fields of parts that a template does not get to see."""
_MEDIA_FIELDS = frozenset(
    {
        "image_url", "image_pil", "image_embeds", "audio_url", "audio_embeds", "input_audio",
        "video_url", "video_embeds", "prompt_embeds", "file", "tool_reference", "uuid",
    }
)  # fmt: skip
_BILLING = "x-anthropic-billing-header"
"""A system text's first line that begins so is dropped: it changes with every request."""
_RESERVED = frozenset(
    {
        "conversation", "messages", "tools", "tokenize", "chat_template", "padding", "truncation",
        "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)  # fmt: skip
_UNSET = (None, "auto")


class UnusualError(ValueError):
    """The request holds what is not understood here, or what the engine will refuse."""


class ChatRequest(msgspec.Struct):
    """The fields of POST /v1/chat/completions that the prompt is made of."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    truncate_prompt_tokens: int | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class CompletionRequest(msgspec.Struct):
    """Likewise of POST /v1/completions."""

    prompt: str | list[Any] | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    prompt_embeds: Any = None


_chat = msgspec.json.Decoder(ChatRequest).decode
_completion = msgspec.json.Decoder(CompletionRequest).decode


def read_chat(body: bytes) -> ChatRequest | None:
    """The request; None where its tokens cannot be foretold."""
    try:
        request = _chat(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if (
        request.chat_template is not None
        or request.truncate_prompt_tokens is not None
        or request.mm_processor_kwargs is not None
        or not 0 < len(request.messages) <= MAX_MESSAGES
        or (request.continue_final_message and request.add_generation_prompt)
    ):
        return None
    return request


def read_completion(body: bytes) -> tuple[str, bool] | None:
    """(the prompt, whether the tokenizer's own special tokens are added); of a list, the first."""
    try:
        request = _completion(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    prompt = request.prompt
    if isinstance(prompt, list):
        prompt = prompt[0] if prompt else None
    if (
        not isinstance(prompt, str)
        or request.truncate_prompt_tokens is not None
        or request.prompt_embeds is not None
    ):
        return None
    return prompt, request.add_special_tokens


def conversation(request: ChatRequest, *, as_parts: bool) -> list[Message]:
    """The messages as a template gets them; contents as lists of parts, or as texts.

    Raises UnusualError. What is given may share its parts with the request.
    """
    found: list[Message] = []
    for message in request.messages:
        if len(message) == 2 and not as_parts:
            role, content = message.get("role"), message.get("content")
            # Nothing but a role and a text, as most messages are.
            if type(content) is str and type(role) is str and role != "system":
                found.append({"role": role, "content": content})
                continue
        found.append(_message(message, as_parts))
    return found


def variables(request: ChatRequest, defaults: dict[str, Any]) -> dict[str, Any]:
    """What else the template may read, over the engine's own `defaults`. Raises UnusualError."""
    own = dict(request.chat_template_kwargs or {})
    if not _RESERVED.isdisjoint(own):
        raise UnusualError("chat_template_kwargs steers more than the template")
    effort = request.reasoning_effort
    if effort is not None and "enable_thinking" not in own:
        own["enable_thinking"] = effort != "none"
    own |= {
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
    }
    if request.documents is not None:
        own["documents"] = request.documents
    if effort is not None:
        own["reasoning_effort"] = effort
    return defaults | {name: value for name, value in own.items() if value not in _UNSET}


def tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools, their fields in the engine's order. Raises UnusualError."""
    if request.tools is None:
        return None
    if not request.tools:
        raise UnusualError("no tools")
    return [_tool(tool) for tool in request.tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise UnusualError("a tool that is no function")
    deferred = tool.get("defer_loading")
    named: dict[str, Any] = {
        "name": _typed(function.get("name"), str),
        "description": _maybe(function.get("description"), str),
        "parameters": _maybe(function.get("parameters"), dict),
    }
    if (strict := _maybe(function.get("strict"), bool)) is not None:
        named["strict"] = strict
    own = _maybe(function.get("defer_loading"), bool)
    if (own := deferred if own is None else own) is not None:
        named["defer_loading"] = own
    found: dict[str, Any] = {"type": "function", "function": named}
    if _maybe(deferred, bool) is not None:
        found["defer_loading"] = deferred
    return found


def _message(message: Message, as_parts: bool) -> Message:
    role = _typed(message.get("role"), str)
    content = _content(message.get("content"), as_parts, is_system=role == "system")
    found: Message = {"role": role, "content": content}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls is not None:
            calls = [_call(call) for call in _typed(calls, list)]
            if calls:
                found["tool_calls"] = calls
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            found["reasoning"] = found["reasoning_content"] = _typed(reasoning, str)
    elif role == "tool":
        if "tool_call_id" in message:
            found["tool_call_id"] = _maybe(message["tool_call_id"], str)
        if isinstance(content, list):
            found["content"] = "\n".join(part["text"] for part in content)
    elif role == "developer":
        if message.get("tools") is not None:
            raise UnusualError("tools of a developer's message")
        found["tools"] = None
    for name in ("name", "task"):
        if name in message:
            found[name] = _typed(message[name], str)
    return found


def _content(content: object, as_parts: bool, is_system: bool) -> str | list[dict[str, Any]]:
    if content is None:
        content = []
    elif isinstance(content, str):
        if is_system and content.startswith(_BILLING):
            content = [{"type": "text", "text": content}]
        elif as_parts:
            return [{"type": "text", "text": content}]
        else:
            return content
    parts = [_part(part) for part in _typed(content, list)]
    if is_system:
        parts = [part for part in map(_without_billing, parts) if part is not None]
    # Of flattened parts, empty ones leave no line.
    return parts if as_parts else "\n".join(filter(None, (part["text"] for part in parts)))


def _part(part: object) -> dict[str, Any]:
    """A part that is text, as a template that reads parts gets it."""
    if not isinstance(part, dict) or not _MEDIA_FIELDS.isdisjoint(part):
        raise UnusualError("a part that is no text")
    field = _TEXT_FIELDS.get(_typed(part.get("type"), str))
    if field is None:
        raise UnusualError("a part that is no text")
    found = {"type": "text", "text": _typed(part.get(field), str)}
    if len(part) > 2:
        found |= {name: value for name, value in part.items() if name not in _PART_FIELDS}
    return found


def _without_billing(part: dict[str, Any]) -> dict[str, Any] | None:
    if not part["text"].startswith(_BILLING):
        return part
    rest = part["text"].partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _call(given: object) -> dict[str, Any]:
    """A tool call, its fields in the engine's order, its arguments an object."""
    call: dict[str, Any] = _typed(given, dict)
    function: dict[str, Any] = _typed(call.get("function"), dict)
    if call.get("type") != "function":
        raise UnusualError("a tool call that is no function's")
    arguments: object = {}
    if text := _typed(function.get("arguments"), str):
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = {}
        except RecursionError:
            raise UnusualError("arguments nested too deeply") from None
    found: dict[str, Any] = {
        "id": _typed(call.get("id"), str),
        "function": {
            "arguments": arguments if isinstance(arguments, dict) else {},
            "name": _typed(function.get("name"), str),
        },
        "type": "function",
    }
    found["function"] |= {k: v for k, v in function.items() if k not in found["function"]}
    return found | {name: value for name, value in call.items() if name not in found}


def _typed(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise UnusualError(f"not a {kind.__name__}")
    return value


def _maybe(value: Any, kind: type[Any]) -> Any:
    return None if value is None else _typed(value, kind)
