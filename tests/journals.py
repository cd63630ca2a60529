"""Journals of routers that lived through arbitrary calls, and their replays."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from calinix.config import Config, Log, Strategy
from calinix.core.events import (
    Failed,
    Failure,
    Finished,
    FirstToken,
    PodFacts,
    PodRestarted,
    ProbeFailed,
    ProbeSucceeded,
    ReplicaFacts,
)
from calinix.core.recorded import RecordedRouter
from calinix.core.requests import RoutePlan, Work
from calinix.edge.journal import Journal, JournalReader
from calinix.sim.journal_replay import Replay, Replayed
from routing import make_config, request, text


def with_journal(config: Config, path: Path, **log: Any) -> Config:
    """The config, with a journal there."""
    return replace(config, log=Log(journal_file=str(path), **log))


def recorded(path: Path, calls: int = 200, seed: int = 1, **settings: Any) -> RecordedRouter:
    """A router that lived through so many arbitrary calls, and wrote its journal there."""
    log = settings.pop("log", {})
    config = with_journal(make_config(3, 3, 3, **settings), path, **log)
    opened = Journal.open(config)
    assert opened is not None
    journal, rng = opened
    router = RecordedRouter(config, rng, journal)
    live(router, random.Random(seed), calls)
    journal.close()
    return router


def live(router: RecordedRouter, rng: random.Random, calls: int) -> None:
    """Arbitrary requests and facts."""
    pods = [pod.id for pod in router.pods()]
    for pod in pods:
        router.observe(ProbeSucceeded(pod), 0.0)
    leases: list[int] = []
    for number in range(calls):
        now = 1.0 + number * 0.1
        kind = rng.randrange(10)
        if kind < 5:
            plan = router.route(
                request(
                    text(rng.randrange(8), rng.randrange(3)),
                    request_id=f"r-{number}",
                    mode=rng.choice(["single", "dispatch", None]),
                    work=rng.choice(list(Work)),
                    streamed=rng.random() < 0.5,
                    session_key=rng.choice([None, "a", "b"]),
                    avoid=rng.choice([0, 1]),
                    tenant=rng.choice([b"", b"\xff\x00"]),
                ),
                now,
            )
            if isinstance(plan, RoutePlan):
                leases.append(plan.lease_id)
        elif kind < 8 and leases:
            lease = rng.choice(leases)
            router.observe(FirstToken(lease), now)
            end = rng.choice([Finished(lease, 200, 100, 10, 20), Failed(lease, "single", FAILURE)])
            router.observe(end, now + 0.05)
        elif kind < 9:
            pod = rng.choice(pods)
            others = ReplicaFacts("other", (PodFacts(pod, 3.0, 500.0),), sync_s=1.0, gateways=2)
            facts = [ProbeFailed(pod), PodRestarted(pod), ProbeSucceeded(pod), others]
            router.observe(rng.choice(facts), now)
        else:
            router.tick(now)


FAILURE = Failure.SERVER_ERROR


def replayed(path: Path, strategy: Strategy | None = None) -> Replayed:
    """The journal, played to its end."""
    reader = JournalReader(path)
    try:
        return Replay(reader, strategy).run()
    finally:
        reader.close()
