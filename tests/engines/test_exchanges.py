"""The exchanges: golden bodies from real vLLM pods, and both ends of NIXL against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from calinix.core.prompt import Endpoint
from calinix.engines.base import Exchange, ExchangeError, Leg, LegAnswer, Prefiller
from calinix.engines.plain import OneLeg
from calinix.engines.protocols import EXCHANGES, exchange_for
from calinix.engines.vllm import Ask, HandleError, HandleTable, NixlHandle, read_params

CAPTURES = {
    case["tag"]: case
    for case in json.loads((Path(__file__).parent.parent / "data/engines/nixl.json").read_text())
}
SPLIT = ("completion", "completion_stream", "chat", "short_prompt_10_tokens")


def exchange_of(protocol: Any, mode: Any, endpoint: Endpoint, body: bytes) -> Exchange:
    """The exchange of a request whose plan has a prefill pod."""
    return exchange_for(protocol, mode, endpoint, body, Prefiller("p", None))


def endpoint_of(case: dict[str, Any]) -> Endpoint:
    """The endpoint that a capture was taken at."""
    chat = case["path"].endswith("/chat/completions")
    return Endpoint.CHAT if chat else Endpoint.COMPLETIONS


def original(case: dict[str, Any]) -> dict[str, Any]:
    """What the client had sent: the captured decode request without the handle."""
    return {k: v for k, v in case["decode_request"].items() if k != "kv_transfer_params"}


def encoded(value: object) -> bytes:
    """Compact JSON, as vLLM sends it."""
    return msgspec.json.encode(value)


def prefill_leg(exchange: Exchange) -> Leg:
    """The only leg that the exchange starts with."""
    (leg,) = exchange.start()
    assert (leg.role, leg.answers_client) == ("prefill", False)
    return leg


@pytest.mark.parametrize("tag", SPLIT)
def test_nixl_legs_are_those_that_real_pods_took(tag: str) -> None:
    """Both legs equal the captured requests, field for field, and the handle byte for byte."""
    case = CAPTURES[tag]
    body = encoded(original(case))
    exchange = exchange_of("nixl", "dispatch", endpoint_of(case), body)
    leg = prefill_leg(exchange)
    assert json.loads(leg.body) == case["prefill_request"]

    answer = LegAnswer(200, encoded(case["prefill_response"]))
    (decode,) = exchange.after(leg, answer)
    handle = encoded(case["prefill_response"]["kv_transfer_params"])
    assert decode == Leg("decode", body[:-1] + b',"kv_transfer_params":' + handle + b"}", True)
    assert json.loads(decode.body) == case["decode_request"]


def test_a_handle_keeps_spacing_and_unknown_fields() -> None:
    """What the prefill pod says is passed on in its own bytes, whatever is in it."""
    exchange = exchange_of("nixl", "dispatch", Endpoint.CHAT, b'{"messages":[]}')
    handle = b'{"new_field" : [1.0, {"x":"\\u00e9"}],"do_remote_prefill": true }'
    answer = LegAnswer(200, b'{"id":"x", "kv_transfer_params" : ' + handle + b"}")
    (decode,) = exchange.after(prefill_leg(exchange), answer)
    assert decode.body == b'{"messages":[],"kv_transfer_params":' + handle + b"}"


@pytest.mark.parametrize("protocol", ["plain", "nixl"])
@pytest.mark.parametrize("body", [b'{"kv_transfer_params":null}', b"{}", b'{"choices":[]}'])
def test_without_a_handle_the_decode_leg_is_plain(protocol: Any, body: bytes) -> None:
    """A prefill pod with nothing to transfer leaves the client's own body for the decode pod."""
    sent = b'{"messages":[] , "max_tokens":5}'
    exchange = exchange_of(protocol, "dispatch", Endpoint.CHAT, sent)
    (decode,) = exchange.after(prefill_leg(exchange), LegAnswer(200, body))
    assert decode == Leg("decode", sent, True)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b"{}"),
        (404, b"{}"),
        (200, b"[]"),
        (200, b"x"),
        (200, b'{"kv_transfer_params":[1]}'),
        (200, b'{"kv_transfer_params":{]}'),
        (200, b'{"kv_transfer_params":{"a":}}'),
        (200, b'{"kv_transfer_params":{"a":1},"x":tru}'),
    ],
)
def test_an_answer_that_is_no_prefill_stops_the_exchange(status: int, body: bytes) -> None:
    """Errors and answers of another shape raise ExchangeError instead of a decode leg."""
    exchange = exchange_of("nixl", "dispatch", Endpoint.CHAT, b'{"messages":[]}')
    with pytest.raises(ExchangeError):
        exchange.after(prefill_leg(exchange), LegAnswer(status, body))


def test_client_supplied_handles_reach_neither_pod() -> None:
    """Even if nobody stripped the body before, both legs carry only what the router says."""
    body = b'{"prompt":"x","kv_transfer_params":{"do_remote_prefill":true},"bootstrap_room":1}'
    exchange = exchange_of("nixl", "dispatch", Endpoint.COMPLETIONS, body)
    leg = prefill_leg(exchange)
    assert json.loads(leg.body)["kv_transfer_params"]["do_remote_decode"] is True
    assert b"bootstrap" not in leg.body
    (decode,) = exchange.after(leg, LegAnswer(200, b"{}"))
    assert decode.body == b'{"prompt":"x"}'


@pytest.mark.parametrize(
    ("endpoint", "limits"),
    [
        (Endpoint.CHAT, {"max_tokens": 1, "max_completion_tokens": 1}),
        (Endpoint.COMPLETIONS, {"max_tokens": 1}),
        (Endpoint.RESPONSES, {"max_output_tokens": 1, "store": False}),
        (Endpoint.MESSAGES, {"max_tokens": 1}),
    ],
)
def test_a_prefill_generates_one_token_of_one_sequence(
    endpoint: Endpoint, limits: dict[str, Any]
) -> None:
    """Streaming, several sequences and lower bounds are taken out; all else stays."""
    sent = {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
        "best_of": 3,
        "use_beam_search": True,
        "min_tokens": 9,
        "temperature": 0.5,
        "cache_salt": "s",
    }
    exchange = exchange_of("plain", "dispatch", endpoint, encoded(sent))
    expected = {
        "model": "m",
        "stream": False,
        "n": 1,
        "min_tokens": 1,
        "temperature": 0.5,
        "cache_salt": "s",
    }
    assert json.loads(prefill_leg(exchange).body) == expected | limits


@pytest.mark.parametrize("least", ["0", "1", "null", '"9"', "1.5"])
def test_min_tokens_is_only_lowered(least: str) -> None:
    """A bound that one token meets, or that the engine will refuse, is left as it is."""
    body = f'{{"messages":[],"min_tokens":{least}}}'.encode()
    exchange = exchange_of("plain", "dispatch", Endpoint.CHAT, body)
    assert f'"min_tokens":{least}'.encode() in prefill_leg(exchange).body


@pytest.mark.parametrize(
    ("protocol", "endpoint", "body"),
    [
        ("nixl", Endpoint.COMPLETIONS, b'{"prompt":["a","b"]}'),
        ("nixl", Endpoint.COMPLETIONS, b'{"prompt":[[1,2],[3]]}'),
        ("nixl", Endpoint.COMPLETIONS, b'{"prompt":"a","n":2}'),
        ("nixl", Endpoint.CHAT, b'{"messages":[],"use_beam_search":true}'),
        ("nixl", Endpoint.RESPONSES, b'{"input":"a","previous_response_id":"resp_1"}'),
        ("plain", Endpoint.RESPONSES, b'{"input":"a","previous_response_id":"resp_1"}'),
        ("plain", Endpoint.MESSAGES, b'{"thinking":{"type":"enabled","budget_tokens":1024}}'),
        ("nixl", Endpoint.EMBEDDINGS, b'{"input":"a"}'),
        ("plain", Endpoint.OTHER_POST, b"not json"),
        ("plain", Endpoint.GET, b""),
    ],
)
def test_what_cannot_be_split_is_one_decode_leg(
    protocol: Any, endpoint: Endpoint, body: bytes
) -> None:
    """A handle covers one sequence, and some requests a prefill pod would refuse."""
    exchange = exchange_of(protocol, "dispatch", endpoint, body)
    assert exchange.start() == (Leg("decode", body, True),)


@pytest.mark.parametrize(
    "body", [b'{"prompt":["a"]}', b'{"prompt":[[1,2]]}', b'{"prompt":[1,2],"n":null}', b'{"n":1}']
)
def test_one_sequence_in_a_list_is_split(body: bytes) -> None:
    """A list of one prompt, or token ids, is still one sequence."""
    prefill_leg(exchange_of("nixl", "dispatch", Endpoint.COMPLETIONS, body))


def test_a_thinking_budget_does_not_stop_nixl() -> None:
    """A real pod checks no budget where `do_remote_decode` is set, so such a request is split."""
    body = b'{"messages":[],"thinking":{"type":"enabled","budget_tokens":1024}}'
    prefill_leg(exchange_of("nixl", "dispatch", Endpoint.MESSAGES, body))


@pytest.mark.parametrize("protocol", EXCHANGES)
def test_single_mode_sends_the_body_itself(protocol: Any) -> None:
    """One leg, the very bytes object, and nothing may follow it."""
    body = b'{"messages":[]}'
    exchange = exchange_of(protocol, "single", Endpoint.CHAT, body)
    (leg,) = exchange.start()
    assert leg == Leg("single", body, True)
    assert leg.body is body
    assert isinstance(exchange, OneLeg)
    with pytest.raises(ExchangeError):
        exchange.after(leg, LegAnswer(200, b"{}"))


def served_by_a_prefill_pod(table: HandleTable, request: bytes, now: float) -> bytes:
    """What a prefill pod answers to a prefill leg."""
    ask, handle = read_params(json.loads(request).get("kv_transfer_params"))
    assert (ask, handle) == (Ask.REMOTE_DECODE, None)
    issued = table.issue("cmpl-1-0-abc", [1, 2, 3], 40, 16, now)
    return encoded({"choices": [], "kv_transfer_params": msgspec.to_builtins(issued)})


def test_both_ends_agree_on_a_transfer() -> None:
    """The decode pod reads from the decode leg exactly the handle that the prefill pod issued."""
    table = HandleTable("engine-1", "127.0.0.1", 5600)
    exchange = exchange_of("nixl", "dispatch", Endpoint.CHAT, b'{"messages":[]}')
    leg = prefill_leg(exchange)
    (decode,) = exchange.after(leg, LegAnswer(200, served_by_a_prefill_pod(table, leg.body, 10.0)))
    ask, handle = read_params(json.loads(decode.body)["kv_transfer_params"])
    assert ask is Ask.REMOTE_PREFILL
    assert handle is not None
    assert table.redeem(handle, 39.9) == 40
    with pytest.raises(HandleError, match="no blocks are kept"):
        table.redeem(handle, 39.9)


def test_issued_handles_look_like_real_ones() -> None:
    """A mock's handle has the fields of a captured one, in their order and with their types."""
    real = CAPTURES["completion"]["prefill_response"]["kv_transfer_params"]
    made = HandleTable("e", "127.0.0.1", 5600).issue("r", [1, 2, 3, 4, 5], 150, 0, 0.0)
    mine = msgspec.to_builtins(made)
    assert list(mine) == [name for name in real if name != "_"]
    same = {"remote_engine_id": "e", "remote_request_id": "r"}
    assert mine == real | same
    assert read_params(real)[0] is Ask.REMOTE_PREFILL


@pytest.mark.parametrize(
    ("change", "now", "reason"),
    [
        ({"remote_engine_id": "other"}, 0.0, "no engine"),
        ({"remote_request_id": "other"}, 0.0, "no blocks are kept"),
        ({"remote_block_ids": [[1, 2]]}, 0.0, "altered"),
        ({"remote_port": 1}, 0.0, "altered"),
        ({"remote_num_tokens": 41}, 0.0, "altered"),
        ({}, 30.0, "lease"),
    ],
)
def test_a_changed_or_late_handle_is_refused(
    change: dict[str, Any], now: float, reason: str
) -> None:
    """Engine, request, blocks, address and lease must all match what was issued."""
    table = HandleTable("e", "h", 1234)
    handle = table.issue("r", [1, 2, 3], 40, 0, 0.0)
    with pytest.raises(HandleError, match=reason):
        table.redeem(msgspec.structs.replace(handle, **change), now)


def test_leases_end_in_order() -> None:
    """`expire` names each request once, when its time has come, and not a redeemed one."""
    table = HandleTable("e", "h", 1, lease_s=5.0)
    handles = [table.issue(f"r{n}", [n], 1, 0, float(n)) for n in range(4)]
    table.redeem(handles[1], 1.0)
    assert table.next_expiry_s() == 5.0
    assert table.expire(4.9) == []
    assert table.expire(7.0) == ["r0", "r2"]
    assert table.expire(100.0) == ["r3"]
    assert table.next_expiry_s() is None
    assert len(table) == 0


@pytest.mark.parametrize(
    ("params", "ask"),
    [
        (None, Ask.NOTHING),
        ({}, Ask.NOTHING),
        ({"do_remote_prefill": False}, Ask.NOTHING),
        ({"do_remote_decode": True, "remote_host": None}, Ask.REMOTE_DECODE),
        ({"do_remote_prefill": True}, Ask.INCOMPLETE),
        ({"do_remote_prefill": True, "remote_block_ids": "x"}, Ask.INCOMPLETE),
    ],
)
def test_what_params_ask_for(params: dict[str, object] | None, ask: Ask) -> None:
    """A pod tells a prefill's wish, a handle, nothing, and the dangerous half of a handle apart."""
    assert read_params(params) == (ask, None)


def test_a_handle_needs_no_optional_field() -> None:
    """Older pods say less; what they always say is enough."""
    least = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 1,
        "remote_num_tokens": 3,
    }
    ask, handle = read_params(least)
    assert ask is Ask.REMOTE_PREFILL
    assert isinstance(handle, NixlHandle)
