"""The pods: frozen records, and the table of who is in which slot."""

from __future__ import annotations

from array import array
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from calinix.config import PodConfig
from calinix.core import bitmap
from calinix.core.bitmap import HostBitmap
from calinix.core.kv import slots_of
from calinix.errors import ConfigError

Role = Literal["single", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("single", "prefill", "decode")

_MAX_SLOT_SETS: Final = 1024


class Pod:
    """One engine endpoint in its slot.

    `epoch` is never used twice: equal epochs mean the same pod and the same engine process.
    """

    __slots__ = ("config", "epoch", "id", "role", "slot", "url")

    def __init__(
        self,
        id: str,  # noqa: A002
        url: str,
        slot: int,
        epoch: int,
        role: Role,
        config: PodConfig,
    ):
        self.id = id
        self.url = url
        self.slot = slot
        self.epoch = epoch
        self.role = role
        self.config = config


class SlotSet:
    """A set of slots: as a bitmap, as `count` slots, ascending. Never to be written to."""

    __slots__ = ("bitmap", "count", "slots", "zeros")

    def __init__(self, members: HostBitmap):
        self.bitmap = members
        self.slots = slots_of(members)
        self.count = len(self.slots)
        self.zeros = array("d", bytes(8 * self.count))

    def index(self, slot: int) -> int:
        """Where `slot` stands; it has to be in the set."""
        return (self.bitmap & ((1 << slot) - 1)).bit_count()


class PodTable:
    """Who is in which slot. Bounded by `max_pods`; a slot is free again after `free`."""

    def __init__(self, max_pods: int):
        self.max_pods = max_pods
        self.at: list[Pod | None] = [None] * max_pods
        """Pod by slot."""
        self.max_conns = array("l", [0]) * max_pods
        """By slot."""
        self.draining: HostBitmap = 0
        self.retired: HostBitmap = 0
        """Removed pods that still have leases; in no role any more."""
        self.ranks: npt.NDArray[np.intp] = np.zeros(max_pods, dtype=np.intp)
        """By slot: place of the pod's id among all ids, in ascending order."""
        self.hosts: npt.NDArray[np.int32] = np.zeros(max_pods, dtype=np.int32)
        """By slot: a number for the pod's host label; 0 where it has none. Likewise:"""
        self.zones: npt.NDArray[np.int32] = np.zeros(max_pods, dtype=np.int32)
        self.urls: npt.NDArray[np.int32] = np.zeros(max_pods, dtype=np.int32)
        self._epochs = 0
        self._by_id: dict[str, Pod] = {}
        self.roles: dict[Role, HostBitmap] = dict.fromkeys(ROLES, 0)
        """The configured pods of each role."""
        self.any_model: HostBitmap = 0
        """The configured pods that serve every model."""
        self._by_model: dict[str, HostBitmap] = {}
        self.slot_sets: dict[HostBitmap, SlotSet] = {}
        """The sets that `slot_set` has made; bounded."""
        self.who: tuple[Pod | None, ...] = tuple(self.at)
        """Pod by slot, as a value that does not change with the table."""
        self.version = 0
        """Changes with every change of who is there."""

    def __len__(self) -> int:
        """How many pods are configured, retired ones not counted."""
        return len(self._by_id)

    def find(self, pod_id: str) -> Pod | None:
        """The configured pod with this id."""
        return self._by_id.get(pod_id)

    def is_current(self, pod: Pod) -> bool:
        """Whether `pod` is still what is in its slot, the same engine process."""
        now = self.at[pod.slot]
        return now is pod or (now is not None and now.epoch == pod.epoch)

    def role(self, role: Role) -> HostBitmap:
        """The configured pods of a role."""
        return self.roles[role]

    def serving(self, model: str) -> HostBitmap:
        """The configured pods that serve `model`; "" is served by all."""
        if not model:
            return self.any_model | self._listed
        return self.any_model | self._by_model.get(model, 0)

    def slot_set(self, members: HostBitmap) -> SlotSet:
        """The arrays of a set of slots; made once per set."""
        found = self.slot_sets.get(members)
        if found is None:
            if len(self.slot_sets) >= _MAX_SLOT_SETS:
                self.slot_sets.clear()
            found = self.slot_sets[members] = SlotSet(members)
        return found

    def place(self, config: PodConfig, role: Role) -> Pod:
        """Takes a free slot for a new pod. Raises ConfigError when there is none."""
        for slot, taken in enumerate(self.at):
            if taken is None:
                return self._put(slot, config, role)
        raise ConfigError(
            [f"pod '{config.id}': no slot is free; cacheRegistry.maxPods is {self.max_pods}"]
        )

    def update(self, pod: Pod, config: PodConfig) -> Pod:
        """Other settings for a pod that goes on as it is, same epoch."""
        return self._set(Pod(config.id, config.url, pod.slot, pod.epoch, pod.role, config))

    def renew(self, pod: Pod, config: PodConfig | None = None) -> Pod:
        """A new epoch: another engine process in the same slot."""
        return self._put(pod.slot, config or pod.config, pod.role)

    def retire(self, pod: Pod) -> None:
        """No longer configured; the slot stays taken until `free`."""
        self._by_id.pop(pod.id, None)
        self.retired |= 1 << pod.slot
        self.draining &= ~(1 << pod.slot)
        self._index()

    def revive(self, pod: Pod) -> None:
        """Configured again before its slot was free."""
        self.retired &= ~(1 << pod.slot)
        self._set(pod)

    def find_retired(self, pod_id: str, role: Role) -> Pod | None:
        """The retired pod of this id and role."""
        for slot in bitmap.iterate(self.retired):
            pod = self.at[slot]
            if pod is not None and pod.id == pod_id and pod.role == role:
                return pod
        return None

    def free(self, slot: int) -> None:
        """Nobody is in the slot any more."""
        self.at[slot] = None
        self.retired &= ~(1 << slot)
        self.draining &= ~(1 << slot)
        self._index()

    def _put(self, slot: int, config: PodConfig, role: Role) -> Pod:
        self._epochs += 1
        return self._set(Pod(config.id, config.url, slot, self._epochs, role, config))

    def _set(self, pod: Pod) -> Pod:
        self.at[pod.slot] = pod
        if not self.retired >> pod.slot & 1:
            self._by_id[pod.id] = pod
        self.max_conns[pod.slot] = pod.config.max_conns
        self._index()
        return pod

    def _index(self) -> None:
        """Makes anew what follows from who is there. Rare: pods come and go by hand."""
        self.who = tuple(self.at)
        self.version += 1
        self.roles = dict.fromkeys(ROLES, 0)
        self.any_model = self._listed = 0
        self._by_model = {}
        codes: dict[tuple[str, str], int] = {}
        for rank, pod_id in enumerate(sorted(self._by_id)):
            pod = self._by_id[pod_id]
            slot, mark = pod.slot, 1 << pod.slot
            self.roles[pod.role] |= mark
            self.ranks[slot] = rank
            if not pod.config.models:
                self.any_model |= mark
            for model in pod.config.models:
                self._listed |= mark
                self._by_model[model] = self._by_model.get(model, 0) | mark
            labels = pod.config.labels
            for column, kind, label in (
                (self.hosts, "host", labels.host),
                (self.zones, "zone", labels.zone),
                (self.urls, "url", pod.url),
            ):
                column[slot] = codes.setdefault((kind, label), len(codes) + 1) if label else 0

    _listed: HostBitmap = 0
