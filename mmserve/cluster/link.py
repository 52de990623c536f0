"""A connection between the front and a worker of the same host, for orders and for what the worker reports.

A call of Ray's costs its caller a millisecond of processor time, an item of a stream a third of one; a message here
costs some 30 microseconds. Messages are pickled, between processes of the same user alone, over an abstract unix
socket, and come in the order in which they were sent. The socket's end is the end of the process.
"""

from __future__ import annotations

import pickle
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from mmserve.core.peer_credentials import is_own_user
from mmserve.errors import Unavailable

_LENGTH = struct.Struct("=Q")
#: Seconds for a process of this host to accept a connection.
_PATIENCE = 5.0


class Link:
    """One end of a connection. ``send`` for any threads, ``messages`` for one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._changed = threading.Condition()
        self._unsent: deque[memoryview] = deque()  # what the other end has had no room for, in order
        self._writing = False  # whether a thread waits for room
        self._closed = False

    def send(self, message: Any) -> None:
        """Send a message; waits for nothing: what the other end has no room for goes later, by a thread. Nothing
        happens where the other end is gone: ``messages`` ends then."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        rest = memoryview(_LENGTH.pack(len(data)) + data)
        with self._changed:
            if self._closed:
                return
            if not self._unsent:
                rest = self._tried(rest)
            if not len(rest):
                return
            self._unsent.append(rest)
            self._changed.notify_all()
            if not self._writing:
                self._writing = True
                threading.Thread(target=self._write, name="mmserve-link", daemon=True).start()

    def messages(self) -> Iterator[Any]:
        """What comes, until the other end is gone."""
        while (head := self._read(_LENGTH.size)) is not None:
            data = self._read(_LENGTH.unpack(head)[0])
            if data is None:
                return
            yield pickle.loads(data)

    def close(self) -> None:
        """End it, for both ends."""
        with self._changed:
            self._closed = True
            self._unsent.clear()
            self._changed.notify_all()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytearray | None:
        """The next ``size`` bytes; None where the connection ends before."""
        data = bytearray(size)
        rest = memoryview(data)
        try:
            while len(rest):
                if not (count := self._socket.recv_into(rest, 0, socket.MSG_WAITALL)):
                    return None
                rest = rest[count:]
        except OSError:
            return None
        return data

    def _tried(self, data: memoryview) -> memoryview:
        """What is left of ``data`` once there is no room any more."""
        try:
            while len(data):
                data = data[self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            pass
        except OSError:  # the other end is gone
            return data[:0]
        return data

    def _write(self) -> None:
        """Send what is unsent, waiting for room."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._closed)
                if self._closed:
                    return
                data = self._unsent[0]
            try:
                sent = self._socket.send(data, socket.MSG_NOSIGNAL)
            except OSError:  # the other end is gone
                self.close()
                return
            with self._changed:
                if self._unsent and self._unsent[0] is data:  # else it was closed meanwhile
                    self._unsent[0] = data[sent:]
                    if sent == len(data):
                        self._unsent.popleft()


class Listener:
    """Where the front finds a worker: an ``address`` that takes one connection."""

    def __init__(self) -> None:
        self.address = f"mmserve-{secrets.token_hex(12)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(1)

    def serve(self, calls: Mapping[str, Callable[..., None]], events: Callable[[], Iterable[Any]]) -> None:
        """Wait for the front; from then on have what it sends call one of ``calls``, and send it all ``events``."""
        threading.Thread(target=self._accept, args=(calls, events), name="mmserve-link-in", daemon=True).start()

    def _accept(self, calls: Mapping[str, Callable[..., None]], events: Callable[[], Iterable[Any]]) -> None:
        connection, _ = self._socket.accept()
        self._socket.close()
        if not is_own_user(connection):
            connection.close()
            return
        link = Link(connection)

        def report() -> None:
            for event in events():
                link.send(event)

        threading.Thread(target=report, name="mmserve-link-out", daemon=True).start()
        for name, arguments in link.messages():
            calls[name](*arguments)


def connected(address: str) -> Link:
    """The front's end of a connection to the ``Listener`` at ``address``. Raises ``Unavailable`` where none accepts."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_PATIENCE)
        connection.connect(f"\0{address}")
        connection.settimeout(None)
        if not is_own_user(connection):
            raise PermissionError("it belongs to another user")
    except OSError as error:
        connection.close()
        raise Unavailable(f"a worker on this host takes no connection: {error}") from error
    return Link(connection)
