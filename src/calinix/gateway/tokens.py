"""Exact tokens for requests on their way: after a short wait, or behind their bytes.

A prompt whose tokens are late is routed by its bytes. They are told to the router when they come:
the next turn of the conversation is to be found by them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from calinix.core.events import PromptTokens
from calinix.core.prompt import Endpoint
from calinix.core.requests import Work
from calinix.edge.prompt_tokens import PromptTokenizer
from calinix.edge.token_check import TokenChecks, Verdict
from calinix.edge.token_link import Job

if TYPE_CHECKING:
    from calinix.gateway.proxy import Flight

MAX_LATE_TOKENS = 65_536
"""Late tokens of longer prompts are not entered: that alone would take the loop a millisecond."""

_TOKENISED = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS})


class ExactTokens:
    """Gives requests their prompts' ids. Nothing of it is asked where prompts go by their text."""

    def __init__(
        self,
        prompts: PromptTokenizer,
        checks: TokenChecks,
        loop: asyncio.AbstractEventLoop,
        wait_s: float,
    ):
        self.prompts = prompts
        self.checks = checks
        self._loop = loop
        self._wait_s = wait_s
        self.counts = {"tokens": 0, "late": 0, "untold": 0, "distrusted": 0}
        """Prompts by what became of their tokens."""

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        """What comparing with the pods has shown, by pod id."""
        return self.checks.verdicts

    @property
    def cache_bytes(self) -> int:
        """About what the remembered pieces take."""
        return self.prompts.cache_bytes

    async def open(self) -> None:
        """Starts what tokenises. Raises ConfigError."""
        await self.prompts.open()

    def close(self) -> None:
        """Ends checks and processes."""
        self.checks.stop()
        self.prompts.close()

    def begin(self, flight: Flight) -> bool:
        """Takes up a request that is about to be routed.

        True: it has to wait, and goes on by itself. False: it can be routed now.
        """
        request = flight.route_request
        endpoint = flight.client.endpoint
        if request.prompt_is_tokens or request.work is not Work.GENERATE or not request.prompt:
            return False
        if endpoint not in _TOKENISED:
            self.counts["untold"] += 1
            return False
        if not self.checks.trusts(endpoint, request.model):
            self.counts["distrusted"] += 1
            return False
        job = self.prompts.start(endpoint, flight.body, request.prompt)
        if job is None:
            self.counts["untold"] += 1
            return False
        return _Waiting(self, flight, job).begin(self._loop, self._wait_s)


class _Waiting:
    """A request whose tokens are not there yet."""

    __slots__ = ("_flight", "_gone", "_job", "_timer", "_tokens")

    def __init__(self, tokens: ExactTokens, flight: Flight, job: Job):
        self._tokens = tokens
        self._flight = flight
        self._job = job
        self._gone = False
        self._timer: asyncio.TimerHandle | None = None
        job.when_done = self._arrive

    def begin(self, loop: asyncio.AbstractEventLoop, wait_s: float) -> bool:
        """Starts to wait; False: there is no time for that."""
        if wait_s <= 0.0:
            self._gone = True
            self._tokens.counts["late"] += 1
            return False
        self._flight.gateway.flights.add(self._flight)
        self._timer = loop.call_later(wait_s, self._go_without)
        return True

    def _go_without(self) -> None:
        self._gone = True
        self._tokens.counts["late"] += 1
        if not self._flight.done:
            self._flight.go(self._flight.gateway.now())

    def _arrive(self, ids: bytes | None) -> None:
        flight = self._flight
        if self._timer is not None:
            self._timer.cancel()
        if ids is None and not self._gone:
            self._tokens.counts["untold"] += 1
        elif not self._gone:
            self._tokens.counts["tokens"] += 1
        if flight.done:
            return
        now = flight.gateway.now()
        request = flight.route_request
        if ids is not None:
            plan = flight.plan
            is_short = len(ids) <= 4 * MAX_LATE_TOKENS
            if plan is not None and flight.lease_open and is_short:
                late = PromptTokens(plan.lease_id, request.model, request.tenant, ids)
                flight.gateway.observe(late)
            # Whatever is routed from now on, a retry or one from the wait queue, goes by them.
            request.spare = request.prompt
            request.prompt = ids
            request.prompt_is_tokens = True
        if not self._gone:
            flight.go(now)
