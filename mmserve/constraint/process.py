"""The server's end of the child process: started when needed, killed when it takes too long, started again."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mmserve
from mmserve.constraint import wire
from mmserve.constraint.findings import Refused
from mmserve.constraint.grammar import Grammar, kind_of
from mmserve.constraint.limits import REPLY_BYTES, START_SECONDS
from mmserve.constraint.vocabulary import Vocabulary
from mmserve.core.constraint import ConstraintSpec
from mmserve.errors import Unavailable


class Overdue(Exception):
    """No answer in time, or none at all any more."""


class Compiler:
    """One child process over one vocabulary, one constraint at a time; may be called from any thread.

    A constraint that needs more than ``seconds``, or that ends the child, is refused; the child is then started anew,
    ahead of the next one.
    """

    def __init__(self, vocabulary: Vocabulary, seconds: float) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._closed = False

    def compile(self, spec: ConstraintSpec) -> tuple[Grammar | Refused, bool]:
        """The grammar of ``spec`` or why there is none, and whether the same would come of it again.

        Raises ``Unavailable`` where no child can be started, or after ``close``.
        """
        with self._lock:
            self._begin()
            try:
                reply = self._ask(wire.from_spec(spec), self._seconds)
            except TimeoutError:
                self._renew()
                return Refused.at("", kind_of(spec), f"takes more than {self._seconds:g} s to compile"), False
            except Overdue:
                self._renew()
                return Refused.at("", kind_of(spec), "needs too much memory or stack to compile"), False
            return wire.to_outcome(reply), True

    def warm(self) -> None:
        """Start the child now, in the background: reading a vocabulary of 126,000 tokens takes it seconds."""
        threading.Thread(target=self._prepare, name="grammar-compiler", daemon=True).start()

    def _prepare(self) -> None:
        with self._lock, contextlib.suppress(Unavailable):  # whoever asks next is told
            self._begin()

    def _renew(self) -> None:
        self._restart()
        self.warm()

    def close(self) -> None:
        """End the child; nothing is compiled any more. May be called twice."""
        with self._lock:
            self._closed = True
            self._end()

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        child = self._child
        return None if child is None else child.pid

    def _begin(self) -> None:
        """A child that is ready for a constraint."""
        if self._closed:
            raise Unavailable("the server is stopping")
        if self._child is None or self._child.poll() is not None:
            self._restart()
        if self._ready:
            return
        try:
            self._ask(wire.from_vocabulary(self._vocabulary), START_SECONDS)
        except (TimeoutError, Overdue) as error:
            self._end()
            raise Unavailable("the process that compiles grammars does not start") from error
        self._ready = True

    def _restart(self) -> None:
        self._end()
        root = str(Path(mmserve.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "mmserve.constraint.worker", str(self._seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # a terminal's Ctrl-C is for the server to handle
        )

    def _end(self) -> None:
        child, self._child, self._ready = self._child, None, False
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        child.wait()

    def _ask(self, message: Any, seconds: float) -> Any:
        """The child's answer to ``message``. Raises ``TimeoutError``, or ``Overdue`` where the child has ended."""
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        deadline = time.monotonic() + seconds
        data = memoryview(wire.packed(message))
        os.set_blocking(child.stdin.fileno(), False)
        try:
            while data:
                _wait(child.stdin.fileno(), select.POLLOUT, deadline)
                data = data[os.write(child.stdin.fileno(), data) :]
        except OSError as error:
            raise _ended(error) from error
        size = int.from_bytes(_exactly(child.stdout.fileno(), wire.HEADER, deadline), "big")
        if size > 2 * REPLY_BYTES:
            raise Overdue
        return wire.unpacked(_exactly(child.stdout.fileno(), size, deadline))


def _ended(error: OSError) -> Exception:
    return error if isinstance(error, TimeoutError) else Overdue()


def _exactly(descriptor: int, size: int, deadline: float) -> bytes:
    """The next ``size`` bytes that can be read."""
    parts, missing = [], size
    while missing:
        _wait(descriptor, select.POLLIN, deadline)
        part = os.read(descriptor, missing)
        if not part:
            raise Overdue
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
