"""The sessions' last pods: a bounded table, least recently used first out, with a time to live."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from calinix.core.pods import Pod, PodTable, Role

SessionKey = tuple[bytes, str]
"""(tenant, session key): equal keys of two tenants are two sessions."""

_SWEEP: Final = 64


class Session:
    """The pods that served a session last, and the answer that the last of them gave."""

    __slots__ = ("answer_tokens", "decode", "prefill", "seen_s", "single")

    def __init__(
        self,
        single: Pod | None = None,
        prefill: Pod | None = None,
        decode: Pod | None = None,
        seen_s: float = 0.0,
    ):
        self.single = single
        self.prefill = prefill
        self.decode = decode
        self.seen_s = seen_s
        self.answer_tokens = 0.0
        """Of the last answer: cached on its pod, and no prompt has told so yet."""


class Sessions:
    """Session key -> last pod per role. An entry ends with the pod's epoch.

    `max_sessions` 0 remembers nothing.
    """

    def __init__(self, table: PodTable, max_sessions: int, ttl_s: float):
        self._table = table
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()

    def __len__(self) -> int:
        """How many sessions are remembered."""
        return len(self._sessions)

    def find(self, key: SessionKey, now: float) -> Session | None:
        """The session, if it is remembered."""
        session = self._sessions.get(key)
        return None if session is None or now - session.seen_s > self._ttl_s else session

    def last(self, key: SessionKey, role: Role, now: float) -> Pod | None:
        """The pod of this role that served the session last, if it is still the same process."""
        session = self.find(key, now)
        return None if session is None else self.pod_of(session, role)

    def pod_of(self, session: Session, role: Role) -> Pod | None:
        """Its last pod of this role, if that is still the same process."""
        pod: Pod | None = getattr(session, role)
        return pod if pod is not None and self._table.is_current(pod) else None

    def remember(
        self, key: SessionKey, pod: Pod, prefill: Pod | None, now: float
    ) -> Session | None:
        """The session's request went to `pod`, in dispatch mode prefilled on `prefill`."""
        session = self._sessions.get(key)
        if session is None:
            if not self._max_sessions:
                return None
            session = self._sessions[key] = Session()
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(key)
        if pod.role == "single":
            session.single = pod
        else:
            session.decode = pod
            if prefill is not None:
                session.prefill = prefill
        session.seen_s = now
        session.answer_tokens = 0.0
        return session

    def sweep(self, now: float) -> None:
        """Forgets some of the sessions that are over: a bounded share."""
        for _ in range(_SWEEP):
            if not self._sessions:
                return
            key = next(iter(self._sessions))
            if now - self._sessions[key].seen_s <= self._ttl_s:
                return
            del self._sessions[key]


class Pins:
    """Which pod keeps a stored answer (`previous_response_id`). Ends with the pod's epoch."""

    def __init__(self, table: PodTable, max_pins: int, ttl_s: float):
        self._table = table
        self._max_pins = max_pins
        self._ttl_s = ttl_s
        self._pins: OrderedDict[str, tuple[Pod, float]] = OrderedDict()

    def __len__(self) -> int:
        """How many answers are remembered."""
        return len(self._pins)

    def remember(self, response_id: str, pod: Pod, now: float) -> None:
        """`pod` keeps this answer."""
        if not self._max_pins:
            return
        self._pins[response_id] = (pod, now)
        self._pins.move_to_end(response_id)
        if len(self._pins) > self._max_pins:
            self._pins.popitem(last=False)

    def find(self, response_id: str, now: float) -> Pod | None:
        """The pod that keeps it; None when that is not known, or it is lost."""
        found = self._pins.get(response_id)
        if found is None or now - found[1] > self._ttl_s or not self._table.is_current(found[0]):
            return None
        return found[0]

    def sweep(self, now: float) -> None:
        """Forgets some of the answers that are too old: a bounded share."""
        for _ in range(_SWEEP):
            if not self._pins:
                return
            key = next(iter(self._pins))
            if now - self._pins[key][1] <= self._ttl_s:
                return
            del self._pins[key]
