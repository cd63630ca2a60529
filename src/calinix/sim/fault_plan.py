"""Lets the faults of a scenario happen at their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from calinix.core.events import BlocksCleared
from calinix.sim.cluster import Cluster
from calinix.sim.door import Door
from calinix.sim.faults import DeadPod, Fault, Flush, LateFacts, LostEvents, SlowPod

Action = Callable[[], None]


def plan(faults: Sequence[Fault], cluster: Cluster, doors: Sequence[Door]) -> None:
    """Puts the beginning and the end of each fault on the clock."""
    for fault in faults:
        for at_s, action in _actions(fault, cluster, doors):
            if at_s < float("inf"):
                cluster.clock.at(at_s, _act, action)


def _act(action: Action) -> None:
    action()


def _actions(fault: Fault, cluster: Cluster, doors: Sequence[Door]) -> list[tuple[float, Action]]:
    begin_s, end_s = fault.at_s, fault.at_s + fault.for_s
    found: list[tuple[float, Action]] = []
    if isinstance(fault, LostEvents):
        share = fault.share
        for door in doors:
            found += [
                (begin_s, partial(_lose, door, share)),
                (end_s, partial(_lose, door, 0.0)),
            ]
    elif isinstance(fault, LateFacts):
        late_s = fault.late_s
        for door in doors:
            found += [
                (begin_s, partial(_delay, door, late_s)),
                (end_s, partial(_delay, door, door.late_s)),
            ]
    elif isinstance(fault, SlowPod | DeadPod | Flush):
        for number in fault.pods:
            slot = number % len(cluster.pods)
            found += _of_pod(fault, slot, cluster, doors)
    return found


def _of_pod(
    fault: SlowPod | DeadPod | Flush, slot: int, cluster: Cluster, doors: Sequence[Door]
) -> list[tuple[float, Action]]:
    begin_s, end_s = fault.at_s, fault.at_s + fault.for_s
    if isinstance(fault, SlowPod):
        return [
            (begin_s, partial(cluster.slow_down, slot, fault.factor)),
            (end_s, partial(cluster.slow_down, slot, 1.0)),
        ]
    if isinstance(fault, DeadPod):
        return [(begin_s, partial(cluster.kill, slot)), (end_s, partial(cluster.revive, slot))]
    told = fault.told

    def flush() -> None:
        cluster.flush(slot)
        if told:
            cleared = BlocksCleared(cluster.described[slot].id)
            for door in doors:
                door.tell(cleared, may_be_lost=True)

    return [(begin_s, flush)]


def _lose(door: Door, share: float) -> None:
    door.lost_share = share


def _delay(door: Door, late_s: float) -> None:
    door.late_s = late_s
