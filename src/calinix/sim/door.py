"""One simulated gateway: a real Router on virtual time, and its requests on their way.

The legs, retries and errors are those of the HTTP gateway: at most one retry, on another pod, and
only where the pod cannot have begun or the leg answers nobody.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from calinix.config import Config
from calinix.core.events import (
    Event,
    Failed,
    Failure,
    Finished,
    FirstToken,
    PrefillDone,
    ProbeFailed,
    ProbeSucceeded,
)
from calinix.core.pods import Role
from calinix.core.requests import Refusal, RefusalReason, RoutePlan, RouteRequest
from calinix.core.router import Router
from calinix.sim.cluster import Cluster
from calinix.sim.late import LateLoad
from calinix.sim.pod_model import Job, JobTooLargeError
from calinix.sim.workload import SimRequest, prompt_bytes

TICK_S = 0.25
"""Between two ticks of a router."""
_GOOD, _TOO_LARGE, _FULL, _LOST, _NOBODY = 200, 400, 429, 502, 503


class Door:
    """A gateway. What it does not know at once it knows `late_s` later."""

    def __init__(
        self,
        cluster: Cluster,
        router: Router,
        config: Config,
        rng: random.Random,
        block_tokens: int,
        late_s: float = 0.0,
    ):
        self.cluster = cluster
        self.clock = cluster.clock
        self.router = router
        self.block_tokens = block_tokens
        self.max_retries = config.gateway.retries
        self.lost_share = 0.0
        """Share of the facts that never reach it."""
        self.late_s = late_s
        """How old everything is that it knows of the load of requests that come now."""
        self.watch: Callable[[RoutePlan, SimRequest, float], None] | None = None
        """Told of every plan before it is carried out, with the truth about the request."""
        self._rng = rng
        self._late: LateLoad | None = None
        self._probe_s = config.health.interval_ms / 1e3
        self._probe(None)
        self.clock.at(TICK_S, self._tick)

    def _probe(self, _: None) -> None:
        now = self.clock.now
        for slot, pod in enumerate(self.cluster.described):
            if self.cluster.is_up(slot):
                self.router.observe(ProbeSucceeded(pod.id), now)
            else:
                self.router.observe(ProbeFailed(pod.id, refused=True), now)
        self.clock.at(now + self._probe_s, self._probe)

    def _tick(self, _: None) -> None:
        now = self.clock.now
        self.router.tick(now)
        self.clock.at(now + TICK_S, self._tick)

    def receive(self, request: SimRequest, now: float) -> None:
        """A client's request comes in."""
        Flight(self, request).start(now)

    def route(
        self, request: RouteRequest, truth: SimRequest, now: float, late_s: float
    ) -> RoutePlan | Refusal:
        """Asks the router; baselines may look at the truth meanwhile."""
        if late_s > 0.0:
            late = self._late = self._late or LateLoad(self.router, self.clock)
            late.remember()
        self.cluster.current = truth
        outcome = self.router.route(request, now)
        self.cluster.current = None
        if late_s > 0.0 and self._late is not None and isinstance(outcome, RoutePlan):
            self._late.hide(outcome, now, late_s)
        if self.watch is not None and isinstance(outcome, RoutePlan):
            self.watch(outcome, truth, now)
        return outcome

    def tell(self, event: Event, late_s: float = 0.0, *, may_be_lost: bool = False) -> None:
        """A fact comes to the router, at once or late."""
        if may_be_lost and self.lost_share > 0.0 and self._rng.random() < self.lost_share:
            return
        if late_s > 0.0:
            self.clock.at(self.clock.now + late_s, self._deliver, event)
        else:
            self.router.observe(event, self.clock.now)

    def _deliver(self, event: Event) -> None:
        self.router.observe(event, self.clock.now)


class Flight:
    """One request from its arrival to its end."""

    __slots__ = (
        "_asked",
        "_cluster",
        "_door",
        "_job",
        "_late_s",
        "_lease_open",
        "_number",
        "_plan",
        "_prefill",
        "_request",
        "_retries",
    )  # fmt: skip

    def __init__(self, door: Door, request: SimRequest):
        self._door = door
        self._cluster = door.cluster
        self._request = request
        self._number = -1
        self._late_s = door.late_s
        self._asked: RouteRequest | None = None
        self._plan: RoutePlan | None = None
        self._lease_open = False
        self._job: Job | None = None
        self._prefill: tuple[int, Job] | None = None
        """Slot and job of the prefill whose KV cache is still held."""
        self._retries = 0

    def start(self, now: float) -> None:
        """Routes the request and sends its first leg."""
        request, door = self._request, self._door
        self._number = number = self._cluster.recorder.arrived(
            now, request.prompt_tokens, request.output_tokens, streamed=request.streamed
        )
        self._asked = asked = RouteRequest(
            request_id=str(number),
            prompt=prompt_bytes(request.chain, request.prompt_tokens, door.block_tokens, number),
            prompt_is_tokens=True,
            session_key=request.session_key,
            streamed=request.streamed,
        )
        outcome = door.route(asked, request, now, self._late_s)
        if isinstance(outcome, Refusal):
            self._refuse(outcome)
        else:
            self._launch(outcome)

    # --- legs --------------------------------------------------------------------------------

    def _launch(self, plan: RoutePlan) -> None:
        self._plan = plan
        self._lease_open = True
        if plan.prefill is None or self._prefill is not None:
            self._send_answering(plan)
        else:
            self._send(plan.prefill.slot, "prefill", 1, hold=True)

    def _send_answering(self, plan: RoutePlan) -> None:
        self._send(plan.pod.slot, plan.pod.role, self._request.output_tokens)

    def _send(self, slot: int, role: Role, output_tokens: int, *, hold: bool = False) -> None:
        """Sends a leg; where nobody listens, the request goes elsewhere."""
        request, held = self._request, self._prefill
        self._job = job = Job(
            id=f"{self._number}{role}{self._retries}",
            prompt_tokens=request.prompt_tokens,
            output_tokens=output_tokens,
            chain=request.chain,
            hold=hold,
            external=held is not None,
            local=held is not None and self._cluster.share_host(slot, held[0]),
        )
        try:
            heard = self._cluster.submit(slot, job, self)
        except JobTooLargeError:
            self._close(role, None, _TOO_LARGE)
            self._end(_TOO_LARGE)
            return
        if not heard and not self._retry(role, Failure.CONNECT):
            self._end(_LOST)

    def on_prefilled(self, job: Job, at_s: float) -> None:
        """The first token is there."""
        if job.hold:
            return
        recorder, number, plan = self._cluster.recorder, self._number, self._plan
        assert plan is not None
        recorder.first_s[number] = at_s
        recorder.pod[number] = plan.pod.slot
        if self._prefill is None:
            recorder.cached_tokens[number] = job.cached_tokens
        else:
            self._give_back_prefill()
        if self._request.streamed:
            self._door.tell(FirstToken(plan.lease_id), self._late_s, may_be_lost=True)

    def on_finished(self, job: Job, at_s: float) -> None:
        """The last token is there."""
        recorder, number, plan = self._cluster.recorder, self._number, self._plan
        assert plan is not None
        if job.hold:
            assert plan.prefill is not None
            self._prefill = (plan.prefill.slot, job)
            recorder.prefill_pod[number] = plan.prefill.slot
            recorder.cached_tokens[number] = job.cached_tokens
            self._door.tell(PrefillDone(plan.lease_id), self._late_s)
            self._send_answering(plan)
            return
        recorder.end_s[number] = at_s
        self._close(plan.pod.role, None, _GOOD)
        self._end(_GOOD)

    def on_lost(self, job: Job, at_s: float) -> None:  # noqa: ARG002
        """The pod died with the leg: a prefill answers nobody and may be tried again."""
        plan = self._plan
        assert plan is not None
        if job.hold:
            if not self._retry("prefill", Failure.CLOSED):
                self._end(_LOST)
            return
        begun = self._cluster.recorder.first_s[self._number] > 0.0
        self._close(plan.pod.role, Failure.BROKEN if begun else Failure.CLOSED, 0)
        self._end(_LOST)

    def _give_back_prefill(self) -> None:
        held, self._prefill = self._prefill, None
        if held is not None:
            self._cluster.release(*held)

    # --- what can go wrong -------------------------------------------------------------------

    def _retry(self, role: Role, failure: Failure) -> bool:
        """Tries another pod, once; what is lost is told either way."""
        plan, before = self._plan, self._asked
        assert plan is not None
        assert before is not None
        failed = plan.prefill if role == "prefill" else plan.pod
        assert failed is not None
        self._close(role, failure, 0)
        if self._retries >= self._door.max_retries:
            return False
        prefill = plan.prefill if role == "decode" else None
        asked = before.once_more(before.avoid | 1 << failed.slot, prefill.id if prefill else None)
        now = self._cluster.clock.now
        outcome = self._door.route(asked, self._request, now, self._late_s)
        if isinstance(outcome, Refusal):
            return False
        self._retries += 1
        self._cluster.recorder.retries[self._number] = self._retries
        self._asked = asked
        self._launch(outcome)
        return True

    def _refuse(self, refusal: Refusal) -> None:
        self._end(_FULL if refusal.reason is RefusalReason.FULL else _NOBODY)

    def _close(self, role: Role, failure: Failure | None, status: int) -> None:
        """Gives the lease back, once."""
        if not self._lease_open or self._plan is None:
            return
        self._lease_open = False
        lease_id = self._plan.lease_id
        if failure is not None:
            self._door.tell(Failed(lease_id, role, failure, status), self._late_s)
            return
        request, good = self._request, status == _GOOD
        cached = self._cluster.recorder.cached_tokens[self._number]
        self._door.tell(
            Finished(
                lease_id,
                status,
                request.prompt_tokens if good else None,
                cached if good else None,
                request.output_tokens if good else None,
            ),
            self._late_s,
        )

    def _end(self, status: int) -> None:
        self._give_back_prefill()
        self._cluster.recorder.status[self._number] = status
        self._cluster.ended(self._request, good=status == _GOOD)
