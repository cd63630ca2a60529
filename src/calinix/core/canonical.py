"""Prompts as canonical bytes: equal prompts give equal bytes, different prompts different ones.

Text is UTF-8, in which the bytes 0xFE and 0xFF never occur, so they can separate: 0xFF begins a
message, 0xFE a field of it. Nothing ends a message, so a conversation that goes on begins with
the bytes that it had before (the key is prefix-preserving) and no two conversations share their
bytes (it is injective). A text and the same text as a single part are the same bytes.

An image, a sound or a file enters as the SHA-256 of its data, written as 32 equal words: it then
fills some blocks, as it does in an engine, whether blocks are made of bytes or of words.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw

from calinix.core.bodies import (
    ChatBody,
    CompletionsBody,
    Content,
    Maybe,
    Message,
    MessagesBody,
    Part,
    ResponsesBody,
)
from calinix.core.hashing import Piece
from calinix.core.kv import join, lift

_MESSAGE: Final = b"\xff"
_FIELD: Final = b"\xfe"
_TEXT: Final = b"\xfet"
_TOOLS: Final = b"\xff\xfeT"
_MEDIA_WORDS: Final = 32

# The head of a message whose first field is its text, for the roles that there are.
_HEADS = {
    role: _MESSAGE + role.encode() + _TEXT
    for role in ("system", "developer", "user", "assistant", "tool", "function")
}
_TEXT_TYPES = frozenset({"text", "input_text", "output_text", "", "summary_text"})
_MEDIA_FIELDS = (
    "image_url", "input_audio", "audio_url", "video_url", "file", "file_id", "file_data",
    "file_url", "source",
)  # fmt: skip
_MEDIA_TYPES = frozenset(
    {
        "image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file",
        "image", "document",
    }
)  # fmt: skip
_OTHER_TYPES = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "refusal"})
_ITEM_TYPES = frozenset({None, "message", "function_call", "function_call_output", "reasoning"})
_MAX_DEPTH: Final = 8


LIFT_FROM_BYTES: Final = 4096
"""Of shorter bodies no texts are lifted: there is nothing to gain."""
LIFT_BYTES: Final = 1024
"""A text as long as this is lifted."""
_LIFT_STRINGS: Final = 64
"""Behind so many short strings no text is looked for any more."""
# Nobody outside of this process knows it; a client who did could only spoil its own key.
_MARK = f"\ue000{hash('calinix.core.canonical') & 0xFFFFFFFFFFFFFFFF:016x}:"

Texts = dict[str, bytes | memoryview]
"""Lifted texts in UTF-8 by the name that stands in their place."""


class LeftOverError(ValueError):
    """A lifted text stood where no text of a prompt was expected: read the body as it came."""


class _UnusualError(ValueError):
    """A part or an item of a kind that is not known here."""


def lifted(raw: bytes) -> tuple[bytes, Texts]:
    """(the body with names in place of its long texts, the texts); as it came where none is.

    Decoding a long text as part of its body costs several passes over it, of which a key needs
    none. Names that are not met again as whole texts make `chat` and the like raise LeftOverError.
    """
    if len(raw) < LIFT_FROM_BYTES:
        return raw, {}
    return lift(raw, LIFT_BYTES, _LIFT_STRINGS, _MARK) or (raw, {})


def completions(body: CompletionsBody, raw: bytes, texts: Texts) -> bytes:  # noqa: ARG001
    """The key of a completion whose prompt is a text; else empty. Raises ValueError."""
    return _joined([body.prompt] if isinstance(body.prompt, str) else [], texts)


def _joined(pieces: list[Piece], texts: Texts) -> bytes:
    """All pieces in order, lifted texts in their places again."""
    if texts:
        found = 0
        for place, piece in enumerate(pieces):
            if type(piece) is str and piece in texts:
                pieces[place] = texts[piece]
                found += 1
        if found != len(texts):
            raise LeftOverError
    return join(pieces)


def chat(body: ChatBody, raw: bytes, texts: Texts) -> bytes:
    """The key of a chat: tools, then the messages in order. Raises ValueError."""
    pieces: list[Piece] = []
    if body.tools is not UNSET:
        _tools(pieces, body.tools)
    if body.messages:
        _all(pieces, body.messages, raw, "messages")
    return _joined(pieces, texts)


def messages(body: MessagesBody, raw: bytes, texts: Texts) -> bytes:
    """The key of an Anthropic request: tools, `system`, the messages. Raises ValueError."""
    pieces: list[Piece] = []
    if body.tools is not UNSET:
        _tools(pieces, body.tools)
    if body.system is not None:
        _system(pieces, body.system)
    _all(pieces, body.messages or [], raw, "messages")
    return _joined(pieces, texts)


def responses(body: ResponsesBody, raw: bytes, texts: Texts) -> bytes:
    """The key of a /v1/responses request: tools, instructions, input. Raises ValueError."""
    pieces: list[Piece] = []
    if body.tools is not UNSET:
        _tools(pieces, body.tools)
    if body.instructions is not None:
        _system(pieces, body.instructions)
    if isinstance(body.input, str):
        pieces += (_HEADS["user"], body.input)
    elif body.input is not None:
        _all(pieces, body.input, raw, "input")
    return _joined(pieces, texts)


def _tools(pieces: list[Piece], tools: Raw) -> None:
    if (octets := _compact(tools)) not in (b"null", b"[]"):
        pieces += (_TOOLS, octets)


def _system(pieces: list[Piece], content: Content) -> None:
    pieces.append(_MESSAGE + b"system")
    _content(pieces, content, 0)


def _all(pieces: list[Piece], items: list[Message], raw: bytes, field: str) -> None:
    loose: Any = None
    places: dict[int, int] = {}
    for message in items:
        role, content = message.role, message.content
        head = _HEADS.get(role)
        # Nothing but a role and a text, as most messages are: one comparison instead of fourteen.
        if head is not None and type(content) is str and message == Message(role, content):
            pieces.append(head)
            pieces.append(content)
            continue
        start = len(pieces)
        try:
            _message(pieces, message)
        except _UnusualError:
            # Of a kind that is not known here: the whole message as JSON.
            del pieces[start:]
            if loose is None:
                loose = msgspec.json.decode(raw)[field]
                places = {id(other): place for place, other in enumerate(items)}
            place = places[id(message)]
            pieces += (_MESSAGE + _FIELD + b"j", msgspec.json.encode(loose[place]))


def _message(pieces: list[Piece], message: Message) -> None:
    if message.type not in _ITEM_TYPES:
        raise _UnusualError
    pieces.append(_MESSAGE + message.role.encode())
    if message.type is not None and message.type != "message":
        _field(pieces, b"y", message.type)
    _field(pieces, b"n", message.name)
    _field(pieces, b"i", message.tool_call_id)
    _field(pieces, b"k", message.call_id)
    _field(pieces, b"r", message.reasoning_content)
    _field(pieces, b"g", message.reasoning)
    _json_field(pieces, b"s", message.summary)
    _field(pieces, b"e", message.encrypted_content)
    _content(pieces, message.content, 0)
    _field(pieces, b"u", message.refusal)
    _json_field(pieces, b"c", message.tool_calls)
    _json_field(pieces, b"f", message.function_call)
    _json_field(pieces, b"a", message.audio)
    _field(pieces, b"A", message.arguments)
    if message.output is not None:
        pieces.append(_FIELD + b"o")
        _content(pieces, message.output, 0)


def _content(pieces: list[Piece], content: Content, depth: int) -> None:
    if content is None:
        return
    if isinstance(content, str):
        pieces += (_TEXT, content)
        return
    for part in content:
        if part.type in _TEXT_TYPES and part.text is not None:
            pieces += (_TEXT, part.text)
        else:
            _part(pieces, part, depth)


def _part(pieces: list[Piece], part: Part, depth: int) -> None:
    """A part that is no text: its type, then its fields in one order."""
    kind = part.type
    if depth > _MAX_DEPTH or (kind not in _MEDIA_TYPES and kind not in _OTHER_TYPES):
        raise _UnusualError
    pieces += (_FIELD, b"p", kind)
    _field(pieces, b"n", part.name)
    _field(pieces, b"i", part.id)
    _field(pieces, b"k", part.tool_use_id)
    if part.text is not None:
        pieces += (_TEXT, part.text)
    _field(pieces, b"h", part.thinking)
    _field(pieces, b"d", part.data)
    _field(pieces, b"u", part.refusal)
    _json_field(pieces, b"c", part.input)
    for number, name in enumerate(_MEDIA_FIELDS):
        media: Maybe = getattr(part, name)
        if media is not UNSET:
            pieces += (_FIELD, b"m%d" % number, _digest_words(bytes(media)))
    if part.content is not None:
        pieces.append(_FIELD + b"(")
        _content(pieces, part.content, depth + 1)
        pieces.append(_FIELD + b")")


def _field(pieces: list[Piece], tag: bytes, value: str | None) -> None:
    if value is not None:
        pieces += (_FIELD, tag, value)


def _json_field(pieces: list[Piece], tag: bytes, value: Maybe) -> None:
    if value is not UNSET and (octets := _compact(value)) not in (b"null", b"[]"):
        pieces += (_FIELD, tag, octets)


def _compact(raw: Raw) -> bytes:
    """The JSON without insignificant whitespace. Raises ValueError where it is not UTF-8."""
    octets: bytes = msgspec.json.format(bytes(raw), indent=-1)
    if not octets.isascii():
        octets.decode()
    return octets


def _digest_words(data: bytes) -> bytes:
    return (hashlib.sha256(data).hexdigest()[:32].encode() + b" ") * _MEDIA_WORDS
