"""Edits of JSON bodies that leave untouched values as they are, byte for byte."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from calinix.core.bodies import (
    TRANSFER_FIELDS,
    TRANSFER_PREFIX,
    is_transfer_field,
    may_repeat_extra,
)
from calinix.engines.fast import find_members
from calinix.engines.members import Changes
from calinix.errors import BadRequest

JsonMembers = dict[str, msgspec.Raw]
"""A JSON object's members by decoded name, each value in its exact bytes."""

EXTRA_ARGS_FIELD = "vllm_xargs"
"""vLLM hands its members to the engine as if they were top-level fields."""

_members = msgspec.json.Decoder(JsonMembers)
_raw_list = msgspec.json.Decoder(list[msgspec.Raw])
_list_of_prompts = re.compile(rb'\[[ \t\n\r]*["\[]').match
LOOKED_AT = (
    "n", "best_of", "use_beam_search", "prompt_logprobs", "echo", "logprobs", "min_tokens",
    "previous_response_id", "thinking", EXTRA_ARGS_FIELD, *sorted(TRANSFER_FIELDS),
)  # fmt: skip
"""What a request is asked for before it goes to two pods."""


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


def with_members(body: bytes, added: Mapping[str, bytes]) -> bytes:
    """`body`, a JSON object that has none of these members, with them at its end."""
    head = body.rstrip()[:-1].rstrip()
    comma = b"" if head == b"{" else b","
    return b"%b%b%b}" % (
        head,
        comma,
        b",".join([b"%b:%b" % (msgspec.json.encode(name), raw) for name, raw in added.items()]),
    )


def drop_transfer_fields(members: JsonMembers) -> bool:
    """Takes transfer fields out of `members` and of its `vllm_xargs`; whether there were any."""
    fields = TRANSFER_FIELDS
    dropped = [name for name in members if name in fields or name.startswith(TRANSFER_PREFIX)]
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


class JsonObject:
    """A JSON object that is looked into and edited where it lies; its members are not copied.

    `body` has been read as JSON before. One with a name that is escaped, or there twice, is written
    anew, with the last of the two. Raises BadRequest when `body` is not a JSON object.
    """

    __slots__ = ("_members", "body", "said")

    def __init__(self, body: bytes):
        members = find_members(body)
        if members is None:
            body = encode_members(decode_members(body))
            members = find_members(body, True)
            assert members is not None
        self._members = members
        self.body = body
        self.said = members.among(LOOKED_AT, TRANSFER_PREFIX)
        """Those of LOOKED_AT, and transfer fields, that are there."""

    def value(self, name: str) -> bytes:
        """The bytes of one of LOOKED_AT; empty when it is absent or null."""
        text = self.said.get(name, b"")
        return b"" if text == b"null" else text

    def edited(self, changes: Changes) -> bytes:
        """The object with these members set, or taken out. All other values keep their bytes."""
        return self._members.edited(changes)

    def prompts(self) -> int | None:
        """How many prompts there are in a list; None: one prompt, not in a list.

        Raises BadRequest when the list is none.
        """
        span = self._members.span("prompt")
        if span is None or _list_of_prompts(self.body, span[0]) is None:
            return None  # a text, token ids, or an empty list
        try:
            return len(_raw_list.decode(self.body[span[0] : span[1]]))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadRequest(f"prompt: {error}", param="prompt") from error


def without_transfer_fields(body: bytes) -> JsonObject:
    """`body` less the transfer fields of a client. Raises BadRequest when it is no JSON object."""
    found = JsonObject(body)
    for name in found.said:
        if name == EXTRA_ARGS_FIELD or is_transfer_field(name):
            stripped = strip_transfer_fields(body)
            return found if stripped is body else JsonObject(stripped)
    return found
