"""What a mock pod answers where nothing is generated: embeddings, scores, tokens, model lists."""

from __future__ import annotations

import base64
import hashlib
import struct
from array import array

from calinix.sim.mock_answers import Json
from calinix.sim.mock_requests import (
    Body,
    InvalidFieldError,
    Reader,
    chat_turns,
    check_fields,
    content_text,
)

EMBEDDING_SIZE = 8


def _numbers(ids: list[int], count: int = EMBEDDING_SIZE) -> list[float]:
    """Numbers in [-1, 1] that depend on these tokens only."""
    digest = hashlib.blake2b(array("Q", ids).tobytes(), digest_size=2 * count).digest()
    return [value / 32768 for value in struct.unpack(f"<{count}h", digest)]


def _inputs(reader: Reader, given: object, field: str) -> list[list[int]]:
    """The token ids of a text, of token ids, or of a list of either."""
    if isinstance(given, str):
        return [reader.words.encode(given)]
    if isinstance(given, list) and given:
        if all(isinstance(one, int) for one in given):
            return [given]
        if all(isinstance(one, str) for one in given):
            return [reader.words.encode(one) for one in given]
        if all(isinstance(one, list) for one in given):
            return given
    raise InvalidFieldError("string_type", f"body.{field}", "Input should be a valid string", given)


def pooling_inputs(reader: Reader, path: str, body: Body) -> list[list[int]]:
    """The sequences that a pooling request makes the pod prefill. Raises EngineError."""
    if path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        check_fields(body, "query", "documents")
        query = reader.words.encode(content_text(body["query"]))
        return [query + ids for ids in _inputs(reader, body["documents"], "documents")]
    if path in ("/score", "/v1/score"):
        first, second = ("text_1", "text_2") if "text_1" in body else ("queries", "documents")
        check_fields(body, first, second)
        left = _inputs(reader, body[first], first)
        right = _inputs(reader, body[second], second)
        left = left * len(right) if len(left) == 1 else left
        return [one + other for one, other in zip(left, right, strict=False)]
    if "messages" in body:
        check_fields(body, "messages")
        return [reader.words.encode_chat(chat_turns(body))]
    check_fields(body, "input")
    return _inputs(reader, body["input"], "input")


def pooling_answer(
    path: str, request_id: str, created_s: int, model: str, body: Body, inputs: list[list[int]]
) -> Json:
    """The answer to a pooling request, in the shape of its path."""
    tokens = sum(map(len, inputs))
    usage: Json = {"prompt_tokens": tokens, "total_tokens": tokens}
    if path.endswith("rerank"):
        documents = body["documents"] if isinstance(body["documents"], list) else [None]
        results: list[Json] = [
            {
                "index": index,
                "document": {"text": document, "multi_modal": None},
                "relevance_score": abs(_numbers(ids, 1)[0]),
            }
            for index, (ids, document) in enumerate(zip(inputs, documents, strict=False))
        ]
        results.sort(key=lambda result: -result["relevance_score"])
        top = body.get("top_n") or len(results)
        rerank_id = f"rerank-{request_id}"
        return {"id": rerank_id, "model": model, "usage": usage, "results": results[:top]}
    usage |= {"completion_tokens": 0, "prompt_tokens_details": None}
    prefix, datum = _DATA[path.rpartition("/")[2]]
    data = [{"index": index} | datum(ids, body) for index, ids in enumerate(inputs)]
    return {
        "id": f"{prefix}-{request_id}",
        "object": "list",
        "created": created_s,
        "model": model,
        "data": data,
        "usage": usage,
    }


def _embedding(ids: list[int], body: Body) -> Json:
    numbers = _numbers(ids)
    if body.get("encoding_format") != "base64":
        return {"object": "embedding", "embedding": numbers}
    packed = base64.b64encode(struct.pack(f"<{EMBEDDING_SIZE}f", *numbers)).decode()
    return {"object": "embedding", "embedding": packed}


def _score(ids: list[int], body: Body) -> Json:  # noqa: ARG001
    return {"object": "score", "score": abs(_numbers(ids, 1)[0])}


def _class(ids: list[int], body: Body) -> Json:  # noqa: ARG001
    first = abs(_numbers(ids, 1)[0])
    label = "LABEL_0" if first >= 0.5 else "LABEL_1"
    return {"label": label, "probs": [first, 1 - first], "num_classes": 2}


def _pooled(ids: list[int], body: Body) -> Json:  # noqa: ARG001
    return {"object": "pooling", "data": _numbers(ids)}


_DATA = {
    "embeddings": ("embd", _embedding),
    "score": ("embd", _score),
    "classify": ("classify", _class),
    "pooling": ("pool", _pooled),
}


def tokenize(reader: Reader, body: Body) -> Json:
    """/tokenize: the ids of a text or of a chat, and their pieces when asked."""
    if "messages" in body:
        check_fields(body, "messages")
        follows = body.get("add_generation_prompt", True)
        ids = reader.words.encode_chat(chat_turns(body), answer_follows=bool(follows))
    else:
        check_fields(body, "prompt")
        ids = reader.words.encode(content_text(body["prompt"]))
    strings = reader.words.pieces(ids) if body.get("return_token_strs") else None
    return {
        "count": len(ids),
        "max_model_len": reader.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


def detokenize(reader: Reader, body: Body) -> Json:
    """/detokenize: the text of token ids, for pieces that this pod has met."""
    check_fields(body, "tokens")
    tokens = body["tokens"]
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise InvalidFieldError("list_type", "body.tokens", "Input should be a valid list", tokens)
    return {"prompt": "".join(reader.words.pieces(tokens))}


def model_list(reader: Reader, created_s: int) -> Json:
    """/v1/models: the base model first, then its adapters."""
    base = reader.models[0]
    permission = {
        "id": "modelperm-0123456789abcdef",
        "object": "model_permission",
        "created": created_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    data = [
        {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "vllm",
            "root": name,
            "parent": None if name == base else base,
            "max_model_len": reader.max_model_len if name == base else None,
            "permission": [permission],
        }
        for name in reader.models
    ]
    return {"object": "list", "data": data}
