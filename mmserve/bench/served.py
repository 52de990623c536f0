"""A server in a separate process, as in production, for end-to-end benchmarks."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Self

from mmserve.errors import ConfigError

#: Seconds within which a server must print its address.
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
#: The line of a server that is ready, with its gRPC address.
ANNOUNCED = re.compile(r"^mmserve serves .*? on (\S+:\d+)(?:, and over HTTP on \S+:\d+)?$")


class ServedProcess:
    """``mmserve serve`` with the configuration of ``arguments``, on a free port of this machine.

    ``with ServedProcess(arguments) as served: Client(served.address)``. Raises ``ConfigError`` with the last lines of
    the server's log if it does not start.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._command = [sys.executable, "-m", "mmserve", "serve", *_flags(arguments), "--set", "server.port=0"]
        self._lines: deque[str] = deque(maxlen=20)
        self._ready = threading.Event()
        self.address = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(_START_SECONDS) or not self.address:
            self._end()
            raise ConfigError("the server did not start:\n" + "".join(self._lines))
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def resident_bytes(self) -> int:
        """Resident memory of the server and of its child processes, in bytes; shared pages are counted once."""
        return sum(_resident(pid) for pid in _family(self._process.pid))

    def processor_seconds(self) -> float:
        """CPU time used by the server and its child processes, in seconds."""
        return sum(processor_seconds(pid) for pid in _family(self._process.pid))

    def loop_seconds(self) -> float:
        """CPU time used by the thread of the server's event loop (gRPC and HTTP), in seconds."""
        pid = self._process.pid
        return processor_seconds(pid, pid)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if found := ANNOUNCED.match(line.strip()):
                self.address = found[1]
                self._ready.set()
        self._ready.set()  # the process ended

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_STOP_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()


def _flags(arguments: argparse.Namespace) -> list[str]:
    flags = ["--config", str(arguments.config)] if arguments.config is not None else []
    for model in arguments.model or ():
        flags += ["--model", model]
    if arguments.companion:
        flags += ["--companion", arguments.companion]
    for override in arguments.set:
        flags += ["--set", override]
    return flags


def _family(pid: int) -> list[int]:
    """The process ids of ``pid`` and all of its live descendants."""
    found = [pid]
    for parent in found:
        for listed in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, listed.read_text().split())
            except OSError:  # the thread has ended
                continue
    return found


def _resident(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):  # shared pages count proportionally
                return int(line.split()[1]) << 10
    except OSError:  # the process has ended
        return 0
    return 0


def processor_seconds(pid: int, thread: int | None = None) -> float:
    """CPU seconds of the process ``pid``, or of one of its threads."""
    try:
        of = f"{pid}" if thread is None else f"{pid}/task/{thread}"
        fields = Path(f"/proc/{of}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / 100
