"""What a gateway must forget of a real pod, and when: a restart, an emptied cache."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from harness.processes import BenchmarkError, Child, Children
from realpods.agreement import forget_prefixes, read_answer
from realpods.gateway import Front, wait_until
from realpods.vllm_pods import MODEL, Engine, PodSpec, start_pod, wait_for_pods

WARM = "a prompt that is long enough to fill some blocks of the cache and is asked again " * 8
OTHER = "something else entirely that makes the engine take another step " * 4


class Forgotten(msgspec.Struct, frozen=True):
    """A prompt that the pod had, asked again after it was lost."""

    what: str
    warm_predicted: int
    warm_actual: int
    """Cached tokens before."""
    predicted: int
    actual: int
    """Cached tokens at the first request after."""
    told_after_s: float
    """From the moment that the engine could say so until the gateway knew it."""
    view: dict[str, Any]
    """What the pod's KV events had brought then."""

    @property
    def holds(self) -> bool:
        """It was there, the engine lost it, and the gateway knew."""
        was_there = self.warm_predicted == self.warm_actual > 0
        return was_there and self.predicted == self.actual == 0


class Asker:
    """Asks one pod of several through the gateway."""

    def __init__(self, front: Front, pod: str, others: list[str]):
        self._front = front
        self._pod = pod
        self._others = others
        self._number = 0

    def cached(self, words: str) -> tuple[int, int]:
        """(predicted, actual) cached tokens of a prompt at the pod."""
        self._number += 1
        request_id = f"lives-{self._pod}-{self._number}-{time.monotonic_ns()}"
        messages = [{"role": "user", "content": words}]
        body: dict[str, object] = {"model": MODEL, "max_tokens": 4, "messages": messages}
        with self._front.only(self._pod, self._others):
            answer = self._front.complete(body, request_id)
        if answer.status != 200:
            raise BenchmarkError(f"{self._pod}: {answer.status} {answer.body[:300]!r}")
        decision = self._front.decision(request_id)
        if decision["podId"] != self._pod:
            raise BenchmarkError(f"{decision['podId']} was asked instead of {self._pod}")
        return round(decision["predicted"]["cachedTokens"]), read_answer(answer.body)[2]

    def view(self) -> dict[str, Any]:
        """What the pod's KV events have brought."""
        kv: dict[str, Any] = self._front.pods()[self._pod]["kv"]
        return kv


def restart(
    children: Children, engine: Engine, front: Front, pods: dict[str, tuple[PodSpec, Child]]
) -> tuple[Forgotten, Child]:
    """The first of the pods is killed and started again; its new process is returned too."""
    (name, (spec, child)), *others = pods.items()
    asker = Asker(front, name, [other for other, _ in others])
    asker.cached(WARM)
    warm = asker.cached(WARM)
    children.end(child)
    wait_until(lambda: front.pods()[name]["state"] != "healthy", f"{name} found dead")
    child = start_pod(children, engine, spec)
    wait_for_pods([(spec, child)])
    healthy_s = wait_until(lambda: front.pods()[name]["state"] == "healthy", f"{name} found alive")
    view = asker.view()
    return Forgotten("restart", *warm, *asker.cached(WARM), round(healthy_s, 3), view), child


def reset(front: Front, spec: PodSpec, others: list[str]) -> Forgotten:
    """A pod's prefix cache is emptied; it says so with its next step, whatever that serves."""
    asker = Asker(front, spec.name, others)
    asker.cached(WARM)
    warm = asker.cached(WARM)
    before = asker.view()["batches"]
    forget_prefixes(spec)
    asker.cached(OTHER)
    told_s = wait_until(lambda: asker.view()["batches"] > before, "the pod's next batch")
    view = asker.view()
    return Forgotten("reset_prefix_cache", *warm, *asker.cached(WARM), round(told_s, 3), view)
