"""Stage workers: where a stage's batches run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from mmserve.priority import lower_priority

Job = Callable[[], None]
#: How long a job that gives way waits for a next one after each that it has let run (seconds): mostly the next step of
#: the same request, which the engine plans in between.
_NEXT_SECONDS = 0.005


class Worker(Protocol):
    """Runs jobs; the engine gives a worker no more of them than it runs at once, until one has reported back."""

    def start(self, job: Job) -> None:
        """Run ``job``, now or soon; a job reports by itself and never raises."""
        ...

    def stop(self) -> None:
        """End the worker after the jobs in hand."""
        ...

    def give_way(self) -> None:
        """Run the jobs that wait; called by the job that runs, between two parts of its work."""
        ...


class InlineWorker:
    """Runs jobs on the caller's thread."""

    def start(self, job: Job) -> None:
        job()

    def stop(self) -> None:
        return

    def give_way(self) -> None:
        return  # nothing waits: a job runs as soon as it is there


class ThreadWorker:
    """Runs jobs on a thread of its own, with its share of the cores; ``width`` of them at once, on as many threads.

    Threads are started as they are needed; ``start`` is for one thread alone. ``low``: at a low priority.
    """

    def __init__(self, name: str, torch_threads: int, width: int = 1, *, low: bool = False) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._name, self._torch_threads, self._width, self._low = name, torch_threads, width, low
        self._free = threading.Semaphore(0)  # threads without a job
        self._threads: list[threading.Thread] = []

    def start(self, job: Job) -> None:
        if not self._free.acquire(blocking=False) and len(self._threads) < self._width:
            thread = threading.Thread(target=self._run, name=f"mmserve-{self._name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._jobs.put(job)

    def stop(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def give_way(self) -> None:
        more = False
        while True:
            try:
                job = self._jobs.get(block=more, timeout=_NEXT_SECONDS)
            except queue.Empty:
                return
            if job is None:  # the worker is to end, but not within a job
                self._jobs.put(None)
                return
            job()
            more = True

    def _run(self) -> None:
        if self._low:
            lower_priority()  # before torch starts threads, which take it over
        torch.set_num_threads(self._torch_threads)
        while (job := self._jobs.get()) is not None:
            job()
            self._free.release()
