"""SGLang's prefill/decode protocol, the pods' end: which rooms a request names, which are open."""

from __future__ import annotations

from typing import Any

import msgspec

from calinix.engines.sglang import HOST_FIELD, PORT_FIELD, ROOM_FIELD
from calinix.errors import CalinixError


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
