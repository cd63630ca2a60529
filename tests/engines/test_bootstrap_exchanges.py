"""The exchanges with a bootstrap server, Mooncake's and SGLang's, against golden bodies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.core.prompt import Endpoint
from calinix.engines.base import Exchange, ExchangeError, Leg, LegAnswer, Prefiller
from calinix.engines.mooncake import (
    Pull,
    TransferTable,
    engine_ids,
    query_answer,
    worker_of,
)
from calinix.engines.plain import OneLeg
from calinix.engines.protocols import exchange_for, protocol_of
from calinix.engines.sglang_rooms import DuplicateRoomError, Room, RoomTable, read_rooms
from calinix.errors import BadRequest

DATA = Path(__file__).parent.parent / "data/engines"
MOONCAKE = {case["tag"]: case for case in json.loads((DATA / "mooncake.json").read_text())}
SGLANG = {case["tag"]: case for case in json.loads((DATA / "sglang.json").read_text())}
ENDPOINTS = {
    "chat": Endpoint.CHAT,
    "completions": Endpoint.COMPLETIONS,
    "messages": Endpoint.MESSAGES,
}
QUERY = b'{"0":{"engine_id":"e","worker_addr":{"0":{"0":"http://h:1"}}}}'


class Draws:
    """Random numbers that a test has thrown itself; asks for the right number of bits."""

    def __init__(self, numbers: list[int]):
        self._numbers = iter(numbers)

    def __call__(self, bits: int) -> int:
        number = next(self._numbers)
        assert 0 <= number < 2**bits
        return number

    def all_used(self) -> bool:
        """Nothing is left."""
        return next(self._numbers, None) is None


def exchange_of(protocol: Any, body: bytes, endpoint: Endpoint = Endpoint.CHAT) -> Exchange:
    """An exchange whose prefill pod's engine is known, and whose numbers count up."""
    prefiller = Prefiller("h", None)
    prefiller.engine_ids = {0: "e"}
    numbers = Draws(list(range(100)))
    return exchange_for(protocol, "dispatch", endpoint, body, prefiller, numbers)


@pytest.mark.parametrize("tag", MOONCAKE)
def test_mooncake_legs_are_the_golden_ones(tag: str) -> None:
    """The query first, then both legs at once, byte for byte; the rank where there are several."""
    case = MOONCAKE[tag]
    draws, prefiller = Draws(case["draws"]), Prefiller(case["host"], case["port"])
    endpoint = ENDPOINTS[case["endpoint"]]
    exchange = exchange_for(
        "mooncake", "dispatch", endpoint, case["body"].encode(), prefiller, draws
    )
    (query,) = exchange.start()
    assert (query.bootstrap_path, query.answers_client, query.body) == ("/query", False, b"")
    legs = exchange.after(query, LegAnswer(200, case["query"].encode()))
    assert legs == (
        Leg("prefill", case["prefill"].encode(), False, lines=case["prefill_lines"].encode()),
        Leg("decode", case["decode"].encode(), True),
    )
    assert draws.all_used()
    assert exchange.after(legs[0], LegAnswer(200, b'{"kv_transfer_params":null}')) == ()
    for leg, body in ((legs[1], b"{}"), (legs[0], b"<html>"), (legs[0], b"[]")):
        with pytest.raises(ExchangeError):
            exchange.after(leg, LegAnswer(200, body))


def test_the_query_is_asked_once_in_a_pods_life() -> None:
    """What the bootstrap server said is kept with the prefill pod; transfer ids never repeat."""
    prefiller = Prefiller("h", None)
    body = b'{"messages":[]}'
    draws = Draws([1, 2])
    first = exchange_for("mooncake", "dispatch", Endpoint.CHAT, body, prefiller, draws)
    first.after(first.start()[0], LegAnswer(200, QUERY))
    second = exchange_for("mooncake", "dispatch", Endpoint.CHAT, body, prefiller, draws)
    prefill, decode = second.start()
    assert prefiller.engine_ids == {0: "e"}
    told = [json.loads(leg.body)["kv_transfer_params"]["transfer_id"] for leg in (prefill, decode)]
    assert told == [f"{2:032x}"] * 2


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"{}"),
        (200, b"[]"),
        (200, b"not json"),
        (200, b'{"x":{"engine_id":"e"}}'),
        (200, b'{"0":{"engine":"e"}}'),
        (200, b'{"0":{"engine_id":7}}'),
        (503, QUERY),
        (200, b'{"0":{"engine_id":"\xff"}}'),
    ],
)
def test_a_query_without_an_engine_stops_the_exchange(status: int, body: bytes) -> None:
    """An answer that names no engine is an ExchangeError, and nothing is kept of it."""
    prefiller = Prefiller("h", None)
    exchange = exchange_for(
        "mooncake", "dispatch", Endpoint.CHAT, b'{"messages":[]}', prefiller, Draws([1])
    )
    with pytest.raises(ExchangeError, match="bootstrap"):
        exchange.after(exchange.start()[0], LegAnswer(status, body))
    assert not prefiller.engine_ids


@pytest.mark.parametrize("tag", SGLANG)
def test_sglang_legs_are_the_golden_ones(tag: str) -> None:
    """The same bytes to both pods at once; what the client wrote keeps its form."""
    case = SGLANG[tag]
    draws = Draws(case["draws"])
    prefiller = Prefiller(case["host"], case["port"])
    endpoint = ENDPOINTS[case["endpoint"]]
    exchange = exchange_for("sglang", "dispatch", endpoint, case["body"].encode(), prefiller, draws)
    prefill, decode = exchange.start()
    assert prefill == Leg("prefill", case["both"].encode(), False, drained=True)
    assert decode == Leg("decode", case["both"].encode(), True)
    assert prefill.body is decode.body
    assert draws.all_used()
    for whole in (b'{"choices":[]}\n', b'data: {"choices":[]}\n\ndata: [DONE]\n\n'):
        assert exchange.after(prefill, LegAnswer(200, whole)) == ()
    with pytest.raises(ExchangeError, match="none of an engine"):
        exchange.after(prefill, LegAnswer(200, b"<html>"))
    with pytest.raises(ExchangeError):
        exchange.after(decode, LegAnswer(200, b""))


@pytest.mark.parametrize("body", [b'{"n":2}', b'{"best_of":4}', b'{"n":"2"}'])
def test_sglang_refuses_several_answers_to_one_prompt(body: bytes) -> None:
    """The engine would run them in one room, which it does not survive: a 400 that says so."""
    with pytest.raises(BadRequest, match="ask several times") as caught:
        exchange_of("sglang", body)
    assert caught.value.code == "one_answer_only"


@pytest.mark.parametrize("body", [b'{"prompt":["a",7]}', b'{"prompt":["a"', b"[]"])
def test_sglang_bodies_that_cannot_be_read(body: bytes) -> None:
    """A list that is none is the client's error, or the engine's to refuse; never a crash."""
    try:
        legs = exchange_of("sglang", body, Endpoint.COMPLETIONS).start()
    except BadRequest:
        return
    assert json.loads(legs[0].body)["bootstrap_room"] == [0, 1]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":["a","b"]}',
        b'{"prompt":"a","n":2}',
        b'{"prompt":"a","prompt_logprobs":1}',
        b'{"prompt":"a","echo":true,"logprobs":2}',
    ],
)
@pytest.mark.parametrize("protocol", ["mooncake", "nixl"])
def test_what_a_transfer_cannot_carry_is_one_decode_leg(protocol: Any, body: bytes) -> None:
    """Several sequences, and the logprobs of the prompt, are served whole."""
    exchange = exchange_of(protocol, body, Endpoint.COMPLETIONS)
    assert exchange.start() == (Leg("decode", body, True),)


@pytest.mark.parametrize("body", [b'{"echo":true}', b'{"logprobs":2}', b'{"prompt_logprobs":null}'])
def test_other_logprobs_are_split(body: bytes) -> None:
    """Those of the answer come from the decode pod; the prefill leg does not ask for them."""
    (prefill,) = exchange_of("nixl", body, Endpoint.COMPLETIONS).start()
    assert not {"logprobs", "echo"} & json.loads(prefill.body).keys()


@pytest.mark.parametrize("protocol", ["plain", "nixl", "mooncake"])
def test_what_shapes_the_prompt_stays_on_the_prefill_leg(protocol: Any) -> None:
    """Tools and formats go into some models' templates: a prefill without them is of no use."""
    shaping = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"x": 1},
    }
    body = msgspec.json.encode({"messages": [], "logprobs": True, "top_logprobs": 2, **shaping})
    sent = json.loads(exchange_of(protocol, body).start()[0].body)
    assert {key: sent[key] for key in shaping} == shaping
    assert not {"logprobs", "top_logprobs"} & sent.keys()


def test_without_a_prefill_pod_it_is_one_leg() -> None:
    """Whatever the protocol, a plan without a prefill pod is the client's own body."""
    for protocol in ("plain", "nixl", "mooncake", "sglang"):
        exchange = exchange_for(protocol, "dispatch", Endpoint.CHAT, b'{"messages":[]}')
        assert isinstance(exchange, OneLeg)
        assert exchange.start() == (Leg("decode", b'{"messages":[]}', True),)


def test_rooms_are_never_made_without_random_numbers() -> None:
    """A host that hands in no random numbers gets an error, not the same room twice."""
    with pytest.raises(ExchangeError, match="random"):
        exchange_for("sglang", "dispatch", Endpoint.CHAT, b"{}", Prefiller("h", None))


def test_what_auto_stands_for() -> None:
    """vLLM: nixl, or mooncake where a bootstrap port is named; SGLang; anything else: plain."""
    assert protocol_of("vllm", None) == "nixl"
    assert protocol_of("vllm", 8998) == "mooncake"
    assert protocol_of("sglang", None) == protocol_of("sglang", 1) == "sglang"
    assert protocol_of("other", 8998) == "plain"


# --- both ends agree ---------------------------------------------------------------------------


def test_both_ends_agree_on_a_mooncake_transfer() -> None:
    """The decode pod finds the worker and the transfer that the prefill pod was told of."""
    answer = query_answer({0: ("e0", "http://h:1"), 1: ("e1", "http://h:2")})
    assert engine_ids(LegAnswer(200, answer)) == {0: "e0", 1: "e1"}
    assert worker_of(answer, "e1") == "http://h:2"
    assert worker_of(answer, "gone") is None
    prefill, decode = exchange_of("mooncake", b'{"messages":[]}').start()
    pull = msgspec.convert(json.loads(decode.body)["kv_transfer_params"], Pull)
    told = json.loads(prefill.body)["kv_transfer_params"]
    assert pull == Pull("http://h:8998", "e", told["transfer_id"])


def test_a_transfer_is_pulled_once_and_within_its_lease() -> None:
    """Not before it is computed, not twice, not after its end."""
    table = TransferTable(lease_s=5.0)
    assert table.pull("t") is None
    table.computed("t", "r1", 40, 0.0)
    table.computed("u", "r2", 41, 1.0)
    assert table.pull("t") == ("r1", 40)
    assert table.pull("t") is None
    assert table.next_expiry_s() == 6.0
    assert table.expire(5.9) == []
    assert table.expire(6.0) == ["r2"]
    assert table.pull("u") is None
    assert (len(table), table.next_expiry_s()) == (0, None)


@given(st.integers(1, 5), st.data())
def test_every_sequence_has_the_room_that_the_router_meant(prompts: int, data: Any) -> None:
    """A pod reads as many rooms as there are prompts, those of the router, in order."""
    numbers = data.draw(
        st.lists(st.integers(0, 2**63 - 1), min_size=prompts, max_size=prompts, unique=True)
    )
    prefiller = Prefiller("h", 7)
    body = msgspec.json.encode({"prompt": [f"p{n}" for n in range(prompts)]})
    legs = exchange_for(
        "sglang", "dispatch", Endpoint.COMPLETIONS, body, prefiller, Draws(numbers)
    ).start()
    rooms = read_rooms(json.loads(legs[1].body), prompts, 1)
    assert rooms == [Room("h", 7, number) for number in numbers]


def test_what_a_pod_makes_of_rooms() -> None:
    """No room: None; one number for a batch counts up; samples of one prompt share its room."""
    assert read_rooms({}, 1, 1) is None
    counted = read_rooms({"bootstrap_room": 5, "bootstrap_host": "h"}, 3, 1)
    assert counted == [Room("h", None, 5), Room("h", None, 6), Room("h", None, 7)]
    shared = read_rooms({"bootstrap_room": 5}, 1, 2)
    assert shared == [Room(None, None, 5)] * 2
    table = RoomTable()
    with pytest.raises(DuplicateRoomError, match="room 5"):
        table.enter(shared)
    table.leave(shared)
    table.enter(shared[:1])
    assert len(table) == 1
