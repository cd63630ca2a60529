"""Leases balance: whatever happens in whatever order, all load is given back exactly once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from calinix.core.events import (
    Event,
    Failed,
    Failure,
    Finished,
    FirstToken,
    PodAdded,
    PodDraining,
    PodHeard,
    PodRemoved,
    PodRestarted,
    PrefillDone,
    ProbeFailed,
    ProbeSucceeded,
)
from calinix.core.requests import RoutePlan, Work
from calinix.core.router import Router
from routing import load_is_zero, make_config, make_router, pod_config, pods, request, text

PODS = [("single-0", "single"), ("single-1", "single"), ("prefill-0", "prefill"),
        ("prefill-1", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")]  # fmt: skip


class Leases(RuleBasedStateMachine):
    """A router with two modes, any calls in any order, and a plain count of what is open."""

    def __init__(self) -> None:
        super().__init__()
        self.router: Router = make_router(
            make_config(
                pods("single", 2, max_conns=3), pods("prefill", 2), pods("decode", 2, max_conns=4)
            )
        )
        self.now = 1.0
        self.open: dict[int, RoutePlan] = {}
        self.closed: list[int] = [999]

    def see(self, event: Event) -> None:
        """Observes an event."""
        self.router.observe(event, self.now)

    @rule(seconds=st.sampled_from([0.0, 0.01, 1.0, 12.0, 40.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.router.tick(self.now)

    @rule(
        mode=st.sampled_from(["single", "dispatch", None]),
        work=st.sampled_from(list(Work)),
        streamed=st.booleans(),
        blocks=st.integers(0, 6),
        session=st.none() | st.sampled_from(["a", "b"]),
        avoid=st.integers(0, 63),
        extra=st.sampled_from(
            [{}, {"prefill_pod": "prefill-0"}, {"pinned_pod": "decode-1"}, {"split": False}]
        ),
    )
    def route(
        self, mode: Any, work: Work, streamed: bool, blocks: int, session: Any, avoid: int,
        extra: dict[str, Any],
    ) -> None:  # fmt: skip
        """A request is routed, or refused."""
        asked = request(
            text(blocks), mode=mode, work=work, streamed=streamed, session_key=session,
            avoid=avoid, **extra,
        )  # fmt: skip
        plan = self.router.route(asked, self.now)
        if isinstance(plan, RoutePlan):
            assert plan.lease_id not in self.open
            self.open[plan.lease_id] = plan

    @rule(data=st.data(), kind=st.sampled_from([FirstToken, PrefillDone]))
    def progress(self, data: st.DataObject, kind: type[Event]) -> None:
        """Something of an open or a closed lease is seen."""
        self.see(kind(data.draw(st.sampled_from([*self.open, *self.closed]))))

    @rule(
        data=st.data(),
        status=st.sampled_from([200, 400, 429, 500, 503]),
        usage=st.integers(0, 100_000) | st.none(),
    )
    def finished(self, data: st.DataObject, status: int, usage: int | None) -> None:
        """An open or a closed lease ends."""
        lease_id = data.draw(st.sampled_from([*self.open, *self.closed]))
        self.see(Finished(lease_id, status, usage, usage, usage))
        self.end(lease_id)

    @rule(
        data=st.data(),
        failure=st.sampled_from(list(Failure)),
        leg=st.sampled_from(["single", "prefill", "decode"]),
    )
    def failed(self, data: st.DataObject, failure: Failure, leg: Any) -> None:
        """An open or a closed lease fails."""
        lease_id = data.draw(st.sampled_from([*self.open, *self.closed]))
        self.see(Failed(lease_id, leg, failure))
        self.end(lease_id)

    def end(self, lease_id: int) -> None:
        """The lease is closed now."""
        if self.open.pop(lease_id, None) is not None:
            self.closed.append(lease_id)

    @rule(
        pod_id=st.sampled_from([name for name, _ in PODS]),
        kind=st.sampled_from(["good", "bad", "refused", "heard", "restarted", "drain", "resume"]),
    )
    def pod_event(self, pod_id: str, kind: str) -> None:
        """Something happens to a pod."""
        self.see(
            {
                "good": ProbeSucceeded(pod_id),
                "bad": ProbeFailed(pod_id),
                "refused": ProbeFailed(pod_id, refused=True),
                "heard": PodHeard(pod_id),
                "restarted": PodRestarted(pod_id),
                "drain": PodDraining(pod_id, True),
                "resume": PodDraining(pod_id, False),
            }[kind]
        )

    @rule(pod=st.sampled_from(PODS), conns=st.sampled_from([1, 3, 100]), moved=st.booleans())
    def reload(self, pod: tuple[str, Any], conns: int, moved: bool) -> None:
        """A pod gets other settings, or another address."""
        url = "http://elsewhere:1" if moved else f"http://{pod[0]}:8000"
        self.see(PodAdded(pod_config(pod[0], url=url, max_conns=conns), pod[1]))

    @rule(pod_id=st.sampled_from([name for name, _ in PODS]))
    def remove(self, pod_id: str) -> None:
        """A pod is no longer configured."""
        self.see(PodRemoved(pod_id))

    @invariant()
    def counts_are_right(self) -> None:
        """Leases and the pods' load are what is open, and never negative."""
        assert self.router.open_leases() == len(self.open)
        ledger = self.router._state.ledger
        expected = [0] * 256
        for plan in self.open.values():
            expected[plan.pod.slot] += 1
        for slot, count in enumerate(expected[:16]):
            # On prefill pods a part of their leases is already given back.
            held = ledger.inflight[slot]
            is_prefill = any(
                plan.prefill is not None and plan.prefill.slot == slot
                for plan in self.open.values()
            )
            assert held >= count if is_prefill else held == count
            assert ledger.prefill_tokens[slot] >= 0
            assert ledger.decode_tokens[slot] >= 0

    def teardown(self) -> None:
        """When all leases are closed nothing is held by anyone."""
        for lease_id in list(self.open):
            self.see(Finished(lease_id, 200))
        ledger = self.router._state.ledger
        assert load_is_zero(self.router)
        assert not ledger.inflight.any()
        assert not ledger.prefill_tokens.any()
        assert not ledger.decode_tokens.any()
        assert not any(ledger._holders)
        assert not self.router._state.health.trying
        self.router.tick(self.now + 1e6)
        assert not self.router._state.table.retired


TestLeases = Leases.TestCase


@given(st.lists(st.integers(0, 40), max_size=40))
def test_full_is_exactly_inflight_at_its_bound(order: list[int]) -> None:
    """The bitmap of full pods is what the counts say, after any opens and closes."""
    router = make_router(make_config(pods("single", 3, max_conns=2)))
    plans: list[RoutePlan] = []
    for step in order:
        if step % 3 and plans:
            router.observe(Finished(plans.pop(step % len(plans)).lease_id, 200), 1.0)
        else:
            plan = router.route(request(), 1.0)
            if isinstance(plan, RoutePlan):
                plans.append(plan)
        full = router._state.ledger.full
        assert [bool(full >> view.slot & 1) for view in router.pods()] == [
            view.inflight >= 2 for view in router.pods()
        ]
