"""A connection between the front and a worker of the same host, for orders and for what the worker reports.

A call of Ray's costs its caller a millisecond of processor time, an item of a stream a third of one; a message here
costs some 30 microseconds. Messages are pickled, between processes of the same user alone, over an abstract unix
socket, and come in the order in which they were sent. The socket's end is the end of the process. The descriptors of
the shared memory that a message has tickets for come with it, so that nobody has to ask for them.
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

#: The memory of a ticket of this process, by a descriptor of its own; None where it has none.
Offered = Callable[[Ticket], Memory | None]
#: Descriptors of one message, at most; Linux takes 253. Memory beyond them is asked for by its ticket.
_MOST_DESCRIPTORS = 250
_LENGTH = struct.Struct("=Q")
_ROOM = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
#: Seconds for a process of this host to accept a connection.
_PATIENCE = 5.0


class _Pickler(pickle.Pickler):
    """Pickles tickets by what they are made of, and where in ``memories`` that of a ticket is."""

    def __init__(self, file: io.BytesIO, offered: Offered) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._offered = offered
        self.memories: list[Memory] = []
        # not ``persistent_id``, which is called for every object of a message, some 300
        self.dispatch_table = {**copyreg.dispatch_table, Ticket: self._ticket}

    def _ticket(self, ticket: Ticket) -> tuple[Callable[..., Ticket], tuple[object, ...]]:
        memory = self._offered(ticket) if len(self.memories) < _MOST_DESCRIPTORS else None
        place, capacity = -1, 0
        if memory is not None:
            place, capacity = len(self.memories), memory.capacity
            self.memories.append(memory)
        return _received, (place, capacity, ticket.host, ticket.address, ticket.number, ticket.size)


def _received(_place: int, _capacity: int, host: str, address: str, number: int, size: int) -> Ticket:
    """A ticket without the descriptor that came with it; ``_Unpickler`` has a method of its own in place of this."""
    return Ticket(host, address, number, size, None)


class _Unpickler(pickle.Unpickler):
    """``descriptors``: those that came with ``data``, all or none of them; it has or closes each."""

    def __init__(self, data: bytearray, descriptors: array.array[int]) -> None:
        super().__init__(io.BytesIO(data))
        self._left = dict(enumerate(descriptors))
        self._taken: list[Memory] = []

    def load(self) -> Any:
        """The message. Raises what unpickling raises."""
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
        if descriptor is None:  # none was sent, or this process had no room for those that came
            return Ticket(host, address, number, size, None)
        memory = Memory(descriptor, size, capacity)
        self._taken.append(memory)
        return Ticket(host, address, number, size, memory)


@dataclass
class _Message:
    """What is left to send of one; ``memories`` go with its first byte."""

    rest: memoryview
    memories: list[Memory] = field(default_factory=list)

    def send(self, connection: socket.socket, flags: int) -> None:
        """Send what there is room for. Raises ``OSError``."""
        descriptors = array.array("i", [memory.fd for memory in self.memories])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)] if descriptors else []
        try:
            sent = connection.sendmsg([self.rest], ancillary, flags | socket.MSG_NOSIGNAL)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # too many are on their way: memory is asked for by its ticket
                raise
            sent = connection.send(self.rest, flags | socket.MSG_NOSIGNAL)
        self.rest = self.rest[sent:]
        for memory in self.memories:
            memory.close()
        self.memories = []


def _nothing(_ticket: Ticket) -> None:
    """Offers no memory."""


class Link:
    """One end of a connection. ``send`` for any threads, ``messages`` for one. ``offered``: see ``Offered``."""

    def __init__(self, connection: socket.socket, offered: Offered = _nothing) -> None:
        self._socket, self._offered = connection, offered
        self._changed = threading.Condition()
        self._unsent: deque[_Message] = deque()  # what the other end has had no room for, in order
        self._writing = False  # whether a thread waits for room
        self._closed = False

    def send(self, message: Any) -> None:
        """Send a message; waits for nothing: what the other end has no room for goes later, by a thread. Nothing
        happens where the other end is gone: ``messages`` ends then."""
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
        """What comes, until the other end is gone, or sends what cannot be read: the connection then ends for both."""
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
        """End it, for both ends."""
        with self._changed:
            self._closed = True
            self._unsent.clear()
            self._changed.notify_all()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int, descriptors: array.array[int]) -> bytearray | None:
        """The next ``size`` bytes, and the ``descriptors`` that come with them; None where the connection ends before.
        Where the process has no room for all descriptors, it takes none."""
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
        """Send what there is room for."""
        try:
            while len(message.rest):
                message.send(self._socket, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError:  # the other end is gone
            message.rest = message.rest[:0]

    def _write(self) -> None:
        """Send what is unsent, waiting for room."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._closed)
                if self._closed:
                    return
                message = self._unsent[0]
            try:
                message.send(self._socket, 0)
            except OSError:  # the other end is gone
                self.close()
                return
            with self._changed:
                if self._unsent and not len(message.rest):  # else it was closed meanwhile
                    self._unsent.popleft()


class Listener:
    """Where the front finds a worker: an ``address`` that takes one connection."""

    def __init__(self, offered: Offered = _nothing) -> None:
        self._offered = offered
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
        link = Link(connection, self._offered)

        def report() -> None:
            for event in events():
                link.send(event)

        threading.Thread(target=report, name="mmserve-link-out", daemon=True).start()
        for name, arguments in link.messages():
            calls[name](*arguments)


def connected(address: str, offered: Offered = _nothing) -> Link:
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
    return Link(connection, offered)
