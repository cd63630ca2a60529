"""Metrics of the pods' KV events: what is believed of their caches stands on what, and how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

SOURCES = ("history", "events", "gapped")
BLOCKS = ("stored", "removed", "orphans", "elsewhere", "foreign", "malformed")
COUNTERS = {
    "lost_batches": ("calinix_kv_lost_batches_total", "Batches of KV events that never came"),
    "replays": ("calinix_kv_replays_total", "Replays of KV events that were asked for"),
    "restarts": ("calinix_kv_restarts_total", "Engine processes that took another's place"),
    "unreadable": ("calinix_kv_unreadable_total", "KV messages and events not understood"),
}


class KvState(Protocol):
    """What the KV events of a pod have brought; also counters by the names above."""

    @property
    def source(self) -> str:
        """history, events or gapped."""
        ...


def kv_families(
    roles: Mapping[str, str], states: Mapping[str, KvState], labels: Sequence[str]
) -> Iterator[Metric]:
    """The families of every pod (id -> role); one without a state stands on history."""
    source = GaugeMetricFamily(
        "calinix_pod_kv_source",
        "1: what is believed of the pod's cache stands on this",
        labels=(*labels, "source"),
    )
    for pod_id, role in roles.items():
        state = states.get(pod_id)
        now = "history" if state is None else state.source
        for name in SOURCES:
            source.add_metric((pod_id, role, name), float(name == now))
    yield source
    blocks = CounterMetricFamily(
        "calinix_kv_blocks_total",
        "Engine blocks in KV events, by what became of them",
        labels=(*labels, "kind"),
    )
    counters = [
        (field, CounterMetricFamily(name, text, labels=labels))
        for field, (name, text) in COUNTERS.items()
    ]
    for pod_id, state in states.items():
        found = (pod_id, roles.get(pod_id, "other"))
        for kind in BLOCKS:
            blocks.add_metric((*found, kind), getattr(state, kind))
        for field, family in counters:
            family.add_metric(found, getattr(state, field))
    yield blocks
    yield from (family for _, family in counters)
