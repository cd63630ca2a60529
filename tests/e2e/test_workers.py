"""`calinix serve` with several workers: what one learns all know, and one that dies is replaced."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from signal import SIGHUP, SIGKILL, SIGTERM
from typing import Any

import kit
from calinix.app_worker import CONFIG_FILE
from calinix.sim.pod_model import PodFigures
from fleets import fleet_of, leases_given_back, merged
from streams import ask, chat, is_whole

SLOW = PodFigures(token_delay_s=0.02)
PROMPT = "The same long beginning of a prompt. " * 40


def workers(count: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """The config of so many."""
    gateway = {"workers": count, "strategy": "cacheAware"}
    return merged({"gateway": gateway, "log": {"level": "info"}}, extra or {})


async def admin(served: kit.Serve, path: str, method: str = "GET") -> Any:
    """What the admin port says."""
    reply = await kit.http(served.admin_port, method, path)
    assert reply.status == 200, reply
    return reply.json()


async def everybody_ready(served: kit.Serve, restarts: int = 0) -> list[dict[str, Any]]:
    """Waits until every worker has open ports, and returns what the admin says of them."""
    found: list[dict[str, Any]] = []

    async def ready() -> bool:
        found[:] = (await admin(served, "/admin/state"))["workers"]
        return sum(one["restarts"] for one in found) == restarts and all(
            one["ready"] for one in found
        )

    await kit.until(ready, "all workers are ready")
    return found


async def one_other_each(served: kit.Serve) -> bool:
    """Whether both of two workers hear of exactly one other."""
    views = [await admin(served, f"/admin/controller?worker={worker}") for worker in (0, 1)]
    return [view["replicas"] for view in views] == [1, 1]


async def streams_on_all(
    served: kit.Serve, count: int, tokens: int
) -> list[tuple[int, kit.Exchange]]:
    """(worker, stream), begun, until each of two workers has at least one."""
    begun: list[tuple[int, kit.Exchange]] = []
    while len(begun) < count or len({worker for worker, _ in begun}) < 2:
        request_id = f"stream-{len(begun)}"
        body = {"model": "mock", "stream": True, "max_tokens": tokens}
        body |= {"messages": [{"role": "user", "content": request_id}]}
        data = kit.request_bytes("POST", "/v1/chat/completions", body, {"x-request-id": request_id})
        stream = await kit.Exchange.send(served.port, data)
        await stream.read_until(b"data:", times=2)
        decision = await admin(served, f"/admin/decisions?request_id={request_id}")
        begun.append((decision["decisions"][0]["worker"], stream))
        assert len(begun) < 64
    return begun


@kit.on_loop
async def test_all_workers_serve_and_the_admin_speaks_for_all(tmp_path: Path) -> None:
    """One port, prompts known to all, one admin, one reload; a bad file changes nothing."""
    async with (
        fleet_of(single=4) as fleet,
        kit.Serve(tmp_path, fleet.config(workers(2))) as served,
    ):
        states = await everybody_ready(served)
        assert len({one["pid"] for one in states}) == 2
        first = await ask(served.port, chat(PROMPT))
        pod = first.headers["x-calinix-target-pod-id"]

        await kit.until(lambda: both_know_blocks(served, pod), "what one worker did, both know")
        replies = [await ask(served.port, chat(PROMPT)) for _ in range(12)]
        assert all(is_whole(reply) for reply in replies)
        assert {reply.headers["x-calinix-target-pod-id"] for reply in replies} == {pod}
        assert all(reply.headers["x-calinix-cache-hit"] == "true" for reply in replies)
        decisions = (await admin(served, "/admin/decisions?last=50"))["decisions"]
        assert {one["worker"] for one in decisions} == {0, 1}
        await leases_given_back(served.admin_port)
        metrics = (await kit.http(served.admin_port, "GET", "/metrics")).body.decode()
        counted = [
            float(line.rsplit(" ", 1)[1])
            for line in metrics.splitlines()
            if line.startswith("calinix_requests_total{") and 'status="200"' in line
        ]
        assert sum(counted) == 13.0
        for path in ("/admin/controller?worker=1", "/admin/pods", "/health"):
            await admin(served, path)
        assert (await kit.http(served.admin_port, "GET", "/admin/none")).status == 404
        assert (await kit.http(served.admin_port, "GET", "/admin/config")).status == 200
        await drains_everywhere(served, pod)
        await reloads_everywhere(served, fleet.config(workers(2)))
        served.send(SIGKILL)
        await served.ended()
        await kit.until(
            lambda: served.output().count('"stopped"') == 2, "workers end with their supervisor"
        )
        assert "Traceback" not in served.output()


async def both_know_blocks(served: kit.Serve, pod_id: str) -> bool:
    """Whether each of two workers, asked by itself, believes something to be cached there."""
    pages = [await admin(served, f"/admin/pods?worker={worker}") for worker in (0, 1)]
    return all(pod["blocks"] for page in pages for pod in page["pods"] if pod["id"] == pod_id)


async def drains_everywhere(served: kit.Serve, pod: str) -> None:
    """A drained pod gets nothing from any worker."""
    assert (await kit.http(served.admin_port, "POST", "/admin/pods/none/drain")).status == 404
    await admin(served, f"/admin/pods/{pod}/drain", "POST")

    async def drained() -> bool:
        pods = (await admin(served, "/admin/pods"))["pods"]
        return all(one["draining"] == (one["id"] == pod) for one in pods)

    await kit.until(drained, "the pod drains")
    replies = [await ask(served.port, chat(PROMPT)) for _ in range(8)]
    assert pod not in {reply.headers["x-calinix-target-pod-id"] for reply in replies}
    await admin(served, f"/admin/pods/{pod}/resume", "POST")


async def reloads_everywhere(served: kit.Serve, config: dict[str, Any]) -> None:
    """A bad file is refused once for all; a good one holds for all."""

    async def policies() -> set[str]:
        replies = [await ask(served.port, chat("x", max_tokens=1)) for _ in range(8)]
        return {reply.headers["x-calinix-route-policy"] for reply in replies}

    before = await policies()
    served.write(merged(config, {"gateway": {"stratgy": "random"}}))
    served.send(SIGHUP)
    await kit.until(lambda: "reload_refused" in served.output(), "it is refused")
    assert await policies() == before
    served.write(merged(config, {"gateway": {"strategy": "leastLoad"}}))
    served.send(SIGHUP)

    async def all_new() -> bool:
        return await policies() == {"leastLoad"}

    await kit.until(all_new, "all go by the new file")


def lose_configuration(pid: int) -> None:
    """As whoever cleans folders of temporary files may do; the next worker has to start anyway."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    (Path(command[4].decode()) / CONFIG_FILE).unlink()


@kit.on_loop
async def test_a_killed_worker_and_a_drain_under_load(tmp_path: Path) -> None:
    """Kill -9 loses what was on that worker and nothing else; SIGTERM loses nothing at all."""
    async with (
        fleet_of(single=2, figures=SLOW) as fleet,
        kit.Serve(tmp_path, fleet.config(workers(2))) as served,
    ):
        before = await everybody_ready(served)
        begun = await streams_on_all(served, 6, tokens=60)
        lose_configuration(before[0]["pid"])
        os.kill(before[0]["pid"], SIGKILL)
        replies = await asyncio.gather(*(stream.reply() for _, stream in begun))
        whole = [is_whole(reply) for reply in replies]
        assert whole == [worker == 1 for worker, _ in begun]
        assert "worker_died" in served.output()
        after = await everybody_ready(served, restarts=1)
        assert after[0]["pid"] != before[0]["pid"]
        assert after[1]["pid"] == before[1]["pid"]
        await leases_given_back(served.admin_port)
        await kit.until(lambda: one_other_each(served), "each knows the other and nobody else")
        begun = await streams_on_all(served, 6, tokens=40)
        served.send(SIGTERM)
        replies = await asyncio.gather(*(stream.reply() for _, stream in begun))
        assert all(is_whole(reply) for reply in replies)
        assert await served.ended() == 0, served.output()


@kit.on_loop
async def test_what_cannot_start(tmp_path: Path) -> None:
    """A taken port is one clear line and exit 2, with workers as without."""
    async with fleet_of(single=1) as fleet, fleet_of(single=1) as other:
        taken = other.pods["single-1"].port
        for key in ("gateway", "admin"):
            config = fleet.config(workers(2))
            served = (
                kit.Serve(tmp_path, config, gateway_port=taken)
                if key == "gateway"
                else kit.Serve(tmp_path, config, admin_port=taken)
            )
            assert await served.ended() == 2
            assert f"{key}.port" in served.output()
            assert "Traceback" not in served.output()
