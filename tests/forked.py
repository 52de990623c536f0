"""Processes that begin with what takes seconds to import."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType

#: With all that these import, PyTorch and transformers among it.
IMPORTED = ["mmserve.engine.engine", "mmserve.models.towers", "mmserve.assembly", "mmserve.cli.serve"]


def forked() -> ForkServerContext:
    """A context whose processes are forks of one that has one thread, and the environment of the first call's time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class ForkedCommand:
    """``mmserve …`` in a process that has imported everything, as ``subprocess.Popen`` of it; ``stderr`` is a file."""

    def __init__(self, arguments: Sequence[str], stderr: Path) -> None:
        context = forked()
        out, theirs = context.Pipe(duplex=False)
        given = (list(arguments), dict(os.environ), theirs, str(stderr))
        self._process = context.Process(target=_run, args=given)
        self._process.start()
        theirs.close()
        with out:
            self.stdout = os.fdopen(os.dup(out.fileno()))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, what: signal.Signals) -> None:
        """Nothing happens where it has ended."""
        if self._process.is_alive():
            os.kill(self.pid, what)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("mmserve", timeout or 0.0)
        return self._process.exitcode

    def __enter__(self) -> ForkedCommand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stdout.close()
        self.wait()


def _run(arguments: list[str], environment: dict[str, str], stdout: Connection, stderr: str) -> None:
    """The main function of a process: the command, with these as its outputs."""
    from mmserve.cli import main

    with Path(stderr).open("wb") as log:
        os.dup2(stdout.fileno(), 1)
        os.dup2(log.fileno(), 2)
    stdout.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["mmserve", *arguments]
    sys.exit(main(arguments))
