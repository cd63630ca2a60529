"""The journal: every call of a Router in a file, from which a fresh Router repeats each plan.

JSON lines. The first says what the Router was made of (configuration without secrets, seed,
version); each later one is a call with its time, and with what came of it where it is a route.
Prompts are in it as they came, so only the file's owner may read it.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import structlog

from calinix import __version__
from calinix.config import Config, Log, Mode
from calinix.config.fields import SECRET_KEYS
from calinix.core import events
from calinix.core.events import BlocksRemoved, BlocksStored, Event, PodAdded
from calinix.core.requests import Refusal, RoutePlan, RouteRequest, Work
from calinix.errors import CalinixError, ConfigError

log = structlog.get_logger()

FORMAT = 1
FLUSH_BYTES = 65_536
FLUSH_S = 0.5
MAX_LINE_BYTES = 1 << 30


class JournalError(CalinixError):
    """The file is no journal, or not one that this version can read."""


class Line(msgspec.Struct, frozen=True, tag_field="call", rename="camel", omit_defaults=True):
    """Base of all lines."""


class Opened(Line, frozen=True, tag="open"):
    """The first line: what the Router was made of."""

    format: int
    version: str
    seed: int
    config: dict[str, Any]
    """Without secrets, which no plan depends on."""


class Asked(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A RouteRequest; fields as there."""

    request_id: str
    mode: Mode | None = None
    work: Work = Work.GENERATE
    model: str = ""
    prompt: bytes = b""
    prompt_is_tokens: bool = False
    other_bytes: int = 0
    tenant: bytes = b""
    session_key: str | None = None
    max_output_tokens: int | None = None
    streamed: bool = False
    avoid: int = 0
    prefill_pod: str | None = None
    pinned_pod: str | None = None
    split: bool | None = None
    spare: bytes = b""


class Planned(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What a replay must repeat of a plan; `refusal` is the reason where there was none."""

    pod: str = ""
    prefill: str | None = None
    mode: Mode | None = None
    lease: int = 0
    blocks: int = 0
    cached_blocks: int = 0
    tokens: float = 0.0
    cached_tokens: float = 0.0
    ttft_s: float | None = None
    """As predicted."""
    refusal: str | None = None


class Routed(Line, frozen=True, tag="route"):
    """`route` was called."""

    at_s: float
    request: Asked
    outcome: Planned


class Observed(Line, frozen=True, tag="observe"):
    """`observe` was called."""

    at_s: float
    event: Any


class Ticked(Line, frozen=True, tag="tick"):
    """`tick` was called."""

    at_s: float


class Closed(Line, frozen=True, tag="close"):
    """The last line, unless the process died."""

    reason: str


Call = Routed | Observed | Ticked
EVENTS: Any = functools.reduce(
    operator.or_,
    (kind for kind in vars(events).values() if getattr(kind, "__bases__", ()) == (Event,)),
)

_encoder = msgspec.json.Encoder()
_lines: msgspec.json.Decoder[Opened | Routed | Observed | Ticked | Closed] = msgspec.json.Decoder(
    Opened | Routed | Observed | Ticked | Closed
)
_MARK = "\x00"
_MARKED = b'"\\u0000'
"""How a text that begins with the mark looks in JSON."""


class Journal:
    """Writes the calls of one Router (core.recorded.Record). Never raises and never waits.

    It ends, with a warning, at its bound or when the file cannot be written; the Router goes on.
    """

    def __init__(self, fd: int, config: Config, seed: int, max_bytes: int):
        self.written_bytes = 0
        self._fd = fd
        self._left_bytes = max_bytes
        self._buffer = bytearray()
        self._open = True
        self._flush_s = float("-inf")
        tree = _without_secrets(msgspec.to_builtins(config))
        self._append(Opened(FORMAT, __version__, seed, tree))

    @classmethod
    def open(cls, config: Config, path: Path | None = None) -> tuple[Journal, random.Random] | None:
        """At `path`, else at `log.journalFile`, with the rng for the Router; None: at neither.

        What a process before it wrote there goes on as FILE.1. Raises ConfigError.
        """
        settings: Log = config.log
        name = settings.journal_file if path is None else str(path)
        if name is None:
            return None
        try:
            fd = _fresh(name)
        except OSError as error:
            raise ConfigError(
                [f"log.journalFile: cannot open {name!r}: {error.strerror or error}"]
            ) from error
        seed = config.gateway.seed
        if seed is None:
            seed = random.SystemRandom().getrandbits(63)
        return cls(fd, config, seed, settings.journal_max_bytes), random.Random(seed)

    # --- core.recorded.Record ----------------------------------------------------------------

    def routed(self, request: RouteRequest, outcome: RoutePlan | Refusal, now: float) -> None:
        """A route, with its outcome."""
        if self._open:
            self._append(Routed(now, asked(request), planned(outcome)))

    def observed(self, event: Event, now: float) -> None:
        """A fact; of a pod's configuration without its key."""
        if self._open:
            if isinstance(event, PodAdded):
                bare = msgspec.structs.replace(event.config, api_key=None)
                event = msgspec.structs.replace(event, config=bare)
            self._append(Observed(now, event))

    def ticked(self, now: float) -> None:
        """A tick; some of them write what has gathered."""
        if self._open:
            self._append(Ticked(now))
            if now >= self._flush_s:
                self._flush_s = now + FLUSH_S
                self._flush()

    # --- the file ----------------------------------------------------------------------------

    def close(self, reason: str = "stopped") -> None:
        """Writes the rest and closes the file; harmless the second time."""
        if self._open:
            self._open = False
            self._buffer += _encoder.encode(Closed(reason)) + b"\n"
            self._flush()
            os.close(self._fd)

    def _append(self, line: Line) -> None:
        data = _encoded(line)
        if len(data) >= self._left_bytes:
            log.warning("journal_full", hint="log.journalMaxBytes is reached; nothing more is kept")
            self.close("full")
            return
        self._left_bytes -= len(data) + 1
        self._buffer += data
        self._buffer += b"\n"
        if len(self._buffer) >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._buffer:
                count = os.write(self._fd, self._buffer)
                self.written_bytes += count
                del self._buffer[:count]
        except OSError as error:
            self._buffer.clear()
            if self._open:
                self._open = False
                os.close(self._fd)
            log.warning("journal_off", reason=error.strerror or str(error))


def _fresh(path: str) -> int:
    """A new file of this name. Raises OSError."""
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        pass
    else:
        if not is_file:
            raise OSError("it is there, and no regular file")
        # A journal is wanted most after its process died: the next one must not overwrite it.
        os.replace(path, path + ".1")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def asked(request: RouteRequest) -> Asked:
    """The request as it is written."""
    return Asked(**{name: getattr(request, name) for name in Asked.__struct_fields__})


def request_of(written: Asked) -> RouteRequest:
    """The request that was written."""
    return RouteRequest(**{name: getattr(written, name) for name in Asked.__struct_fields__})


def planned(outcome: RoutePlan | Refusal) -> Planned:
    """What of a plan (or of a refusal) is compared."""
    if isinstance(outcome, Refusal):
        return Planned(refusal=outcome.reason.value)
    ttft_s = outcome.explanation.predicted_ttft_s
    return Planned(
        pod=outcome.pod.id,
        prefill=None if outcome.prefill is None else outcome.prefill.id,
        mode=outcome.mode,
        lease=outcome.lease_id,
        blocks=outcome.prompt_blocks,
        cached_blocks=outcome.cached_blocks,
        tokens=outcome.prompt_tokens,
        cached_tokens=outcome.predicted_cached_tokens,
        ttft_s=ttft_s if ttft_s is None or math.isfinite(ttft_s) else None,
    )


class JournalReader:
    """A journal, read again: what its Router was made of, and an iterator over its calls."""

    def __init__(self, path: Path):
        """Raises JournalError, OSError."""
        self._path = path
        self._file = path.open("rb")
        self.ending: str | None = None
        """Why it ends, once it was read to the end; None: its process died."""
        self.read_bytes = 0
        try:
            self.opened = self._first()
            self.config = msgspec.convert(self.opened.config, Config)
        except msgspec.MsgspecError as error:
            self.close()
            raise JournalError(f"{path}:1: not a configuration of this version: {error}") from error
        except JournalError:
            self.close()
            raise

    def __iter__(self) -> Iterator[Call]:
        """The calls, in order; a last line that was cut off is left out."""
        number = 1
        while data := self._file.readline(MAX_LINE_BYTES):
            number += 1
            self.read_bytes += len(data)
            if not data.endswith(b"\n"):
                return
            line = self._decode(data, number)
            if isinstance(line, Closed):
                self.ending = line.reason
                return
            if isinstance(line, Opened):
                raise JournalError(f"{self._path}:{number}: a second journal begins here")
            yield line

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _first(self) -> Opened:
        first = self._decode(self._file.readline(MAX_LINE_BYTES), 1)
        if not isinstance(first, Opened):
            raise JournalError(f"{self._path}: its first line is not that of a journal")
        if first.format != FORMAT:
            raise JournalError(f"{self._path}: of format {first.format}, this reads {FORMAT}")
        return first

    def _decode(self, data: bytes, number: int) -> Opened | Call | Closed:
        try:
            line = _lines.decode(data)
            if isinstance(line, Observed):
                event = msgspec.convert(_texts(line.event, _read), EVENTS)
                _check_blocks(event)
                return msgspec.structs.replace(line, event=event)
            if isinstance(line, Routed):
                return msgspec.structs.replace(line, request=_texts_of(line.request, _read))
        except msgspec.MsgspecError as error:
            raise JournalError(f"{self._path}:{number}: no line of a journal: {error}") from error
        return line


def _check_blocks(event: Event) -> None:
    """Raises ValidationError for blocks that are no hashes."""
    if isinstance(event, BlocksStored | BlocksRemoved):
        parent = event.parent if isinstance(event, BlocksStored) else None
        if not all(0 <= block < 1 << 64 for block in (*event.blocks, parent or 0)):
            raise msgspec.ValidationError("a block is not an unsigned number of 64 bits")


def _encoded(line: Line) -> bytes:
    """One line. Texts of clients that JSON cannot hold come back as they were."""
    try:
        data = _encoder.encode(line)
        if _MARKED not in data:
            return data
    except UnicodeEncodeError:
        pass  # a lone surrogate
    if isinstance(line, Routed):
        line = msgspec.structs.replace(line, request=_texts_of(line.request, _written))
        return _encoder.encode(line)
    return _encoder.encode(_texts(msgspec.to_builtins(line), _written))


def _texts_of(request: Asked, change: Any) -> Asked:
    changed = {
        name: change(value)
        for name in ("request_id", "model", "session_key", "prefill_pod", "pinned_pod")
        if isinstance(value := getattr(request, name), str)
    }
    return msgspec.structs.replace(request, **changed)


def _texts(node: Any, change: Any) -> Any:
    if isinstance(node, dict):
        return {key: _texts(value, change) for key, value in node.items()}
    if isinstance(node, list):
        return [_texts(item, change) for item in node]
    return change(node) if isinstance(node, str) else node


def _written(text: str) -> str:
    return _MARK + text.encode("utf-8", "surrogatepass").hex()


def _read(text: str) -> str:
    if not text.startswith(_MARK):
        return text
    try:
        return bytes.fromhex(text[1:]).decode("utf-8", "surrogatepass")
    except ValueError:
        return text


def _without_secrets(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: _without_secrets(value) for key, value in node.items() if key not in SECRET_KEYS
        }
    if isinstance(node, list | tuple):
        return [_without_secrets(item) for item in node]
    return node
