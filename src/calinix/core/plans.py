"""From the chosen pods to a plan: takes the load, says what is expected, writes it all down."""

from __future__ import annotations

from calinix.core.choice import Choice
from calinix.core.explain import DecisionRing, Explanation
from calinix.core.ledger import Lease
from calinix.core.means import RequestMeans
from calinix.core.pods import Pod
from calinix.core.prepare import Prompt
from calinix.core.rates import REQUEST_TOKENS
from calinix.core.requests import RoutePlan, RouteRequest, Work
from calinix.core.state import State

# An enum's member is slow to get at through its class.
_GENERATE, _POOLING, _MEAN = Work.GENERATE, Work.POOLING, Work.MEAN


class Planner:
    """Opens leases and writes plans."""

    def __init__(self, state: State, means: RequestMeans, decisions: DecisionRing):
        self._state = state
        self._means = means
        self._append = decisions.append

    def open(
        self,
        request: RouteRequest,
        prompt: Prompt,
        choice: Choice,
        first: Choice | None,
        now: float,
    ) -> RoutePlan:
        """The plan for `choice`, and for the prefill pod of `first` in dispatch mode."""
        state, means = self._state, self._means
        ledger, pod = state.ledger, choice.pod
        assert pod is not None
        asked, prefill = (choice, None) if first is None else (first, first.pod)
        prefiller = pod if prefill is None else prefill
        cached, cached_tokens = 0, 0.0
        if prompt.blocks:
            if asked.depths is None or request.prefill_pod is not None:
                cached = self._cached_blocks(request, prompt, prefiller)
            elif asked.deepest:
                cached = int(asked.depths[asked.index])
            if cached:
                # Most blocks that can help: engines always recompute the last token.
                cached_tokens = min(cached, prompt.cap_blocks) * prompt.block_tokens
        uncached, output, ttft_s = 0.0, 0.0, None
        work = request.work
        if work is _GENERATE:
            if request.prefill_pod is None:
                uncached = prompt.tokens - cached_tokens
            output = means.output_tokens(request.max_output_tokens)
            backlog = ledger.backlog_tokens(prefiller.slot) + uncached + REQUEST_TOKENS
            ttft_s = backlog / state.rates.rate(prefiller)
        elif work is _POOLING:
            uncached = prompt.tokens
        elif work is _MEAN:
            uncached = means.prompt_tokens(prefiller.role)
            output = means.output_tokens(None)
        explanation = Explanation(choice, first, now, ttft_s)
        lease = ledger.open(pod, prefill, work, now, uncached, output, prompt, explanation)
        if not request.streamed and ttft_s is not None and prefill is None:
            ledger.release_prefill_at(lease, now + ttft_s)
        self._write_down(request, lease)
        plan = RoutePlan(
            request_id=request.request_id,
            lease_id=lease.id,
            mode="single" if choice.role == "single" else "dispatch",
            pod=pod,
            prefill=choice.near,
            strategy=state.strategy.name,
            namespace=prompt.namespace,
            prompt_blocks=prompt.blocks,
            cached_blocks=cached,
            prompt_tokens=prompt.tokens,
            predicted_cached_tokens=cached_tokens,
            explanation=explanation,
        )
        self._append(plan)
        return plan

    def _write_down(self, request: RouteRequest, lease: Lease) -> None:
        """What a plan brings with it, beside its load."""
        state, prompt, pod, prefill = self._state, lease.prompt, lease.pod, lease.prefill
        if prompt.blocks:
            ticket = lease.id & 0xFFFFFFFF
            state.registry.route(pod.slot, prompt.chain, ticket)
            if prefill is not None:
                state.registry.route(prefill.slot, prompt.chain, ticket)
        if lease.work is _GENERATE and request.prefill_pod is None:
            self._means.routed(pod.role if prefill is None else prefill.role, lease.work_tokens)
        if request.session_key is not None:
            key = (request.tenant, request.session_key)
            state.sessions.remember(key, pod, prefill, lease.opened_s)
        if state.health.half_open:
            self._begin_trials(lease)

    def _cached_blocks(self, request: RouteRequest, prompt: Prompt, prefiller: Pod) -> int:
        """Leading blocks that the pod that prefills is believed to hold, not looked up yet."""
        if request.prefill_pod is not None:
            return prompt.blocks  # prefilled by an earlier plan
        if self._state.health.silent >> prefiller.slot & 1:
            return 0
        alone = self._state.table.slot_set(1 << prefiller.slot)
        return self._state.registry.held(prompt.chain, alone.slots)[1]

    def _begin_trials(self, lease: Lease) -> None:
        """A half-open pod gets no other request until this one has shown what it can do."""
        health = self._state.health
        for pod in (lease.pod, lease.prefill):
            if pod is not None and health.half_open >> pod.slot & 1:
                health.begin_trial(pod.slot, lease.id)
