"""Pods that come, go and start anew: their slots, epochs and cache mirrors."""

from __future__ import annotations

from calinix.config import PodConfig
from calinix.core import bitmap
from calinix.core.pods import Pod, Role
from calinix.core.state import State

MAX_CAPACITY_BLOCKS = 2**31 - 1
_CAPACITY_DRIFT = 0.1
"""A mirror is resized when its capacity in blocks is off by this share."""


EVENT_ROOM = 1.5
"""Times a pod's capacity: where events say what it evicts, its mirror has room for what requests
under way bring in before that."""


class Roster:
    """Keeps table, health and registry in step."""

    def __init__(self, state: State):
        self._state = state
        self._capacities = [0] * state.table.max_pods
        self._stated_tokens = [0] * state.table.max_pods
        self._next = 0

    def capacity_blocks(self, slot: int) -> int:
        """Blocks that the pod's mirror may hold."""
        return self._capacities[slot]

    def add(self, config: PodConfig, role: Role) -> None:
        """A pod is configured. Raises ConfigError when no slot is free."""
        table = self._state.table
        known = table.find(config.id)
        if known is not None and known.role != role:
            self.remove(known)
            known = None
        if known is None:
            known = table.find_retired(config.id, role)
            if known is not None:
                table.revive(known)
        if known is None:
            self.free_retired()
            self._start(table.place(config, role))
        elif known.url != config.url:
            # Another address is another engine: nothing of the old one holds for it.
            self._start(table.renew(known, config))
        else:
            pod = table.update(known, config)
            self._state.ledger.recheck(pod.slot)
            self._resize(pod)

    def remove(self, pod: Pod) -> None:
        """No longer configured; its slot is freed when its leases are closed."""
        self._state.table.retire(pod)

    def free_retired(self) -> None:
        """Frees the slots of removed pods without leases."""
        state = self._state
        for slot in bitmap.iterate(state.table.retired):
            if state.ledger.is_idle(slot):
                state.registry.close_slot(slot)
                state.health.reset(slot, known=False)
                state.rates.forget(slot)
                state.calibration.forget(slot)
                state.table.free(slot)

    def make_cold(self, pod: Pod) -> None:
        """Another engine process: a new epoch, an empty mirror. Load and health stay."""
        state = self._state
        fresh = state.table.renew(pod)
        state.rates.forget(fresh.slot)
        state.calibration.forget(fresh.slot)
        state.registry.open_slot(fresh.slot, self._capacities[fresh.slot])

    def state_capacity(self, pod: Pod, tokens: int) -> None:
        """The engine's own word of its KV capacity, in tokens."""
        if tokens > 0:
            self._stated_tokens[pod.slot] = tokens
            self._resize(pod)

    def resize_next(self) -> None:
        """Lets one pod's mirror follow what was learned of tokens per block."""
        table = self._state.table
        self._next = (self._next + 1) % table.max_pods
        pod = table.at[self._next]
        if pod is not None:
            self._resize(pod)

    def _start(self, pod: Pod) -> None:
        state = self._state
        state.health.reset(pod.slot, known=True)
        state.rates.forget(pod.slot)
        state.calibration.forget(pod.slot)
        state.ledger.recheck(pod.slot)
        self._stated_tokens[pod.slot] = 0
        self._capacities[pod.slot] = self._wanted(pod)
        state.registry.open_slot(pod.slot, self._capacities[pod.slot])

    def _resize(self, pod: Pod) -> None:
        wanted, now = self._wanted(pod), self._capacities[pod.slot]
        if abs(wanted - now) > _CAPACITY_DRIFT * now:
            self._capacities[pod.slot] = wanted
            self._state.registry.set_capacity(pod.slot, wanted)

    def _wanted(self, pod: Pod) -> int:
        tokens = (
            pod.config.kv_capacity_tokens
            or self._stated_tokens[pod.slot]
            or self._state.kv_capacity_tokens
        )
        if self._state.event_blocks and (
            self._state.events_bound or pod.config.kv_events.endpoint is not None
        ):
            tokens = round(EVENT_ROOM * tokens)
        blocks = round(tokens / self._state.preparer.tokens_per_block)
        return max(1, min(blocks, MAX_CAPACITY_BLOCKS))
