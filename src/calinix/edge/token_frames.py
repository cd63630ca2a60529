"""What the gateway and its tokenizing processes say to each other: frames on a socket.

A frame is a head (HEAD) and a body. Questions are numbered; their answers bear the same number and
may come in any order.
"""

from __future__ import annotations

import enum
import struct

import msgspec

from calinix.config.tokens import Tokenizing

HEAD = struct.Struct("<IIBQ")
"""(bytes of the body, number, kind, memory that remembered pieces take, in bytes)."""
MAX_BODY_BYTES = 4_194_304
"""Longer bodies are not tokenised."""
MAX_TOKENS = 131_072
"""A prompt of more tokens than this is not told: joining and hashing them would take the loop too
long."""


class Question(enum.IntEnum):
    """What a frame to the process is."""

    SETTINGS = 0
    """The first one: Settings, as JSON."""
    CHAT = 1
    """A body of POST /v1/chat/completions."""
    COMPLETIONS = 2
    """Likewise of POST /v1/completions."""


class Answer(enum.IntEnum):
    """What a frame from the process is."""

    READY = 0
    """The tokenizer is read."""
    REFUSED = 1
    """It cannot be; the body says why. The process ends."""
    TOKENS = 2
    """The ids of a prompt, little-endian u32."""
    UNTOLD = 3
    """There are none: they cannot be foretold, or are too many."""


class Settings(msgspec.Struct, frozen=True):
    """What a process needs to know."""

    path: str
    """The folder, or the file, with the tokenizer."""
    tokenizing: Tokenizing
    cache_bytes: int
    """Memory for pieces, of this process alone."""


def frame(kind: int, number: int = 0, body: bytes = b"", cache_bytes: int = 0) -> bytes:
    """One frame."""
    return HEAD.pack(len(body), number, kind, cache_bytes) + body
