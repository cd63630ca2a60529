"""The heads that the gateway sends: what passes, what it sets, what it strips."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix import headers as h
from calinix.config import PodConfig
from calinix.core.choice import Choice
from calinix.core.explain import Explanation
from calinix.core.pods import Pod
from calinix.core.prompt import Endpoint
from calinix.core.requests import RoutePlan
from calinix.edge.http_server import RequestHead
from calinix.gateway.heads import (
    ClientHead,
    PodAddress,
    RequestIds,
    client_lines,
    plan_lines,
    request_head,
    response_lines,
)

Fields = list[tuple[bytes, bytes]]
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def fields(lines: bytes) -> Fields:
    """The header lines as pairs; each line must end in CRLF."""
    assert not lines or lines.endswith(b"\r\n")
    pairs = [line.split(b": ", 1) for line in lines.split(b"\r\n")[:-1]]
    return [(name, value) for name, value in pairs]


def passed(sent: Fields) -> Fields:
    """What of a client's headers goes to a pod, without the trace context of ours."""
    return [pair for pair in to_pod(sent) if pair[0] != b"traceparent"]


def to_pod(sent: Fields, ids: RequestIds | None = None) -> Fields:
    """The header lines that a pod gets of a client's headers, a trace context of ours included."""
    lines, traced = client_lines(sent)
    return fields(lines if traced else lines + (ids or RequestIds()).traceparent_line())


def client_of(method: str, target: bytes, sent: Fields, *, forward: bool = False) -> ClientHead:
    """What the gateway makes of a client's head."""
    path = target.partition(b"?")[0].decode()
    head = RequestHead((method, target, path, b"", 1), sent, dict(sent), keep_alive=True)
    return ClientHead(head, Endpoint.CHAT, path, None, forward)


def plan(**changed: Any) -> RoutePlan:
    """A plan for the pod `p-1`, but for what is changed."""
    config = PodConfig(id="p-1", url="http://p:1")
    given_: dict[str, Any] = {
        "request_id": "r-7",
        "lease_id": 1,
        "mode": "single",
        "pod": Pod("p-1", "http://p:1", 0, 1, "single", config),
        "prefill": None,
        "strategy": "cacheAware",
        "namespace": "00ff",
        "prompt_blocks": 9,
        "cached_blocks": 3,
        "prompt_tokens": 100.0,
        "predicted_cached_tokens": 48.0,
        "explanation": Explanation(Choice("single", 9, 0, (), None), None, 0.0, None),
    }
    return RoutePlan(**{**given_, **changed})


def test_ordinary_headers_pass_in_order() -> None:
    """What a client sends beside the stripped ones reaches the pod as it is, repeated ones too."""
    sent = [
        (b"content-type", b"application/json; charset=utf-8"),
        (b"x-custom", b"one"),
        (b"user-agent", b"openai/2"),
        (b"x-custom", b"two"),
        (b"accept", b"text/event-stream"),
    ]
    assert passed(sent) == sent


@pytest.mark.parametrize(
    "name",
    [
        *sorted(h.HOP_BY_HOP),
        b"host",
        b"content-length",
        b"expect",
        b"accept-encoding",
        b"authorization",
        b"x-api-key",
        b"api-key",
        b"cookie",
        b"x-request-id",
        b"x-data-parallel-rank",
        b"x-override-bootstrap-room",
        b"x-override-rid",
        b"x_override_bootstrap_host",
        b"x-calinix-mode",
        b"x-calinix-target-pod-id",
        b"x-calinix-made-up",
        b"x_calinix_mode",
        b"x-calinix_mode",
        b"x_data_parallel_rank",
        b"x_api_key",
        b"transfer_encoding",
    ],
    ids=bytes.decode,
)
def test_headers_that_never_reach_a_pod(name: bytes) -> None:
    """Hop-by-hop headers, credentials, ours and what steers an engine past the router.

    With underscores too: some servers take them for dashes.
    """
    assert passed([(b"x-before", b"1"), (name, b"x"), (b"x-after", b"2")]) == [
        (b"x-before", b"1"),
        (b"x-after", b"2"),
    ]


@pytest.mark.parametrize(
    "lines",
    [
        [b"x-secret"],
        [b"close, X-Secret"],
        [b"keep-alive", b"x-other , x-secret"],
        [b"x-secret", b"close"],
    ],
)
def test_headers_named_by_connection_stay_on_their_hop(lines: list[bytes]) -> None:
    """RFC 9110 7.6.1: what any Connection header names goes no further, to neither side."""
    sent = [(b"x-kept", b"1"), (b"x-secret", b"2"), *((b"connection", line) for line in lines)]
    assert passed(sent) == [(b"x-kept", b"1")]
    assert fields(response_lines(sent)) == [(b"x-kept", b"1")]


def test_a_valid_trace_context_is_passed_on() -> None:
    """One good traceparent goes to the pod with its tracestate, and none is added."""
    sent = [(b"traceparent", TRACE), (b"tracestate", b"vendor=1")]
    assert to_pod(sent) == sent
    later = [(b"traceparent", b"01" + TRACE[2:] + b"-more")]
    assert to_pod(later) == later


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [(b"tracestate", b"vendor=1")],
        [(b"traceparent", b""), (b"tracestate", b"vendor=1")],
        [(b"traceparent", TRACE.upper())],
        [(b"traceparent", TRACE + b"-more")],
        [(b"traceparent", b"ff" + TRACE[2:])],
        [(b"traceparent", b"00-" + b"0" * 32 + TRACE[35:])],
        [(b"traceparent", TRACE[:36] + b"0" * 16 + b"-01")],
        [(b"traceparent", TRACE), (b"tracestate", b"vendor=1"), (b"traceparent", TRACE)],
    ],
)
def test_no_or_a_bad_trace_context_is_made_anew(sent: Fields) -> None:
    """The pod gets exactly one valid traceparent, and no state of a trace that ended here."""
    got = to_pod([(b"x-kept", b"1"), *sent])
    assert [name for name, _ in got] == [b"x-kept", b"traceparent"]
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-01", got[1][1])
    assert b"-" + b"0" * 16 not in got[1][1]
    assert got[1][1] != TRACE


def test_every_trace_is_another() -> None:
    """Traces made for different requests differ, in one process and between two."""
    ids = RequestIds()
    made = {ids.traceparent_line() for _ in range(50)}
    made.add(RequestIds().traceparent_line())
    assert len(made) == 51


@given(st.binary(max_size=150))
def test_request_ids_are_safe(given_: bytes) -> None:
    """A client's id is kept where it can be written anywhere as it is, else one of ours is."""
    made = RequestIds().request_id(given_)
    assert re.fullmatch(r"[A-Za-z0-9._:@/+=-]{1,128}", made)
    if re.fullmatch(rb"[A-Za-z0-9._:@/+=-]{1,128}", given_):
        assert made == given_.decode()


def test_request_ids_differ() -> None:
    """Ids of ours are not repeated, in one process or between two."""
    first, second = RequestIds(), RequestIds()
    made = [ids.request_id(None) for ids in (first, second) for _ in range(100)]
    assert len(set(made)) == 200
    assert first.request_id(b"a\r\nx-injected: 1") not in made


def test_what_a_plan_says_of_itself() -> None:
    """All of the design's headers: a decode pod is the target; a hit is one cached block."""
    assert dict(fields(plan_lines(plan()))) == {
        b"x-request-id": b"r-7",
        h.CALINIX_REQUEST_ID: b"r-7",
        h.MODE: b"single",
        h.TARGET_POD_ID: b"p-1",
        h.CACHE_HIT: b"true",
        h.CACHE_PREFIX_DEPTH: b"3",
        h.CACHE_NAMESPACE: b"00ff",
        h.ROUTE_POLICY: b"cacheAware",
    }
    config = PodConfig(id="q", url="http://q:1")
    prefill = Pod("q", "http://q:1", 1, 2, "prefill", config)
    lines = dict(fields(plan_lines(plan(mode="dispatch", prefill=prefill, cached_blocks=0))))
    assert lines[h.PREFILL_POD_ID] == b"q"
    assert lines[h.DECODE_POD_ID] == lines[h.TARGET_POD_ID] == b"p-1"
    assert (lines[h.CACHE_HIT], lines[h.CACHE_PREFIX_DEPTH]) == (b"false", b"0")


def test_a_request_head_to_the_byte() -> None:
    """Method, prefix and target, the pod's host, then the lines as they are given."""
    address = PodAddress(b"pod:8000", b"/prefix", None)
    client = client_of("POST", b"/v1/x?y=1", [(b"a", b"b")])
    head = request_head(client, address, b"t: u\r\n", b"c: d\r\n", 12)
    assert head == (
        b"POST /prefix/v1/x?y=1 HTTP/1.1\r\nhost: pod:8000\r\na: b\r\nt: u\r\nc: d\r\n"
        b"content-length: 12\r\n\r\n"
    )
    bare = request_head(client_of("GET", b"/", []), PodAddress(b"p", b"", None), b"", b"", 0)
    assert bare == b"GET / HTTP/1.1\r\nhost: p\r\n\r\n"
    empty = request_head(client_of("POST", b"/", []), PodAddress(b"p", b"", None), b"", b"", 0)
    assert empty == b"POST / HTTP/1.1\r\nhost: p\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("pod_key", "client_key", "forward", "sent"),
    [
        ("pod", b"Bearer client", True, b"Bearer pod"),
        ("pod", None, True, b"Bearer pod"),
        ("pod", b"Bearer client", False, b"Bearer pod"),
        (None, b"Basic c", True, b"Basic c"),
        (None, b"Basic c", False, None),
        (None, None, True, None),
    ],
)
def test_the_pods_own_key_goes_before_the_clients(
    pod_key: str | None, client_key: bytes | None, forward: bool, sent: bytes | None
) -> None:
    """One authorization header at most; a pod with a key of its own gets that one."""
    address = PodAddress(b"p", b"", pod_key)
    given_ = [] if client_key is None else [(b"authorization", client_key)]
    head = request_head(client_of("GET", b"/", given_, forward=forward), address, b"", b"", 0)
    expected = [] if sent is None else [(b"authorization", sent)]
    assert fields(head.split(b"\r\n", 2)[2][:-2]) == expected


def test_what_a_client_gets_of_a_pods_head() -> None:
    """The pod's headers pass but for framing, hop-by-hop ones and copies of ours."""
    sent = [
        (b"date", b"now"),
        (b"content-type", b"text/event-stream"),
        (b"content-length", b"5"),
        (b"transfer-encoding", b"chunked"),
        (b"connection", b"keep-alive"),
        (b"keep-alive", b"timeout=5"),
        (b"x-request-id", b"the pod's"),
        (b"x-calinix-target-pod-id", b"a lie"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
    ]
    assert fields(response_lines(sent)) == [
        (b"date", b"now"),
        (b"content-type", b"text/event-stream"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
    ]
