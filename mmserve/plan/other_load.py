"""Load of other processes on the machine during a measurement (Linux)."""

from __future__ import annotations

import os
import statistics
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

#: Sampling interval in seconds.
_EVERY = 0.05


class OtherLoad:
    """Counts the runnable threads of other processes while its context is active.

    ``threads`` is their mean; 0 if the system does not report them.
    """

    def __init__(self) -> None:
        self._seen = list[int]()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mmserve-beside", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    @property
    def threads(self) -> float:
        """The mean number so far."""
        return statistics.mean(self._seen) if self._seen else 0.0

    def _watch(self) -> None:
        while not self._end.wait(_EVERY):
            everything = _runnable()
            if everything is None:
                return
            self._seen.append(max(0, everything - _own_runnable()))


def _runnable() -> int | None:
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            if line.startswith("procs_running"):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def _own_runnable() -> int:
    """Number of runnable threads of this process and of its children."""
    own = Path(f"/proc/{os.getpid()}")
    children = {pid for file in own.glob("task/*/children") for pid in _text(file).split()}
    folders = [own, *(Path(f"/proc/{pid}") for pid in children)]
    states = (_text(file).rpartition(")")[2].split()[:1] for folder in folders for file in folder.glob("task/*/stat"))
    return sum(state == ["R"] for state in states)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the process has ended
        return ""
