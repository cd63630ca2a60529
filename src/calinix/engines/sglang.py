"""SGLang's prefill/decode protocol, both ends: the router's exchange, the pods' rooms.

Router: the same body to both pods at once, with the prefill pod's bootstrap server and a room, a
random number that ties the two together. The decode pod answers; the prefill pod's answer is
drained and dropped. A room that two requests share breaks an engine, so whatever a client sends of
these fields is replaced. A decode pod that waits for a prefill that failed waits for long: an error
on the prefill side ends the request.
"""

from __future__ import annotations

from typing import Any

import msgspec

from calinix.engines.base import (
    Draw,
    ExchangeError,
    JsonMembers,
    Leg,
    LegAnswer,
    Prefiller,
    batch_of,
    drop_transfer_fields,
    encode_members,
    raw_member,
    with_members,
)
from calinix.errors import BadRequest, CalinixError

ROOM_BITS = 63
_ENDS = (b"}", b"data: [DONE]")
"""Of a JSON object, and of a stream."""
HOST_FIELD, PORT_FIELD, ROOM_FIELD = "bootstrap_host", "bootstrap_port", "bootstrap_room"


class SglangExchange:
    """`start` -> both legs; nothing follows. `members` are those of `body`.

    Raises BadRequest for several sequences of one prompt: the engine would run them all in one
    room.
    """

    __slots__ = ("_legs",)

    def __init__(self, body: bytes, members: JsonMembers, prefiller: Prefiller, draw: Draw):
        for name in ("n", "best_of"):
            if raw_member(members, name) not in (b"", b"1"):
                raise BadRequest(
                    f"{name}: SGLang's prefill and decode pods make one answer for a prompt; "
                    "ask several times",
                    param=name,
                    code="one_answer_only",
                )
        if drop_transfer_fields(members):
            body = encode_members(members)
        host: Any = prefiller.host
        port: Any = prefiller.port
        count = batch_of(members)
        room: Any
        if count is None:
            room = draw(ROOM_BITS)
        else:
            host, port = [host] * count, [port] * count
            room = [draw(ROOM_BITS) for _ in range(count)]
        encode = msgspec.json.encode
        named = {HOST_FIELD: encode(host), PORT_FIELD: encode(port), ROOM_FIELD: encode(room)}
        both = with_members(body, named)
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


# --- the pods' side --------------------------------------------------------------------------


class Room(msgspec.Struct, frozen=True):
    """Where one sequence's KV passes from prefill to decode."""

    host: str | None
    port: int | None
    """None: the engine's own default."""
    number: int


class DuplicateRoomError(CalinixError):
    """Two requests in one room: real engines do not survive it."""


def read_rooms(body: dict[str, Any], prompts: int, choices: int) -> list[Room] | None:
    """One room for each sequence, as the engine spreads the fields; None where no room is named.

    `prompts` is the size of the batch, `choices` is `n`.
    """
    room = body.get(ROOM_FIELD)
    if room is None:
        return None
    count = prompts * choices
    rooms = room * choices if isinstance(room, list) else [room + at for at in range(count)]
    hosts, ports = body.get(HOST_FIELD), body.get(PORT_FIELD)
    hosts = hosts * choices if isinstance(hosts, list) else [hosts] * count
    ports = ports * choices if isinstance(ports, list) else [ports] * count
    # Samples of one prompt take over its room, whatever room was meant for them.
    return [
        Room(hosts[at], ports[at], rooms[at])
        for at in (prompt for prompt in range(prompts) for _ in range(choices))
    ]


class RoomTable:
    """The rooms that requests of one pod are in."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, rooms: list[Room]) -> None:
        """Takes rooms for a request. Raises DuplicateRoomError."""
        for room in rooms:
            if room.number in self._open:
                raise DuplicateRoomError(f"room {room.number} is in use")
            self._open.add(room.number)

    def leave(self, rooms: list[Room]) -> None:
        """The request is over."""
        self._open.difference_update(room.number for room in rooms)
