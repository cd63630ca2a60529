"""What is seen of an event stream as its bytes pass by: data events, and the end marker."""

from __future__ import annotations

_DATA = b"\ndata:"
_DONE = b"\ndata: [DONE]"


class EventCounter:
    """Counts the data events of one stream. The bytes may be cut anywhere.

    `events` counts every `data:` line but the end marker; the first one is the first token.
    """

    __slots__ = ("_carry", "_lines", "done")

    def __init__(self) -> None:
        self._carry = b"\n"
        self._lines = 0
        self.done = False
        """The end marker `data: [DONE]` was seen."""

    @property
    def events(self) -> int:
        """Data events so far, the end marker not counted."""
        return self._lines - self.done

    def feed(self, piece: bytes) -> int:
        """Takes the next bytes of the stream; returns `events`."""
        text = self._carry + piece
        # The carry holds the last len(_DONE) - 1 bytes: a data line in it is counted already
        # unless it is cut at the very end.
        self._lines += text.count(_DATA, max(0, len(self._carry) - len(_DATA) + 1))
        if not self.done and b"[DONE]" in text:
            self.done = _DONE in text
        self._carry = text[1 - len(_DONE) :]
        return self._lines - self.done
