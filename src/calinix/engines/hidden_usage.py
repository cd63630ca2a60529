"""Usage that a stream's client did not ask for: asked of the pod, and cut out of its answer."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from calinix.engines.json_edits import decode_members, encode_members, raw_member, with_members
from calinix.errors import BadRequest

MAX_HELD_BYTES: Final = 16_384
"""An event that is longer than this before it ends is no usage chunk: the widest is a tenth."""

_OPTIONS: Final = "stream_options"
_ASKED: Final = b'{"include_usage":true}'
# Where a name that is not to be seen may be: escaped ASCII letters are \u00xx.
_ESCAPE: Final = b"\\u00"


def ask_for_usage(body: bytes) -> bytes | None:
    """`body`, a streamed request without `include_usage`, with it; every other byte as it was.

    None where it is better left alone: with `continuous_usage_stats`, which some engines heed by
    itself and others only now, its chunks would change; and other types are the engine's affair.
    """
    if _OPTIONS.encode() not in body and _ESCAPE not in body:
        return with_members(body, {_OPTIONS: _ASKED})
    try:
        members = decode_members(body)
        options = raw_member(members, _OPTIONS)
        if not options:
            members[_OPTIONS] = msgspec.Raw(_ASKED)
        elif options.startswith(b"{"):
            inner = decode_members(options)
            if raw_member(inner, "continuous_usage_stats") not in (b"", b"false"):
                return None
            inner["include_usage"] = msgspec.Raw(b"true")
            members[_OPTIONS] = msgspec.Raw(encode_members(inner))
        else:
            return None
    except BadRequest:
        return None
    return encode_members(members)


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: msgspec.Raw = msgspec.Raw(b"null")


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_may_be_usage = re.compile(rb'"choices"\s*:\s*\[\s*\]').search
_event_end = re.compile(rb"\r?\n\r?\n").search
_DATA: Final = b"data:"


class UsageCut:
    """Takes the usage chunk out of one event stream. The bytes may be cut anywhere.

    Whole events are passed on at once; of one that has only begun, its bytes are held until it is
    clear what it is. Nothing but that chunk is changed.
    """

    __slots__ = ("_held", "_open", "cut")

    def __init__(self) -> None:
        self._held = b""
        self._open = False
        """In the middle of an event that is being passed on."""
        self.cut = 0
        """Chunks taken out."""

    def feed(self, piece: bytes, last: bool) -> bytes:
        """Takes the next bytes; returns those to pass on: `piece` itself where all of them are."""
        if not (self._held or self._open) and piece[-2:] == b"\n\n" and not _may_be_usage(piece):
            return piece
        passed: list[bytes] = []
        text = self._held + piece
        start = 0
        while (found := _event_end(text, start)) is not None:
            end = found.end()
            event = text[start:end]
            if self._open or not _is_usage(event):
                passed.append(event)
            else:
                # Blank lines before it are another's.
                passed.append(event[: len(event) - len(event.lstrip(b"\r\n"))])
                self.cut += 1
            self._open = False
            start = end
        rest = text[start:]
        if last and rest and (self._open or not _is_usage(rest)):
            passed.append(rest)
            rest = b""
        elif self._open or len(rest) > MAX_HELD_BYTES:
            # What may be the first half of an end is kept back, to be known as one.
            keep = len(rest) - len(rest.rstrip(b"\r\n"))
            self._open = True
            passed.append(rest[: len(rest) - keep])
            rest = rest[len(rest) - keep :]
        self._held = b"" if last else rest
        return b"".join(passed)


def _is_usage(event: bytes) -> bool:
    """Whether an event is one data line with no choice in it, and usage."""
    if _may_be_usage(event) is None:
        return False
    line = event.strip(b"\r\n")
    if not line.startswith(_DATA) or b"\n" in line:
        return False
    try:
        chunk = _decode_chunk(line[len(_DATA) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return chunk.choices == [] and bytes(chunk.usage).startswith(b"{")
