"""Several runs of one scenario, on as many processes as there are cores; equal on any of them."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import TypeVar

import msgspec

from calinix.errors import CalinixError
from calinix.sim.measures import Outcome, outcome_of
from calinix.sim.simulate import run
from calinix.sim.tasks import Task, named

STILL_S = 120.0
"""Runs tell of their progress many times a second; after so long without a word they hang."""
END_S = 5.0

T = TypeVar("T")


class RunError(CalinixError):
    """Runs in other processes came to no end."""


def run_task(task: Task, progress: Callable[[float], None] | None = None) -> Outcome:
    """One run, boiled down; `progress` is told the share that is done."""
    name, scenario = named(task)
    done = run(
        scenario,
        name,
        task.seed,
        load=task.load,
        pods=task.pods,
        progress=progress,
    )
    return outcome_of(msgspec.structs.replace(done, strategy=task.strategy))


def run_all(
    tasks: Sequence[Task],
    progress: Callable[[float, int], None] | None = None,
    processes: int | None = None,
) -> list[Outcome]:
    """All runs, in the order of `tasks`; `progress` is told the share and the runs done.

    By default on as many processes as there are cores for this one. Raises RunError where one of
    them ends or hangs.
    """
    count = min(len(tasks), processes or cores())
    shares = [0.0] * len(tasks)

    def tell(number: int, share: float) -> None:
        shares[number] = max(shares[number], share)
        if progress is not None:
            progress(sum(shares) / len(shares), sum(one >= 1.0 for one in shares))

    if count <= 1:
        found = []
        for number, task in enumerate(tasks):
            found.append(run_task(task, functools.partial(_below_one, tell, number)))
            tell(number, 1.0)
        return found
    return _run_apart(tasks, count, tell)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """Another process, and the end of the pipe to it."""

    __slots__ = ("number", "pipe", "process")

    def __init__(self) -> None:
        # Spawned, since a progress display has threads: locks that are held while others fork are
        # never released there. And each has a pipe of its own, so that one that dies or hangs
        # keeps nothing from the others.
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there,), daemon=True)
        self.process.start()
        there.close()
        self.number = -1
        """Of the task that it runs."""

    def end(self) -> None:
        """Ends it, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _run_apart(
    tasks: Sequence[Task], processes: int, tell: Callable[[int, float], None]
) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    waiting = list(range(len(tasks)))[::-1]
    workers: list[_Worker] = []
    try:
        while len(workers) < processes:
            workers.append(_Worker())
        for worker in workers:
            _give(worker, waiting, tasks)
        while len(outcomes) < len(tasks):
            heard = connection.wait([worker.pipe for worker in workers], STILL_S)
            if not heard:
                raise RunError(f"nothing was heard of the runs for {STILL_S:g} s; they were ended")
            for worker in [worker for worker in workers if worker.pipe in heard]:
                said = _heard(worker, tasks)
                if isinstance(said, float):
                    tell(worker.number, said)
                else:
                    outcomes[worker.number] = said
                    tell(worker.number, 1.0)
                    if not _give(worker, waiting, tasks):
                        workers.remove(worker)
                        worker.end()
        return [outcomes[number] for number in range(len(tasks))]
    finally:
        for worker in workers:
            worker.end()


def _give(worker: _Worker, waiting: list[int], tasks: Sequence[Task]) -> bool:
    """Gives it the next task; False: there is none."""
    if not waiting:
        return False
    worker.number = waiting.pop()
    with contextlib.suppress(BrokenPipeError):  # said by the end of its pipe
        worker.pipe.send(tasks[worker.number])
    return True


def _heard(worker: _Worker, tasks: Sequence[Task]) -> float | Outcome:
    """The share of its run that is done, or what came of it. Raises RunError: it is no more."""
    try:
        said: float | Outcome = worker.pipe.recv()
    except (EOFError, OSError) as error:
        worker.process.join(END_S)
        task = tasks[worker.number]
        raise RunError(
            f"the run of {task.strategy} with seed {task.seed} broke off: its process ended"
            f" with exit code {worker.process.exitcode}"
        ) from error
    return said


def _serve(pipe: connection.Connection) -> None:
    """In another process: runs what comes. Ctrl-C ends it at once and without words."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            return
        pipe.send(run_task(task, functools.partial(_below_one, _send, pipe)))


def _send(pipe: connection.Connection, share: float) -> None:
    pipe.send(share)


def _below_one(tell: Callable[[T, float], None], whom: T, share: float) -> None:
    # All requests have come; some are still under way.
    tell(whom, min(share, 0.99))
