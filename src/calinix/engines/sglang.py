"""SGLang's prefill/decode protocol, the router's end (the pods' end is in sglang_rooms).

The same body to both pods at once, with the prefill pod's bootstrap server and a room, a
random number that ties the two together. The decode pod answers; the prefill pod's answer is
drained and dropped. A room that two requests share breaks an engine, so whatever a client sends of
these fields is replaced. A decode pod that waits for a prefill that failed waits for long: an error
on the prefill side ends the request.
"""

from __future__ import annotations

import msgspec

from calinix.engines.base import Draw, ExchangeError, Leg, LegAnswer, Prefiller
from calinix.engines.json_edits import JsonObject
from calinix.errors import BadRequest

ROOM_BITS = 63
_ENDS = (b"}", b"data: [DONE]")
"""Of a JSON object, and of a stream."""
HOST_FIELD, PORT_FIELD, ROOM_FIELD = "bootstrap_host", "bootstrap_port", "bootstrap_room"


class SglangExchange:
    """`start` -> both legs; nothing follows.

    Raises BadRequest for several sequences of one prompt: the engine would run them all in one
    room.
    """

    __slots__ = ("_legs",)

    def __init__(self, request: JsonObject, prefiller: Prefiller, draw: Draw):
        if request.said:
            _check_sequences(request)
        host, port = prefiller.host_json, prefiller.port_json
        count = request.prompts()
        if count is None:
            room = b"%d" % draw(ROOM_BITS)
        else:
            host, port = _list_of(count, host), _list_of(count, port)
            room = msgspec.json.encode([draw(ROOM_BITS) for _ in range(count)])
        both = request.edited({HOST_FIELD: host, PORT_FIELD: port, ROOM_FIELD: room})
        self._legs = (
            Leg("prefill", both, answers_client=False, drained=True),
            Leg("decode", both, answers_client=True),
        )

    def start(self) -> tuple[Leg, ...]:
        """Both legs."""
        return self._legs

    def after(self, leg: Leg, answer: LegAnswer) -> tuple[Leg, ...]:
        """Nothing follows; of the answer the end is enough.

        Raises ExchangeError for a leg that is none of its own, and for what no engine says: a pod
        that says it has prefilled nothing, and its decode pod would wait for long.
        """
        if leg is not self._legs[0]:
            raise ExchangeError(f"nothing follows the {leg.role} leg")
        if not answer.body.rstrip().endswith(_ENDS):
            raise ExchangeError("the prefill pod's answer is none of an engine")
        return ()


def _check_sequences(request: JsonObject) -> None:
    for name in ("n", "best_of"):
        if request.value(name) not in (b"", b"1"):
            raise BadRequest(
                f"{name}: SGLang's prefill and decode pods make one answer for a prompt; "
                "ask several times",
                param=name,
                code="one_answer_only",
            )


def _list_of(count: int, value: bytes) -> bytes:
    return b"[%b]" % b",".join([value] * count)
