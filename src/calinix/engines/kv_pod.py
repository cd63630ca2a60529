"""One pod by its KV events: a stream and a mirror for each of its DP ranks, as one pod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from calinix.core.events import BlocksCleared, Event, PodHeard, PodRestarted
from calinix.engines.kv_events import Message, rank_of
from calinix.engines.kv_mirror import KvMirror
from calinix.engines.kv_names import Namespaces
from calinix.engines.kv_stream import KvStream, Line, Source

HEARD_S = 1.0
"""Messages are a sign of life once in so long."""
LIMIT_FACTOR = 4
"""A mirror may know so many times the pod's capacity: what it knows of is also lost events'."""
_LEAST_LIMIT = 4096


class KvPodSettings(msgspec.Struct, frozen=True):
    """What is configured of a pod's events."""

    pod_id: str
    model: str
    """Name of its base model, as clients ask for it."""
    ranks: int
    capacity_tokens: int
    """Tokens that one rank's cache holds."""
    check_s: float
    clears_only: bool
    """Prompts are not hashed by tokens, so of all events only a cleared cache has a meaning."""


class KvView(msgspec.Struct, frozen=True, rename="camel"):
    """What the events of one pod have brought, for people."""

    source: Source
    """history, events or gapped: what is believed of its cache stands on this."""
    ranks: int
    batches: list[int]
    """By rank, batches that its engine has published as far as is known."""
    blocks: int
    """Engine blocks known now."""
    block_size: int
    """Tokens of an engine block; 0: none was seen yet."""
    stored: int
    removed: int
    lost_batches: int
    replays: int
    restarts: int
    orphans: int
    """Blocks stored behind unknown ones: ignored."""
    elsewhere: int
    """Blocks outside of GPU memory, or of layers that do not decide a hit: not counted."""
    foreign: int
    """Blocks with media, or of an adapter without a name: no prompt key is like theirs."""
    malformed: int
    unreadable: int
    """Messages and events that were not understood."""


class KvPod:
    """Bounded by its ranks. The host calls `live` and `replayed` for what it receives."""

    def __init__(
        self,
        settings: KvPodSettings,
        namespaces: Namespaces,
        emit: Callable[[Event], None],
        epoch: Callable[[], int],
        line: Callable[[int], Line],
    ):
        """`emit` takes what is found out; `line(rank)` carries replay requests.

        `epoch` is the router's for this pod: another one when it has forgotten the pod's cache.
        """
        self.settings = settings
        self.restarts = 0
        self.unreadable = 0
        self._emit = emit
        self._epoch_of = epoch
        self._epoch = epoch()
        self._touched = False
        """Something counted since the epoch began."""
        self._heard_s = 0.0
        limit = LIMIT_FACTOR * settings.capacity_tokens // namespaces.block_tokens
        self.streams = [
            KvStream(
                KvMirror(
                    settings.pod_id, settings.model, namespaces, max(limit, _LEAST_LIMIT), emit
                ),
                line(rank),
                self._restarted,
                check_s=settings.check_s,
                capacity_tokens=settings.capacity_tokens,
                clears_only=settings.clears_only,
            )
            for rank in range(settings.ranks)
        ]
        for stream in self.streams:
            stream.mirror.alone = settings.ranks == 1

    @property
    def source(self) -> Source:
        """The least certain of the ranks."""
        if self.settings.clears_only:
            return "history"
        sources = {stream.source for stream in self.streams}
        return "gapped" if "gapped" in sources else "history" if "history" in sources else "events"

    def live(self, rank: int, message: Message, now: float) -> None:
        """A message from the socket of `rank`; with several ranks the batch says whose it is."""
        self._follow(now)
        told = rank_of(message.payload) if len(self.streams) > 1 else None
        if told is not None and told < len(self.streams):
            rank = told
        if now - self._heard_s >= HEARD_S:
            self._heard_s = now
            self._emit(PodHeard(self.settings.pod_id))
        self.streams[rank].live(message, now)
        self._look_back(self.streams[rank], now)

    def replayed(self, rank: int, answer: Message | Literal["end"], now: float) -> None:
        """An answer on the line of `rank`."""
        self._follow(now)
        self.streams[rank].replayed(answer, now)
        self._look_back(self.streams[rank], now)

    def drain(self, now: float) -> bool:
        """Lets one batch count that has waited for a replay; whether more can follow it."""
        self._follow(now)
        for stream in self.streams:
            if stream.behind:
                stream.drain(now)
                self._look_back(stream, now)
                break
        return self.behind

    @property
    def behind(self) -> bool:
        """Batches are there for `drain`."""
        return any(stream.behind for stream in self.streams)

    def tick(self, now: float) -> None:
        """To be called some times a second."""
        self._follow(now)
        for stream in self.streams:
            stream.tick(now)
            self._look_back(stream, now)

    def view(self) -> KvView:
        """What people see."""
        streams = self.streams
        counts = [stream.mirror.counts for stream in streams]
        return KvView(
            source=self.source,
            ranks=len(streams),
            batches=[stream.last + 1 for stream in streams],
            blocks=sum(len(stream.mirror) for stream in streams),
            block_size=max(stream.mirror.block_size for stream in streams),
            stored=sum(count.stored for count in counts),
            removed=sum(count.removed for count in counts),
            lost_batches=sum(stream.lost for stream in streams),
            replays=sum(stream.replays for stream in streams),
            restarts=self.restarts,
            orphans=sum(count.orphans for count in counts),
            elsewhere=sum(count.elsewhere for count in counts),
            foreign=sum(count.foreign for count in counts),
            malformed=sum(count.malformed for count in counts),
            unreadable=self.unreadable + sum(stream.unreadable for stream in streams),
        )

    # --- epochs ------------------------------------------------------------------------------

    def _follow(self, now: float) -> None:
        """The router may have forgotten the pod since: then all is told again."""
        if self._epoch_of() != self._epoch:
            self._begin(now)

    def _look_back(self, stream: KvStream, now: float) -> None:
        """The router may have forgotten the pod while it was told: then it knows a part only."""
        if self._epoch_of() != self._epoch:
            self._emit(BlocksCleared(self.settings.pod_id))
            self._begin(now)
        elif stream.last >= 0:
            self._touched = True

    def _begin(self, now: float) -> None:
        self._epoch = self._epoch_of()
        self._touched = False
        for stream in self.streams:
            stream.resume(now)

    def _restarted(self, stream: KvStream, now: float) -> None:
        """Another process publishes. The ranks of a pod start together: one restart is told."""
        if stream.generation < self.restarts:
            stream.generation = self.restarts
            stream.mirror.clear()
            return
        self.restarts += 1
        stream.generation = self.restarts
        stream.mirror.forget()
        if self._touched:
            self._emit(PodRestarted(self.settings.pod_id))
            self._epoch = self._epoch_of()
            self._touched = False
        for other in self.streams:
            if other is not stream:
                other.resume(now)
