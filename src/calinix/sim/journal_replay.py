"""A journal played into a fresh Router: does every plan come out again, what would others pick."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from calinix.config import Config, Strategy
from calinix.core.events import Event, Failed, Failure, Finished, StrategyChanged
from calinix.core.requests import RoutePlan
from calinix.core.router import Router
from calinix.edge.journal import JournalReader, Observed, Planned, Routed, planned, request_of
from calinix.errors import ConfigError

MAX_KEPT = 20
"""Differences that are kept in full; all are counted."""
_PROGRESS_CALLS = 512


class Difference(msgspec.Struct, frozen=True, rename="camel"):
    """A route whose outcome is not the recorded one."""

    route: int
    """Its number, from 1."""
    request_id: str
    at_s: float
    recorded: Planned
    replayed: Planned


class Picks(msgspec.Struct, frozen=True, rename="camel"):
    """What was picked, over all routes: recorded, or replayed."""

    refused: int
    pods: dict[str, int]
    """Requests by the pod that answers."""
    cached_token_ratio: float
    """Prompt tokens believed cached where they went, over all prompt tokens."""
    predicted_ttft_mean_s: float | None


class Replayed(msgspec.Struct, frozen=True, rename="camel"):
    """What came of a journal."""

    version: str
    """That wrote it."""
    strategy: str
    """That was replayed."""
    other: bool
    """Another strategy than the recorded one: then differences are the point."""
    calls: int
    routes: int
    equal: int
    """Routes with the recorded outcome."""
    same_pod: int
    """Routes to the recorded pods, whatever was believed of them."""
    ending: str | None
    """Why the journal ends; None: its process died."""
    recorded: Picks
    replayed: Picks
    differences: list[Difference]
    """The first MAX_KEPT."""

    @property
    def holds(self) -> bool:
        """Every plan came out again."""
        return self.equal == self.routes


class _Tally:
    """Sums up outcomes."""

    def __init__(self) -> None:
        self.pods: Counter[str] = Counter()
        self.refused = 0
        self._tokens = self._cached = self._ttft_s = 0.0
        self._predicted = 0

    def add(self, outcome: Planned) -> None:
        if outcome.refusal is not None:
            self.refused += 1
            return
        self.pods[outcome.pod] += 1
        self._tokens += outcome.tokens
        self._cached += outcome.cached_tokens
        if outcome.ttft_s is not None:
            self._ttft_s += outcome.ttft_s
            self._predicted += 1

    def picks(self) -> Picks:
        return Picks(
            self.refused,
            dict(sorted(self.pods.items())),
            self._cached / self._tokens if self._tokens else 0.0,
            self._ttft_s / self._predicted if self._predicted else None,
        )


class Replay:
    """One run of a journal. With another strategy, each request still takes as long as it did.

    So what another strategy would have gained is not to be read here, but where it would have
    sent each request, given the load and the caches that its own picks before had led to.
    """

    def __init__(self, journal: JournalReader, strategy: Strategy | None = None):
        self._journal = journal
        self._other = strategy is not None
        config = journal.config if strategy is None else _with(journal.config, strategy)
        named = config.gateway.strategy
        self._strategy = named if isinstance(named, str) else named.name
        self.router = Router(config, random.Random(journal.opened.seed))
        # Recorded to replayed lease; as many as were open at once.
        self._leases: dict[int, int] = {}
        self._routes = self._equal = self._same_pod = 0
        self._recorded, self._replayed = _Tally(), _Tally()
        self._differences: list[Difference] = []

    def run(self, progress: Callable[[int], None] | None = None) -> Replayed:
        """Plays it to its end. Raises JournalError."""
        calls = 0
        for call in self._journal:
            calls += 1
            if isinstance(call, Routed):
                self._route(call)
            elif isinstance(call, Observed):
                self._observe(call.event, call.at_s)
            else:
                self.router.tick(call.at_s)
            if progress is not None and not calls % _PROGRESS_CALLS:
                progress(calls)
        return Replayed(
            version=self._journal.opened.version,
            strategy=self._strategy,
            other=self._other,
            calls=calls,
            routes=self._routes,
            equal=self._equal,
            same_pod=self._same_pod,
            ending=self._journal.ending,
            recorded=self._recorded.picks(),
            replayed=self._replayed.picks(),
            differences=self._differences,
        )

    def _route(self, call: Routed) -> None:
        result = self.router.route(request_of(call.request), call.at_s)
        outcome, recorded = planned(result), call.outcome
        self._routes += 1
        self._recorded.add(recorded)
        self._replayed.add(outcome)
        self._same_pod += (outcome.pod, outcome.prefill) == (recorded.pod, recorded.prefill)
        if outcome == recorded:
            self._equal += 1
        elif len(self._differences) < MAX_KEPT:
            self._differences.append(
                Difference(self._routes, call.request.request_id, call.at_s, recorded, outcome)
            )
        if isinstance(result, RoutePlan):
            if recorded.refusal is None:
                self._leases[recorded.lease] = result.lease_id
            else:
                # Nobody served it then, so nothing will be heard of its end.
                gone = Failed(result.lease_id, result.pod.role, Failure.CANCELLED)
                self.router.observe(gone, call.at_s)

    def _observe(self, event: Event, at_s: float) -> None:
        lease = getattr(event, "lease_id", None)
        if lease is not None:
            ends = isinstance(event, Finished | Failed)
            mine = self._leases.pop(lease, None) if ends else self._leases.get(lease)
            if mine is None:
                return
            event = replace(event, lease_id=mine)
        elif self._other and isinstance(event, StrategyChanged):
            return
        try:
            self.router.observe(event, at_s)
        except ConfigError:
            # As then: a pod for which there was no room.
            return


def _with(config: Config, strategy: Strategy) -> Config:
    return replace(config, gateway=replace(config.gateway, strategy=strategy))
