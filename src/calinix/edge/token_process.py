"""A process that tokenises prompts, so that the gateway's own never has to.

It is asked over the socket that is its standard input, and ends with it. Templates, JSON and the
conversion of ids hold the interpreter for as long as a prompt is long: in a thread they would hold
up the gateway's loop, in a process of their own they do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import select
import signal
import socket
import struct

import msgspec

from calinix.core.prompt import Endpoint
from calinix.edge.token_frames import HEAD, Answer, Question, Settings, frame
from calinix.errors import ConfigError

NICENESS = 10
"""The loop goes first where there are not enough processors for all. It is not less than that: what
ran only when nobody else wants to would never come to an end on a busy machine."""

SLICE_S = 0.0001
"""So long it keeps a processor that the loop waits for; without it, for some milliseconds."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_attributes = struct.Struct("=IIQiIQQQ")
"""Of Linux' sched_setattr: size, policy, flags, niceness, priority, runtime, deadline, period."""

_ENDPOINTS = {Question.CHAT: Endpoint.CHAT, Question.COMPLETIONS: Endpoint.COMPLETIONS}


def serve(channel: socket.socket) -> None:
    """Answers until the other side is gone."""
    first = _read(channel)
    if first is None:
        return
    settings = msgspec.json.decode(first[2], type=Settings)
    try:
        # Only here: where the libraries are missing, that is told like everything else.
        from calinix.edge.prompt_desk import PromptDesk  # noqa: PLC0415
        from calinix.edge.tokenizers import tokenizer_of  # noqa: PLC0415

        tokenizer = tokenizer_of(settings.path, settings.tokenizing)
    except ConfigError as error:
        channel.sendall(frame(Answer.REFUSED, body=str(error).encode()))
        return
    desk = PromptDesk(tokenizer, settings.cache_bytes)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    _step_back()
    channel.sendall(frame(Answer.READY))
    while True:
        while not len(desk) or select.select([channel], [], [], 0.0)[0]:
            asked = _read(channel)
            if asked is None:
                return
            kind, number, body = asked
            desk.take(number, _ENDPOINTS[Question(kind)], body)
        found = desk.step()
        if found is not None:
            number, ids = found
            answer = Answer.UNTOLD if ids is None else Answer.TOKENS
            channel.sendall(frame(answer, number, ids or b"", desk.cache_bytes))


def _step_back() -> None:
    """From now on the loop goes first."""
    os.nice(NICENESS)
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return
    # Linux 6.12 and newer take a slice for ordinary processes, too; others leave it as it is.
    said = _attributes.pack(_attributes.size, 0, 0, NICENESS, 0, int(SLICE_S * 1e9), 0, 0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).syscall(number, 0, said, 0)


def _read(channel: socket.socket) -> tuple[int, int, bytes] | None:
    """(kind, number, body); None: the other side is gone."""
    head = _exactly(channel, HEAD.size)
    if head is None:
        return None
    size, number, kind, _ = HEAD.unpack(head)
    body = _exactly(channel, size)
    return None if body is None else (kind, number, bytes(body))


def _exactly(channel: socket.socket, size: int) -> bytearray | None:
    found = bytearray(size)
    view = memoryview(found)
    while view:
        count = channel.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return found


def main() -> None:
    """The process."""
    # A terminal, or a service manager, signals to all processes: the gateway drains first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as channel, contextlib.suppress(ConnectionError):
        serve(channel)
    # There is nothing to tidy up.
    os._exit(0)


if __name__ == "__main__":
    main()
