"""The workers of one gateway: started, watched, started anew, told what they all have to do.

Each is a process of its own with a stream to this one (edge/bus.py), on which its reports go to
the others. Nothing of a request goes through here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog

from calinix.edge.bus import BusError, Drained, Kind, Link, hello_of, packed

log = structlog.get_logger()

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 10.0
"""A worker that dies again and again is started anew after twice the time, up to this."""
STEADY_S: Final = 30.0
"""One that has lived so long begins again with the first pause."""
LOOK_S: Final = 1.0
"""How often it is looked whether each has said something; they do so at least as often."""
HUNG_LOOKS: Final = 30
"""One that was silent at so many looks in a row stands still, and is killed."""
SILENT_LOOKS: Final = 2
"""One that was silent at more is not asked for anything: whoever asks would wait in vain."""
HURRY_S: Final = 2.0
"""One that is to end at once and is still there after so long is killed."""
LATE_S: Final = 5.0
"""How long over its time a worker that is to end may take before it is killed."""


class Seat:
    """The place of one worker, whoever sits there."""

    def __init__(self, index: int):
        self.index = index
        self.process: asyncio.subprocess.Process | None = None
        self.link: Link | None = None
        self.ready = False
        """Its ports are open."""
        self.restarts = 0
        self.silent_looks = 0

    @property
    def pid(self) -> int:
        """Of its process; 0: none."""
        return 0 if self.process is None else self.process.pid

    @property
    def name(self) -> str:
        """Of who sits there now; another one after each start."""
        return worker_name(self.index, self.pid)


def worker_name(index: int, pid: int) -> str:
    """By which the others know a worker."""
    return f"worker-{index}.{pid}"


class Workers:
    """Keeps as many workers running as there are seats."""

    def __init__(
        self,
        count: int,
        command: Callable[[int], Sequence[str]],
        folder: Path,
        drain_s: float,
    ):
        """`command` of a worker's index starts it; sockets go into `folder`."""
        self.seats = [Seat(index) for index in range(count)]
        self.folder = folder
        self.drain_s = drain_s
        self.on_ended: Callable[[str], None] = lambda _: None
        """Is told the name of each worker that has ended."""
        self._command = command
        self._loop = asyncio.get_running_loop()
        self._seat_of: dict[Link, Seat] = {}
        self._drained: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._started: asyncio.Future[int] = self._loop.create_future()
        self._bus: asyncio.Server | None = None
        self._looking: asyncio.TimerHandle | None = None

    def running(self) -> Iterator[Seat]:
        """Those whose ports are open, and that do not stand still."""
        return (s for s in self.seats if s.ready and s.silent_looks <= SILENT_LOOKS)

    def admin_socket(self, seat: Seat) -> Path:
        """Where the worker's own admin answers."""
        return self.folder / f"admin-{seat.index}.sock"

    @property
    def bus_socket(self) -> Path:
        """Where workers come to."""
        return self.folder / "bus.sock"

    async def start(self) -> int:
        """Starts them all; 0 when all are ready, else the exit status of the first that failed."""
        self._bus = await self._loop.create_unix_server(
            lambda: Link(self._on_frame, self._on_lost), str(self.bus_socket)
        )
        self._tasks = [self._loop.create_task(self._keep(seat)) for seat in self.seats]
        self._look_again()
        return await self._started

    async def stop(self) -> None:
        """Lets each end what it has under way; none outlives the drain by more than LATE_S."""
        self._stopping.set()
        self._tell_to_stop(b"")
        late: set[asyncio.Task[None]] = set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=self.drain_s + LATE_S)
        if late:
            log.error("workers_killed", reason="they did not end in time", count=len(late))
            await self.kill()
        self._close()

    async def kill(self) -> None:
        """Ends them now."""
        self._stopping.set()
        for seat in self.seats:
            _kill(seat.process)
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._close()

    def hurry(self) -> None:
        """They are not to wait for what is under way."""
        self._tell_to_stop(b"!")
        for seat in self.seats:
            self._loop.call_later(HURRY_S, _kill, seat.process)

    def reload(self, pod_ids: Container[str]) -> None:
        """They are to read the file again; of pods that are not in it, nothing is kept."""
        self._drained = {pod_id for pod_id in self._drained if pod_id in pod_ids}
        self._tell(Kind.RELOAD)

    def reopen_logs(self) -> None:
        """They are to open their request logs anew, and nothing else."""
        self._tell(Kind.RELOAD, b"!")

    def drain_pod(self, pod_id: str, *, draining: bool) -> None:
        """A pod is to get no new work, or some again; those that start later are told, too."""
        if draining:
            self._drained.add(pod_id)
        else:
            self._drained.discard(pod_id)
        self._tell(Kind.DRAIN, packed(Drained(pod_id, draining)))

    def look(self) -> None:
        """Ends those that live but stand still: their clients wait for nothing.

        It counts looks and not time: after a pause of the whole machine nobody was silent.
        """
        for seat in self._seat_of.values():
            seat.silent_looks += 1
            if seat.silent_looks > HUNG_LOOKS:
                log.error("worker_hung", worker=seat.index, pid=seat.pid, silent_s=HUNG_LOOKS)
                seat.silent_looks = 0
                _kill(seat.process)

    def _look_again(self) -> None:
        if not self._stopping.is_set():
            self._looking = self._loop.call_later(LOOK_S, self._look_again)
            self.look()

    # --- processes ---------------------------------------------------------------------------

    async def _keep(self, seat: Seat) -> None:
        pause_s = 0.0
        while not self._stopping.is_set():
            began_s = self._loop.time()
            status = await self._live(seat)
            was_ready, seat.ready = seat.ready, False
            if self._stopping.is_set():
                return
            if not self._started.done() and not was_ready:
                self._started.set_result(status if status > 0 else 1)
                return
            lived_s = self._loop.time() - began_s
            pause_s = FIRST_PAUSE_S if lived_s >= STEADY_S else min(2 * pause_s, LONGEST_PAUSE_S)
            pause_s = max(pause_s, FIRST_PAUSE_S)
            log.error(
                "worker_died",
                worker=seat.index,
                pid=seat.pid,
                status=status,
                hint="a negative status is a signal",
                again_in_s=pause_s,
            )
            seat.restarts += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _live(self, seat: Seat) -> int:
        """One process from its start to its end; its exit status, 1 where it could not start."""
        seat.process = None
        try:
            seat.process = await asyncio.create_subprocess_exec(
                *self._command(seat.index), stdin=asyncio.subprocess.DEVNULL
            )
        except OSError as error:
            # No memory or no process left: that may pass.
            log.error("worker_cannot_start", worker=seat.index, reason=str(error))
            return 1
        status = await seat.process.wait()
        self._gone(seat)
        return status

    def _gone(self, seat: Seat) -> None:
        """What it had is to be forgotten."""
        name = seat.name
        if seat.link is not None:
            self._seat_of.pop(seat.link, None)
            seat.link.close()
            seat.link = None
        self.on_ended(name)
        self._tell(Kind.GONE, name.encode())

    def _tell_to_stop(self, how: bytes) -> None:
        self._tell(Kind.STOP, how)
        for seat in self.seats:
            if seat.link is None and seat.process is not None and seat.process.returncode is None:
                seat.process.terminate()

    def _close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._bus is not None:
            self._bus.close()
            self._bus = None

    # --- the bus -----------------------------------------------------------------------------

    def _tell(self, kind: Kind, payload: bytes = b"") -> None:
        for link in tuple(self._seat_of):
            link.send(kind, payload)

    def _on_frame(self, link: Link, kind: Kind, payload: bytes) -> None:
        seat = self._seat_of.get(link)
        if seat is not None:
            seat.silent_looks = 0
        if kind is Kind.REPORT and seat is not None:
            for other in self._seat_of:
                if other is not link:
                    other.send(kind, payload)
        elif kind is Kind.HELLO:
            self._welcome(link, payload)
        elif kind is Kind.READY and seat is not None:
            seat.ready = True
            log.info("worker_ready", worker=seat.index, pid=seat.pid)
            if all(each.ready for each in self.seats) and not self._started.done():
                self._started.set_result(0)

    def _welcome(self, link: Link, payload: bytes) -> None:
        hello = hello_of(payload)
        if not 0 <= hello.index < len(self.seats) or self.seats[hello.index].pid != hello.pid:
            raise BusError(f"nobody with index {hello.index} and pid {hello.pid} was started")
        self._tell(Kind.ASK)
        seat = self.seats[hello.index]
        seat.link, seat.silent_looks = link, 0
        self._seat_of[link] = seat
        for pod_id in sorted(self._drained):
            link.send(Kind.DRAIN, packed(Drained(pod_id, True)))
        if self._stopping.is_set():
            link.send(Kind.STOP)

    def _on_lost(self, link: Link, why: str) -> None:
        seat = self._seat_of.pop(link, None)
        if seat is None or seat.link is not link:
            return
        seat.link = None
        process = seat.process
        if self._stopping.is_set() or process is None or process.returncode is not None:
            return
        # Mostly it has died. If not, it ends by itself: without the others it knows too little.
        log.warning("worker_lost", worker=seat.index, pid=process.pid, reason=why)
        self._loop.call_later(self.drain_s + LATE_S, _kill, process)


def _kill(process: asyncio.subprocess.Process | None) -> None:
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
