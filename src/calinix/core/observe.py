"""What each event means: one handler per kind of event, and nothing enters by another door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from calinix.core import events
from calinix.core.events import Event, Failure
from calinix.core.ledger import Lease
from calinix.core.means import RequestMeans
from calinix.core.outlook import Answers
from calinix.core.peers import Peers
from calinix.core.pods import Pod
from calinix.core.requests import Work
from calinix.core.roster import Roster
from calinix.core.state import State
from calinix.core.strategies import recipes

SOME_TOKENS: Final = 4096.0
MOST_TOKENS_PER_S: Final = 20_000.0
"""An answer that states more than some tokens at more than this pace did not have them."""
_GENERATE = Work.GENERATE
_NEUTRAL = frozenset({Failure.TOTAL_TIMEOUT, Failure.CANCELLED})
_ANSWERED = frozenset({Failure.REFUSED, Failure.SERVER_ERROR})
_NEVER_S = float("inf")


class Observer:
    """Applies events to the state. Events about unknown pods or closed leases are harmless."""

    def __init__(self, state: State, roster: Roster, means: RequestMeans):
        self._state = state
        self._ledger, self._table = state.ledger, state.table
        self._health, self._rates = state.health, state.rates
        self._calibration = state.calibration
        self._registry, self._preparer = state.registry, state.preparer
        self._roster = roster
        self._means = means
        peers = Peers(state, roster)
        self.handlers: dict[type[Event], Callable[[Any, float], None]] = {
            events.PodAdded: self._pod_added,
            events.PodRemoved: self._pod_removed,
            events.PodDraining: self._pod_draining,
            events.StrategyChanged: self._strategy_changed,
            events.RulesChanged: self._rules_changed,
            events.ProbeSucceeded: self._probe_succeeded,
            events.ProbeFailed: self._probe_failed,
            events.PodHeard: self._pod_heard,
            events.PodRestarted: self._pod_restarted,
            events.PodCapacity: self._pod_capacity,
            events.BlocksStored: self._blocks_stored,
            events.BlocksRemoved: self._blocks_removed,
            events.BlocksCleared: self._blocks_cleared,
            events.ResponseStored: self._response_stored,
            events.PromptTokens: self._prompt_tokens,
            events.PrefillDone: self._prefill_done,
            events.FirstToken: self._first_token,
            events.Finished: self._finished,
            events.Failed: self._failed,
            events.ReplicaFacts: peers.columns,
            events.ReplicaGone: peers.gone,
            events.PeerFacts: peers.absorb,
        }

    # --- pods --------------------------------------------------------------------------------

    def _pod_added(self, event: events.PodAdded, now: float) -> None:  # noqa: ARG002
        self._roster.add(event.config, event.role)

    def _pod_removed(self, event: events.PodRemoved, now: float) -> None:  # noqa: ARG002
        pod = self._state.table.find(event.pod_id)
        if pod is not None:
            self._roster.remove(pod)

    def _pod_draining(self, event: events.PodDraining, now: float) -> None:  # noqa: ARG002
        table = self._state.table
        pod = table.find(event.pod_id)
        if pod is not None and event.draining:
            table.draining |= 1 << pod.slot
        elif pod is not None:
            table.draining &= ~(1 << pod.slot)

    def _strategy_changed(self, event: events.StrategyChanged, now: float) -> None:  # noqa: ARG002
        self._state.strategy = event.strategy
        self._state.owed.clear()
        self._state.recipes = recipes(event.strategy) | self._state.own_recipes

    def _rules_changed(self, event: events.RulesChanged, now: float) -> None:  # noqa: ARG002
        self._state.health.adopt(event.health)
        self._state.default_mode = event.default_mode
        self._state.prefill_threshold = event.prefill_threshold
        self._state.modes.clear()

    def _probe_succeeded(self, event: events.ProbeSucceeded, now: float) -> None:
        pod = self._state.table.find(event.pod_id)
        if pod is not None:
            self._heard(pod, now)
            self._state.health.probe_succeeded(pod.slot)

    def _probe_failed(self, event: events.ProbeFailed, now: float) -> None:  # noqa: ARG002
        pod = self._state.table.find(event.pod_id)
        if pod is not None:
            self._state.health.probe_failed(pod.slot, event.reason)
            if event.refused:
                self._refused_connection(pod)

    def _pod_heard(self, event: events.PodHeard, now: float) -> None:
        pod = self._state.table.find(event.pod_id)
        if pod is not None:
            self._heard(pod, now)

    def _pod_restarted(self, event: events.PodRestarted, now: float) -> None:
        pod = self._state.table.find(event.pod_id)
        if pod is not None:
            # `heard` may call for a new epoch as well; one is enough.
            self._state.health.heard(pod.slot, now)
            self._roster.make_cold(pod)

    def _pod_capacity(self, event: events.PodCapacity, now: float) -> None:
        pod = self._state.table.find(event.pod_id)
        if pod is not None:
            self._heard(pod, now)
            self._roster.state_capacity(pod, event.tokens)

    # --- what pods cache ---------------------------------------------------------------------

    def _blocks_stored(self, event: events.BlocksStored, now: float) -> None:
        pod = self._state.table.find(event.pod_id)
        if pod is not None:
            self._heard(pod, now)
            if self._state.caching:
                self._state.registry.stored(pod.slot, event.parent, event.blocks)

    def _blocks_removed(self, event: events.BlocksRemoved, now: float) -> None:
        pod = self._state.table.find(event.pod_id)
        if pod is not None:
            self._heard(pod, now)
            if self._state.caching:
                self._state.registry.removed(pod.slot, event.blocks)

    def _blocks_cleared(self, event: events.BlocksCleared, now: float) -> None:
        pod = self._state.table.find(event.pod_id)
        if pod is not None:
            self._heard(pod, now)
            if self._state.caching:
                self._state.registry.clear(pod.slot)

    def _response_stored(self, event: events.ResponseStored, now: float) -> None:
        pod = self._state.table.find(event.pod_id)
        if pod is not None:
            self._state.pins.remember(event.response_id, pod, now)

    # --- leases ------------------------------------------------------------------------------

    def _prompt_tokens(self, event: events.PromptTokens, now: float) -> None:  # noqa: ARG002
        """What was routed by its bytes is to be found by its tokens as well."""
        state = self._state
        lease = state.ledger.leases.get(event.lease_id)
        if lease is None or not lease.prompt.blocks or lease.prompt.spare is not None:
            return
        chain = state.preparer.chain_of(event.model, event.tenant, event.tokens, True)
        lease.prompt.spare = chain
        ticket = lease.id & 0xFFFFFFFF
        for pod, is_there in ((lease.pod, lease.confirmed), (lease.prefill, lease.prefilled)):
            if pod is not None and state.table.is_current(pod):
                state.registry.route(pod.slot, chain, ticket)
                if is_there:
                    state.registry.confirm(pod.slot, chain)

    def _prefill_done(self, event: events.PrefillDone, now: float) -> None:
        state = self._state
        lease = state.ledger.leases.get(event.lease_id)
        if lease is None or lease.prefill is None or lease.prefilled:
            return
        lease.prefilled = True
        state.ledger.release_prefill(lease)
        prefill = lease.prefill
        if state.table.is_current(prefill):
            self._heard(prefill, now)
            if not event.transferred:
                lease.prefilled_s = now
                predicted_s = lease.explanation.predicted_ttft_s
                if predicted_s is not None:
                    took_s = now - lease.opened_s
                    self._calibration.first_token_seen(prefill.slot, predicted_s, took_s)
            self._learn_rate(prefill, lease, now)
            state.health.succeeded(prefill.slot, lease.id, now)
            self._confirm(prefill, lease)

    def _first_token(self, event: events.FirstToken, now: float) -> None:
        ledger = self._ledger
        lease = ledger.leases.get(event.lease_id)
        if lease is None:
            return
        why = lease.explanation
        if why.ttft_s is not None:
            return
        opened_s = lease.opened_s
        why.ttft_s = now - opened_s
        ledger.release_prefill(lease)
        pod, health = lease.pod, self._health
        if self._table.is_current(pod):
            if health.heard(pod.slot, now):
                self._roster.make_cold(pod)
            if lease.work is _GENERATE:
                lease.crowd = ledger.loads.inflight[pod.slot]
                if lease.prefill is None:
                    self._learn_rate(pod, lease, now)
                elif lease.prefilled_s > 0.0:
                    self._learn_transfer(lease, now)
            if health.trying:
                health.first_token(pod.slot, lease.id, now)
            predicted_s = why.predicted_ttft_s
            if predicted_s is not None and lease.prefill is None:
                self._calibration.first_token_seen(pod.slot, predicted_s, now - opened_s)
        if not lease.confirmed:
            self._confirm_all(lease)

    def _learn_rate(self, pod: Pod, lease: Lease, now: float) -> None:
        """The pod has prefilled this, and with it what it got before and did not tell of."""
        ledger = self._ledger
        if lease.hidden or not lease.effort:
            return
        ledger.pass_line(pod.slot, lease)
        if lease.ahead:
            # Work of others stood between two first tokens of ours: only the whole wait is known.
            self._rates.learn(pod, lease.ahead, lease.opened_s, now, is_wait=True)
            return
        effort, since_s = lease.effort, lease.opened_s
        if ledger.unseen:
            unseen, since_s = ledger.take_unseen(pod.slot, since_s)
            effort += unseen
        self._rates.learn(pod, effort, since_s, now)

    def _learn_transfer(self, lease: Lease, now: float) -> None:
        state, prefill = self._state, lease.prefill
        assert prefill is not None
        kind = state.transfers.kind(state.table, prefill.slot, lease.pod.slot)
        step_s = state.outlooks["decode"].token_s
        state.transfers.learn(kind, lease.prompt.tokens, max(now - lease.prefilled_s - step_s, 0.0))

    def _learn_answer(self, lease: Lease, tokens: int) -> None:
        """How long an answer took after its first token, where that was seen."""
        why, slot = lease.explanation, lease.pod.slot
        if lease.session is not None:
            lease.session.answer_tokens = float(tokens)
        if why.ttft_s is None or why.e2e_s is None or tokens < 2:
            return
        answers = self._state.answers
        kept = answers[slot]
        if kept is None:
            kept = answers[slot] = Answers()
        load = 0.5 * (lease.crowd + self._ledger.loads.inflight[slot] + 1.0)
        kept.add(why.e2e_s - why.ttft_s, tokens - 1.0, load)

    def _finished(self, event: events.Finished, now: float) -> None:
        lease = self._ledger.close(event.lease_id, now, not 200 <= event.status < 300)
        if lease is None:
            return
        if self._state.replicas.lapse_s < _NEVER_S:
            self._echo_no_more(lease)
        status, why = event.status, lease.explanation
        why.e2e_s = now - lease.opened_s
        why.status = status
        why.prompt_tokens = event.prompt_tokens
        why.cached_tokens = event.cached_tokens
        why.output_tokens = event.output_tokens
        is_good = 200 <= status < 300
        if is_good:
            if lease.work is _GENERATE:
                # Engines err, too: what a request cannot hold is believed of none of them.
                stated, cached, output = (
                    event.prompt_tokens, event.cached_tokens, event.output_tokens,
                )  # fmt: skip
                if stated is not None and lease.prompt.may_have(stated):
                    if cached is not None and cached <= stated:
                        self._compare_cache(lease, cached, stated, now)
                    self._preparer.learn(lease.prompt, stated)
                if output is not None and output <= SOME_TOKENS + MOST_TOKENS_PER_S * why.e2e_s:
                    self._means.answered(output)
                    if self._table.is_current(lease.pod):
                        self._learn_answer(lease, output)
            if not lease.confirmed:
                self._confirm_all(lease)
        else:
            self._withdraw(lease)
        pod, health = lease.pod, self._health
        if self._table.is_current(pod):
            if health.heard(pod.slot, now):
                self._roster.make_cold(pod)
            if is_good:
                health.succeeded(pod.slot, lease.id, now)
            else:
                self._judge(pod, lease, _failure_of(status), now)
        if health.trying:
            self._end_trials(lease)

    def _compare_cache(self, lease: Lease, found: int, prompt_tokens: int, now: float) -> None:
        """What the pod that prefilled had of the prompt, against what was believed."""
        pod = lease.pod if lease.prefill is None else lease.prefill
        believed = lease.explanation.believed_tokens
        if lease.prompt.blocks and believed >= 0.0 and self._table.is_current(pod):
            self._calibration.cache_seen(pod.slot, believed, found, prompt_tokens, now)

    def _failed(self, event: events.Failed, now: float) -> None:
        state = self._state
        lease = state.ledger.close(event.lease_id, now, True)
        if lease is None:
            return
        if state.replicas.lapse_s < _NEVER_S:
            self._echo_no_more(lease)
        why = lease.explanation
        why.e2e_s = now - lease.opened_s
        why.status = event.status or None
        why.failure = event.failure.value
        self._withdraw(lease)
        # After a decode pod was picked anew, the lease does not speak of the prefill pod.
        pod = lease.prefill if event.leg == "prefill" else lease.pod
        if pod is not None and state.table.is_current(pod):
            if event.failure in _ANSWERED:
                self._heard(pod, now)
            self._judge(pod, lease, event.failure, now)
        if state.health.trying:
            self._end_trials(lease)

    def _echo_no_more(self, lease: Lease) -> None:
        """What it let suppose of other workers goes with it."""
        for pod in (lease.pod, lease.prefill):
            if pod is not None:
                self._state.replicas.over(pod.slot, lease.opened_s)
                self._ledger.recheck(pod.slot)

    def _judge(self, pod: Pod, lease: Lease, failure: Failure | None, now: float) -> None:
        """What an answer that is no good one says of the pod. None: nothing (3xx, 4xx)."""
        health = self._state.health
        if failure is None or failure in _NEUTRAL:
            return
        if failure is Failure.REFUSED:
            health.refused(pod.slot, now)
            return
        health.failed(pod.slot, lease.id, now, self._state.table.role(pod.role))
        if failure is Failure.CONNECT:
            self._refused_connection(pod)

    def _end_trials(self, lease: Lease) -> None:
        """Whatever this lease tried and did not settle may be tried again."""
        health = self._health
        health.neutral(lease.pod.slot, lease.id)
        if lease.prefill is not None:
            health.neutral(lease.prefill.slot, lease.id)

    def _confirm_all(self, lease: Lease) -> None:
        """The prompt is prefilled wherever the request went."""
        lease.confirmed = True
        prompt, pod = lease.prompt, lease.pod
        if prompt.blocks and self._table.is_current(pod):
            self._registry.confirm(pod.slot, prompt.chain)
            if prompt.spare is not None:
                self._registry.confirm(pod.slot, prompt.spare)
        if lease.prefill is not None and not lease.prefilled:
            lease.prefilled = True
            self._confirm(lease.prefill, lease)

    def _confirm(self, pod: Pod, lease: Lease) -> None:
        prompt = lease.prompt
        if prompt.blocks and self._table.is_current(pod):
            self._registry.confirm(pod.slot, prompt.chain)
            if prompt.spare is not None:
                self._registry.confirm(pod.slot, prompt.spare)

    def _withdraw(self, lease: Lease) -> None:
        """Takes back what was only believed; another epoch has no entries of this lease."""
        state, prompt = self._state, lease.prompt
        if not prompt.blocks or lease.confirmed:
            return
        ticket = lease.id & 0xFFFFFFFF
        prefill = lease.prefill
        for chain in (prompt.chain, prompt.spare):
            if chain is None:
                continue
            if state.table.is_current(lease.pod):
                state.registry.withdraw(lease.pod.slot, chain, ticket)
            if prefill is not None and not lease.prefilled and state.table.is_current(prefill):
                state.registry.withdraw(prefill.slot, chain, ticket)

    def _heard(self, pod: Pod, now: float) -> None:
        if self._state.health.heard(pod.slot, now):
            self._roster.make_cold(pod)

    def _refused_connection(self, pod: Pod) -> None:
        if self._state.health.refused_connection(pod.slot):
            self._roster.make_cold(pod)


def _failure_of(status: int) -> Failure | None:
    """What a pod's own status says of it."""
    if status in (429, 503):
        return Failure.REFUSED
    return Failure.SERVER_ERROR if status >= 500 else None
