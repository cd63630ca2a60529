"""What other routers of the same pods do, and those that are workers of this gateway.

Any router's load comes as columns (ReplicaFacts) and never as leases. Workers also tell some tens
of times a second what cannot be said in columns (PeerFacts): their prompts enter the registry as
if they had been routed here.
"""

from __future__ import annotations

from typing import Final

from calinix.core.events import Failure, PeerFacts, ReplicaFacts, ReplicaGone
from calinix.core.kv import Chain
from calinix.core.peer_records import NO_SLOT, deliver
from calinix.core.pods import Pod
from calinix.core.prepare import Prompt
from calinix.core.roster import Roster
from calinix.core.state import State

MAX_PEERS: Final = 64
MAX_OPEN: Final = 16_384
"""Requests of one peer that are remembered until their prompt is prefilled; the oldest go."""
_FOREIGN: Final = 0x80000000
"""The top bit of tickets that are not of this router's own leases."""
_NEUTRAL: Final = (Failure.TOTAL_TIMEOUT, Failure.CANCELLED)
_ANSWERED: Final = (Failure.REFUSED, Failure.SERVER_ERROR)
_EMPTY = Chain.of(())


def without_some(state: State) -> None:
    """Some of the other routers are gone: what had followed from theirs does so no more."""
    replicas = state.replicas
    state.rates.share(replicas.rate_tokens, replicas.rate_s)
    state.ledger.count_others(replicas.in_workers)


class _Course:
    """A request of a peer whose prompt is not known to be prefilled yet."""

    __slots__ = ("chains", "pod", "prefill", "ticket")

    def __init__(self, pod: Pod | None, prefill: Pod | None, ticket: int):
        self.pod = pod
        self.prefill = prefill
        """None: there is none, or it has the prompt."""
        self.ticket = ticket
        self.chains: list[Chain] = []


class _Peer:
    """One other worker."""

    __slots__ = ("mark", "open", "pods")

    def __init__(self, number: int):
        self.pods: list[Pod | None] = []
        """Own pods by the peer's slots."""
        self.open: dict[int, _Course] = {}
        self.mark = _FOREIGN | number << 24
        """No other peer's tickets begin with it."""


class Peers:
    """Takes in what they tell; record by record (peer_records.Taker)."""

    def __init__(self, state: State, roster: Roster):
        self._state = state
        self._roster = roster
        self._peers: dict[str, _Peer] = {}
        self._from = _Peer(0)
        self._now = 0.0

    def __len__(self) -> int:
        """Requests of all peers whose prompts are not known to be prefilled."""
        return sum(len(peer.open) for peer in self._peers.values())

    def absorb(self, event: PeerFacts, now: float) -> None:
        """Takes in what one of them did. Raises ValueError where that makes no sense."""
        peer = self._peers.get(event.replica)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                return
            taken = {other.mark for other in self._peers.values()}
            peer = next(one for one in map(_Peer, range(MAX_PEERS)) if one.mark not in taken)
            self._peers[event.replica] = peer
        find = self._state.table.find
        peer.pods = [find(name) if name else None for name in event.pods]
        self._from, self._now = peer, now
        deliver(event.records, self)

    def columns(self, event: ReplicaFacts, now: float) -> None:
        """What one of them has on the pods."""
        state, replicas = self._state, self._state.replicas
        if replicas.absorb(event, now):
            state.rates.share(replicas.rate_tokens, replicas.rate_s)
        # Workers of one gateway: `maxConns` is for all of them together.
        ledger = state.ledger
        ledger.others = replicas.in_workers
        for slot in replicas.moved:
            ledger.recheck(slot)

    def gone(self, event: ReplicaGone, now: float) -> None:  # noqa: ARG002
        """It has ended, and with it what it had under way."""
        self._state.replicas.forget(event.replica)
        without_some(self._state)
        peer = self._peers.pop(event.replica, None)
        if peer is not None:
            for course in peer.open.values():
                self._withdraw(course)

    # --- one record each (Taker) -------------------------------------------------------------

    def routed(self, lease: int, slot: int, prefill: int, chain: Chain) -> None:
        """Its blocks are believed there; once more for another chain of the same prompt."""
        peer, registry = self._from, self._state.registry
        if not self._state.caching:
            return
        course = peer.open.get(lease)
        if course is None:
            ticket = peer.mark | lease & 0xFFFFFF
            course = _Course(self._pod(slot), self._pod(prefill), ticket)
            if len(peer.open) >= MAX_OPEN:
                del peer.open[next(iter(peer.open))]
            peer.open[lease] = course
        course.chains.append(chain)
        if course.pod is not None:
            registry.route(course.pod.slot, chain, course.ticket)
        if course.prefill is not None:
            registry.route(course.prefill.slot, chain, course.ticket)

    def held(self, slot: int, prefill: int, chain: Chain) -> None:
        """Its blocks are there."""
        if self._state.caching:
            for pod in (self._pod(slot), self._pod(prefill)):
                if pod is not None:
                    self._state.registry.confirm(pod.slot, chain)

    def prefilled(self, lease: int) -> None:
        """The prefill pod has it."""
        course = self._from.open.get(lease)
        if course is not None and course.prefill is not None:
            self._confirm(course.prefill, course)
            course.prefill = None

    def settled(self, lease: int) -> None:
        """All pods have it."""
        course = self._from.open.pop(lease, None)
        if course is not None:
            self._confirm(course.pod, course)
            self._confirm(course.prefill, course)

    def lost(self, lease: int) -> None:
        """What was only believed is taken back."""
        course = self._from.open.pop(lease, None)
        if course is not None:
            self._withdraw(course)

    def session(
        self, tenant: bytes, key: str, slot: int, prefill: int, answer_tokens: float
    ) -> None:
        """Its last pods, and what the last answer left there."""
        pod = self._pod(slot)
        if pod is not None:
            sessions = self._state.sessions
            found = sessions.remember((tenant, key), pod, self._pod(prefill), self._now)
            if found is not None:
                found.answer_tokens = max(answer_tokens, 0.0)

    def good(self, slot: int) -> None:
        """The pod lives, and failures are in a row no more."""
        pod = self._pod(slot)
        if pod is not None:
            self._heard(pod)
            self._state.health.succeeded(pod.slot, 0, self._now)

    def bad(self, slot: int, failure: Failure) -> None:
        """Counts as if it had happened here, but no trial ends by it."""
        pod = self._pod(slot)
        if pod is None or failure in _NEUTRAL:
            return
        state, health = self._state, self._state.health
        if failure in _ANSWERED:
            self._heard(pod)
        if failure is Failure.REFUSED:
            health.refused(pod.slot, self._now)
            return
        health.failed(pod.slot, 0, self._now, state.table.role(pod.role))
        if failure is Failure.CONNECT and health.refused_connection(pod.slot):
            self._roster.make_cold(pod)

    def learned(self, model: str, units: float, tokens: float, blocks: int) -> None:
        """How large prompts of this model are."""
        preparer = self._state.preparer
        if 0.0 < tokens < 1e9 and 0.0 < units < 1e12:
            ratio = preparer.ratio(model)
            preparer.learn(Prompt(_EMPTY, blocks, "", 0.0, units=units, ratio=ratio), int(tokens))

    def kept(self, response_id: str, slot: int) -> None:
        """Whatever names it can be served there only."""
        pod = self._pod(slot)
        if pod is not None:
            self._state.pins.remember(response_id, pod, self._now)

    # --- inside ------------------------------------------------------------------------------

    def _pod(self, slot: int) -> Pod | None:
        """The own pod in a slot of the peer; None: nobody, or not configured here."""
        pods = self._from.pods
        return pods[slot] if slot != NO_SLOT and slot < len(pods) else None

    def _heard(self, pod: Pod) -> None:
        if self._state.health.heard(pod.slot, self._now):
            self._roster.make_cold(pod)

    def _confirm(self, pod: Pod | None, course: _Course) -> None:
        if pod is not None and self._state.table.is_current(pod):
            for chain in course.chains:
                self._state.registry.confirm(pod.slot, chain)

    def _withdraw(self, course: _Course) -> None:
        for pod in (course.pod, course.prefill):
            if pod is not None and self._state.table.is_current(pod):
                for chain in course.chains:
                    self._state.registry.withdraw(pod.slot, chain, course.ticket)
