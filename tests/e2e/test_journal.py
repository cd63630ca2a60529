"""A live gateway keeps a journal, and `calinix replay` repeats its plans in another process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from signal import SIGHUP, SIGKILL, SIGTERM

import msgspec

import kit
from calinix.sim.load_report import Summary
from calinix.sim.load_traffic import Shape
from calinix.sim.loadgen import Plan, run_load
from calinix.sim.pod_model import PodFigures
from faultproxy import reserve_port
from fleets import Fleet, fleet_of, merged
from streams import SLOW_TOKENS, chat

FIGURES = PodFigures(delay_s=0.002, token_delay_s=0.001, prefill_tokens_per_s=50_000.0)
SHAPE = Shape(model="mock", prompt_tokens=120, shared_prefix=0.7, prefixes=3, turns=2, max_tokens=5)


async def load(port: int) -> list[Summary]:
    """Chats in both modes, streamed and not."""
    base = f"http://127.0.0.1:{port}"
    shapes = {"single": SHAPE, "dispatch": Shape(model="mock", max_tokens=3, stream=False)}
    return [
        await run_load(base, shape, Plan(requests=30, concurrency=6, mode=mode))
        for mode, shape in shapes.items()
    ]


async def replayed(folder: Path, journal: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of `calinix replay`, in a process of its own."""
    async with kit.Process(folder, "replay", journal, *options) as process:
        code = await process.ended()
        return code, " ".join(process.output().split())


async def faults(fleet: Fleet, port: int) -> None:
    """A pod that dies and comes back, and a client that leaves in the middle."""
    fleet.pods["single-1"].die()
    await load(port)
    fleet.pods["single-1"].revive()
    exchange = await kit.Exchange.send(port, chat(max_tokens=500))
    await exchange.read_until(b"data:", times=2)
    await exchange.leave()


@kit.on_loop
async def test_a_gateways_plans_come_out_again(tmp_path: Path) -> None:
    """Both modes, sessions, failures, a lost client, a reload: `calinix replay` finds all equal."""
    journal = tmp_path / "journal.jsonl"
    async with fleet_of(single=3, dispatch=2, figures=FIGURES) as fleet:
        config = fleet.config({"health": {"intervalMs": 100}, "log": {"level": "info"}})
        with contextlib.ExitStack() as stack:
            ports = [stack.enter_context(reserve_port()).getsockname()[1] for _ in range(2)]
            keys = {
                "gateway": {"host": "127.0.0.1", "port": ports[0]},
                "admin": {"port": ports[1]},
            }
            path = tmp_path / "config.yaml"
            write(path, merged(config, keys))
            async with kit.Process(tmp_path, "serve", path, "--journal", journal.name) as served:
                await served.ready(ports[0])
                await load(ports[0])
                await faults(fleet, ports[0])
                write(path, merged(config, merged(keys, {"gateway": {"strategy": "powerOfTwo"}})))
                served.send(SIGHUP)
                await kit.until(lambda: "reloaded" in served.output(), "the reload")
                await load(ports[0])
                served.send(SIGTERM)
                assert await served.ended() == 0
    code, said = await replayed(tmp_path, journal)
    assert code == 0, said
    routes = int(said.split()[0])
    assert routes > 150
    assert said == f"{routes} routes, {routes} with the same plan: all equal"


def write(path: Path, config: object) -> None:
    """The config as a file; JSON is YAML."""
    path.write_bytes(msgspec.json.encode(config))


@kit.on_loop
async def test_a_killed_gateway_leaves_a_journal(tmp_path: Path) -> None:
    """log.journalFile; what was written before SIGKILL can be replayed, and the end is missing."""
    journal = tmp_path / "journal.jsonl"
    async with fleet_of(single=2, figures=SLOW_TOKENS) as fleet:
        config = fleet.config({"log": {"journalFile": str(journal)}})
        async with kit.Serve(tmp_path, config) as served:
            exchange = await kit.Exchange.send(served.port, chat(max_tokens=500))
            await exchange.read_until(b"data:", times=2)
            await kit.until(lambda: b'"route"' in journal.read_bytes(), "the route is written")
            served.send(SIGKILL)
            await served.ended()
            await exchange.leave()
    code, said = await replayed(tmp_path, journal, "--strategy", "leastLoad")
    assert code == 0, said
    assert "the journal has no end" in said
    assert "1 routes; leastLoad would have sent" in said
