"""Does the gateway know what real pods hold: its prediction beside the engine's count, each time.

Mixed requests go through a gateway. For each one the decision's predicted cached tokens are
compared with the usage.prompt_tokens_details.cached_tokens that the engine states in the answer.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from harness.processes import BenchmarkError
from realpods.gateway import Front
from realpods.traffic import Kind, Shot, Traffic
from realpods.vllm_pods import BLOCK_TOKENS, PodSpec, call, metric

ANSWER_TIMEOUT_S = 120.0
PATIENCE_S = 20.0


class Compared(msgspec.Struct, frozen=True):
    """One request: what was predicted of its pod, and what the pod said."""

    number: int
    kind: Kind
    pod: str
    prompt_tokens: int
    predicted: int
    actual: int
    overlapped: bool
    """Another request was at the same pod for a part of its time."""

    @property
    def off(self) -> int:
        """Predicted less actual, in tokens."""
        return self.predicted - self.actual


class Agreement(msgspec.Struct, frozen=True):
    """What one run of mixed requests came to."""

    name: str
    requests: int
    cancelled: int
    compared: int
    hits: int
    """Requests of which the engine had at least one block."""
    equal: int
    within_a_block: int
    evicted_blocks: dict[str, int]
    """Blocks that each pod published as removed; empty without events."""
    by_pod: dict[str, tuple[int, int, int]]
    """(compared, equal, within one block)."""
    kinds: dict[str, int]
    seconds: float
    rest: list[Compared]
    """Those that were not equal."""
    reasons: dict[str, int]
    """How many of the rest have which reason (`reason_of`)."""

    def share(self, count: int) -> float:
        """Of the compared ones."""
        return count / self.compared if self.compared else 0.0


class Run:
    """Sends mixed requests with a number of clients, and compares."""

    def __init__(self, front: Front, seed: int, clients: int):
        self._front = front
        self._traffic = Traffic(seed)
        self._clients = clients
        self._lock = threading.Lock()
        self._times: dict[int, tuple[str, float, float]] = {}
        self._found: list[tuple[Shot, str, int, int, int]] = []
        self._cancelled = 0
        self._name = f"engine-{seed}"
        self._stopped = threading.Event()

    def compare(self, name: str, requests: int, specs: Sequence[PodSpec]) -> Agreement:
        """Sends `requests`; raises BenchmarkError where one fails."""
        began, removed = time.monotonic(), self._removed()
        self._name = re.sub(r"\W+", "-", name)
        shares = [requests // self._clients] * self._clients
        shares[0] += requests - sum(shares)
        with ThreadPoolExecutor(self._clients) as pool:
            clients = [pool.submit(self._client, share) for share in shares]
            try:
                for client in clients:
                    client.result()
            finally:
                self._stopped.set()
        self._wait_for_rest(specs)
        compared = [self._judged(*one) for one in self._found]
        kinds = Counter(str(one.kind) for one in compared)
        if self._cancelled:
            kinds[str(Kind.CANCELLED)] = self._cancelled
        after = self._removed()
        rest = [one for one in compared if not _is_equal(one)]
        return Agreement(
            name=name,
            requests=requests,
            cancelled=self._cancelled,
            compared=len(compared),
            hits=sum(one.actual > 0 for one in compared),
            equal=sum(_is_equal(one) for one in compared),
            within_a_block=sum(_is_near(one) for one in compared),
            evicted_blocks={pod: after[pod] - removed[pod] for pod in after},
            by_pod={spec.name: _counts(compared, spec.name) for spec in specs},
            kinds=dict(kinds.most_common()),
            seconds=round(time.monotonic() - began, 1),
            rest=rest,
            reasons=dict(Counter(reason_of(one, known=bool(after)) for one in rest).most_common()),
        )

    def _client(self, requests: int) -> None:
        for _ in range(requests):
            if self._stopped.is_set():
                return
            shot = self._traffic.next()
            if shot.kind is Kind.CANCELLED:
                self._cancel(shot)
            else:
                self._ask(shot)

    def _ask(self, shot: Shot) -> None:
        request_id = f"{self._name}-{shot.number}"
        began = time.monotonic()
        answer = self._front.complete(shot.body, request_id)
        ended = time.monotonic()
        if answer.status != 200:
            raise BenchmarkError(f"{shot.kind}: {answer.status} {answer.body[:300]!r}")
        text, prompt_tokens, actual = read_answer(answer.body)
        decision = self._front.decision(request_id)
        pod = str(decision["podId"])
        predicted = round(decision["predicted"]["cachedTokens"])
        with self._lock:
            self._times[shot.number] = (pod, began, ended)
            self._found.append((shot, pod, prompt_tokens, predicted, actual))
        self._traffic.answered(shot, text, prompt_tokens)

    def _cancel(self, shot: Shot) -> None:
        """Sends it and leaves: at once, or after the first of the answer."""
        began = time.monotonic()
        request_id = f"{self._name}-{shot.number}"
        connection = http.client.HTTPConnection(
            "127.0.0.1", self._front.port, timeout=ANSWER_TIMEOUT_S
        )
        data = msgspec.json.encode(shot.body)
        headers = {"content-type": "application/json", "x-request-id": request_id}
        try:
            connection.request("POST", "/v1/chat/completions", data, headers)
            if shot.leaves_early:
                time.sleep(0.005)
            else:
                connection.getresponse().read(64)
        finally:
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
        with self._lock:
            self._cancelled += 1
            # The pod hears of it a little later: until then the next one overlaps.
            pod = "" if shot.leaves_early else str(self._front.decision(request_id)["podId"])
            self._times[shot.number] = (pod, began, time.monotonic() + 0.1)

    def _wait_for_rest(self, specs: Sequence[PodSpec]) -> None:
        """Until no pod has any request left: what was cancelled must not be counted later."""
        deadline = time.monotonic() + PATIENCE_S
        while any(metric(spec.port, "vllm:num_requests_running") for spec in specs):
            if time.monotonic() > deadline:
                raise BenchmarkError("pods go on with requests that were cancelled")
            time.sleep(0.1)

    def _removed(self) -> dict[str, int]:
        views = {pod: view["kv"] for pod, view in self._front.pods().items()}
        return {pod: int(view["removed"]) for pod, view in views.items() if "removed" in view}

    def _judged(
        self, shot: Shot, pod: str, prompt_tokens: int, predicted: int, actual: int
    ) -> Compared:
        _, began, ended = self._times[shot.number]
        overlapped = any(
            number != shot.number and where in (pod, "") and start < ended and end > began
            for number, (where, start, end) in self._times.items()
        )
        return Compared(shot.number, shot.kind, pod, prompt_tokens, predicted, actual, overlapped)


def reason_of(one: Compared, *, known: bool) -> str:
    """Why a prediction was not what the engine counted; `known`: by KV events."""
    if not known and one.kind is Kind.FORKED and -2 * BLOCK_TOKENS <= one.off < 0:
        return "blocks that an answer filled: history knows prompts only"
    if one.overlapped:
        return "another request came to the pod between the decision and the engine's step"
    if not known:
        return "the engine evicted in another order than history supposes"
    return "unexplained"


def read_answer(body: bytes) -> tuple[str, int, int]:
    """(text, prompt tokens, cached tokens) of a whole answer, or of a stream with its usage."""
    if body.startswith(b"data:"):
        lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
        parts = [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]
    else:
        parts = [msgspec.json.decode(body)]
    choices = itertools.chain.from_iterable(part.get("choices") or () for part in parts)
    text = "".join(map(_text, choices))
    usage = next((part["usage"] for part in reversed(parts) if part.get("usage")), None)
    if usage is None:
        raise BenchmarkError(f"an answer without usage: {body[-300:]!r}")
    details = usage.get("prompt_tokens_details") or {}
    return text, int(usage["prompt_tokens"]), int(details.get("cached_tokens") or 0)


def _text(choice: dict[str, object]) -> str:
    said = choice.get("message") or choice.get("delta") or choice
    text = said.get("content", said.get("text")) if isinstance(said, dict) else ""
    return str(text or "")


def _is_equal(one: Compared) -> bool:
    return one.predicted == one.actual


def _is_near(one: Compared) -> bool:
    return abs(one.off) <= BLOCK_TOKENS


def _counts(compared: list[Compared], pod: str) -> tuple[int, int, int]:
    mine = [one for one in compared if one.pod == pod]
    return len(mine), sum(map(_is_equal, mine)), sum(map(_is_near, mine))


def forget_prefixes(spec: PodSpec) -> None:
    """Empties a pod's prefix cache; it publishes that with its next step."""
    answer = call(spec.port, "POST", "/reset_prefix_cache")
    if answer.status != 200:
        raise BenchmarkError(f"{spec.name}: /reset_prefix_cache answers {answer.status}")
