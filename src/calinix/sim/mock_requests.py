"""What a mock pod understands of a request, and the errors that vLLM answers otherwise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import msgspec

from calinix.errors import CalinixError
from calinix.sim.words import Tokenizer

Body = dict[str, Any]
Turns = list[tuple[str, str]]

DEFAULT_COMPLETION_TOKENS = 16
_MAX_REPORTED_INPUT = 200
_MAX_TOKEN_ID = (1 << 32) - 1


class EngineError(CalinixError):
    """A refusal in vLLM's shape: `{"error": {message, type, param, code}}`."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        error_type: str = "BadRequestError",
        param: str | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.status = status
        self.error_type = error_type
        self.param = param

    def body(self, *, anthropic: bool = False) -> bytes:
        """The JSON body; Anthropic's messages API has a shape of its own."""
        error: dict[str, object] = {"message": self.message, "type": self.error_type}
        if anthropic:
            return msgspec.json.encode({"type": "error", "error": error})
        return msgspec.json.encode({"error": error | {"param": self.param, "code": self.status}})


class InvalidFieldError(EngineError):
    """The validator's error for one field, as vLLM words it."""

    def __init__(self, kind: str, where: str, text: str, given: object, **more: object):
        if isinstance(given, dict | list):
            given = f"<{type(given).__name__} of {len(given)} items>"
        elif isinstance(given, str) and len(given) > _MAX_REPORTED_INPUT:
            given = given[:_MAX_REPORTED_INPUT] + "...[truncated]"
        entry = {"type": kind, "loc": where, "msg": text, "input": given, **more}
        super().__init__(f"1 validation error:\n  {entry}", 400, "Bad Request", where)


def parse_body(content_type: bytes | None, body: bytes) -> Body:
    """The JSON object of a POST. Raises EngineError as vLLM's validation does."""
    media = (content_type or b"").partition(b";")[0].strip().lower()
    if media != b"application/json":
        raise EngineError(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            400,
            "Bad Request",
        )
    try:
        parsed = json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        position = error.pos if isinstance(error, json.JSONDecodeError) else 0
        raise InvalidFieldError(
            "json_invalid", f"body.{position}", "JSON decode error", {}, ctx={"error": reason}
        ) from None
    if not isinstance(parsed, dict):
        raise InvalidFieldError(
            "model_attributes_type",
            "body",
            "Input should be a valid dictionary or object to extract fields from",
            parsed,
        )
    return parsed


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_CHECKS: dict[str, tuple[Callable[[object], bool], str, str]] = {
    "int": (
        _is_int,
        "int_parsing",
        "Input should be a valid integer, unable to parse string as an integer",
    ),
    "float": (
        lambda value: isinstance(value, float) or _is_int(value),
        "float_parsing",
        "Input should be a valid number, unable to parse string as a number",
    ),
    "bool": (
        lambda value: isinstance(value, bool),
        "bool_parsing",
        "Input should be a valid boolean, unable to interpret input",
    ),
    "str": (lambda value: isinstance(value, str), "string_type", "Input should be a valid string"),
    "list": (lambda value: isinstance(value, list), "list_type", "Input should be a valid list"),
    "dict": (
        lambda value: isinstance(value, dict),
        "dict_type",
        "Input should be a valid dictionary",
    ),
}

_FIELDS = {
    "model": "str", "stream": "bool", "stream_options": "dict", "n": "int", "max_tokens": "int",
    "max_completion_tokens": "int", "max_output_tokens": "int", "min_tokens": "int",
    "temperature": "float", "top_p": "float", "ignore_eos": "bool", "return_token_ids": "bool",
    "cache_salt": "str", "kv_transfer_params": "dict", "ec_transfer_params": "dict",
    "vllm_xargs": "dict", "messages": "list", "tools": "list",
}  # fmt: skip


def check_fields(body: Body, *required: str) -> None:
    """Raises EngineError for the first required field that is missing or known one ill-typed."""
    for name in required:
        if name not in body:
            raise InvalidFieldError("missing", f"body.{name}", "Field required", body)
    for name, kind in _FIELDS.items():
        value = body.get(name)
        if value is None:
            continue
        holds, code, text = _CHECKS[kind]
        if not holds(value):
            raise InvalidFieldError(code, f"body.{name}", text, value)


class Wanted(msgspec.Struct, kw_only=True):
    """A generation request, understood: its prompts and how long the answers may be."""

    model: str
    prompts: list[list[int]]
    """Token ids of each prompt."""
    choices: int = 1
    """Answers for each prompt (`n`)."""
    max_tokens: int
    """Tokens of each answer."""
    finish_reason: str
    """"length" when the client set the bound, "stop" when the answer ends by itself."""
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    salt: str = ""
    transfer: dict[str, object] | None = None
    """The request's `kv_transfer_params`."""


class Reader:
    """Reads generation requests for one pod: its models, its context length, its tokenizer."""

    def __init__(
        self, models: tuple[str, ...], max_model_len: int, answer_tokens: int, words: Tokenizer
    ):
        self.models = models
        self.max_model_len = max_model_len
        self.answer_tokens = answer_tokens
        self.words = words

    def model_of(self, body: Body) -> str:
        """The model asked for, by default the pod's own. Raises EngineError 404 when unknown."""
        model = str(body.get("model") or self.models[0])
        if model not in self.models:
            raise EngineError(
                f"The model `{model}` does not exist. Valid aliases: {', '.join(self.models)}.",
                404,
                "NotFoundError",
                "model",
            )
        return model

    def chat(self, body: Body) -> Wanted:
        """Reads a /v1/chat/completions body."""
        check_fields(body, "messages")
        prompt = self.words.encode_chat(chat_turns(body))
        limit = "max_completion_tokens"
        if body.get(limit) is None:
            limit = "max_tokens"
        return self._wanted(body, [prompt], limit, body.get(limit))

    def completion(self, body: Body) -> Wanted:
        """Reads a /v1/completions body: a text, token ids, or a list of either."""
        check_fields(body, "prompt")
        prompts = self._prompts(body["prompt"])
        limit = body.get("max_tokens")
        given = DEFAULT_COMPLETION_TOKENS if limit is None else limit
        return self._wanted(body, prompts, "max_tokens", given)

    def message(self, body: Body) -> Wanted:
        """Reads a /v1/messages body (Anthropic's)."""
        check_fields(body, "model", "messages", "max_tokens")
        turns = chat_turns(body)
        if body.get("system"):
            turns.insert(0, ("system", content_text(body["system"])))
        prompt = self.words.encode_chat(turns)
        return self._wanted(body, [prompt], "max_tokens", body["max_tokens"])

    def response(self, body: Body, earlier: Turns) -> Wanted:
        """Reads a /v1/responses body; `earlier` are the turns of `previous_response_id`."""
        check_fields(body, "input")
        prompt = self.words.encode_chat(earlier + response_turns(body))
        limit = body.get("max_output_tokens")
        return self._wanted(body, [prompt], "max_output_tokens", limit)

    def _prompts(self, prompt: object) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self.words.encode(prompt)]
        if isinstance(prompt, list) and prompt:
            if _are_token_ids(prompt):
                return [prompt]
            if all(isinstance(one, str) for one in prompt):
                return [self.words.encode(one) for one in prompt]
            if all(isinstance(one, list) and _are_token_ids(one) for one in prompt):
                return prompt
        raise InvalidFieldError(
            "string_type", "body.prompt", "Input should be a valid string", prompt
        )

    def _wanted(
        self, body: Body, prompts: list[list[int]], limit_name: str, limit: int | None
    ) -> Wanted:
        model = self.model_of(body)
        choices = 1 if body.get("n") is None else body["n"]
        if choices < 1:
            raise EngineError(f"n must be at least 1, got {choices}.")
        self.check_lengths(prompts, limit_name, limit)
        longest = max(len(prompt) for prompt in prompts)
        room = self.max_model_len - longest
        asked = limit
        if asked is None:
            asked = room if body.get("ignore_eos") else self.answer_tokens
        options = body.get("stream_options") or {}
        return Wanted(
            model=model,
            prompts=prompts,
            choices=choices,
            max_tokens=min(asked, room),
            finish_reason="stop" if limit is None and asked < room else "length",
            stream=bool(body.get("stream")),
            include_usage=bool(options.get("include_usage")),
            continuous_usage=bool(options.get("continuous_usage_stats")),
            return_token_ids=bool(body.get("return_token_ids")),
            salt=body.get("cache_salt") or "",
            transfer=body.get("kv_transfer_params"),
        )

    def check_lengths(
        self, prompts: list[list[int]], name: str = "", limit: int | None = None
    ) -> None:
        """Raises EngineError for an empty or too long prompt, or a bound on the answer that is."""
        context = self.max_model_len
        if limit is not None and limit > context:
            raise EngineError(
                f"{name}={limit} cannot be greater than max_model_len={context}. Please request "
                f"fewer output tokens. (parameter={name}, value={limit})",
                param=name,
            )
        if limit is not None and limit < 1:
            raise EngineError(f"{name} must be at least 1, got {limit}.", param=name)
        if any(not prompt for prompt in prompts):
            raise EngineError("The decoder prompt cannot be empty")
        longest = max(len(prompt) for prompt in prompts)
        if longest >= context:
            # The tokenizer stops one token after the bound, so more than that is never counted.
            seen = context + 1
            raise EngineError(
                f"This model's maximum context length is {context} tokens. However, your prompt "
                f"contains at least {seen} input tokens, which exceeds this limit even without "
                "any output tokens. Please reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={seen})",
                param="input_tokens",
            )


def _are_token_ids(values: list[Any]) -> bool:
    return all(_is_int(value) and 0 <= value <= _MAX_TOKEN_ID for value in values)


def content_text(content: object) -> str:
    """The text of a message's content; media parts stand for themselves by their digest."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, sort_keys=True)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            digest = hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=8)
            text = f"<{digest.hexdigest()}>"
        texts.append(text)
    return "".join(texts)


def chat_turns(body: Body) -> Turns:
    """(role, text) of each message, behind the tools."""
    turns: Turns = []
    if body.get("tools"):
        turns.append(("tools", json.dumps(body["tools"], sort_keys=True)))
    for index, message in enumerate(body["messages"]):
        if not isinstance(message, dict):
            raise InvalidFieldError(
                "dict_type", f"body.messages.{index}", "Input should be a valid dictionary", message
            )
        if "role" not in message:
            raise InvalidFieldError(
                "missing", f"body.messages.{index}.role", "Field required", message
            )
        text = content_text(message.get("content"))
        if message.get("tool_calls"):
            text += json.dumps(message["tool_calls"], sort_keys=True)
        turns.append((str(message["role"]), text))
    return turns


def response_turns(body: Body) -> Turns:
    """(role, text) of the instructions and of each input item of a /v1/responses body."""
    turns: Turns = []
    if body.get("instructions"):
        turns.append(("system", content_text(body["instructions"])))
    given = body["input"]
    if isinstance(given, str):
        return [*turns, ("user", given)]
    if not isinstance(given, list):
        raise InvalidFieldError(
            "string_type", "body.input", "Input should be a valid string", given
        )
    for item in given:
        role = item.get("role", item.get("type", "user")) if isinstance(item, dict) else "user"
        content = item.get("content", item) if isinstance(item, dict) else item
        turns.append((str(role), content_text(content)))
    return turns
