"""What telemetry costs: `finish` on the request path, and the pass that counts and writes.

    python benchmarks/bench_telemetry.py [--records N] [--repeat R]

Prints one JSON object: method, machine, versions, then CPU microseconds per record, the median and
the best of R runs. Records differ in status, pod, latencies and request id; the request log goes
to a file in a temporary folder. Bars: finish <= 0.3 us without the pass, the pass <= 4 us.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from calinix import __version__
from calinix.config import parse_config
from calinix.telemetry import BATCH, PodState, RequestRecord, Telemetry

PODS = 16
FINISH_BAR_US, PASS_BAR_US = 0.3, 4.0


class Pod(msgspec.Struct, frozen=True):
    """A pod as the router would tell of it."""

    id: str
    role: str = "single"
    inflight: int = 3
    healthy: bool = True
    draining: bool = False
    ejected: bool = False
    blocks: int = 4096


class Pods:
    """A router that only knows its pods."""

    def pods(self) -> Sequence[PodState]:
        """PODS of them."""
        return [Pod(f"pod-{i}") for i in range(PODS)]


def record(i: int) -> RequestRecord:
    """A streamed chat request; no two are alike."""
    return RequestRecord(
        request_id=f"req-{i:028x}",
        endpoint="/v1/chat/completions",
        mode="single",
        strategy="cacheAware",
        model="Qwen/Qwen3-32B",
        status=200 if i % 50 else 503,
        pod_id=f"pod-{i % PODS}",
        received_at=1.8e9 + i / 1e3,
        ttft_us=int((0.05 + (i % 97) / 3e3) * 1e6),
        itl_us=int((0.01 + (i % 31) / 3e4) * 1e6),
        e2e_us=int((1.0 + (i % 89) / 3e2) * 1e6),
        decision_us=int((2e-5 + (i % 13) * 1e-6) * 1e6),
        prompt_blocks=64,
        cached_blocks=i % 64,
        predicted_cached_tokens=128.0 * (i % 64),
        prompt_tokens=2048,
        cached_tokens=1024,
        output_tokens=120,
        chunks=120,
        bytes_out=26_000,
    )


def per_record_us(step: Callable[[RequestRecord], None], records: list[RequestRecord]) -> float:
    """CPU microseconds per record of the loop over `step`."""
    begin = time.process_time()
    for one in records:
        step(one)
    return (time.process_time() - begin) / len(records) * 1e6


def measure(telemetry: Telemetry, count: int) -> dict[str, float]:
    """One run over `count` records."""
    records = [record(i) for i in range(count)]
    empty_us = per_record_us(lambda _: None, records)
    finish_us = pass_us = 0.0
    for start in range(0, count, BATCH - 1):
        part = records[start : start + BATCH - 1]
        finish_us += per_record_us(telemetry.finish, part) * len(part)
        begin = time.process_time()
        telemetry.flush()
        pass_us += (time.process_time() - begin) * 1e6
    whole_us = per_record_us(telemetry.finish, [record(i) for i in range(count)])
    begin = time.process_time()
    telemetry.metrics.exposition()
    return {
        "emptyCallUs": empty_us,
        "finishUs": finish_us / count,
        "passUs": pass_us / count,
        "finishWithPassUs": whole_us,
        "scrapeUs": (time.process_time() - begin) * 1e6,
    }


def main() -> int:
    """Runs, prints, and fails where a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        config = parse_config(
            f"log: {{requestsFile: '{path}'}}\n"
            "upstreams: {single: {pods: [{id: pod-0, url: 'http://127.0.0.1:1'}]}}\n"
        )
        telemetry = Telemetry(config, Pods())
        runs = [measure(telemetry, options.records) for _ in range(options.repeat)]
        telemetry.close()
        line_bytes = path.stat().st_size / (2 * options.records * options.repeat)
    result = {
        "method": f"{options.repeat} runs of {options.records} records in one process, "
        f"batches of {BATCH}, {PODS} pods, log to a file",
        "machine": f"{platform.machine()} {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "calinix": __version__,
        "lineBytes": round(line_bytes, 1),
        "median": {k: round(statistics.median(r[k] for r in runs), 3) for k in runs[0]},
        "best": {k: round(min(r[k] for r in runs), 3) for k in runs[0]},
        "bars": {"finishUs": FINISH_BAR_US, "passUs": PASS_BAR_US},
    }
    print(msgspec.json.format(msgspec.json.encode(result)).decode())
    best = min(runs, key=lambda run: run["passUs"])
    return 0 if best["finishUs"] <= FINISH_BAR_US and best["passUs"] <= PASS_BAR_US else 1


if __name__ == "__main__":
    sys.exit(main())
