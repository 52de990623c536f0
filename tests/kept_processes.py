"""Child processes that one test's engine leaves to the next: starting one takes half a second of a core.

How they start, end and are replaced is tested in ``unit/test_constraint_children.py`` and
``engine/test_media_decoding.py``, with processes of their own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from mmserve.constraint.compile.wire import Child, TokenTable
from mmserve.encode.decoding import PROCESSES

#: Idle processes that compile constraints, at most.
MOST_IDLE = 4
#: Those, and what each was made for; the one that waits longest is first.
_idle: deque[tuple[Any, Child]] = deque()
_lock = threading.Lock()


class KeptChild:
    """As ``Child``, over an idle process for the same vocabulary where there is one.

    ``end`` leaves the process to others, unless its latest question ended badly.
    """

    def __init__(self, seconds: float, patience: float) -> None:
        self._limits = seconds, patience
        self._child: Child | None = None
        self._ended: Child | None = None
        self._fit = False

    def read(self, vocabulary: TokenTable) -> None:
        self._made_for = *self._limits, vocabulary
        self._child = _taken(self._made_for)
        if self._child is None:
            self._child = Child(*self._limits)
            self._child.read(vocabulary)
        self._fit = True

    def ask(self, message: Any, seconds: float) -> Any:
        assert self._child is not None
        self._fit = False
        reply = self._child.ask(message, seconds)
        self._fit = not reply["last"]
        return reply

    def kill(self) -> None:
        if self._child is not None and not self._fit:
            self._child.kill()

    def end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if not self._fit:
            child.end()
            self._ended = child
            return
        with _lock:
            _idle.append((self._made_for, child))
            while len(_idle) > MOST_IDLE:
                _idle.popleft()[1].end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child or self._ended, name)


def _taken(made_for: Any) -> Child | None:
    """The idle process that was used last among those that were made for this."""
    with _lock:
        for found in [each for each in reversed(_idle) if each[0] == made_for]:
            _idle.remove(found)
            if found[1].alive:
                return found[1]
            found[1].end()
    return None


@contextmanager
def constraint_processes_kept() -> Iterator[None]:
    """Engines that are made meanwhile compile constraints in kept processes."""
    with patch("mmserve.constraint.compile.service.Child", KeptChild):
        yield


@contextmanager
def media_processes_kept() -> Iterator[None]:
    """Processes that decode media outlast the engines that are stopped meanwhile."""
    PROCESSES.open()
    yield
    PROCESSES.close()


def end_kept() -> None:
    """End the idle processes that compile constraints."""
    with _lock:
        while _idle:
            _idle.pop()[1].end()
