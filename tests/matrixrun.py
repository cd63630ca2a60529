"""Runs cells of the failure matrix over real sockets, and says what is not as it has to be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

import kit
from calinix.app import App, running_gateway
from calinix.config import Config
from calinix.sim.mock_faults import Fault
from calinix.sim.mock_pod import MockPod, MockRole
from calinix.sim.pod_model import PodFigures
from faultproxy import reserve_port
from matrixcells import RETRIED, SLACK_S, TIMEOUT_S, Cell, Expected, expected

CHAT = "/v1/chat/completions"
AT_ONCE = 10
"""Cells under way in one loop: all but one of them wait for time-outs."""
SETTLE_S = 4.0
STALL_S = 0.1
"""Where the machine stood still for so long, time-outs tell nothing, and a cell runs once more."""
STALLED_TRIES = 3
CELL_S = 20.0
"""Nothing in a cell takes so long; then it hangs."""
TIMEOUT_MS = round(TIMEOUT_S * 1000)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"connector": "none"},
    "nixl": {"connector": "nixl"},
    "mooncake": {"connector": "mooncake"},
    "sglang": {"dialect": "sglang"},
}
FAULTS = {
    "refuses": Fault(kind="refuse"),
    "500": Fault(kind="status", status=500),
    "hangs": Fault(kind="hang"),
    "closes": Fault(kind="cut"),
    "garbage": Fault(kind="garbage"),
    "dies": Fault(kind="reset", chunks=3),
}
SLOW = PodFigures(delay_s=60.0, prefill_tokens_per_s=0.02)
SLOW_TOKENS = PodFigures(token_delay_s=0.02)


class Observed(NamedTuple):
    """What came of a cell."""

    status: int
    end: str
    calls: dict[str, int]
    cancelled: frozenset[str]
    seconds: float
    left: tuple[str, ...]
    """What was not given back in time."""
    lag_s: float
    """The longest that the loop was late, while the cell ran."""


async def observe(cell: Cell, door: asyncio.Lock) -> Observed:
    """Runs one cell from its pods' start to their end.

    `door` is held while there is work to do, not while time-outs pass: so nobody's time-outs are
    used up by the work of others.
    """
    async with contextlib.AsyncExitStack() as stack:
        async with door:
            pods = await _pods_of(cell, stack)
            app = await stack.enter_async_context(running_gateway(_config_of(cell, pods)))
            await kit.until(app.router.ready, "the gateway is ready")
            await _break(cell, pods, app)
            asking = asyncio.create_task(_ask(cell, pods, app))
            if not expected(cell).waits:
                await asyncio.wait([asking])
        try:
            status, end, seconds = await asking
        except AssertionError as error:  # what was waited for did not come
            status, end, seconds = 0, str(error), 0.0
        left = await _settle(pods, app, expected(cell).cancelled)
        calls = {name: pod.paths[CHAT] for name, pod in pods.items()}
        cancelled = frozenset(name for name, pod in pods.items() if pod.cancelled)
        lag_s = app.gateway.max_tick_lag_s
        return Observed(status, end, calls, cancelled, seconds, left, lag_s)


async def _pods_of(cell: Cell, stack: contextlib.AsyncExitStack) -> dict[str, MockPod]:
    pods = {}
    roles: tuple[tuple[str, MockRole], ...] = (("p", "prefill"), ("d", "decode"))
    for letter, role in roles:
        for number in range(1, 3 if cell.spare else 2):
            name = f"{letter}{number}"
            settings = dict(KINDS[cell.protocol])
            settings["role"] = "single" if (name, cell.prefill) == ("p1", "no params") else role
            if cell.client == ("in prefill" if letter == "p" else "between"):
                settings["figures"] = SLOW
            elif cell.client == "mid-answer":
                settings["figures"] = SLOW_TOKENS
            # So that nobody else is given the port of a pod that does not listen any more.
            holder = stack.enter_context(reserve_port())
            port = holder.getsockname()[1]
            pods[name] = MockPod(lease_s=1.0, port=port, **settings)
            await stack.enter_async_context(pods[name])
    return pods


def _config_of(cell: Cell, pods: dict[str, MockPod]) -> Config:
    entries: dict[str, list[dict[str, Any]]] = {"p": [], "d": []}
    for name, pod in pods.items():
        entry: dict[str, Any] = {"id": name, "url": pod.url}
        if pod.connector.port and name[0] == "p":
            entry["bootstrapPort"] = pod.connector.port
        entries[name[0]].append(entry)
    times = ("connectMs", "firstTokenMs", "idleMs", "totalMs", "prefillMs", "drainMs")
    return msgspec.convert(
        {
            "upstreams": {
                "dispatch": {
                    "protocol": cell.protocol,
                    "prefill": {"pods": entries["p"]},
                    "decode": {"pods": entries["d"]},
                }
            },
            "gateway": {
                "host": "127.0.0.1",
                "port": 0,
                "strategy": "roundRobin",
                "timeouts": dict.fromkeys(times, TIMEOUT_MS),
            },
            "health": {"intervalMs": 60_000, "passive": {"failures": 50}},
            "admin": {"enabled": False},
            "log": {"requests": False},
        },
        Config,
    )


async def _break(cell: Cell, pods: dict[str, MockPod], app: App) -> None:
    """Puts the faults in force; who refuses has lost the connections that were kept to it."""
    for name, fault in (("p1", cell.prefill), (cell.faulty_decode, cell.decode)):
        if fault not in FAULTS:
            continue
        pod, client = pods[name], app.gateway.upstreams[name].client
        pod.add_faults([FAULTS[fault]])
        if fault == "refuses":
            await kit.until(lambda p=pod: p._server is None, "it refuses")
            await kit.until(lambda c=client: not c._idle, "nothing is kept")


async def _ask(cell: Cell, pods: dict[str, MockPod], app: App) -> tuple[int, str, float]:
    """(status, how the answer ended, seconds) of the cell's one request."""
    loop = asyncio.get_running_loop()
    body = {
        "model": "mock",
        "messages": [{"role": "user", "content": str(cell)}],
        "max_tokens": 300 if cell.client == "mid-answer" else 8,
        "stream": cell.stream,
    }
    begin_s = loop.time()
    exchange = await kit.Exchange.send(app.server.port, kit.request_bytes("POST", CHAT, body))
    if cell.client == "stays":
        status, end = _read(await exchange.reply())
        return status, end, loop.time() - begin_s
    try:
        if cell.client == "mid-answer" and cell.stream:
            await exchange.read_until(b"data:", times=3)
        else:
            await kit.until(lambda: _has_come(cell, pods), f"{cell} has come so far")
    finally:
        await exchange.leave()
    return 0, "left", loop.time() - begin_s


def _read(reply: kit.Reply) -> tuple[int, str]:
    """(status, how the answer ended)."""
    if reply.status != 200:
        good = reply.complete and b'"error"' in reply.body and b'"message"' in reply.body
        return reply.status, "error" if good else f"odd error: {reply.wire[:300]!r}"
    if "event-stream" in reply.headers.get("content-type", ""):
        events = reply.events()
        if reply.complete and events[-1:] == ["[DONE]"] and '"error"' not in reply.body.decode():
            return 200, "whole"
        broke = "[DONE]" not in events and events and '"error"' in events[-1]
        return 200, "event" if broke else f"odd stream: {reply.wire[-300:]!r}"
    return 200, "whole" if reply.complete and reply.json()["choices"] else "cut"


def _has_come(cell: Cell, pods: dict[str, MockPod]) -> bool:
    """Whether the moment is there at which the client leaves."""
    second_p = second_d = False
    if cell.spare and cell.together:
        second_p = second_d = "refuses" in (cell.prefill, cell.decode)
        second_p = cell.prefill == "refuses"
    elif cell.spare:
        second_p = cell.prefill in RETRIED
        second_d = second_p or cell.decode == "refuses"
    prefill, decode = pods["p2" if second_p else "p1"], pods["d2" if second_d else "d1"]
    if cell.client == "in prefill":
        return bool(prefill.received and (decode.received or not cell.together))
    if not decode.received:
        return False
    prefilled = any(pod.served for name, pod in pods.items() if name[0] == "p")
    if cell.decode == "hangs":
        return prefilled or cell.protocol == "sglang"
    model = decode.model
    if cell.client == "between":
        return model.running + model.waiting > 0 and prefilled
    return model.running > 0 and model.counters.prompt_tokens > 0


async def _settle(pods: dict[str, MockPod], app: App, cancelled: frozenset[str]) -> tuple[str, ...]:
    """Waits until everything is given back; what is not."""

    def kept() -> tuple[str, ...]:
        found = [f"{app.router.open_leases()} leases"] if app.router.open_leases() else []
        found += ["flights"] if app.gateway.flights else []
        for view in app.router.pods():
            if view.inflight or view.prefill_tokens or view.decode_tokens:
                found.append(f"load of {view.id}")
        for name, pod in pods.items():
            model = pod.model
            if model.running or model.waiting or model.held or model.blocks.used:
                found.append(f"work or KV on {name}")
            if pod.connector.pending():
                found.append(f"a request that waits on {name}")
            if name in cancelled and not pod.cancelled:
                found.append(f"a request of {name} that was not taken back")
        return tuple(found)

    with contextlib.suppress(AssertionError):
        await kit.until(lambda: not kept(), "all is given back", timeout_s=SETTLE_S)
    return kept()


def problems(cell: Cell, seen: Observed, want: Expected) -> list[str]:
    """What is not as it has to be."""
    found = [f"left: {what}" for what in seen.left]
    if (seen.status, seen.end) not in want.ends:
        found.append(f"ended {seen.status} {seen.end}, expected {sorted(want.ends)}")
    for name, count in seen.calls.items():
        if count not in want.calls[name]:
            found.append(f"{count} calls of {name}, expected {sorted(want.calls[name])}")
    if not want.cancelled <= seen.cancelled <= want.cancelled | want.may_cancel:
        wanted = sorted(want.cancelled), sorted(want.may_cancel)
        found.append(f"cancelled {sorted(seen.cancelled)}, expected {wanted}")
    least_s, most_s = 0.9 * want.waits * TIMEOUT_S, want.waits * TIMEOUT_S + SLACK_S
    if not least_s <= seen.seconds <= most_s:
        found.append(f"took {seen.seconds:.2f} s, expected {least_s:.2f} to {most_s:.2f}")
    return found


async def run_cells(cells: Iterable[Cell]) -> dict[Cell, list[str]]:
    """Runs them, some at a time; the problems of each."""
    places, door = asyncio.Semaphore(AT_ONCE), asyncio.Lock()

    async def one(cell: Cell) -> tuple[Cell, list[str]]:
        async with places:
            try:
                for _ in range(STALLED_TRIES):
                    async with asyncio.timeout(CELL_S):
                        seen = await observe(cell, door)
                    found = problems(cell, seen, expected(cell))
                    if not found or seen.lag_s < STALL_S:
                        break
                return cell, found
            except (AssertionError, OSError, TimeoutError) as error:
                return cell, [f"did not come to its end: {error!r}"]

    return dict(await asyncio.gather(*(one(cell) for cell in cells)))
