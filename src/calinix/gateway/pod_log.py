"""The pods' states in the operational log: one line when a state changes, none while it stays."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from calinix.core.views import PodView

log = structlog.get_logger()

_BAD = frozenset({"unhealthy", "ejected"})


class PodLog:
    """What was last said of each pod."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def look(self, pods: Iterable[PodView]) -> None:
        """Says what changed since the last look; a new pod was `starting`."""
        said = {}
        for pod in pods:
            was, state = self._said.get(pod.id, "starting"), _state(pod)
            said[pod.id] = state
            if state == was:
                continue
            why = {"reason": pod.reason} if state in _BAD else {}
            tell = log.warning if state in _BAD else log.info
            tell("pod_state", pod=pod.id, role=pod.role, state=state, was=was, **why)
        self._said = said


def _state(pod: PodView) -> str:
    return "draining" if pod.draining and pod.state == "healthy" else pod.state
