"""How a mock pod words what it generated in the newer APIs: responses, and Anthropic's messages."""

from __future__ import annotations

from calinix.sim.mock_answers import Answer, Choice, Json, Tally, encode
from calinix.sim.mock_requests import Body, Wanted


def named_event(name: str, data: Json) -> bytes:
    """One SSE event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(data))


class ResponseAnswer(Answer):
    """/v1/responses. The stream announces the response before there is a token."""

    prefix = "resp_"

    def __init__(self, request_id: str, created_s: int, wanted: Wanted, body: Body):
        super().__init__(request_id, created_s, wanted)
        self._body = body
        self._item_id = f"msg_{request_id}"
        self._sequence = 0

    def announced(self) -> list[bytes]:
        """The response as it begins."""
        response = self._response("in_progress", [], None, None)
        return [
            self._event("response.created", {"response": response}),
            self._event("response.in_progress", {"response": response}),
        ]

    def opening(self, choices: list[Choice], tally: Tally) -> list[bytes]:  # noqa: ARG002
        """What precedes the first token."""
        added = self._item("in_progress", [])
        part = self._place() | {"part": _output_text("")}
        return [
            self._event("response.output_item.added", {"output_index": 0, "item": added}),
            self._event("response.content_part.added", part),
        ]

    def token(self, choice: Choice, at: int, tally: Tally) -> bytes:  # noqa: ARG002
        """The event of one token."""
        data = self._place() | {"delta": choice.pieces[at], "logprobs": []}
        return self._event("response.output_text.delta", data)

    def closing(self, choices: list[Choice], tally: Tally) -> list[bytes]:
        """What follows the last token."""
        text = "".join(choices[0].pieces)
        item = self._item("completed", [_output_text(text)])
        response = self._finished(choices, tally, None)
        return [
            self._event("response.output_text.done", self._place() | {"text": text}),
            self._event("response.content_part.done", self._place() | {"part": _output_text(text)}),
            self._event("response.output_item.done", {"output_index": 0, "item": item}),
            self._event("response.completed", {"response": response}),
        ]

    def whole(self, choices: list[Choice], tally: Tally, transfer: Json | None) -> bytes:
        """The whole answer in one body."""
        return encode(self._finished(choices, tally, transfer))

    def _event(self, name: str, data: Json) -> bytes:
        numbered = {"type": name, "sequence_number": self._sequence} | data
        self._sequence += 1
        return named_event(name, numbered)

    def _place(self) -> Json:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str, content: list[Json]) -> Json:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "status": status,
        }

    def _finished(self, choices: list[Choice], tally: Tally, transfer: Json | None) -> Json:
        # What the bound on tokens cut off is incomplete: that is vLLM's rule.
        status = "incomplete" if self.wanted.finish_reason == "length" else "completed"
        item = self._item("completed", [_output_text("".join(choices[0].pieces))])
        usage = {
            "input_tokens": tally.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": tally.cached_tokens,
                "cache_write_tokens": tally.created_tokens,
                "input_tokens_per_turn": [tally.prompt_tokens],
                "cached_tokens_per_turn": [tally.cached_tokens],
            },
            "output_tokens": tally.output_tokens,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [tally.output_tokens],
                "tool_output_tokens_per_turn": [0],
            },
            "total_tokens": tally.prompt_tokens + tally.output_tokens,
        }
        return self._response(status, [item], usage, transfer)

    def _response(
        self, status: str, output: list[Json], usage: Json | None, transfer: Json | None
    ) -> Json:
        body = self._body
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "created_at": self.created_s,
            "incomplete_details": incomplete,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": self.wanted.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": body.get("temperature", 1.0),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p", 1.0),
            "background": False,
            "max_output_tokens": self.wanted.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": body.get("previous_response_id"),
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": body.get("text"),
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage,
            "user": body.get("user"),
            "kv_transfer_params": transfer,
            "ec_transfer_params": None,
        }


def _output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class MessageAnswer(Answer):
    """/v1/messages, in Anthropic's shape."""

    prefix = "chatcmpl-"

    def opening(self, choices: list[Choice], tally: Tally) -> list[bytes]:  # noqa: ARG002
        """What precedes the first token."""
        message: Json = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self.wanted.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": tally.prompt_tokens, "output_tokens": 0},
        }
        block = {"type": "text", "text": ""}
        return [
            named_event("message_start", {"type": "message_start", "message": message}),
            named_event(
                "content_block_start",
                {"type": "content_block_start", "content_block": block, "index": 0},
            ),
        ]

    def token(self, choice: Choice, at: int, tally: Tally) -> bytes:  # noqa: ARG002
        """The event of one token."""
        delta = {"type": "text_delta", "text": choice.pieces[at]}
        return named_event(
            "content_block_delta", {"type": "content_block_delta", "delta": delta, "index": 0}
        )

    def closing(self, choices: list[Choice], tally: Tally) -> list[bytes]:  # noqa: ARG002
        """What follows the last token."""
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        ended = {"type": "message_delta", "delta": delta, "usage": _anthropic_usage(tally)}
        return [
            named_event("content_block_stop", {"type": "content_block_stop", "index": 0}),
            named_event("message_delta", ended),
            named_event("message_stop", {"type": "message_stop"}),
        ]

    def whole(self, choices: list[Choice], tally: Tally, transfer: Json | None) -> bytes:
        """The whole answer in one body."""
        message = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": "".join(choices[0].pieces)}],
            "model": self.wanted.model,
            "stop_reason": self._stop_reason(),
            "usage": _anthropic_usage(tally),
        }
        # This API leaves out what is null.
        return encode(message if transfer is None else message | {"kv_transfer_params": transfer})

    def _stop_reason(self) -> str:
        return "max_tokens" if self.wanted.finish_reason == "length" else "end_turn"


def _anthropic_usage(tally: Tally) -> Json:
    """Anthropic's input tokens leave out what was read from or written to the cache."""
    rest = tally.prompt_tokens - tally.cached_tokens - tally.created_tokens
    return {
        "input_tokens": max(0, rest),
        "output_tokens": tally.output_tokens,
        "cache_creation_input_tokens": tally.created_tokens,
        "cache_read_input_tokens": tally.cached_tokens,
    }
