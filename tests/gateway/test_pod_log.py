"""The operational log tells of pods: what their probes heard, and when their state changes."""

from __future__ import annotations

from typing import Any

import structlog

import kit
from calinix.core.views import PodView
from calinix.gateway.pod_log import PodLog
from calinix.sim.mock_faults import Fault
from fleets import fleet_of, gateway_of


def view(**more: Any) -> PodView:
    """A pod as the router would show it."""
    fields: dict[str, Any] = dict.fromkeys(PodView.__struct_fields__)
    pod = {"id": "pod-1", "role": "single", "state": "healthy", "reason": "", "draining": False}
    return PodView(**fields | pod | more)


def test_a_line_for_each_change_and_none_without() -> None:
    """A state is told once; trouble is a warning, with its reason."""
    log = PodLog()
    with structlog.testing.capture_logs() as lines:
        for state in ("starting", "healthy", "healthy", "ejected", "healthy", "unhealthy"):
            log.look([view(state=state, reason=f"of {state}")])
    assert [(line["was"], line["state"], line["log_level"]) for line in lines] == [
        ("starting", "healthy", "info"),
        ("healthy", "ejected", "warning"),
        ("ejected", "healthy", "info"),
        ("healthy", "unhealthy", "warning"),
    ]
    assert [line.get("reason") for line in lines] == [None, "of ejected", None, "of unhealthy"]


def test_a_drained_pod_is_told_of_and_a_removed_one_forgotten() -> None:
    """Draining is a state; a pod that was removed and comes again is new."""
    log = PodLog()
    with structlog.testing.capture_logs() as lines:
        log.look([view()])
        log.look([view(draining=True)])
        log.look([])
        log.look([view()])
    assert [(line["was"], line["state"]) for line in lines] == [
        ("starting", "healthy"),
        ("healthy", "draining"),
        ("starting", "healthy"),
    ]


@kit.on_loop
async def test_probes_that_fail_alike_are_told_once() -> None:
    """A pod whose probes are answered 404 gives one line that says so, with the URL."""
    config = {"health": {"intervalMs": 10, "unhealthyThreshold": 2}}
    async with fleet_of(single=1) as fleet, gateway_of(fleet.config(config)) as gateway:
        pod = fleet.pods["single-1"]
        with structlog.testing.capture_logs() as lines:
            pod.add_faults([Fault(kind="status", status=404, everywhere=True)])
            await kit.until(lambda: not gateway.router.ready(), "its probes took it out")
        told = [line for line in lines if line["event"] == "probe_failed"]
    assert [line["reason"] for line in told] == ["answered 404"]
    assert told[0]["url"].endswith("/health")
