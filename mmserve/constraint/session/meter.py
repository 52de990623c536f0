"""The cost of a constraint to its request: processor time of each step, and the searches that gave up.

Processor time of the thread that decodes, not wall time: other load on the machine has no effect on it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from mmserve.constraint.search.witness import Outcome
from mmserve.core.events import ConstraintStats


@dataclass
class Meter:
    """Counts for one request; a step is all that the constraint does for one forward pass and after it."""

    fallbacks: int = 0
    late: int = 0
    forward_seconds: float = 0.0
    _steps: list[float] = field(default_factory=list)  # seconds
    _open: float = 0.0  # seconds of the current step
    _outcomes: set[Outcome] = field(default_factory=set)  # of its searches

    @property
    def seconds(self) -> float:
        """Processor time of all steps so far."""
        return sum(self._steps) + self._open

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the processor time of the block, which stays on one thread, to the current step."""
        begun = time.thread_time()
        try:
            yield
        finally:
            self._open += time.thread_time() - begun

    def searched(self, outcome: Outcome) -> None:
        """Record the outcome of a search of the current step."""
        self._outcomes.add(outcome)

    def end_step(self) -> None:
        """End the current step."""
        self._steps.append(self._open)
        self.fallbacks += self._outcomes != {Outcome.FOUND} and bool(self._outcomes)
        self.late += Outcome.LATE in self._outcomes
        self._open, self._outcomes = 0.0, set()

    def report(self) -> ConstraintStats:
        """The counts so far."""
        return ConstraintStats(
            steps=len(self._steps),
            fallbacks=self.fallbacks,
            late=self.late,
            search_seconds=sum(self._steps),
            forward_seconds=self.forward_seconds,
            step_ms=tuple(1000 * seconds for seconds in self._steps),
        )


class Metered(Protocol):
    """An object with a meter."""

    meter: Meter


M = TypeVar("M", bound=Metered)
P = ParamSpec("P")
R = TypeVar("R")


def metered(work: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """``work``, on the meter of its first argument; it calls nothing that is metered itself."""

    @functools.wraps(work)
    def measured(of: M, *args: P.args, **options: P.kwargs) -> R:
        with of.meter.running():
            return work(of, *args, **options)

    return measured
