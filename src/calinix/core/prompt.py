"""Reads a request body: what routing needs to know of it, and the prompt as canonical bytes.

Every JSON body is decoded once, into typed structs (core/bodies.py), and what is not JSON or has
a wrong type is a BadRequest that names the field. The canonical bytes are core/canonical.py's.
"""

from __future__ import annotations

import enum
import re
import sys
from array import array
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

import msgspec
from msgspec import UNSET

from calinix.core import canonical
from calinix.core.bodies import (
    Body,
    ChatBody,
    CompletionsBody,
    EmbeddingsBody,
    MessagesBody,
    ParsedBody,
    ResponsesBody,
    TokenOrText,
    closed_form,
    is_transfer_field,
    may_repeat_extra,
    names_transfer,
)
from calinix.core.requests import Work
from calinix.errors import BadRequest, PayloadTooLarge

__all__ = ["Endpoint", "ParsedBody", "read_body"]


class Endpoint(enum.Enum):
    """What kind of request a path takes, and how it counts as load."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    POOLING_LIKE = "pooling_like"
    """Rerank, score, classify, pooling."""
    OTHER_POST = "other_post"
    GET = "get"

    # Members are unique, and Enum's own hash is a Python function that hashes the name.
    __hash__ = object.__hash__

    @property
    def work(self) -> Work:
        """How a request counts as load."""
        return _WORK[self]


_WORK = {
    Endpoint.CHAT: Work.GENERATE,
    Endpoint.COMPLETIONS: Work.GENERATE,
    Endpoint.RESPONSES: Work.GENERATE,
    Endpoint.MESSAGES: Work.GENERATE,
    Endpoint.EMBEDDINGS: Work.POOLING,
    Endpoint.POOLING_LIKE: Work.POOLING,
    Endpoint.OTHER_POST: Work.MEAN,
    Endpoint.GET: Work.NONE,
}


_NOTHING = ParsedBody()
_T = TypeVar("_T", bound=Body)

_PATH = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
# What may stand before the first brace of JSON in any of the encodings that engines guess.
_BEFORE_JSON: Final = b" \t\r\n\x00\xff\xfe\xef\xbb\xbf"
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
COUNTED_BYTES: Final = 1 << 20
"""Longer JSON bodies are counted through before they are decoded."""
MAX_CONTAINERS: Final = 262_144
MAX_MEMBERS: Final = 2_000_000
"""Objects and lists, and members of objects, in a body: decoded, `{}` is a hundred times as large.
Characters of texts are counted too, which no prompt that an engine takes has so many of."""


class _Reader:
    """The two decoders of one shape.

    The closed form knows the fields that clients usually send and refuses all others, so a body
    that it accepts has no transfer field at the top; only for other bodies are the names looked
    at one by one, which is a second pass over the body.
    """

    def __init__(self, shape: type[_T]):
        # Engines take "16" for 16 and "true" for true (pydantic's lax mode): so is it here.
        self._closed = msgspec.json.Decoder(closed_form(shape), strict=False).decode
        self._open = msgspec.json.Decoder(shape, strict=False).decode

    def keyed(self, body: bytes, key: Callable[..., bytes]) -> tuple[Any, bool, bytes]:
        """(the struct, whether it has transfer fields, its prompt by `key`). Raises BadRequest.

        `key` takes the struct, the body and the texts that were lifted out of it.
        """
        short, texts = canonical.lifted(body)
        if texts:
            try:
                parsed: Body = self._closed(short)
                return parsed, _extra_names_transfer(parsed, body), key(parsed, body, texts)
            except _UNREADABLE:
                pass  # what is wrong with it shows where it is read as it came
        parsed, transfer = self.read(body)
        try:
            return parsed, transfer, key(parsed, body, {})
        except _UNREADABLE as error:
            _refuse(error)

    def read(self, body: bytes) -> tuple[Any, bool]:
        """(the struct, whether it has transfer fields). Raises BadRequest."""
        try:
            try:
                parsed: Body = self._closed(body)
            except msgspec.ValidationError:
                parsed = self._open(body)
                return parsed, (
                    any(map(is_transfer_field, _members(body)))
                    or parsed.has_transfer()
                    or (parsed.vllm_xargs is not UNSET and may_repeat_extra(body))
                )
            return parsed, _extra_names_transfer(parsed, body)
        except _UNREADABLE as error:
            _refuse(error)


def _extra_names_transfer(parsed: Body, body: bytes) -> bool:
    extra = parsed.vllm_xargs
    return extra is not UNSET and (names_transfer(extra) or may_repeat_extra(body))


_CHAT = _Reader(ChatBody)
_COMPLETIONS = _Reader(CompletionsBody)
_RESPONSES = _Reader(ResponsesBody)
_MESSAGES = _Reader(MessagesBody)
_EMBEDDINGS = _Reader(EmbeddingsBody)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode


def read_body(endpoint: Endpoint, body: bytes) -> ParsedBody:
    """Reads `body`. Raises BadRequest, with the field in `param` where one is to blame.

    Of one that holds too many values: PayloadTooLarge.
    """
    if len(body) > COUNTED_BYTES:
        _check_values(body)
    return _READERS[endpoint](body)


def _check_values(body: bytes) -> None:
    """Refuses what would take seconds, and gigabytes, to decode; uploads may hold any bytes."""
    if body.lstrip(_BEFORE_JSON)[:1] == b"{" and (
        body.count(b"{") + body.count(b"[") > MAX_CONTAINERS or body.count(b":") > MAX_MEMBERS
    ):
        raise PayloadTooLarge("the body holds too many objects and lists")


def _chat(body: bytes) -> ParsedBody:
    parsed, transfer, prompt = _CHAT.keyed(body, canonical.chat)
    if parsed.messages is None:
        _missing("messages")
    limit = parsed.max_completion_tokens
    if limit is None:
        limit = parsed.max_tokens
    return _parsed(parsed, transfer, prompt, limit)


def _messages(body: bytes) -> ParsedBody:
    parsed, transfer, prompt = _MESSAGES.keyed(body, canonical.messages)
    if parsed.messages is None:
        _missing("messages")
    user = parsed.metadata.user_id if parsed.metadata is not None else None
    return _parsed(parsed, transfer, prompt, parsed.max_tokens, user=user)


def _responses(body: bytes) -> ParsedBody:
    parsed, transfer, prompt = _RESPONSES.keyed(body, canonical.responses)
    if parsed.input is None and parsed.previous_response_id is None:
        _missing("input")
    return _parsed(
        parsed,
        transfer,
        prompt,
        parsed.max_output_tokens,
        previous_response_id=parsed.previous_response_id,
    )


def _completions(body: bytes) -> ParsedBody:
    parsed, transfer, prompt = _COMPLETIONS.keyed(body, canonical.completions)
    is_tokens, other_bytes = False, 0
    if parsed.prompt is None and parsed.prompt_embeds is UNSET:
        _missing("prompt")
    if type(parsed.prompt) is list:
        prompt, is_tokens, other_bytes = _first_input(parsed.prompt, "prompt")
    return _parsed(
        parsed,
        transfer,
        prompt,
        parsed.max_tokens,
        prompt_is_tokens=is_tokens,
        other_bytes=other_bytes,
    )


def _embeddings(body: bytes) -> ParsedBody:
    parsed, transfer = _EMBEDDINGS.read(body)
    if parsed.input is not None:
        first, _, other_bytes = _first_input(parsed.input, "input")
        other_bytes += len(first)
    elif parsed.messages is not UNSET:
        other_bytes = len(bytes(parsed.messages))
    else:
        _missing("input")
    return _parsed(parsed, transfer, b"", None, other_bytes=other_bytes)


_POOLED = ("input", "query", "queries", "documents", "text_1", "text_2", "items", "messages")


def _pooling_like(body: bytes) -> ParsedBody:
    parsed, members = _other(body)
    other_bytes = sum(len(bytes(members[name])) for name in _POOLED if name in members)
    return msgspec.structs.replace(parsed, other_bytes=other_bytes)


def _other_post(body: bytes) -> ParsedBody:
    # Uploads are no JSON. But what an engine might take for JSON, in whatever encoding, has to be
    # JSON for us too: else it could carry transfer fields past us.
    if body.lstrip(_BEFORE_JSON)[:1] != b"{":
        return _NOTHING
    return _other(body)[0]


def _other(body: bytes) -> tuple[ParsedBody, dict[str, msgspec.Raw]]:
    """Reads what any JSON body may have. Types are the pod's affair."""
    try:
        members = _members(body)
        return (
            ParsedBody(
                model=_string(members.get("model")),
                stream=_bytes(members.get("stream")) == b"true",
                session_key=_string(members.get("prompt_cache_key")) or None,
                user=_string(members.get("user")) or None,
                cache_salt=_string(members.get("cache_salt")).encode(),
                has_transfer_fields=any(map(is_transfer_field, members))
                or any(map(is_transfer_field, _extra_names(members.get("vllm_xargs"))))
                or ("vllm_xargs" in members and may_repeat_extra(body)),
            ),
            members,
        )
    except _UNREADABLE as error:
        _refuse(error)


def _get(body: bytes) -> ParsedBody:  # noqa: ARG001  one shape for all readers
    return _NOTHING


_READERS = {
    Endpoint.CHAT: _chat,
    Endpoint.COMPLETIONS: _completions,
    Endpoint.RESPONSES: _responses,
    Endpoint.MESSAGES: _messages,
    Endpoint.EMBEDDINGS: _embeddings,
    Endpoint.POOLING_LIKE: _pooling_like,
    Endpoint.OTHER_POST: _other_post,
    Endpoint.GET: _get,
}


def _parsed(
    body: Body,
    transfer: bool,
    prompt: bytes,
    max_output_tokens: int | None,
    prompt_is_tokens: bool = False,
    other_bytes: int = 0,
    user: str | None = None,
    previous_response_id: str | None = None,
) -> ParsedBody:
    options = body.stream_options
    salt = body.cache_salt
    return ParsedBody(
        body.model or "",
        body.stream is True,
        options is not None and options.include_usage is True,
        prompt,
        prompt_is_tokens,
        other_bytes,
        max_output_tokens,
        body.prompt_cache_key or None,
        user or body.user or None,
        salt.encode() if salt else b"",
        previous_response_id,
        transfer,
    )


def _first_input(value: TokenOrText, param: str) -> tuple[bytes, bool, int]:
    """(bytes of the first input, whether they are token ids, bytes of all other inputs)."""
    if value is None:
        return b"", False, 0
    if isinstance(value, str):
        return value.encode(), False, 0
    if not value:
        raise BadRequest(f"{param} is an empty list", param=param)
    first = value[0]
    if isinstance(first, int):
        return _token_bytes(value, param), True, 0
    # Without a loop in Python: a body of empty texts has millions of them.
    if len(set(map(type, value))) > 1:
        raise BadRequest(f"{param} mixes texts and token ids", param=param)
    sized: Any = value
    others = sum(map(len, sized)) - len(first)
    if isinstance(first, str):
        return first.encode(), False, others
    return _token_bytes(first, param), True, 4 * others


def _token_bytes(tokens: list[Any], param: str) -> bytes:
    try:
        ids = array("I", tokens)
    except (TypeError, OverflowError) as error:
        raise BadRequest(
            f"{param}: token ids are integers from 0 to 4294967295", param=param
        ) from error
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _string(raw: msgspec.Raw | None) -> str:
    """The string, empty where there is none."""
    octets = _bytes(raw)
    return _text(octets) if octets[:1] == b'"' else ""


def _bytes(raw: msgspec.Raw | None) -> bytes:
    return b"" if raw is None else bytes(raw)


def _extra_names(raw: msgspec.Raw | None) -> dict[str, msgspec.Raw]:
    octets = _bytes(raw)
    return _members(octets) if octets[:1] == b"{" else {}


def _missing(param: str) -> NoReturn:
    raise BadRequest(f"{param} is required", param=param, code="missing_required_parameter")


def _refuse(error: Exception) -> NoReturn:
    """Turns what the decoder says into what a client can use."""
    if isinstance(error, RecursionError):
        raise BadRequest("The body is nested too deeply.") from error
    if isinstance(error, msgspec.ValidationError):
        found = _PATH.search(str(error))
        param = found[1] or None if found else None
        reason = str(error) if found is None else str(error)[: found.start()]
        where = f"{param}: " if param else "The body: "
        raise BadRequest(f"{where}{reason[:1].lower()}{reason[1:]}", param=param) from error
    raise BadRequest(f"The body is not valid JSON: {error}") from error
