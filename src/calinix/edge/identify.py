"""What a pod is: vLLM, SGLang or something else, by the paths in which engines name themselves."""

from __future__ import annotations

from typing import Any

import msgspec

from calinix.edge.http_client import FetchError, PodClient, fetch
from calinix.engines.protocols import Engine

_VLLM_PATH = "/version"
_SGLANG_PATHS = ("/server_info", "/get_server_info")
"""The second is the name of older versions."""
_MAX_VERSION_CHARS = 64


class Identity(msgspec.Struct, frozen=True):
    """What a pod said that it is."""

    engine: Engine
    version: str = ""
    bootstrap_port: int | None = None
    """Of its P/D bootstrap server, where the engine tells it (SGLang)."""


async def identify(client: PodClient, api_key: str | None, *, timeout_s: float) -> Identity | None:
    """Asks the pod; `timeout_s` bounds each of at most three questions.

    None when it could not be asked now: to be tried again. A pod that answers, and like neither,
    is "other".
    """
    headers = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
    try:
        said = await _ask(client, _VLLM_PATH, headers, timeout_s)
        if isinstance(said.get("version"), str):
            return Identity("vllm", said["version"][:_MAX_VERSION_CHARS])
        for path in _SGLANG_PATHS:
            said = await _ask(client, path, headers, timeout_s)
            if isinstance(said.get("version"), str) and "disaggregation_mode" in said:
                port = said.get("disaggregation_bootstrap_port")
                is_port = isinstance(port, int) and 0 < port < 65536
                version = said["version"][:_MAX_VERSION_CHARS]
                return Identity("sglang", version, port if is_port else None)
    except FetchError:
        return None
    return Identity("other")


async def _ask(
    client: PodClient, path: str, headers: list[tuple[bytes, bytes]], timeout_s: float
) -> dict[str, Any]:
    """The JSON object at `path`; empty where there is none. Raises FetchError."""
    head, body = await fetch(client, "GET", path, headers, timeout_s=timeout_s)
    if head.status != 200:
        return {}
    try:
        said: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return said
