"""Slowdown of passes on a host whose cores are all busy: they share caches, memory bandwidth and, with SMT, cores."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event, Semaphore
from types import TracebackType
from typing import Self

from mmserve import memory
from mmserve.config import Config
from mmserve.cores import available_cores
from mmserve.errors import ConfigError

#: Timeout in seconds for the start, and for the end, of a process.
_PATIENCE = 300.0
#: A batch, see ``StageBench.run``: images, requests, sentences, side in pixels.
Case = tuple[int, int, int, int]
#: Seconds of passes, by stage and by the sums of their batches.
Seconds = Mapping[str, Mapping[tuple[float, float], Sequence[float]]]


class Neighbours:
    """Processes that repeatedly run the same batches on the other cores, while ``at_work`` is active.

    One for each core except the caller's, as far as memory permits; ``count`` is 0 if there is not enough for any.
    ``config`` and ``cases``: the model and batches of each process.
    """

    def __init__(self, config: Config, cases: Sequence[Case]) -> None:
        room = memory.available() // max(1, memory.resident())
        self.count = max(0, min(available_cores() - 1, room))
        context = multiprocessing.get_context("spawn")
        self._working, self._ended, self._ready = context.Event(), context.Event(), context.Semaphore(0)
        given = (config, tuple(cases), self._working, self._ended, self._ready)
        self._processes = [context.Process(target=_work, args=given, daemon=True) for _ in range(self.count)]

    def __enter__(self) -> Self:
        try:
            for process in self._processes:
                process.start()
            for _ in self._processes:
                self._wait_for_one()
        except BaseException:
            for process in self._processes:
                if process.pid is not None:
                    process.kill()
            raise
        return self

    def _wait_for_one(self) -> None:
        end = time.monotonic() + _PATIENCE
        while not self._ready.acquire(timeout=1.0):
            if time.monotonic() > end or any(process.exitcode is not None for process in self._processes):
                raise ConfigError("a process that is to keep another core busy could not load the model")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._working.set()
        for process in self._processes:
            process.join(_PATIENCE)
            process.kill()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The other cores are busy within the context."""
        self._working.set()
        try:
            yield
        finally:
            self._working.clear()


def interference(alone: Seconds, crowded: Seconds) -> float:
    """The median slowdown over all batches that were run both ways; at least 1, and 1 without any."""
    ratios = [
        statistics.median(seconds) / statistics.median(alone[stage][sums])
        for stage, each in crowded.items()
        for sums, seconds in each.items()
        if sums in alone[stage]
    ]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def _work(config: Config, cases: Sequence[Case], working: Event, ended: Event, ready: Semaphore) -> None:
    """The main function of a neighbour process."""
    from mmserve.plan.measure import StageBench, Times  # which imports this module

    bench = StageBench(config)
    for case in cases[:1]:
        bench.run(*case, into=Times())
    ready.release()
    while True:
        for case in cases:
            working.wait()
            if ended.is_set():
                return
            bench.run(*case, into=Times())
