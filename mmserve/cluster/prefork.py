"""Forks Ray worker processes from a template process that has already imported PyTorch and the models' code.

Ray starts ``python -m mmserve.cluster.prefork SCRIPT …`` instead of ``python SCRIPT …`` (``py_executable`` of the
actor's runtime environment). That requests a fork from the host's template process, which runs ``SCRIPT``, and exits.
The first one on a host starts the template, which imports everything once, has one thread, and exits with the raylet.
Imports are most of a worker's start time: some 5 seconds of a core. Not for workers with GPUs, because CUDA does not
work in forks of a process that has initialised it; nor for clusters that are joined, whose hosts may have another
Python.
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

#: The environment variable in which Ray passes the raylet's process id to a worker.
_RAYLET = "RAY_RAYLET_PID"
_SERVE = "--serve"
_SIZE = struct.Struct("=Q")
#: Seconds between two attempts to connect to a template that has just been started.
_AGAIN = 0.02
#: Timeout (seconds) for a client's request, because others wait meanwhile.
_PATIENCE = 30.0


def command() -> str:
    """The command that Ray runs instead of Python."""
    return f"{sys.executable} -m mmserve.cluster.prefork"


def main(arguments: list[str]) -> None:
    """Run the template (``--serve``), or have it run a script with its arguments; without a template, run it here."""
    if arguments == [_SERVE]:
        _serve()
        return
    with suppress(OSError):
        _forked(arguments)
        return
    os.execv(sys.executable, [sys.executable, *arguments])


def _address() -> str:
    """The abstract Unix socket of the template of this user, raylet and installation."""
    return f"\0mmserve-prefork-{os.getuid()}-{os.environ[_RAYLET]}-{zlib.crc32(__file__.encode())}"


def _forked(arguments: list[str]) -> None:
    """Request a fork from the template; returns when it has forked. Raises ``OSError`` if that fails."""
    if _RAYLET not in os.environ:
        raise OSError("this process was not started by a raylet")
    asked = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()  # noqa: PTH109
    with _connected() as connection:
        if not is_own_user(connection):
            raise OSError("the socket belongs to another user's process")
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
    """Fork for each client, until the raylet exits."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address())  # first: if several templates start, only one succeeds
    except OSError:
        return
    listener.listen(128)
    raylet = os.pidfd_open(int(os.environ[_RAYLET]))
    import ray._private.worker  # noqa: F401

    import mmserve.cluster.worker
    import mmserve.models.towers  # noqa: F401 - with what every loader imports of transformers

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the raylet supervises forks, so they are not waited for
    gc.collect()
    gc.freeze()  # otherwise the first collection in a fork would copy all shared pages
    waited: list[Any] = [listener, raylet]
    while True:
        ready, _, _ = select.select(waited, [], [])
        if raylet in ready:
            os._exit(0)
        connection, _ = listener.accept()
        with connection, suppress(OSError, ValueError, struct.error):  # errors of one client must not affect others
            if not is_own_user(connection):
                continue
            connection.settimeout(_PATIENCE)
            _fork(connection, listener, raylet)


def _fork(connection: socket.socket, listener: socket.socket, raylet: int) -> None:
    """Read a request from ``connection``, and fork; returns only in the template."""
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
    """Run a script in this process as its main program; does not return."""
    code = 1
    try:
        os.setsid()  # the raylet kills the process group of a worker that has exited
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
