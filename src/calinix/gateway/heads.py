"""The head of every message that the gateway sends: what passes, what is set, what is stripped."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final

from calinix import errors
from calinix import headers as h
from calinix.core.prompt import Endpoint
from calinix.core.requests import Mode, RoutePlan
from calinix.edge.http_client import ResponseHead
from calinix.edge.http_server import RequestHead
from calinix.engines.usage_shapes import Usage
from calinix.gateway.routes import response_id_of

_NEVER_TO_PODS = h.HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    # Answers are looked at for usage and the first token, so they must come unencoded.
    b"accept-encoding",
    # Sent by `request_head`: the pod's own key, or the client's where the config forwards it.
    h.AUTHORIZATION,
    # Credentials as well, and no engine asks for them.
    b"x-api-key",
    b"api-key",
    b"cookie",
    h.REQUEST_ID,
    h.DATA_PARALLEL_RANK,
}
_STEERING_PREFIXES = (h.CALINIX_PREFIX, h.OVERRIDE_PREFIX)

_NEVER_TO_CLIENTS = h.HOP_BY_HOP | {b"content-length", h.REQUEST_ID}

_MODES: dict[bytes | None, Mode | None] = {
    None: None,
    b"single": "single",
    b"dispatch": "dispatch",
}

_SAFE_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}\Z")

# W3C Trace Context: no id is all zeros, and what follows the flags is for later versions only.
_IDS = rb"-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_is_traceparent = re.compile(rb"(?:00%b|(?!00|ff)[0-9a-f]{2}%b(?:-[!-~]*)?)\Z" % (_IDS, _IDS)).match
_TRACESTATE: Final = b"tracestate"


_HEX = tuple(f"{number:02x}" for number in range(256))
_HEX_BYTES = tuple(digits.encode() for digits in _HEX)


class RequestIds:
    """Ids of requests and traces: a random start per process, then a count.

    All but the last two digits of a count stay the same for 256 requests: they are kept.
    """

    def __init__(self) -> None:
        self._prefix = os.urandom(6).hex()
        self._trace_start = b"traceparent: 00-" + os.urandom(8).hex().encode()
        self._count = 0
        self._traces = 0
        self._stem = f"{self._prefix}-000000"
        self._trace_stem = b"0" * 14

    def request_id(self, given: bytes | None) -> str:
        """The client's own id where it is safe to write into a head and a log, else a new one."""
        if given is not None and _SAFE_ID.match(given):
            return given.decode("ascii")
        self._count = count = self._count + 1
        last = count & 255
        if last == 0:
            self._stem = f"{self._prefix}-{count >> 8:06x}"
        return self._stem + _HEX[last]

    def traceparent_line(self) -> bytes:
        """A new W3C trace context, version 00, sampled."""
        # A span id of zero is invalid, so the count starts at one.
        self._traces = count = self._traces + 1
        last = count & 255
        if last == 0:
            self._trace_stem = b"%014x" % (count >> 8)
        digits = self._trace_stem + _HEX_BYTES[last]
        return b"".join((self._trace_start, digits, b"-", digits, b"-01\r\n"))


class PodAddress:
    """What is constant in every head sent to one pod."""

    __slots__ = ("authorization_line", "host_line", "prefix")

    def __init__(self, host: bytes, prefix: bytes, api_key: str | None):
        self.host_line = b"host: " + host + b"\r\n"
        self.prefix = prefix
        self.authorization_line = (
            b"authorization: Bearer " + api_key.encode() + b"\r\n" if api_key else b""
        )


def plan_lines(plan: RoutePlan) -> bytes:
    """The x-calinix-* lines of a plan: the same go to the pods and back to the client."""
    pod_id = plan.pod.id
    lines = (
        f"x-request-id: {plan.request_id}\r\n"
        f"x-calinix-request-id: {plan.request_id}\r\n"
        f"x-calinix-mode: {plan.mode}\r\n"
        f"x-calinix-target-pod-id: {pod_id}\r\n"
        f"x-calinix-cache-hit: {'true' if plan.cached_blocks else 'false'}\r\n"
        f"x-calinix-cache-prefix-depth: {plan.cached_blocks}\r\n"
        f"x-calinix-cache-namespace: {plan.namespace}\r\n"
        f"x-calinix-route-policy: {plan.strategy}\r\n"
    )
    if plan.prefill is not None:
        lines += (
            f"x-calinix-prefill-pod-id: {plan.prefill.id}\r\nx-calinix-decode-pod-id: {pod_id}\r\n"
        )
    return lines.encode("ascii")


def prefill_usage_lines(usage: Usage) -> bytes:
    """What a prefill pod counted, for a client that asked."""
    lines = b""
    if usage.prompt_tokens is not None:
        lines += b"x-calinix-prefill-prompt-tokens: %d\r\n" % usage.prompt_tokens
    if usage.cached_tokens is not None:
        lines += b"x-calinix-prefill-cached-tokens: %d\r\n" % usage.cached_tokens
    return lines


def _without_named_by_connection(
    headers: Sequence[tuple[bytes, bytes]],
) -> list[tuple[bytes, bytes]]:
    """Drops `Connection` and what it declares hop-by-hop (RFC 9110 section 7.6.1)."""
    named = {b"connection"}
    for name, value in headers:
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return [header for header in headers if header[0] not in named]


def _is_ours(name: bytes) -> bool:
    return name in _NEVER_TO_PODS or name.startswith(_STEERING_PREFIXES)


def client_lines(headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bool]:
    """The client's header lines that go to a pod, and whether a good traceparent is among them.

    A bad traceparent is left out, so that one of ours can take its place.
    """
    passed: list[bytes] = []
    traces = 0
    has_state = False
    for name, value in headers:
        if name in _NEVER_TO_PODS:
            if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
                return client_lines(_without_named_by_connection(headers))
            continue
        if name.startswith(_STEERING_PREFIXES):
            continue
        if b"_" in name and _is_ours(name.replace(b"_", b"-")):
            continue  # servers after CGI's manner take the two for one
        if name == h.TRACEPARENT:
            traces += 1 if _is_traceparent(value) else 2
        elif name == _TRACESTATE:
            has_state = True
        passed += (name, b": ", value, b"\r\n")
    if traces != 1:
        if traces or has_state:
            # The trace begins anew here: what was said of the old one goes with it.
            rest = [header for header in headers if header[0] not in (h.TRACEPARENT, _TRACESTATE)]
            return client_lines(rest)
        return b"".join(passed), False
    return b"".join(passed), True


class ClientHead:
    """What the gateway makes of a client's head: for all requests whose heads are alike.

    Raises BadRequest for a mode that there is not. `era` is the configuration it was made under.
    """

    __slots__ = (
        "authorization", "endpoint", "era", "has_body", "label", "lines", "method", "mode",
        "prefill_usage", "request_id", "response_id", "session_key", "target", "traced",
    )  # fmt: skip

    def __init__(
        self, head: RequestHead, endpoint: Endpoint, label: str, era: object, forward: bool
    ):
        self.endpoint = endpoint
        self.label = label
        self.era = era
        values = head.values
        self.method = head.method.encode("ascii")
        self.has_body = head.method not in ("GET", "HEAD", "DELETE")
        target = head.target
        if target[:1] != b"/":  # absolute form: pods get the origin form
            target = head.path.encode("ascii") + (b"?" + head.query if head.query else b"")
        self.target = target
        self.lines, self.traced = client_lines(head.fields)
        given = values.get(h.AUTHORIZATION) if forward else None
        self.authorization = b"authorization: " + given + b"\r\n" if given else b""
        mode = values.get(h.MODE)
        if mode not in _MODES:
            shown = repr((mode or b"")[:40].decode("latin-1"))
            raise errors.BadRequest(
                f"x-calinix-mode must be 'single' or 'dispatch', not {shown}", code="unknown_mode"
            )
        self.mode: Mode | None = _MODES[mode]
        session = values.get(h.SESSION_KEY)
        self.session_key = session.decode("latin-1") if session else None
        self.request_id = values.get(h.REQUEST_ID)
        self.response_id = response_id_of(head.path)
        self.prefill_usage = values.get(h.PREFILL_USAGE, b"").lower() == b"true"
        """The client wants to know what the prefill pod counted."""


def request_head(
    client: ClientHead,
    address: PodAddress,
    trace_line: bytes,
    calinix_lines: bytes,
    body_bytes: int,
) -> bytes:
    """The whole head of a request to a pod, blank line included.

    `trace_line` is a traceparent of ours, or empty where the client sent a good one. The pod's
    key goes before the client's own.
    """
    return b"%b %b%b HTTP/1.1\r\n%b%b%b%b%b%b\r\n" % (
        client.method,
        address.prefix,
        client.target,
        address.host_line,
        address.authorization_line or client.authorization,
        client.lines,
        trace_line,
        calinix_lines,
        b"content-length: %d\r\n" % body_bytes if client.has_body or body_bytes else b"",
    )


def is_event_stream(head: ResponseHead) -> bool:
    """Whether the body is server-sent events."""
    return (head.header(b"content-type") or b"").lower().startswith(b"text/event-stream")


def response_lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The pod's header lines that go to the client; those of the plan follow them."""
    passed: list[bytes] = []
    for name, value in headers:
        if name not in _NEVER_TO_CLIENTS and not name.startswith(h.CALINIX_PREFIX):
            passed += (name, b": ", value, b"\r\n")
        elif name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            return response_lines(_without_named_by_connection(headers))
    return b"".join(passed)
