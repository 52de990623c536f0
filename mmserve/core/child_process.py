"""A Python process of the server's own, of one owner, that answers over pipes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mmserve

#: How often ``check`` is called while nothing can be read or written (milliseconds).
_POLL = 20
#: Most bytes that are written at once.
_WRITTEN = 1 << 20


class ChildExited(Exception):
    """The process ended, or was ended, before it was done."""


class ChildProcess:
    """The module ``program``, run with ``arguments`` in a process of its own; ``kill`` alone is for any thread."""

    def __init__(self, program: str, *arguments: str) -> None:
        root = str(Path(mmserve.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # what is in the working directory is no part of the program
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # a terminal's Ctrl-C is for the server to handle
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._found = bytearray()  # of a read that ``check`` ended; the next read begins with it
        os.set_blocking(self._in, False)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    @property
    def killed(self) -> bool:
        """Whether it was ended from outside, by an operator or for want of memory on the whole machine: what goes wrong
        within ends it by other signals. For its owner, after ``end``."""
        return self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    @property
    def overtime(self) -> bool:
        """Whether it was ended for the processor time that it took. For its owner, after ``end``."""
        return self._process.returncode == -signal.SIGPROF

    def kill(self) -> None:
        """End the process; its owner, if it waits, gets ``ChildExited``."""
        self._process.kill()

    def end(self) -> None:
        """End the process and give back what belongs to it. May be called twice, by the owner."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _read(self, size: int, check: Callable[[], None]) -> bytes:
        """The next ``size`` bytes; ``check`` is called while there are none, and ends the wait by what it raises.

        Nothing is lost by that: the same read can be repeated. Raises ``ChildExited``.
        """
        while len(self._found) < size:
            _wait(self._out, select.POLLIN, check)
            part = os.read(self._out, size - len(self._found))
            if not part:
                raise ChildExited
            self._found += part
        found, self._found = bytes(self._found[:size]), self._found[size:]
        return found

    def _write(self, data: bytes, check: Callable[[], None]) -> None:
        """Send ``data``; ``check`` and errors as of ``_read``."""
        left = memoryview(data)
        while left:
            _wait(self._in, select.POLLOUT, check)
            try:
                left = left[os.write(self._in, left[:_WRITTEN]) :]
            except OSError as error:
                raise ChildExited from error


def _wait(descriptor: int, event: int, check: Callable[[], None]) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    while not poll.poll(_POLL):
        check()
