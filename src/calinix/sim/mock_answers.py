"""How a mock pod words what it generated: chat and completions, whole and as an event stream.

Fields, their order and the order of events are those of vLLM 0.32's own answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from calinix.sim.mock_requests import EngineError, Wanted

DONE = b"data: [DONE]\n\n"
FINGERPRINT = "vllm-0.32.0-calinix1"
Json = dict[str, Any]
encode = msgspec.json.encode


class Tally(msgspec.Struct, kw_only=True):
    """Tokens of one request, over all its prompts and choices."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    created_tokens: int = 0
    """Tokens of the prompt blocks that this request added to the cache."""


class Choice(msgspec.Struct, kw_only=True):
    """One generated answer."""

    index: int
    prompt: list[int]
    ids: list[int]
    pieces: list[str]


class Answer(ABC):
    """One request's answer in one dialect. Subclasses word it; the pod says when."""

    prefix = ""
    stream_type = b"text/event-stream; charset=utf-8"
    head_waits = False
    """A stream's head goes out with its first event, not before."""

    def __init__(self, request_id: str, created_s: int, wanted: Wanted):
        self.id = f"{self.prefix}{request_id}"
        self.created_s = created_s
        self.wanted = wanted

    def announced(self) -> list[bytes]:
        """Events that go out before there is a token."""
        return []

    def opening(self, choices: list[Choice], tally: Tally) -> list[bytes]:  # noqa: ARG002
        """Events that go out with the first token, before it."""
        return []

    @abstractmethod
    def token(self, choice: Choice, at: int, tally: Tally) -> bytes:
        """The event of the choice's token `at`."""

    @abstractmethod
    def closing(self, choices: list[Choice], tally: Tally) -> list[bytes]:
        """Events after the last token."""

    def error_body(self, error: EngineError) -> bytes:
        """An error in the place of the answer."""
        return error.body()

    def error_event(self, error: EngineError) -> bytes:
        """An error in a stream that has begun."""
        return b"data: " + error.body() + b"\n\n"

    @abstractmethod
    def whole(self, choices: list[Choice], tally: Tally, transfer: Json | None) -> bytes:
        """The body of an answer that is not streamed."""


def event(data: object) -> bytes:
    """One SSE event."""
    return b"data: " + encode(data) + b"\n\n"


class _OpenAi(Answer):
    """What chat and completions share."""

    chunk_object = ""

    def __init__(self, request_id: str, created_s: int, wanted: Wanted):
        super().__init__(request_id, created_s, wanted)
        self._head = {
            "id": self.id,
            "object": self.chunk_object,
            "created": created_s,
            "model": wanted.model,
        }
        # Every token event but the last starts and ends alike: only the piece is encoded anew.
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def token(self, choice: Choice, at: int, tally: Tally) -> bytes:
        """The event of one token."""
        wanted = self.wanted
        last = at + 1 == len(choice.ids)
        if not last and not wanted.continuous_usage and not wanted.return_token_ids:
            frame = self._frames.get(choice.index)
            if frame is None:
                marked = event(self._head | {"choices": [self._chunk(choice, "\x00", None, last)]})
                start, end = marked.split(b'"\\u0000"')
                frame = self._frames[choice.index] = (start, end)
            return frame[0] + encode(choice.pieces[at]) + frame[1]
        ids = [choice.ids[at]] if wanted.return_token_ids else None
        chunk = self._chunk(choice, choice.pieces[at], ids, last)
        if at == 0 and "prompt_token_ids" in chunk and wanted.return_token_ids:
            chunk["prompt_token_ids"] = choice.prompt
        data = self._head | {"choices": [chunk]}
        if wanted.continuous_usage:
            data["usage"] = _usage_so_far(tally)
        if last and not wanted.include_usage:
            data["system_fingerprint"] = FINGERPRINT
        return event(data)

    def closing(self, choices: list[Choice], tally: Tally) -> list[bytes]:  # noqa: ARG002
        """What follows the last token."""
        if not self.wanted.include_usage:
            return [DONE]
        usage = _usage(tally) | {"prompt_tokens_details": self._stream_details(tally)}
        data = self._head | {"choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}
        return [event(data), DONE]

    @abstractmethod
    def _chunk(self, choice: Choice, piece: str, ids: list[int] | None, last: bool) -> Json: ...

    @abstractmethod
    def _stream_details(self, tally: Tally) -> Json: ...


class ChatAnswer(_OpenAi):
    """/v1/chat/completions."""

    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def opening(self, choices: list[Choice], tally: Tally) -> list[bytes]:
        """What precedes the first token."""
        events = []
        for choice in choices:
            delta = {"role": "assistant", "content": ""}
            chunk = {
                "index": choice.index,
                "delta": delta,
                "logprobs": None,
                "finish_reason": None,
            }
            data: Json = self._head | {"choices": [chunk]}
            if self.wanted.continuous_usage:
                nothing_yet = msgspec.structs.replace(tally, output_tokens=0)
                data["usage"] = _usage_so_far(nothing_yet)
            ids = choice.prompt if self.wanted.return_token_ids else None
            events.append(event(data | {"prompt_token_ids": ids, "prompt_text": None}))
        return events

    def whole(self, choices: list[Choice], tally: Tally, transfer: Json | None) -> bytes:
        """The whole answer in one body."""
        wanted = self.wanted
        made = [
            {
                "index": choice.index,
                "message": {
                    "role": "assistant",
                    "content": "".join(choice.pieces),
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": wanted.finish_reason,
                "stop_reason": None,
                "token_ids": choice.ids if wanted.return_token_ids else None,
                "routed_experts": None,
            }
            for choice in choices
        ]
        details = self._stream_details(tally) | {"multimodal_tokens": None}
        return encode(
            {
                "id": self.id,
                "object": "chat.completion",
                "created": self.created_s,
                "model": wanted.model,
                "choices": made,
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": _whole_usage(tally, details),
                "prompt_logprobs": None,
                "prompt_token_ids": choices[0].prompt if wanted.return_token_ids else None,
                "prompt_text": None,
                "kv_transfer_params": transfer,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def _chunk(self, choice: Choice, piece: str, ids: list[int] | None, last: bool) -> Json:
        chunk: Json = {"index": choice.index, "delta": {"content": piece}, "logprobs": None}
        if last:
            chunk |= {"finish_reason": self.wanted.finish_reason, "stop_reason": None}
        else:
            chunk["finish_reason"] = None
        return chunk | {"token_ids": ids}

    def _stream_details(self, tally: Tally) -> Json:
        return {
            "cached_tokens": tally.cached_tokens,
            "created_cache_tokens": tally.created_tokens,
        }


class CompletionAnswer(_OpenAi):
    """/v1/completions."""

    prefix = "cmpl-"
    chunk_object = "text_completion"

    def whole(self, choices: list[Choice], tally: Tally, transfer: Json | None) -> bytes:
        """The whole answer in one body."""
        wanted = self.wanted
        made = [
            {
                "index": choice.index,
                "text": "".join(choice.pieces),
                "logprobs": None,
                "finish_reason": wanted.finish_reason,
                "stop_reason": None,
                "token_ids": choice.ids if wanted.return_token_ids else None,
                "prompt_logprobs": None,
                "prompt_token_ids": choice.prompt if wanted.return_token_ids else None,
                "routed_experts": None,
            }
            for choice in choices
        ]
        details = {
            "cached_tokens": tally.cached_tokens,
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        }
        return encode(
            self._head
            | {
                "choices": made,
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": _whole_usage(tally, details),
                "kv_transfer_params": transfer,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def _chunk(self, choice: Choice, piece: str, ids: list[int] | None, last: bool) -> Json:
        return {
            "index": choice.index,
            "text": piece,
            "logprobs": None,
            "finish_reason": self.wanted.finish_reason if last else None,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": ids,
        }

    def _stream_details(self, tally: Tally) -> Json:
        return {"cached_tokens": tally.cached_tokens}


def _usage(tally: Tally) -> Json:
    return {
        "prompt_tokens": tally.prompt_tokens,
        "total_tokens": tally.prompt_tokens + tally.output_tokens,
        "completion_tokens": tally.output_tokens,
    }


def _usage_so_far(tally: Tally) -> Json:
    return _usage(tally) | {"completion_tokens_details": None}


def _whole_usage(tally: Tally, details: Json) -> Json:
    return _usage(tally) | {
        "prompt_tokens_details": details,
        "completion_tokens_details": None,
    }
