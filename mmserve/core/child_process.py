"""A Python child process with one owner, which communicates over pipes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mmserve

#: Interval of calls of ``check`` while nothing can be read or written (milliseconds).
_POLL = 20
#: Maximum number of bytes in one write.
_MAX_WRITE_BYTES = 1 << 20


class ChildExited(Exception):
    """The process exited, or was killed, before it had answered."""


class ChildProcess:
    """The module ``program``, run with ``arguments`` in a child process. Only ``kill`` is thread-safe."""

    def __init__(self, program: str, *arguments: str) -> None:
        root = str(Path(mmserve.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # PYTHONSAFEPATH: modules in the working directory must not be imported
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # a terminal's Ctrl-C is handled by the server
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._partial = bytearray()  # partial read interrupted by ``check``; the next read begins with it
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
        """Whether it was killed from outside, by an operator or by the system's OOM killer; its own crashes end it with
        other signals. To be called by the owner after ``end``."""
        return self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    @property
    def exceeded_cpu_limit(self) -> bool:
        """Whether it was killed for exceeding its CPU time limit. To be called by the owner after ``end``."""
        return self._process.returncode == -signal.SIGPROF

    def kill(self) -> None:
        """Kill the process; an owner that waits gets ``ChildExited``."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process and release its resources. May be called twice, by the owner."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _read(self, size: int, check: Callable[[], None]) -> bytes:
        """The next ``size`` bytes. ``check`` is called while there are none, and may raise to end the wait.

        The same read can then be repeated without loss. Raises ``ChildExited``.
        """
        while len(self._partial) < size:
            _wait(self._out, select.POLLIN, check)
            part = os.read(self._out, size - len(self._partial))
            if not part:
                raise ChildExited
            self._partial += part
        found, self._partial = bytes(self._partial[:size]), self._partial[size:]
        return found

    def _write(self, data: bytes, check: Callable[[], None]) -> None:
        """Send ``data``; ``check`` and errors as in ``_read``."""
        left = memoryview(data)
        while left:
            _wait(self._in, select.POLLOUT, check)
            try:
                left = left[os.write(self._in, left[:_MAX_WRITE_BYTES]) :]
            except OSError as error:
                raise ChildExited from error


def _wait(descriptor: int, event: int, check: Callable[[], None]) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    while not poll.poll(_POLL):
        check()
