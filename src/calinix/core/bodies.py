"""The shapes of request bodies, as far as they are read: fields not named here pass unseen."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

Maybe = Raw | UnsetType
TokenOrText = str | list[int | str | list[int]] | None

TRANSFER_FIELDS = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        # SGLang: which rank has the prompt's KV. A wrong one leaves a decode pod waiting.
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "data_parallel_rank",
    }
)
TRANSFER_PREFIX = "bootstrap_"


def is_transfer_field(name: str) -> bool:
    """Whether a field of this name steers KV transfers: only the router may set it."""
    return name in TRANSFER_FIELDS or name.startswith(TRANSFER_PREFIX)


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class Metadata(msgspec.Struct):
    """Anthropic's `metadata`."""

    user_id: str | None = None


class Body(msgspec.Struct):
    """What every body may have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    kv_transfer_params: Maybe = UNSET
    ec_transfer_params: Maybe = UNSET
    bootstrap_host: Maybe = UNSET
    bootstrap_port: Maybe = UNSET
    bootstrap_room: Maybe = UNSET
    vllm_xargs: Maybe = UNSET

    def has_transfer(self) -> bool:
        """Whether a transfer field named here is there, at the top or in `vllm_xargs`."""
        return (
            self.kv_transfer_params is not UNSET
            or self.ec_transfer_params is not UNSET
            or self.bootstrap_room is not UNSET
            or self.bootstrap_host is not UNSET
            or self.bootstrap_port is not UNSET
            or (self.vllm_xargs is not UNSET and names_transfer(self.vllm_xargs))
        )


def may_repeat_extra(body: bytes) -> bool:
    """Whether a body that has `vllm_xargs` may have it twice.

    Of a repeated name parsers here see the last one alone, so what an earlier one holds has to be
    taken out unseen. In escapes the name may be hidden.
    """
    return body.count(b"xargs") > 1 or b"\\u00" in body


def names_transfer(raw: Raw) -> bool:
    """Whether an object has a transfer field."""
    octets = bytes(raw)
    return octets[:1] == b"{" and any(
        map(is_transfer_field, msgspec.json.decode(octets, type=dict[str, Raw]))
    )


class Part(msgspec.Struct):
    """One part of a content, OpenAI's and Anthropic's kinds.

    Hints such as cache_control do not change the prompt and are not read.
    """

    type: str = ""
    text: str | None = None
    # Media: only a digest of these enters the key.
    image_url: Maybe = UNSET
    input_audio: Maybe = UNSET
    audio_url: Maybe = UNSET
    video_url: Maybe = UNSET
    file: Maybe = UNSET
    file_id: Maybe = UNSET
    file_data: Maybe = UNSET
    file_url: Maybe = UNSET
    source: Maybe = UNSET
    # Tools and reasoning, as parts.
    id: str | None = None
    name: str | None = None
    input: Maybe = UNSET
    tool_use_id: str | None = None
    content: str | list[Part] | None = None
    thinking: str | None = None
    data: str | None = None
    refusal: str | None = None


Content = str | list[Part] | None


class Message(msgspec.Struct):
    """One message of a chat, or one item of a response's input."""

    role: str = ""
    content: Content = None
    type: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Maybe = UNSET
    function_call: Maybe = UNSET
    audio: Maybe = UNSET
    tool_call_id: str | None = None
    # Items of /v1/responses.
    call_id: str | None = None
    arguments: str | None = None
    output: Content = None
    summary: Maybe = UNSET
    encrypted_content: str | None = None


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[Message] | None = None
    tools: Maybe = UNSET
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class CompletionsBody(Body):
    """POST /v1/completions."""

    prompt: TokenOrText = None
    prompt_embeds: Maybe = UNSET
    max_tokens: int | None = None


class ResponsesBody(Body):
    """POST /v1/responses."""

    input: str | list[Message] | None = None
    instructions: str | None = None
    tools: Maybe = UNSET
    max_output_tokens: int | None = None
    previous_response_id: str | None = None


class MessagesBody(Body):
    """POST /v1/messages (Anthropic)."""

    messages: list[Message] | None = None
    system: Content = None
    tools: Maybe = UNSET
    max_tokens: int | None = None
    metadata: Metadata | None = None


class EmbeddingsBody(Body):
    """POST /v1/embeddings."""

    input: TokenOrText = None
    messages: Maybe = UNSET


_FIRST = (
    "model",
    "messages",
    "prompt",
    "input",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
)
"""What clients usually send first: the decoder looks for each field behind the one before."""
_USUAL = (
    "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logprobs", "top_logprobs", "logit_bias",
    "response_format", "tool_choice", "parallel_tool_calls", "metadata", "store", "reasoning",
    "reasoning_effort", "chat_template_kwargs", "min_tokens", "ignore_eos", "echo",
    "encoding_format", "dimensions", "stop_sequences", "thinking", "text", "include",
)  # fmt: skip
"""Fields without meaning for routing that clients usually send."""

_T = TypeVar("_T", bound=Body)


def closed_form(shape: type[_T]) -> type[_T]:
    """The fields of `shape` and the usual further ones; no others, transfer fields included.

    It has no methods. `vllm_xargs` is there: what is in it has to be looked at.
    """
    own = {one.name: (one.name, one.type, one.default) for one in msgspec.structs.fields(shape)}
    names = dict.fromkeys([*(name for name in _FIRST if name in own), *_USUAL, *own])
    closed: Any = msgspec.defstruct(
        f"Closed{shape.__name__}",
        [own.get(name, (name, Maybe, UNSET)) for name in names if not is_transfer_field(name)],
        forbid_unknown_fields=True,
    )
    return closed  # type: ignore[no-any-return]


class ParsedBody(msgspec.Struct, frozen=True, gc=False):
    """What a body says, as far as routing and the gateway need it."""

    model: str = ""
    stream: bool = False
    include_usage: bool = False
    """The client asked for a usage chunk at the end of the stream."""
    prompt: bytes = b""
    """Canonical bytes, or little-endian u32 token ids when `prompt_is_tokens`."""
    prompt_is_tokens: bool = False
    other_bytes: int = 0
    """Bytes of inputs beside `prompt` (batches, pooling; 4 a token id): load, never a key."""
    max_output_tokens: int | None = None
    session_key: str | None = None
    """The body's `prompt_cache_key`."""
    user: str | None = None
    cache_salt: bytes = b""
    previous_response_id: str | None = None
    has_transfer_fields: bool = False
    """The client sent fields that steer KV transfers; they must not reach a pod."""
