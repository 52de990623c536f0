"""Payloads in memory shared by processes of one host: an anonymous file (``memfd``) each, passed as a descriptor.

There is no name in a file system and no lease: the kernel frees the memory when the last process with the descriptor or
a mapping closes it or dies. Descriptors are passed over an abstract unix socket, to processes of the same user only;
the bytes are written once and read in place. Memory without readers is reused: allocating new pages takes four times as
long as writing to them. Readers keep mappings for reuse, up to a bound: mapping 8 MB and touching its pages takes as
long as verifying their checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import resource
import secrets
import socket
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from mmserve.core.peer_credentials import is_own_user
from mmserve.errors import TransferError
from mmserve.transfer.codec import Packed
from mmserve.transfer.spare import Spare, capacity_for

logger = logging.getLogger("mmserve.cluster")

#: Timeout in seconds of a response from a process of the same host, which copies nothing: a slower one is suspended.
_PATIENCE = 5.0
#: Seconds until a failed ``accept`` is repeated.
_AGAIN = 0.1
_ASK, _ANSWER = struct.Struct("=Q"), struct.Struct("=qq")
#: Maximum bytes of memory that a reader keeps mapped.
_MOST_MAPPED = 64 << 20


def host_id() -> str:
    """Identifies the kernel and the network namespace of this process: within them, memory can be shared."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{Path('/proc/self/ns/net').stat().st_ino}"


def allow_descriptors() -> None:
    """Raise this process's limit of file descriptors to the maximum: each state uses one or two."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Memory:
    """Shared memory, by its file descriptor ``fd``, open until ``close``; the first ``size`` bytes of its ``capacity``
    are a payload."""

    def __init__(self, fd: int, size: int, capacity: int, mapped: mmap.mmap | None = None) -> None:
        self.fd, self.size, self.capacity, self._mapped = fd, size, capacity, mapped

    @classmethod
    def create(cls, capacity: int) -> Memory:
        """New memory of this process, of a fixed size."""
        fd = os.memfd_create("mmserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, capacity)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, 0, capacity, mmap.mmap(fd, capacity, flags=mmap.MAP_SHARED))
        except BaseException:
            os.close(fd)
            raise

    @property
    def own(self) -> bool:
        """Whether this process created it, and can write to it."""
        return self._mapped is not None

    def write(self, packed: Packed) -> None:
        """Write a payload, in the process that created the memory."""
        assert self._mapped is not None and packed.size <= self.capacity
        self.size = packed.size
        packed.write(memoryview(self._mapped)[: packed.size])

    def read(self) -> memoryview:
        """The payload. Writes to the view are private (copy-on-write); it may outlive ``close``."""
        return memoryview(mmap.mmap(self.fd, self.size, access=mmap.ACCESS_COPY))

    def close(self) -> None:
        """Close the descriptor; may be called repeatedly."""
        fd, self.fd, self._mapped = self.fd, -1, None
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, TypeError):  # TypeError at interpreter shutdown
            self.close()


@dataclass(frozen=True)
class Ticket:
    """A reference to memory: the ``host`` and socket ``address`` of its process, and its ``number`` there.

    ``memory``: the memory itself, if its descriptor came with the ticket; it is not pickled.
    """

    host: str
    address: str
    number: int
    size: int  # bytes
    memory: Memory | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[type[Ticket], tuple[str, str, int, int]]:
        return Ticket, (self.host, self.address, self.number, self.size)


class Arena:
    """The memory that this process offers to others. Thread-safe.

    ``spare``: bytes of memory kept for reuse.
    """

    def __init__(self, spare: int = 256 << 20) -> None:
        self.host = host_id()
        self.address = f"mmserve-{secrets.token_hex(12)}"
        self._lock = threading.Lock()
        self._kept: dict[int, Memory] = {}
        self._next = 0
        self._spare = Spare[Memory](spare)
        self._closed = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(128)
        threading.Thread(target=self._accept, name="mmserve-arena", daemon=True).start()

    def write(self, packed: Packed) -> Ticket:
        """Offer ``packed`` until ``drop``, which must not be called before all readers are done."""
        memory = self._blank(packed.size)
        memory.write(packed)
        return self.put(memory)

    def put(self, memory: Memory) -> Ticket:
        """Offer ``memory``, which then belongs to the arena, until ``drop``."""
        with self._lock:
            self._next += 1
            self._kept[self._next] = memory
            return Ticket(self.host, self.address, self._next, memory.size)

    def offered(self, ticket: Ticket) -> Memory | None:
        """The memory of ``ticket``, with a new descriptor that the caller closes; None if it is not offered here."""
        with self._lock:
            memory = self._kept.get(ticket.number) if ticket.address == self.address else None
            return None if memory is None else Memory(os.dup(memory.fd), memory.size, memory.capacity)

    def drop(self, ticket: Ticket) -> None:
        """Stop offering it. Does nothing if it is not offered."""
        with self._lock:
            memory = self._kept.pop(ticket.number, None) if ticket.address == self.address else None
            if memory is None or (memory.own and self._spare.put(memory)):
                return
        memory.close()

    def _blank(self, size: int) -> Memory:
        """Memory of at least ``size`` bytes."""
        with self._lock:
            found = self._spare.take(size)
        return Memory.create(capacity_for(size)) if found is None else found

    def __len__(self) -> int:
        return len(self._kept)

    def close(self) -> None:
        """Drop all memory, and stop serving requests."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            kept, self._kept = [*self._kept.values(), *self._spare.clear()], {}
        for memory in kept:
            memory.close()

    def _accept(self) -> None:
        failing = False
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not failing and not self._closed.is_set():
                    logger.warning("no process can connect to read payloads from this one: %s", error)
                failing = True  # for lack of free descriptors: connections wait until there are some
                self._closed.wait(_AGAIN)
                continue
            failing = False
            threading.Thread(target=self._serve, args=(connection,), name="mmserve-arena-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve one process until it disconnects."""
        with connection, contextlib.suppress(OSError):
            if not is_own_user(connection):
                return
            while asked := _received(connection, _ASK.size):
                with self._lock:
                    memory = self._kept.get(_ASK.unpack(asked)[0])
                    fd = -1 if memory is None else os.dup(memory.fd)
                if memory is None or fd < 0:
                    connection.sendall(_ANSWER.pack(-1, 0))
                    continue
                try:
                    socket.send_fds(connection, [_ANSWER.pack(memory.size, memory.capacity)], [fd])
                finally:
                    os.close(fd)


class Reader:
    """Reads from the arenas of other processes, with a connection to each. Thread-safe: waiting for a suspended process
    does not delay requests to others.

    ``patience``: timeout of a response in seconds. ``mapped``: bytes of memory that stay mapped after they were
    read.
    """

    def __init__(self, patience: float = _PATIENCE, mapped: int = _MOST_MAPPED) -> None:
        self._lock, self._patience = threading.Lock(), patience
        self._mapped, self._most_mapped = OrderedDict[tuple[int, int], mmap.mmap](), mapped  # the most recent last
        self._connections: dict[str, socket.socket] = {}
        self._turns: dict[str, threading.Lock] = {}  # locks by process; never removed
        self._closed = False

    def take(self, ticket: Ticket) -> Memory:
        """The memory of ``ticket``. Unless it came with the ticket, raises ``TransferError`` if its process is gone or
        suspended, or does not have it any more."""
        if ticket.memory is not None and ticket.memory.fd >= 0:
            return ticket.memory
        with self._lock:
            turn = self._turns.setdefault(ticket.address, threading.Lock())
        with turn:
            try:
                return self._take(ticket)
            except OSError as error:
                self._discard(ticket.address)
                raise TransferError(f"the process that has a payload does not answer: {error}") from error

    def read(self, ticket: Ticket) -> memoryview:
        """The payload of ``ticket``, see ``Memory.read``, to be read before its process may overwrite it; raises as
        ``take``."""
        memory = self.take(ticket)
        try:
            return memoryview(self._mapping(memory))[: memory.size]
        finally:
            memory.close()

    def _mapping(self, memory: Memory) -> mmap.mmap:
        """All of ``memory``: the previous mapping if it is cached, so that its pages are already faulted in."""
        found = os.fstat(memory.fd)
        key = found.st_dev, found.st_ino  # unique while it is mapped
        with self._lock:
            if (known := self._mapped.get(key)) is not None:
                self._mapped.move_to_end(key)
                return known
            made = mmap.mmap(memory.fd, memory.capacity, access=mmap.ACCESS_COPY)
            self._mapped[key] = made
            while sum(map(len, self._mapped.values())) > self._most_mapped:
                self._mapped.popitem(last=False)  # freed with its last view
            return made

    def close(self) -> None:
        """Close all connections, and forget all mappings; ``take`` then raises ``TransferError``."""
        self._closed = True
        self._mapped.clear()
        for address in list(self._connections):
            self._discard(address)

    def _take(self, ticket: Ticket) -> Memory:
        connection = self._connections.get(ticket.address)
        if connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self._patience)
            self._connections[ticket.address] = connection
            if self._closed:  # checked after registration, so that ``close`` or this closes it
                raise ConnectionError("this process reads no more payloads")
            connection.connect(f"\0{ticket.address}")
        connection.sendall(_ASK.pack(ticket.number))
        answer, fds, _, _ = socket.recv_fds(connection, _ANSWER.size, 1)
        if len(answer) != _ANSWER.size:
            raise ConnectionError("it closed the connection")
        size, capacity = _ANSWER.unpack(answer)
        if size < 0 or not fds:
            raise TransferError("a payload is not there any more")
        return Memory(fds[0], size, capacity)

    def _discard(self, address: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()


def _received(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes; empty if the peer has disconnected."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data
