"""The shape of a P/D protocol, and edits of JSON bodies that leave untouched values as they are."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from calinix.core.bodies import is_transfer_field, may_repeat_extra
from calinix.errors import BadRequest, CalinixError

LegRole = Literal["single", "prefill", "decode"]


class Leg(msgspec.Struct, frozen=True):
    """One HTTP request to one pod of the plan: `role` says which, `body` is sent as it is."""

    role: LegRole
    body: bytes
    answers_client: bool
    """This leg's answer is the client's answer; any other leg's is read and kept from it."""


class LegAnswer(msgspec.Struct, frozen=True):
    """The whole answer of a leg that does not answer the client."""

    status: int
    body: bytes


class ExchangeError(CalinixError):
    """A leg's answer does not allow the exchange to go on."""


class Exchange(Protocol):
    """One request's legs, in the order that the engine's protocol wants them."""

    def start(self) -> tuple[Leg, ...]:
        """The legs to send at once."""
        ...

    def after(self, leg: Leg, answer: LegAnswer) -> tuple[Leg, ...]:
        """The legs that follow the answer to `leg` (a 2xx). Raises ExchangeError."""
        ...


JsonMembers = dict[str, msgspec.Raw]
"""A JSON object's members by decoded name, each value in its exact bytes."""

EXTRA_ARGS_FIELD = "vllm_xargs"
"""vLLM hands its members to the engine as if they were top-level fields."""

_members = msgspec.json.Decoder(JsonMembers)


def decode_members(body: bytes) -> JsonMembers:
    """The members of a JSON object; of duplicate names the last one counts, as for the engines.

    Raises BadRequest when `body` is not a JSON object.
    """
    try:
        return _members.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not a JSON object: {error}") from error


def encode_members(members: JsonMembers) -> bytes:
    """The object as JSON. Every value keeps its bytes."""
    return msgspec.json.encode(members)


def raw_member(members: JsonMembers, name: str) -> bytes:
    """The member's bytes; empty when it is absent or null."""
    value = members.get(name)
    text = b"" if value is None else bytes(value)
    return b"" if text == b"null" else text


def with_member(body: bytes, name: str, value: bytes) -> bytes:
    """`body`, a JSON object that has no member `name`, with that member at its end."""
    head = body.rstrip()[:-1].rstrip()
    comma = b"" if head == b"{" else b","
    return b"%b%b%b:%b}" % (head, comma, msgspec.json.encode(name), value)


def drop_transfer_fields(members: JsonMembers) -> bool:
    """Takes transfer fields out of `members` and of its `vllm_xargs`; whether there were any."""
    dropped = [name for name in members if is_transfer_field(name)]
    for name in dropped:
        del members[name]
    extra = members.get(EXTRA_ARGS_FIELD)
    if extra is None or bytes(memoryview(extra)[:1]) != b"{":
        return bool(dropped)
    inner = decode_members(bytes(extra))
    kept = {name: value for name, value in inner.items() if not is_transfer_field(name)}
    if len(kept) == len(inner):
        return bool(dropped)
    members[EXTRA_ARGS_FIELD] = msgspec.Raw(encode_members(kept))
    return True


def strip_transfer_fields(body: bytes) -> bytes:
    """`body` without client-supplied transfer fields; the same object when there are none.

    Found by the parser, so that escaped and duplicate names cannot hide them. A client-supplied
    handle can hang a decode engine and, on disconnect, kill it. Raises BadRequest when `body` is
    not a JSON object.
    """
    members = decode_members(body)
    hidden = EXTRA_ARGS_FIELD in members and may_repeat_extra(body)
    return encode_members(members) if drop_transfer_fields(members) or hidden else body
