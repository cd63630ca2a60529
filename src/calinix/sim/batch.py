"""Several runs of one scenario, on as many processes as there are cores; equal on any of them."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from calinix.sim.measures import Outcome, outcome_of
from calinix.sim.simulate import run
from calinix.sim.tasks import Task, named

LOOK_S = 0.1
"""How often progress is told."""


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

    By default on as many processes as there are cores for this one.
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


def _run_apart(
    tasks: Sequence[Task], processes: int, tell: Callable[[int, float], None]
) -> list[Outcome]:
    # Not forked from here: a progress display has threads, and locks that are held while others
    # fork are never released there. The fork server has none, and imports everything once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    news = context.SimpleQueue()
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, _begin, (news,))
    try:
        futures = [pool.submit(_run_there, number, task) for number, task in enumerate(tasks)]
        waiting = set(futures)
        while waiting:
            done, waiting = concurrent.futures.wait(
                waiting, LOOK_S, concurrent.futures.FIRST_COMPLETED
            )
            while not news.empty():
                tell(*news.get())
            for number, future in enumerate(futures):
                if future in done:
                    future.result()
                    tell(number, 1.0)
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)


_news: Any = None


def _begin(news: Any) -> None:
    """In a new process: Ctrl-C ends it at once and without words."""
    global _news
    _news = news
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run_there(number: int, task: Task) -> Outcome:
    return run_task(task, functools.partial(_below_one, _put, number))


def _put(number: int, share: float) -> None:
    _news.put((number, share))


def _below_one(tell: Callable[[int, float], None], number: int, share: float) -> None:
    # All requests have come; some are still under way.
    tell(number, min(share, 0.99))
