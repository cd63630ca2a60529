"""What one routing decision costs, in process: read_body, route, FirstToken, Finished.

Medians in microseconds over requests of one shape, on a router whose pods are warm and busy:

    100 words    a chat of about 600 bytes, mostly new
    2 KB         a chat of 2 KB, one in four of which was seen before
    32 KB        a chat of 32 KB of which the first 80 % were seen before

Every request runs the whole path: the body is decoded, routed, its first token and its end are
observed. A window of requests stays inflight, so that load is uneven as it is in service.

`decision` is read_body + route, the making of the request between them included: all that is done
until the plan is out, and nothing is left for later (the new blocks are stored, the decision is
kept). `all` is the sum of the four steps.

Whatever else runs on the machine only adds: of several rounds the one with the lowest median
decision is shown (all are in the JSON).

    python benchmarks/bench_decision.py [--json FILE] [--quick] [--pods 16 64 256]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec
import numpy as np

from calinix.config import Config, Gateway, PodConfig, SingleUpstream, Strategy, Upstreams
from calinix.core.events import Finished, FirstToken, ProbeSucceeded
from calinix.core.kv import COMPILED
from calinix.core.prompt import Endpoint, read_body
from calinix.core.requests import RoutePlan, RouteRequest
from calinix.core.router import Router

STEPS = ("read_body", "route", "first_token", "finished")
INFLIGHT_PER_POD = 3
BARS_US = {
    ("100 words", 16): 15.0,
    ("100 words", 256): 40.0,
    ("32 KB", 16): 50.0,
    ("32 KB", 256): 75.0,
}
"""Decisions with the compiled registry."""
WORDS = [f"w{number:x}" + "aeiou"[number % 5] * (number % 6) for number in range(4000)]


def text(rng: random.Random, size: int) -> str:
    """Random words, `size` characters in all."""
    words: list[str] = []
    length = 0
    while length < size:
        word = rng.choice(WORDS)
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:size]


def body(system: str, user: str) -> bytes:
    """A streamed chat."""
    return msgspec.json.encode(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": user},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 128,
            "temperature": 0.7,
        }
    )


def bodies(shape: str, rng: random.Random, count: int) -> Iterator[bytes]:
    """Requests of one shape."""
    if shape == "100 words":
        for _ in range(count):
            yield body("You are a helpful assistant.", text(rng, 560))
    elif shape == "2 KB":
        shared = [text(rng, 1400) for _ in range(max(1, count // 4))]
        for number in range(count):
            yield body(shared[number % len(shared)], text(rng, 600))
    else:
        shared = [text(rng, 26_000) for _ in range(64)]
        for number in range(count):
            yield body(shared[number % len(shared)], text(rng, 6_500))


SHAPES = ("100 words", "2 KB", "32 KB")


def router_of(pods: int, strategy: str) -> Router:
    """A router with healthy pods."""
    named = tuple(PodConfig(f"pod-{i:03}", f"http://127.0.0.1:{9000 + i}") for i in range(pods))
    config = Config(
        upstreams=Upstreams(single=SingleUpstream(pods=named)),
        gateway=Gateway(strategy=msgspec.convert({"name": strategy}, Strategy), seed=1),
    )
    router = Router(config, random.Random(1))
    for pod in named:
        router.observe(ProbeSucceeded(pod.id), 0.0)
    return router


def measure(
    pods: int, shape: str, requests: int, strategy: str = "cacheAware"
) -> dict[str, list[int]]:
    """Nanoseconds of each step of every request after the first quarter, which warms up."""
    rng = random.Random(pods)
    router = router_of(pods, strategy)
    taken: dict[str, list[int]] = {step: [] for step in STEPS}
    inflight: deque[int] = deque()
    now = 1.0
    # As in the gateway, where an endpoint comes out of a table.
    chat, work = Endpoint.CHAT, Endpoint.CHAT.work
    for number, kept in enumerate(list(bodies(shape, rng, requests))):
        now += 0.001
        # A body has just been read from a socket, so it is warm in the cache; this copy is, too.
        octets = bytes(bytearray(kept))
        start = perf_counter_ns()
        parsed = read_body(chat, octets)
        read = perf_counter_ns()
        plan = router.route(
            RouteRequest(
                request_id="r",
                mode=None,
                work=work,
                model=parsed.model,
                prompt=parsed.prompt,
                prompt_is_tokens=parsed.prompt_is_tokens,
                other_bytes=parsed.other_bytes,
                tenant=parsed.cache_salt,
                session_key=parsed.session_key,
                max_output_tokens=parsed.max_output_tokens,
                streamed=parsed.stream,
            ),
            now,
        )
        routed = perf_counter_ns()
        assert isinstance(plan, RoutePlan)
        inflight.append(plan.lease_id)
        first_start = perf_counter_ns()
        router.observe(FirstToken(plan.lease_id), now + 0.01)
        first_end = perf_counter_ns()
        lease_id = inflight.popleft() if len(inflight) > INFLIGHT_PER_POD * pods else 0
        end_start = perf_counter_ns()
        router.observe(Finished(lease_id, 200, 1000, 0, 20), now + 0.02)
        end_end = perf_counter_ns()
        if number % 50 == 0:
            router.tick(now)
        if number >= requests // 4 and lease_id:
            taken["read_body"].append(read - start)
            taken["route"].append(routed - read)
            taken["first_token"].append(first_end - first_start)
            taken["finished"].append(end_end - end_start)
    return taken


def summary(taken: dict[str, list[int]]) -> dict[str, float]:
    """Medians in microseconds, of the decision (read_body + route) the 99th percentile too."""
    row = {step: statistics.median(values) / 1e3 for step, values in taken.items()}
    decisions = [a + b for a, b in zip(taken["read_body"], taken["route"], strict=True)]
    row["decision"] = statistics.median(decisions) / 1e3
    row["decision_p99"] = statistics.quantiles(decisions, n=100)[98] / 1e3
    row["all"] = statistics.median(map(sum, zip(*taken.values(), strict=True))) / 1e3
    return row


def findings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bars that the figures are held to."""
    return [
        {
            "what": f"decision, {row['prompt']}, {row['pods']} pods, us",
            "figure": round(row["decision"], 1),
            "limit": f"<= {BARS_US[row['prompt'], row['pods']]}",
            "holds": row["decision"] <= BARS_US[row["prompt"], row["pods"]],
        }
        for row in rows
        if (row["prompt"], row["pods"]) in BARS_US
    ]


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--pods", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--requests", type=int, default=3000, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--strategy", default="cacheAware")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.rounds = 1500, 3
    print(
        f"calinix decision, microseconds, medians; compiled: {COMPILED}; "
        f"Python {platform.python_version()}, numpy {np.__version__}, {arguments.strategy}"
    )
    columns = ("decision", "decision_p99", *STEPS, "all")
    print(f"{'prompt':<10}{'pods':>5}" + "".join(f"{name:>13}" for name in columns))
    # The gateway's own settings.
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for pods in arguments.pods:
            rounds = [
                summary(measure(pods, shape, arguments.requests, arguments.strategy))
                for _ in range(arguments.rounds)
            ]
            best = min(rounds, key=lambda row: row["decision"])
            rows.append({"prompt": shape, "pods": pods, **best, "rounds": rounds})
            figures = "".join(f"{best[name]:>13.1f}" for name in columns)
            print(f"{shape:<10}{pods:>5}{figures}", flush=True)
    if arguments.json is not None:
        result = {
            "benchmark": "decision",
            "method": __doc__,
            "unit": "microseconds",
            "compiled": COMPILED,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.platform(),
            "strategy": arguments.strategy,
            "findings": findings(rows),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
