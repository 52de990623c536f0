"""The workers that run the batches of an engine's stages, and their free capacity."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from mmserve.config import EngineConfig
from mmserve.engine.request_state import MEDIA_WORKERS, WORKERS
from mmserve.priority import lower_priority

Job = Callable[[], None]
#: Seconds for which a yielding job waits for another job after each one that it has let run: usually for the next step
#: of the same request, which the engine plans in between.
_NEXT_SECONDS = 0.005


class Worker(Protocol):
    """Runs jobs; the engine submits at most as many jobs as it runs concurrently."""

    def start(self, job: Job) -> None:
        """Run ``job``, now or later; a job reports its own outcome and never raises."""
        ...

    def stop(self, until: float) -> bool:
        """Stop the worker after its current jobs. Returns whether it has stopped by ``until`` (monotonic clock,
        seconds)."""
        ...

    def run_waiting_jobs(self) -> None:
        """Run waiting jobs; called by the running job, between two parts of its work."""
        ...


class InlineWorker:
    """Runs jobs on the caller's thread."""

    def start(self, job: Job) -> None:
        job()

    def stop(self, until: float) -> bool:
        return True

    def run_waiting_jobs(self) -> None:
        return  # no job ever waits


class ThreadWorker:
    """Runs jobs on its own threads, with its share of the cores; ``width``: number of concurrent jobs and threads.

    Threads are started on demand; ``start`` must be called by one thread only. ``low``: at a low priority.
    """

    def __init__(self, name: str, torch_threads: int, width: int = 1, *, low: bool = False) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._name, self._torch_threads, self._width, self._low = name, torch_threads, width, low
        self._free = threading.Semaphore(0)  # idle threads
        self._threads: list[threading.Thread] = []

    def start(self, job: Job) -> None:
        if not self._free.acquire(blocking=False) and len(self._threads) < self._width:
            thread = threading.Thread(target=self._run, name=f"mmserve-{self._name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._jobs.put(job)

    def stop(self, until: float) -> bool:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def run_waiting_jobs(self) -> None:
        more = False
        while True:
            try:
                job = self._jobs.get(block=more, timeout=_NEXT_SECONDS)
            except queue.Empty:
                return
            if job is None:  # request to stop, but not within a job
                self._jobs.put(None)
                return
            job()
            more = True

    def _run(self) -> None:
        if self._low:
            lower_priority()  # before torch starts threads, which inherit it
        torch.set_num_threads(self._torch_threads)
        while (job := self._jobs.get()) is not None:
            job()
            self._free.release()


class Workers:
    """One worker for each stage; for the engine's thread only.

    During a long pass, its worker accepts one more job at a time, and runs it between two layers
    (``run_waiting_jobs``), as long as the scheduler allows more rows ``within`` it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._workers: dict[str, Worker] = {}
        self._busy: Counter[str] = Counter()  # jobs in progress
        self._within: dict[str, int] = {}  # rows that may still run during the current pass of a stage
        self._config = config

    def start(self) -> None:
        """Create the workers; their threads start with their first jobs."""
        for name, width in WORKERS.items():
            inline = self._config.stages == "inline" and width == 1  # the others wait for other processes
            threads = self._config.torch_threads
            self._workers[name] = (
                InlineWorker() if inline else ThreadWorker(name, threads, width, low=name in MEDIA_WORKERS)
            )

    def stop(self, seconds: float) -> list[str]:
        """Stop the workers after their current jobs. Returns the stages of those that did not stop within
        ``seconds``."""
        until = time.monotonic() + seconds
        return [name for name, worker in self._workers.items() if not worker.stop(until)]

    def yield_callback(self, name: str) -> Callable[[], None]:
        """The callback that a long pass of the stage ``name`` calls between its layers, on the worker's thread."""
        return self._workers[name].run_waiting_jobs

    def free(self, name: str) -> int:
        """Number of further jobs that the stage's worker can run now."""
        return WORKERS[name] - self._busy[name]

    def idle(self) -> frozenset[str]:
        """The stages whose workers accept another job."""
        return frozenset(name for name in WORKERS if self.free(name) > 0)

    def within(self) -> Mapping[str, int]:
        """Number of rows that shorter requests may run now, for each stage with a long pass in progress."""
        return {name: rows for name, rows in self._within.items() if rows > 0 and self._busy[name] == 1}

    def run(self, name: str, job: Callable[[bool], None], within: int) -> None:
        """Give the stage ``name`` a job, with ``within`` rows allowed within its pass from now on; ``ended`` must
        follow.

        ``job`` is called with True for its own pass, False if it runs within one in progress.
        """
        own = not self._busy[name]
        self._within[name] = within
        self._busy[name] += 1
        self._workers[name].start(lambda: job(own))

    def ended(self, name: str, own: bool) -> None:
        """A job of the stage has reported. Nothing runs within a pass that has ended, but a job given to it may still
        run afterwards."""
        self._busy[name] -= 1
        if own:
            self._within[name] = 0
