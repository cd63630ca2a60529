"""SGLang's dialect: its answers, its errors and what it says of itself, where vLLM's differ.

Fields and their order are those of SGLang 0.5.23's own definitions.
"""

# ruff: noqa: ARG002  one signature for all
from __future__ import annotations

from calinix.sim.mock_answers import (
    DONE,
    ChatAnswer,
    Choice,
    CompletionAnswer,
    Json,
    Tally,
    encode,
    event,
)
from calinix.sim.mock_requests import EngineError, Reader
from calinix.sim.pod_model import PodModel

VERSION = "0.5.23"
_METADATA = {"weight_version": "default"}


def error_body(error: EngineError) -> bytes:
    """An error as the body of an answer."""
    return encode(_error(error))


def error_event(error: EngineError) -> bytes:
    """The same inside a stream that has begun as a 200."""
    return event({"error": _error(error)})


def _error(error: EngineError) -> Json:
    return {
        "object": "error",
        "message": error.message,
        "type": error.error_type,
        "param": error.param,
        "code": error.status,
    }


def _usage(tally: Tally) -> Json:
    return {
        "prompt_tokens": tally.prompt_tokens,
        "total_tokens": tally.prompt_tokens + tally.output_tokens,
        "completion_tokens": tally.output_tokens,
        "prompt_tokens_details": {"cached_tokens": tally.cached_tokens},
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


class SglangChatAnswer(ChatAnswer):
    """/v1/chat/completions."""

    prefix = ""
    head_waits = True

    def error_body(self, error: EngineError) -> bytes:
        """An error in the place of the answer."""
        return error_body(error)

    def error_event(self, error: EngineError) -> bytes:
        """An error in a stream that has begun."""
        return error_event(error)

    def opening(self, choices: list[Choice], tally: Tally) -> list[bytes]:
        """The roles, with the first token."""
        delta = _delta("assistant", "")
        return [self._event(self._choice(choice, delta, None)) for choice in choices]

    def token(self, choice: Choice, at: int, tally: Tally) -> bytes:
        """The event of one token; the reason of the end has one of its own."""
        return self._event(self._choice(choice, _delta(None, choice.pieces[at]), None))

    def closing(self, choices: list[Choice], tally: Tally) -> list[bytes]:
        """What follows the last token."""
        reason = self.wanted.finish_reason
        ends = [self._event(self._choice(choice, _delta(None, None), reason)) for choice in choices]
        if self.wanted.include_usage:
            ends.append(event(self._head | {"choices": [], "usage": _usage(tally)}))
        return [*ends, DONE]

    def whole(self, choices: list[Choice], tally: Tally, transfer: Json | None) -> bytes:
        """The whole answer in one body."""
        made = [
            {
                "index": choice.index,
                "message": {
                    "role": "assistant",
                    "content": "".join(choice.pieces),
                    "reasoning_content": None,
                },
                "logprobs": None,
                "finish_reason": self.wanted.finish_reason,
                "matched_stop": None,
            }
            for choice in choices
        ]
        head = self._head | {"object": "chat.completion"}
        return encode(head | {"choices": made, "usage": _usage(tally), "metadata": _METADATA})

    def _event(self, choice: Json) -> bytes:
        return event(self._head | {"choices": [choice], "usage": None})

    def _choice(self, choice: Choice, delta: Json, reason: str | None) -> Json:
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": reason,
            "matched_stop": None,
        }


def _delta(role: str | None, content: str | None) -> Json:
    return {"role": role, "content": content, "reasoning_content": None, "tool_calls": None}


class SglangCompletionAnswer(CompletionAnswer):
    """/v1/completions."""

    prefix = ""
    head_waits = True

    def error_body(self, error: EngineError) -> bytes:
        """An error in the place of the answer."""
        return error_body(error)

    def error_event(self, error: EngineError) -> bytes:
        """An error in a stream that has begun."""
        return error_event(error)

    def token(self, choice: Choice, at: int, tally: Tally) -> bytes:
        """The event of one token."""
        last = at + 1 == len(choice.ids)
        reason = self.wanted.finish_reason if last else None
        made = self._made(choice, choice.pieces[at], reason)
        return event(self._head | {"choices": [made], "usage": None})

    def closing(self, choices: list[Choice], tally: Tally) -> list[bytes]:
        """What follows the last token."""
        if not self.wanted.include_usage:
            return [DONE]
        return [event(self._head | {"choices": [], "usage": _usage(tally)}), DONE]

    def whole(self, choices: list[Choice], tally: Tally, transfer: Json | None) -> bytes:
        """The whole answer in one body."""
        made = [
            self._made(choice, "".join(choice.pieces), self.wanted.finish_reason)
            for choice in choices
        ]
        rest = {"choices": made, "usage": _usage(tally), "metadata": _METADATA}
        return encode(self._head | rest)

    def _made(self, choice: Choice, text: str, reason: str | None) -> Json:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": reason,
            "matched_stop": None,
        }


def model_list(reader: Reader, created_s: int) -> Json:
    """/v1/models."""
    data = [
        {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "sglang",
            "root": name,
            "parent": None if name == reader.models[0] else reader.models[0],
            "max_model_len": reader.max_model_len if name == reader.models[0] else None,
        }
        for name in reader.models
    ]
    return {"object": "list", "data": data}


def server_info(reader: Reader, model: PodModel, role: str, bootstrap_port: int) -> Json:
    """/server_info: what an operator or a router wants of the many settings."""
    figures = model.figures
    return {
        "model_path": reader.models[0],
        "served_model_name": reader.models[0],
        "tokenizer_path": reader.models[0],
        "context_length": reader.max_model_len,
        "page_size": figures.block_size,
        "tp_size": 1,
        "dp_size": 1,
        "disaggregation_mode": "null" if role == "single" else role,
        "disaggregation_bootstrap_port": bootstrap_port,
        "max_total_num_tokens": figures.kv_capacity_tokens,
        "internal_states": [{"last_gen_throughput": 0.0}],
        "version": VERSION,
    }


def model_info(reader: Reader, role: str) -> Json:
    """/model_info."""
    return {
        "model_path": reader.models[0],
        "served_model_name": reader.models[0],
        "tokenizer_path": reader.models[0],
        "is_generation": True,
        "weight_version": "default",
        "disaggregation_mode": "null" if role == "single" else role,
    }


def metrics_page(model: PodModel, name: str, role: str, started_s: float) -> bytes:
    """/metrics: the gauges and counters that tell of load and cache."""
    counters = model.counters
    engine_type = "unified" if role == "single" else role
    labels = f'engine_type="{engine_type}",model_name="{name}",tp_rank="0"'
    capacity = model.figures.kv_capacity_tokens
    used = round(model.kv_usage * capacity)
    hit_rate = counters.cached_tokens / max(1, counters.prompt_tokens)
    lines = [
        "# HELP process_start_time_seconds Start time of the process since unix epoch.",
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started_s}",
    ]
    for metric, kind, text, value in (
        ("num_running_reqs", "gauge", "The number of running requests.", model.running),
        ("num_queue_reqs", "gauge", "The number of requests in the queue.", model.waiting),
        ("max_total_num_tokens", "gauge", "Maximum total number of tokens.", capacity),
        ("page_size", "gauge", "Tokens of a page.", model.figures.block_size),
        ("num_used_tokens", "gauge", "The number of used tokens.", used),
        ("token_usage", "gauge", "The token usage.", model.kv_usage),
        ("cache_hit_rate", "gauge", "The prefix cache hit rate.", hit_rate),
        ("prompt_tokens_total", "counter", "Prefill tokens.", counters.prompt_tokens),
        ("cached_tokens_total", "counter", "Cached prompt tokens.", counters.cached_tokens),
        ("generation_tokens_total", "counter", "Generation tokens.", counters.output_tokens),
    ):
        lines += [
            f"# HELP sglang:{metric} {text}",
            f"# TYPE sglang:{metric} {kind}",
            f"sglang:{metric}{{{labels}}} {float(value)}",
        ]
    return ("\n".join(lines) + "\n").encode()
