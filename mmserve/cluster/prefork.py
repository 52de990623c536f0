"""Processes for Ray's workers that have PyTorch and the models' code imported from the start: forked from one that has.

Ray starts ``python -m mmserve.cluster.prefork SCRIPT …`` where it would start ``python SCRIPT …`` (``py_executable`` of
the actor's runtime environment). That asks the host's template process for a fork, which runs ``SCRIPT``, and ends. The
first one of a host starts the template, which imports everything once, has one thread, and ends with the raylet.
Imports are nearly all that a worker's start costs: some 5 seconds of a core. Not for workers with GPUs: CUDA does not
work in forks of a process that has looked for it; nor on clusters that are joined, whose hosts may have another Python.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from typing import Any

from mmserve.core.peer_credentials import is_own_user

#: The process id of a worker's raylet, in the environment that Ray gives it.
_RAYLET = "RAY_RAYLET_PID"
_SERVE = "--serve"
_SIZE = struct.Struct("=Q")
#: Seconds between two attempts to reach a template that has just been started.
_AGAIN = 0.02
#: Seconds for who asks to have said what for: others wait meanwhile.
_PATIENCE = 30.0


def command() -> str:
    """What Ray is to run in place of Python."""
    return f"{sys.executable} -m mmserve.cluster.prefork"


def main(arguments: list[str]) -> None:
    """Be the template (``--serve``), or have it run a script with its arguments; without one, run it here."""
    if arguments == [_SERVE]:
        _serve()
        return
    with suppress(OSError):
        _forked(arguments)
        return
    os.execv(sys.executable, [sys.executable, *arguments])


def _address() -> str:
    """Of the template of this user, raylet and installation: an abstract unix socket."""
    return f"\0mmserve-prefork-{os.getuid()}-{os.environ[_RAYLET]}-{zlib.crc32(__file__.encode())}"


def _forked(arguments: list[str]) -> None:
    """Have the template fork; returns when it has. Raises ``OSError`` where that is not possible."""
    if _RAYLET not in os.environ:
        raise OSError("this process was not started by a raylet")
    asked = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()  # noqa: PTH109
    with _connected() as connection:
        if not is_own_user(connection):
            raise OSError("another user's process answers")
        socket.send_fds(connection, [_SIZE.pack(len(asked))], [1, 2])
        connection.sendall(asked)
        if not connection.recv(1):
            raise OSError("the template has ended")


def _connected() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    template: subprocess.Popen[bytes] | None = None
    while True:
        try:
            connection.connect(_address())
            return connection
        except ConnectionRefusedError:
            if template is None:
                template = subprocess.Popen(
                    [sys.executable, "-m", "mmserve.cluster.prefork", _SERVE],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            elif template.poll():
                raise
            time.sleep(_AGAIN)


def _serve() -> None:
    """Fork for each process that asks, until the raylet ends."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address())  # first of all: of several templates that start, one goes on
    except OSError:
        return
    listener.listen(128)
    raylet = os.pidfd_open(int(os.environ[_RAYLET]))
    import ray._private.worker  # noqa: F401

    import mmserve.cluster.worker
    import mmserve.models.towers  # noqa: F401 - with what every loader imports of transformers

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for here: the raylet watches them
    gc.collect()
    gc.freeze()  # else the first collection of a fork writes to all pages that it shares with this process
    waited: list[Any] = [listener, raylet]
    while True:
        ready, _, _ = select.select(waited, [], [])
        if raylet in ready:
            os._exit(0)
        connection, _ = listener.accept()
        with connection, suppress(OSError, ValueError, struct.error):  # one that ends as it asks ends nothing else
            if not is_own_user(connection):
                continue
            connection.settimeout(_PATIENCE)
            _fork(connection, listener, raylet)


def _fork(connection: socket.socket, listener: socket.socket, raylet: int) -> None:
    """Read what is asked for on ``connection``, and fork; only the template returns."""
    head, outputs, _, _ = socket.recv_fds(connection, _SIZE.size, 2)
    try:
        with connection.makefile("rb") as received:
            asked = json.loads(received.read(*_SIZE.unpack(head)))
        if os.fork() == 0:
            for end in (listener, connection):
                end.close()
            os.close(raylet)
            _run(asked["arguments"], asked["environment"], asked["folder"], outputs)
    finally:
        for output in outputs:
            os.close(output)
    connection.sendall(b"1")


def _run(arguments: list[str], environment: dict[str, str], folder: str, outputs: list[int]) -> None:
    """Run a script in this process, as if it had been started for that; does not return."""
    code = 1
    try:
        os.setsid()  # the raylet ends the whole process group of a worker that has ended
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for own, output in enumerate(outputs, start=1):
            os.dup2(output, own)
            os.close(output)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
