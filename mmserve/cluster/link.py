"""A connection between the front end and a worker on the same host, for orders and reports.

A call of Ray costs its caller a millisecond of CPU time, an item of a stream a third of one; a message here costs some
30 microseconds. Messages are pickled, only between processes of the same user, over an abstract Unix socket, and arrive
in order. When the socket closes, the process has exited. File descriptors of shared memory in a message's tickets are
sent with it, so that they need not be requested.
"""

from __future__ import annotations

import array
import copyreg
import errno
import io
import logging
import os
import pickle
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mmserve.core.peer_credentials import is_own_user
from mmserve.errors import Unavailable
from mmserve.transfer.shared_memory import Memory, Ticket

logger = logging.getLogger("mmserve.cluster")

#: The memory of a ticket of this process, by a new descriptor; None if it has none.
Offered = Callable[[Ticket], Memory | None]
#: Maximum descriptors of one message; Linux allows 253. Other memory is requested by its ticket.
_MOST_DESCRIPTORS = 250
_LENGTH = struct.Struct("=Q")
_ROOM = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
#: Timeout (seconds) for a connection to a process of this host.
_PATIENCE = 5.0


class _Pickler(pickle.Pickler):
    """Pickles tickets as their fields and the index in ``memories`` of their descriptor."""

    def __init__(self, file: io.BytesIO, offered: Offered) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._offered = offered
        self.memories: list[Memory] = []
        # not ``persistent_id``, which would be called for each of the some 300 objects of a message
        self.dispatch_table = {**copyreg.dispatch_table, Ticket: self._ticket}

    def _ticket(self, ticket: Ticket) -> tuple[Callable[..., Ticket], tuple[object, ...]]:
        memory = self._offered(ticket) if len(self.memories) < _MOST_DESCRIPTORS else None
        place, capacity = -1, 0
        if memory is not None:
            place, capacity = len(self.memories), memory.capacity
            self.memories.append(memory)
        return _received, (place, capacity, ticket.host, ticket.address, ticket.number, ticket.size)


def _received(_place: int, _capacity: int, host: str, address: str, number: int, size: int) -> Ticket:
    """A ticket without its descriptor; ``_Unpickler`` replaces this function by a method."""
    return Ticket(host, address, number, size, None)


class _Unpickler(pickle.Unpickler):
    """``descriptors``: those that came with ``data``, all or none of them; each is used or closed."""

    def __init__(self, data: bytearray, descriptors: array.array[int]) -> None:
        super().__init__(io.BytesIO(data))
        self._left = dict(enumerate(descriptors))
        self._taken: list[Memory] = []

    def load(self) -> Any:
        """The message. Raises the errors of unpickling."""
        try:
            return super().load()
        except BaseException:
            for memory in self._taken:
                memory.close()
            raise
        finally:
            for each in self._left.values():
                os.close(each)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._ticket if found is _received else found

    def _ticket(self, place: int, capacity: int, host: str, address: str, number: int, size: int) -> Ticket:
        descriptor = self._left.pop(place, None)
        if descriptor is None:  # not sent, or not received for lack of free descriptors
            return Ticket(host, address, number, size, None)
        memory = Memory(descriptor, size, capacity)
        self._taken.append(memory)
        return Ticket(host, address, number, size, memory)


@dataclass
class _Message:
    """The unsent rest of a message; ``memories`` are sent with its first byte."""

    rest: memoryview
    memories: list[Memory] = field(default_factory=list)

    def send(self, connection: socket.socket, flags: int) -> None:
        """Send as much as possible without blocking. Raises ``OSError``."""
        descriptors = array.array("i", [memory.fd for memory in self.memories])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)] if descriptors else []
        try:
            sent = connection.sendmsg([self.rest], ancillary, flags | socket.MSG_NOSIGNAL)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # too many in transit: the receiver requests memory by its ticket
                raise
            sent = connection.send(self.rest, flags | socket.MSG_NOSIGNAL)
        self.rest = self.rest[sent:]
        for memory in self.memories:
            memory.close()
        self.memories = []


def _nothing(_ticket: Ticket) -> None:
    """Sends no memory."""


class Link:
    """One end of a connection. ``send`` is thread-safe, ``messages`` is for one thread. ``offered``: see
    ``Offered``."""

    def __init__(self, connection: socket.socket, offered: Offered = _nothing) -> None:
        self._socket, self._offered = connection, offered
        self._changed = threading.Condition()
        self._unsent: deque[_Message] = deque()  # messages that the socket buffer had no space for, in order
        self._writing = False  # whether a thread is sending them
        self._closed = False

    def send(self, message: Any) -> None:
        """Send a message without blocking: if the socket buffer is full, a thread sends it later. No effect if the
        other end is closed: ``messages`` then ends."""
        file = io.BytesIO(bytes(_LENGTH.size))
        file.seek(_LENGTH.size)
        pickler = _Pickler(file, self._offered)
        pickler.dump(message)
        data = file.getbuffer()
        _LENGTH.pack_into(data, 0, len(data) - _LENGTH.size)
        whole = _Message(data, pickler.memories)
        with self._changed:
            if self._closed:
                return
            if not self._unsent:
                self._try(whole)
            if not len(whole.rest):
                return
            self._unsent.append(whole)
            self._changed.notify_all()
            if not self._writing:
                self._writing = True
                threading.Thread(target=self._write, name="mmserve-link", daemon=True).start()

    def messages(self) -> Iterator[Any]:
        """Received messages, until the other end closes, or sends something unreadable, which closes the connection."""
        while True:
            descriptors = array.array("i")
            head = self._read(_LENGTH.size, descriptors)
            data = None if head is None else self._read(_LENGTH.unpack(head)[0], descriptors)
            if data is None:
                for each in descriptors:
                    os.close(each)
                return
            try:
                message = _Unpickler(data, descriptors).load()
            except Exception:
                logger.exception("a message from another process cannot be read: the connection to it ends")
                self.close()
                return
            yield message

    def close(self) -> None:
        """Close the connection, for both ends."""
        with self._changed:
            self._closed = True
            self._unsent.clear()
            self._changed.notify_all()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int, descriptors: array.array[int]) -> bytearray | None:
        """The next ``size`` bytes, and the ``descriptors`` sent with them; None if the connection closes before. If the
        process lacks free descriptors for all of them, it takes none."""
        data = bytearray(size)
        rest = memoryview(data)
        flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
        try:
            while len(rest):
                count, ancillary, found, _ = self._socket.recvmsg_into([rest], _ROOM, flags)
                for _level, _kind, given in ancillary:
                    descriptors.frombytes(given[: len(given) - len(given) % descriptors.itemsize])
                if found & socket.MSG_CTRUNC:
                    while descriptors:
                        os.close(descriptors.pop())
                if not count:
                    return None
                rest = rest[count:]
        except OSError:
            return None
        return data

    def _try(self, message: _Message) -> None:
        """Send as much as possible without blocking."""
        try:
            while len(message.rest):
                message.send(self._socket, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError:  # the other end is closed
            message.rest = message.rest[:0]

    def _write(self) -> None:
        """Send the unsent messages, blocking."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._closed)
                if self._closed:
                    return
                message = self._unsent[0]
            try:
                message.send(self._socket, 0)
            except OSError:  # the other end is closed
                self.close()
                return
            with self._changed:
                if self._unsent and not len(message.rest):  # otherwise it was closed meanwhile
                    self._unsent.popleft()


class Listener:
    """A worker's listening socket: ``address`` accepts one connection, from the front end."""

    def __init__(self, offered: Offered = _nothing) -> None:
        self._offered = offered
        self.address = f"mmserve-{secrets.token_hex(12)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(1)

    def serve(self, calls: Mapping[str, Callable[..., None]], events: Callable[[], Iterable[Any]]) -> None:
        """Wait for the front end; then call ``calls`` for its messages, and send it all ``events``."""
        threading.Thread(target=self._accept, args=(calls, events), name="mmserve-link-in", daemon=True).start()

    def _accept(self, calls: Mapping[str, Callable[..., None]], events: Callable[[], Iterable[Any]]) -> None:
        connection, _ = self._socket.accept()
        while not is_own_user(connection):  # every user can see the address
            connection.close()
            connection, _ = self._socket.accept()
        self._socket.close()
        link = Link(connection, self._offered)

        def report() -> None:
            for event in events():
                link.send(event)

        threading.Thread(target=report, name="mmserve-link-out", daemon=True).start()
        for name, arguments in link.messages():
            calls[name](*arguments)


def connected(address: str, offered: Offered = _nothing) -> Link:
    """The front end's side of a connection to the ``Listener`` at ``address``. Raises ``Unavailable`` if none
    accepts."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_PATIENCE)
        connection.connect(f"\0{address}")
        connection.settimeout(None)
        if not is_own_user(connection):
            raise PermissionError("the socket belongs to another user")
    except OSError as error:
        connection.close()
        raise Unavailable(f"a worker on this host accepts no connection: {error}") from error
    return Link(connection, offered)
