"""The members of a JSON object: where they are in its bytes, and edits that leave the others alone.

The readable specification; `_members.pyx` is the same behaviour, compiled. fast.py chooses.
"""

from __future__ import annotations

import re

Changes = dict[str, bytes | None]
"""Name, of letters and `_` -> the value that is to be there; None: the member is taken out."""

MAX_CHANGES = 24
MAX_COMPARED = 64
"""Of more members than this it is not known here whether their names are all different."""

_space = re.compile(rb"[ \t\n\r]*").match
_string = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL).match
_literal = re.compile(rb"[-+.0-9A-Za-z]+").match
_structure = re.compile(rb'["\[\]{}]').search


class Members:
    """Made by `find_members`. Names are compared as they are written."""

    __slots__ = ("_body", "_spans")

    def __init__(self, body: bytes, spans: dict[bytes, tuple[int, int, int]]):
        self._body = body
        self._spans = spans
        """Name -> where the member begins, where its value begins, where the value ends."""

    def span(self, name: str) -> tuple[int, int] | None:
        """Where the value of this member begins and ends; None where there is no such member."""
        found = self._spans.get(name.encode())
        return None if found is None else found[1:]

    def value(self, name: str) -> bytes | None:
        """The value in its bytes; None where there is no such member."""
        found = self.span(name)
        return None if found is None else self._body[found[0] : found[1]]

    def among(self, names: tuple[str, ...], prefix: str) -> dict[str, bytes]:
        """The values of those of these members that there are, and of all that begin so."""
        found = {name: value for name in names if (value := self.value(name)) is not None}
        for raw, (_, start, end) in self._spans.items():
            if raw.startswith(prefix.encode()):
                found[raw.decode("utf-8", "replace")] = self._body[start:end]
        return found

    def edited(self, changes: Changes) -> bytes:
        """The object with some of its members set and, for None, taken out.

        What is set stays where it was, or comes to the end. All other bytes stay, but for space
        behind the last member where there is something to add. Raises ValueError for more than
        MAX_CHANGES changes.
        """
        if len(changes) > MAX_CHANGES:
            raise ValueError(f"more than {MAX_CHANGES} changes")
        body = self._body
        left: dict[bytes, bytes | None] = {name.encode(): to for name, to in changes.items()}
        pieces: list[bytes] = []
        at = last = 0
        kept = dangling = False  # dangling: the first members are gone, their comma not yet
        for name, (begin, start, end) in self._spans.items():
            if dangling:
                at, dangling = begin, False
            if name not in left:
                kept = True
            elif (value := left.pop(name)) is not None:
                pieces += (body[at:start], value)
                at, kept = end, True
            else:
                pieces.append(body[at : last if kept else begin])
                at, dangling = end, not kept
            last = end
        added = [b'"%b":%b' % (name, value) for name, value in left.items() if value is not None]
        if not added:
            return b"".join((*pieces, body[at:]))
        last = last or body.find(b"{") + 1
        comma = b"," if kept else b""
        return b"".join((*pieces, body[at:last], comma, b",".join(added), b"}"))


def find_members(body: bytes, written_anew: bool = False) -> Members | None:
    """The members of a JSON object. None: it is none, or has to be written anew first.

    That is so where a name is there twice, or may be, and where one has an escape in it: not so any
    more when it was `written_anew`, by an encoder that escapes only what it must. What is within
    lists and objects is taken for JSON and not looked at.
    """
    spans: dict[bytes, tuple[int, int, int]] = {}
    begin = _past_space(body, 0)
    if body[begin : begin + 1] != b"{":
        return None
    begin = _past_space(body, begin + 1)
    is_end = body[begin : begin + 1] == b"}"
    while not is_end:
        quoted = _string(body, begin)
        if quoted is None:
            return None
        colon = _past_space(body, quoted.end())
        start = _past_space(body, colon + 1)
        end = _past_value(body, start)
        name = quoted[0][1:-1]
        if body[colon : colon + 1] != b":" or end < 0:
            return None
        if not written_anew and (name in spans or b"\\" in name or len(spans) == MAX_COMPARED):
            return None
        spans[name] = (begin, start, end)
        begin = _past_space(body, end)
        is_end = body[begin : begin + 1] == b"}"
        if not is_end:
            if body[begin : begin + 1] != b",":
                return None
            begin = _past_space(body, begin + 1)
    return Members(body, spans) if _past_space(body, begin + 1) == len(body) else None


def _past_space(body: bytes, at: int) -> int:
    found = _space(body, at)
    return at if found is None else found.end()


def _past_value(body: bytes, at: int) -> int:
    """Behind the value that begins there; -1: there is none, or it has no end."""
    head = body[at : at + 1]
    if head not in (b"[", b"{"):
        found = _string(body, at) if head == b'"' else _literal(body, at)
        return -1 if found is None else found.end()
    depth = 0
    while (mark := _structure(body, at)) is not None:
        at = mark.end()
        if mark[0] == b'"':
            text = _string(body, mark.start())
            if text is None:
                return -1
            at = text.end()
        else:
            depth += 1 if mark[0] in (b"[", b"{") else -1
            if not depth:
                return at
    return -1
