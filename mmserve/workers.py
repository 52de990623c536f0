"""The workers of one engine's stages: what runs on each, and what may still be given to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from mmserve.config import EngineConfig
from mmserve.request_state import MEDIA_WORKERS, WORKERS
from mmserve.worker import InlineWorker, ThreadWorker, Worker


class Workers:
    """One worker a stage. For one thread, the engine's.

    During a long pass, its worker takes one more job at a time, and runs it between two layers (``give_way``), as long
    as the scheduler allows more rows ``within`` it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._workers: dict[str, Worker] = {}
        self._busy: Counter[str] = Counter()  # jobs under way
        self._within: dict[str, int] = {}  # rows that may still run during the pass of a stage
        self._config = config

    def start(self) -> None:
        """Make the workers; their threads start with their first jobs."""
        for name, width in WORKERS.items():
            inline = self._config.stages == "inline" and width == 1  # the others wait for other processes
            threads = self._config.torch_threads
            self._workers[name] = (
                InlineWorker() if inline else ThreadWorker(name, threads, width, low=name in MEDIA_WORKERS)
            )

    def stop(self) -> None:
        """End the workers after the jobs in hand."""
        for worker in self._workers.values():
            worker.stop()

    def give_way(self, name: str) -> Callable[[], None]:
        """What a long pass of the stage ``name`` calls between its layers, on the worker's thread."""
        return self._workers[name].give_way

    def free(self, name: str) -> int:
        """How many more jobs the stage's worker runs at once."""
        return WORKERS[name] - self._busy[name]

    def idle(self) -> frozenset[str]:
        """The stages whose workers take another job."""
        return frozenset(name for name in WORKERS if self.free(name) > 0)

    def within(self) -> Mapping[str, int]:
        """Rows that shorter requests may run now during the long pass of each stage that runs one."""
        return {name: rows for name, rows in self._within.items() if rows > 0 and self._busy[name] == 1}

    def run(self, name: str, job: Callable[[bool], None], within: int) -> None:
        """Give the stage ``name`` a job, with so many rows ``within`` its pass from now on; ``ended`` must follow.

        ``job`` is called with whether the pass is its own, or one under way that it runs within.
        """
        own = not self._busy[name]
        self._within[name] = within
        self._busy[name] += 1
        self._workers[name].start(lambda: job(own))

    def ended(self, name: str, own: bool) -> None:
        """A job of the stage has reported; nothing runs within a pass that has ended, though a job given to it may
        still run after it."""
        self._busy[name] -= 1
        if own:
            self._within[name] = 0
