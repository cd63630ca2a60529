"""The mock pod's other APIs: metrics, responses, Anthropic's messages, pooling, keys, adapters."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kit
from calinix.engines.usage import Usage, read_usage
from calinix.sim.mock_pod import MockPod
from calinix.sim.pod_model import PodFigures

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Say something nice to everyone here, please"}]}


def tiny(**settings: Any) -> MockPod:
    """A pod with a short context."""
    return MockPod(model="tiny", max_model_len=1024, **settings)


@kit.on_loop
async def test_metrics_have_the_names_that_are_read() -> None:
    """Every metric that a router reads has its real name, labels and true value."""
    async with tiny(figures=PodFigures(token_delay_s=0.002, block_size=32)) as pod:
        await kit.http(pod.port, "POST", CHAT, HELLO | {"max_tokens": 5})
        page = (await kit.http(pod.port, "GET", "/metrics")).body.decode()
        prompt = pod.model.counters.prompt_tokens
    both = 'engine="0",model_name="tiny"'
    for line in (
        f"vllm:num_requests_running{{{both}}} 0.0",
        f"vllm:num_requests_waiting{{{both}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{both}}} 0.0",
        f"vllm:prompt_tokens_total{{{both}}} {float(prompt)}",
        f"vllm:generation_tokens_total{{{both}}} 5.0",
        f'vllm:prompt_tokens_by_source_total{{{both},source="local_compute"}} {float(prompt)}',
        f'vllm:prompt_tokens_by_source_total{{{both},source="local_cache_hit"}} 0.0',
        f'vllm:prompt_tokens_by_source_total{{{both},source="external_kv_transfer"}} 0.0',
        f"vllm:time_to_first_token_seconds_count{{{both}}} 1.0",
        f"vllm:inter_token_latency_seconds_count{{{both}}} 4.0",
        f"vllm:request_queue_time_seconds_count{{{both}}} 1.0",
        f"vllm:request_prefill_time_seconds_count{{{both}}} 1.0",
        f'vllm:inter_token_latency_seconds_bucket{{{both},le="0.001"}} 0.0',
        f'vllm:inter_token_latency_seconds_bucket{{{both},le="0.005"}} 4.0',
    ):
        assert line in page.splitlines()
    assert 'block_size="32"' in page
    assert 'num_gpu_blocks="16384"' in page
    assert "process_start_time_seconds " in page


@kit.on_loop
async def test_responses_are_kept_on_the_pod_that_made_them() -> None:
    """Whole or streamed, a response can be read and continued there, and nowhere else."""
    path = "/v1/responses"
    body = {"input": "Hello", "max_output_tokens": 5}
    async with tiny() as pod, tiny() as other:
        first = (await kit.http(pod.port, "POST", path, body)).json()
        stream = await kit.http(pod.port, "POST", path, body | {"stream": True})
        events = [event.split("\ndata: ") for event in stream.events()]
        kinds = [name.removeprefix("event: ") for name, _ in events]
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * 5,
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        numbered = [json.loads(data) for _, data in events]
        assert [one["sequence_number"] for one in numbered] == list(range(len(events)))
        last = numbered[-1]["response"]
        assert last["output"][0]["content"] == first["output"][0]["content"]
        assert last["status"] == "incomplete"
        usage = read_usage(stream.body)
        assert usage == Usage(last["usage"]["input_tokens"], 5, 0)

        for one in (first, last):
            read = await kit.http(pod.port, "GET", f"{path}/{one['id']}")
            assert read.json() == one
        more = body | {"previous_response_id": first["id"]}
        continued = (await kit.http(pod.port, "POST", path, more)).json()
        assert continued["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        for reply in (
            await kit.http(other.port, "GET", f"{path}/{first['id']}"),
            await kit.http(other.port, "POST", path, more),
        ):
            assert reply.status == 404
            assert reply.json()["error"] == {
                "message": f"Response with id '{first['id']}' not found.",
                "type": "invalid_request_error",
                "param": "response_id",
                "code": 404,
            }
        unstored = (await kit.http(pod.port, "POST", path, body | {"store": False})).json()
        assert (await kit.http(pod.port, "GET", f"{path}/{unstored['id']}")).status == 404


@kit.on_loop
async def test_anthropic_messages() -> None:
    """Whole and streamed messages in Anthropic's shape, with its way of counting input tokens."""
    path = "/v1/messages"
    body = {**HELLO, "model": "tiny", "max_tokens": 3, "system": "Be kind. " * 20}
    async with tiny() as pod:
        whole = (await kit.http(pod.port, "POST", path, body)).json()
        reply = await kit.http(pod.port, "POST", path, body | {"stream": True})
        unknown = await kit.http(pod.port, "POST", path, body | {"model": "nope"})
        missing = await kit.http(pod.port, "POST", path, {"model": "tiny", "max_tokens": 1})
        counted = await kit.http(pod.port, "POST", f"{path}/count_tokens", body)
    assert (whole["type"], whole["role"], whole["stop_reason"]) == (
        "message",
        "assistant",
        "max_tokens",
    )
    events = [event.split("\ndata: ") for event in reply.events()]
    data = [json.loads(text) for _, text in events]
    assert [f"event: {one['type']}" for one in data] == [name for name, _ in events]
    assert [one["type"] for one in data] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(one["delta"]["text"] for one in data if one["type"] == "content_block_delta")
    assert whole["content"] == [{"type": "text", "text": text}]
    first, again = read_usage(json.dumps(whole).encode()), read_usage(reply.body)
    assert first is not None
    assert first.prompt_tokens is not None
    assert again is not None
    assert first.prompt_tokens == again.prompt_tokens == counted.json()["input_tokens"]
    assert (first.cached_tokens, again.cached_tokens) == (0, first.prompt_tokens // 16 * 16)
    assert unknown.json()["type"] == "error"
    assert unknown.json()["error"]["type"] == "NotFoundError"
    assert missing.json()["error"]["param"] == "body.messages"


@pytest.mark.parametrize(
    ("path", "body", "fields", "tokens"),
    [
        ("/v1/embeddings", {"input": "one two"}, {"index", "object", "embedding"}, 2),
        ("/v1/embeddings", {"input": [1, 2, 3]}, {"index", "object", "embedding"}, 3),
        ("/v1/embeddings", {"input": ["a", "b c"]}, {"index", "object", "embedding"}, 3),
        ("/classify", {"input": ["a", "b"]}, {"index", "label", "probs", "num_classes"}, 2),
        ("/pooling", {"input": [[1], [2, 3]]}, {"index", "object", "data"}, 3),
        ("/score", {"text_1": "a", "text_2": ["b", "c"]}, {"index", "object", "score"}, 4),
    ],
)
@kit.on_loop
async def test_pooling_like_paths(
    path: str, body: dict[str, Any], fields: set[str], tokens: int
) -> None:
    """One datum for each input, in order; prompt tokens only; the pod has prefilled them."""
    async with tiny(figures=PodFigures(prefill_tokens_per_s=10_000.0)) as pod:
        reply = (await kit.http(pod.port, "POST", path, body)).json()
        assert pod.model.counters.prompt_tokens == tokens
        assert pod.model.blocks.cached == 0
    assert [one["index"] for one in reply["data"]] == list(range(len(reply["data"])))
    assert {field for one in reply["data"] for field in one} == fields
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == tokens


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
@kit.on_loop
async def test_rerank(path: str) -> None:
    """Documents come back best first, with their index and text, cut to top_n."""
    body: dict[str, Any] = {"query": "q", "documents": ["a", "b", "c"], "top_n": 2}
    async with tiny() as pod:
        results = (await kit.http(pod.port, "POST", path, body)).json()["results"]
    assert len(results) == 2
    assert results[0]["relevance_score"] >= results[1]["relevance_score"]
    assert all(body["documents"][one["index"]] == one["document"]["text"] for one in results)


@kit.on_loop
async def test_an_api_key_is_asked_for_on_v1_only() -> None:
    """With a key, /v1 paths answer 401 as vLLM does, probes stay open."""
    async with tiny(api_key="secret") as pod:
        refused = await kit.http(pod.port, "POST", CHAT, HELLO)
        right = {"authorization": "Bearer secret"}
        assert (await kit.http(pod.port, "POST", CHAT, HELLO, right)).status == 200
        assert (await kit.http(pod.port, "GET", "/health")).status == 200
    assert (refused.status, refused.json()) == (401, {"error": "Unauthorized"})


@kit.on_loop
async def test_adapters_are_models_of_their_own() -> None:
    """A LoRA is listed with its parent, answers, and shares no cache with the base model."""
    body = {"prompt": list(range(40)), "max_tokens": 1}
    async with tiny(loras=("fine",)) as pod:
        models = (await kit.http(pod.port, "GET", "/v1/models")).json()["data"]
        assert [(one["id"], one["parent"]) for one in models] == [("tiny", None), ("fine", "tiny")]
        for name in ("tiny", "fine"):
            await kit.http(pod.port, "POST", TEXT, body | {"model": name})
        assert pod.model.counters.cached_tokens == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": ""}),
        (TEXT, {"prompt": []}),
        (TEXT, {"prompt": [1, "a"]}),
        (TEXT, {"prompt": {"a": 1}}),
        (TEXT, {"prompt": "a", "max_tokens": 0}),
        (TEXT, {"prompt": "a", "stream": "maybe"}),
        (CHAT, {"messages": ["x"]}),
        (CHAT, {"messages": [{"content": "x"}]}),
        (CHAT, b"[1]"),
        (CHAT, b"\xff"),
        (CHAT, b"[" * 100_000),
        ("/v1/responses", {"input": 7}),
        ("/v1/embeddings", {"input": None}),
        ("/detokenize", {"tokens": "x"}),
    ],
)
@kit.on_loop
async def test_nonsense_is_a_400(path: str, body: Any) -> None:
    """Bodies that make no sense are refused in the error shape, and the pod lives on."""
    async with tiny() as pod:
        reply = await kit.http(pod.port, "POST", path, body)
        assert (reply.status, set(reply.json()["error"])) == (
            400,
            {"message", "type", "param", "code"},
        )
        assert (await kit.http(pod.port, "POST", CHAT, HELLO)).status == 200
