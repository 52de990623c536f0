"""Stage workers: where a stage's batches run, and how one request's failure is kept from the rest of its batch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")
Job = Callable[[], None]


class Worker(Protocol):
    """Runs one job after another; the engine gives a worker a job only when its last one has reported back."""

    def start(self, job: Job) -> None:
        """Run ``job``, now or soon; a job reports by itself and never raises."""
        ...

    def stop(self) -> None:
        """End the worker after the job in hand."""
        ...


class InlineWorker:
    """Runs jobs on the caller's thread."""

    def start(self, job: Job) -> None:
        job()

    def stop(self) -> None:
        return


class ThreadWorker:
    """Runs jobs on a thread of its own, with its share of the cores."""

    def __init__(self, name: str, torch_threads: int) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(torch_threads,), name=f"mmserve-{name}", daemon=True)
        self._thread.start()

    def start(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self, torch_threads: int) -> None:
        torch.set_num_threads(torch_threads)
        while (job := self._jobs.get()) is not None:
            job()


def run_isolated(run: Callable[[list[A]], Sequence[B]], batch: list[A]) -> list[B | BaseException]:
    """Results of ``run(batch)``; if that raises, of ``run([item])`` for each item, with the exception where it raises.

    ``run`` must leave no trace of a call that raised.
    """
    try:
        return list(run(batch))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - native panics too; the engine reports it
        if len(batch) == 1:
            return [error]
    return [outcome for item in batch for outcome in run_isolated(run, [item])]
