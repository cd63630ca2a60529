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
        cached, cached_tokens, believed_tokens = self._expected(request, prompt, asked, prefiller)
        uncached, output, effort, ttft_s = 0.0, 0.0, 0.0, None
        work = request.work
        if work is _GENERATE:
            output = means.output_tokens(request.max_output_tokens)
            if request.prefill_pod is None:
                credit = asked.answer_tokens if asked.last is pod and prefill is None else 0.0
                uncached = max(prompt.tokens - cached_tokens - credit, 0.0)
                effort = self._effort(uncached, prompt.tokens - uncached)
                ttft_s = self._ahead(prefiller, effort) * state.rates.pace(prefiller)
        elif work is _POOLING:
            uncached = prompt.tokens
            effort = self._effort(uncached, 0.0)
        elif work is _MEAN:
            uncached = means.prompt_tokens(prefiller.role)
            output = means.output_tokens(None)
            effort = self._effort(uncached, 0.0)
        explanation = Explanation(choice, first, now, ttft_s, believed_tokens)
        context = prompt.tokens + 0.5 * output if work is _GENERATE else 0.0
        is_shared = state.replicas.inflight is not None
        ahead = self._ahead(prefiller, effort) if is_shared else 0.0
        lease = ledger.open(
            pod, prefill, work, now, uncached, output, prompt, explanation, effort, context
        )
        lease.ahead = ahead
        if is_shared:
            self._echo(lease)
        if not request.streamed and ttft_s is not None and prefill is None:
            ledger.hide(lease, now + ttft_s)
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

    def _effort(self, uncached: float, cached: float) -> float:
        """The work of a prefill in work tokens, as the costs see it."""
        attention_tokens = self._state.strategy.predictive.attention_tokens
        if attention_tokens <= 0.0:
            return uncached + REQUEST_TOKENS
        return uncached * (1.0 + (cached + 0.5 * uncached) / attention_tokens) + REQUEST_TOKENS

    def _ahead(self, pod: Pod, effort: float) -> float:
        """Work until the first token of a request with this one: all that the pod has before it."""
        state = self._state
        shared = state.replicas.work
        ahead = state.ledger.loads.work[pod.slot] + effort
        return ahead if shared is None else ahead + shared[pod.slot]

    def _echo(self, lease: Lease) -> None:
        """Other workers of this gateway are taken to do the same, until they say what they did."""
        state, prefill, now = self._state, lease.prefill, lease.opened_s
        state.replicas.echo(lease.pod.slot, lease.effort if prefill is None else 0.0, now)
        state.ledger.recheck(lease.pod.slot)
        if prefill is not None:
            state.replicas.echo(prefill.slot, lease.effort, now)
            state.ledger.recheck(prefill.slot)

    def _write_down(self, request: RouteRequest, lease: Lease) -> None:
        """What a plan brings with it, beside its load."""
        state, prompt, pod, prefill = self._state, lease.prompt, lease.pod, lease.prefill
        if prompt.blocks:
            ticket = lease.id & 0xFFFFFFFF
            state.registry.route(pod.slot, prompt.chain, ticket)
            if prefill is not None:
                state.registry.route(prefill.slot, prompt.chain, ticket)
            if prompt.spare is not None:
                state.registry.route(pod.slot, prompt.spare, ticket)
                if prefill is not None:
                    state.registry.route(prefill.slot, prompt.spare, ticket)
        if lease.work is _GENERATE and request.prefill_pod is None:
            role = pod.role if prefill is None else prefill.role
            self._means.routed(role, lease.work_tokens)
            outlook = state.outlooks[role]
            outlook.requests += 1.0
            outlook.work += lease.effort
            if prefill is not None:
                state.outlooks[pod.role].requests += 1.0
        if request.session_key is not None:
            key = (request.tenant, request.session_key)
            lease.session = state.sessions.remember(key, pod, prefill, lease.opened_s)
        if state.health.half_open:
            self._begin_trials(lease)

    def _expected(
        self, request: RouteRequest, prompt: Prompt, asked: Choice, prefiller: Pod
    ) -> tuple[int, float, float]:
        """What the pod that prefills has of the prompt: (blocks, tokens), and tokens if trusted."""
        if not prompt.blocks:
            return 0, 0.0, 0.0
        cached = 0
        if asked.depths is None or request.prefill_pod is not None:
            cached = self._cached_blocks(request, prompt, prefiller)
        elif asked.deepest:
            cached = _held(asked)
        if not cached:
            return 0, 0.0, 0.0
        # Most blocks that can help: engines always recompute the last token.
        tokens = min(cached, prompt.cap_blocks) * prompt.block_tokens
        if request.prefill_pod is not None:
            return cached, tokens, -1.0
        calibration = self._state.calibration
        if calibration.doubted >> prefiller.slot & 1:
            trust = calibration.trust(prefiller.slot)
            return int(cached * trust), tokens * trust, tokens
        return cached, tokens, tokens

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


def _held(choice: Choice) -> int:
    """Leading blocks that the pick is believed to hold, before any doubt."""
    depths, trusts = choice.depths, choice.trusts
    assert depths is not None
    depth = depths[choice.index]
    # What was multiplied is whole again but for the last bits.
    return int(depth) if trusts is None else round(depth / trusts[choice.index])
