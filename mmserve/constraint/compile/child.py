"""One child process that compiles: started, asked within a time, ended from whichever thread."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mmserve
from mmserve.constraint.compile import wire
from mmserve.constraint.compile.vocabulary import Vocabulary
from mmserve.constraint.limits import IDLE_BYTES, REPLY_BYTES, START_SECONDS

#: A program that compiles and searches nothing.
PROGRAM = "mmserve.constraint.compile.worker"


class WorkerExited(Exception):
    """No answer any more: the child has ended."""


class ReplyTooLong(Exception):
    """An answer of more bytes than any is let grow to."""


class Child:
    """``program``, a module that runs ``compile.worker.serve``, in a process of its own, of one owner;
    ``kill`` alone is for any thread.

    A question may take it ``seconds`` of processor time. Should its owner be gone, it ends after twice ``patience``
    seconds by the clock at the latest.
    """

    def __init__(self, seconds: float, patience: float, program: str = PROGRAM) -> None:
        root = str(Path(mmserve.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, str(seconds), str(2 * patience), str(IDLE_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # what lies in the working directory is no part of the program
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # a terminal's Ctrl-C is for the server to handle
        )

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
        within ends it by other signals. For its owner, after ``WorkerExited`` and ``end``."""
        return self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    @property
    def overtime(self) -> bool:
        """Whether it was ended for the processor time that it took. For its owner, as ``killed``."""
        return self._process.returncode == -signal.SIGPROF

    def read(self, vocabulary: Vocabulary) -> None:
        """Have it read ``vocabulary``, as the first thing. Raises ``TimeoutError`` or ``WorkerExited``."""
        self.ask(wire.from_vocabulary(vocabulary), START_SECONDS)

    def ask(self, message: Any, seconds: float) -> Any:
        """The answer to ``message``; the child is of no more use where there is none.

        Raises ``TimeoutError`` after ``seconds`` by the clock, ``WorkerExited`` where the child ends,
        ``ReplyTooLong`` for a reply above the limit.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        into, out = self._process.stdin.fileno(), self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        data = memoryview(wire.packed(message))
        os.set_blocking(into, False)
        try:
            while data:
                _wait(into, select.POLLOUT, deadline)
                data = data[os.write(into, data) :]
        except OSError as error:
            raise error if isinstance(error, TimeoutError) else WorkerExited from error
        size = int.from_bytes(_exactly(out, wire.HEADER, deadline), "big")
        if size > 2 * REPLY_BYTES:
            raise ReplyTooLong
        return wire.unpacked(_exactly(out, size, deadline))

    def kill(self) -> None:
        """End the process; its owner, should it be asking, hears ``WorkerExited`` at once."""
        self._process.kill()

    def end(self) -> None:
        """End the process and give back what belongs to it. May be called twice, by the owner."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def _exactly(descriptor: int, size: int, deadline: float) -> bytes:
    """The next ``size`` bytes that can be read."""
    parts, missing = [], size
    while missing:
        _wait(descriptor, select.POLLIN, deadline)
        part = os.read(descriptor, missing)
        if not part:
            raise WorkerExited
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
