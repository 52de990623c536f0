"""Payloads in memory that processes of one host share: one anonymous file (``memfd``) each, handed on as a descriptor.

No name in any file system and no lease: the kernel frees the memory when the last process that has the descriptor or a
mapping of it closes it, or dies. A descriptor goes over an abstract unix socket, to processes of the same user alone;
the bytes are written once and read where they lie. Memory that nobody reads any more is written again: to get new pages
from the kernel takes four times as long as to write to them. Readers keep mappings of it for the next time, as far as a
bound allows: to map 8 MB anew and touch its pages takes as long as to check their sum.
"""

from __future__ import annotations

import contextlib
import fcntl
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

#: Seconds for an answer of a process of the same host, which copies nothing: one that takes longer is stopped.
_PATIENCE = 5.0
_ASK, _ANSWER = struct.Struct("=Q"), struct.Struct("=qq")
#: Bytes of memory that a reader keeps mapped.
_MOST_MAPPED = 64 << 20


def host_id() -> str:
    """Names the kernel and the network namespace that this process runs in: within them, memory can be shared."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{Path('/proc/self/ns/net').stat().st_ino}"


def allow_descriptors() -> None:
    """Let this process have as many descriptors as the system allows it: each state takes one or two."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Memory:
    """Shared memory, by its descriptor ``fd``, which this process has until ``close``; the first ``size`` bytes of its
    ``capacity`` are a payload."""

    def __init__(self, fd: int, size: int, capacity: int, mapped: mmap.mmap | None = None) -> None:
        self.fd, self.size, self.capacity, self._mapped = fd, size, capacity, mapped

    @classmethod
    def create(cls, capacity: int) -> Memory:
        """New memory of this process, of a size that can never change."""
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
        """The payload. What is written there is seen by the holder of this view alone; it may outlive ``close``."""
        return memoryview(mmap.mmap(self.fd, self.size, access=mmap.ACCESS_COPY))

    def close(self) -> None:
        """Give the descriptor back; may be called again."""
        fd, self.fd, self._mapped = self.fd, -1, None
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, TypeError):  # the second at the interpreter's end
            self.close()


@dataclass(frozen=True)
class Ticket:
    """Where memory can be asked for: the ``host`` and socket ``address`` of its process, and its ``number`` there.

    ``memory``: the memory itself, where its descriptor came with the ticket; it is not pickled.
    """

    host: str
    address: str
    number: int
    size: int  # bytes
    memory: Memory | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[type[Ticket], tuple[str, str, int, int]]:
        return Ticket, (self.host, self.address, self.number, self.size)


class Arena:
    """The memory that other processes may ask this one for; for any number of threads.

    ``spare``: bytes that are kept to be written again.
    """

    def __init__(self, spare: int = 256 << 20) -> None:
        self.host = host_id()
        self.address = f"mmserve-{secrets.token_hex(12)}"
        self._lock = threading.Lock()
        self._kept: dict[int, Memory] = {}
        self._next = 0
        self._spare = Spare[Memory](spare)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(128)
        threading.Thread(target=self._accept, name="mmserve-arena", daemon=True).start()

    def write(self, packed: Packed) -> Ticket:
        """Offer ``packed`` until ``drop``, which must wait until nobody reads it any more."""
        memory = self._blank(packed.size)
        memory.write(packed)
        return self.put(memory)

    def put(self, memory: Memory) -> Ticket:
        """Offer ``memory``, which is the arena's from then on, until ``drop``."""
        with self._lock:
            self._next += 1
            self._kept[self._next] = memory
            return Ticket(self.host, self.address, self._next, memory.size)

    def offered(self, ticket: Ticket) -> Memory | None:
        """What ``ticket`` is for, by another descriptor, which the caller closes; None where it is not offered here."""
        with self._lock:
            memory = self._kept.get(ticket.number) if ticket.address == self.address else None
            return None if memory is None else Memory(os.dup(memory.fd), memory.size, memory.capacity)

    def drop(self, ticket: Ticket) -> None:
        """Offer it no longer. Nothing happens where it is not there."""
        with self._lock:
            memory = self._kept.pop(ticket.number, None) if ticket.address == self.address else None
            if memory is None or (memory.own and self._spare.give(memory)):
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
        """Drop everything, and answer nobody from now on."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            kept, self._kept = [*self._kept.values(), *self._spare.clear()], {}
        for memory in kept:
            memory.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), name="mmserve-arena-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one process until it goes."""
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
    """Asks the arenas of other processes; keeps a connection to each. For any number of threads: one that waits for a
    process that is stopped keeps none waiting that asks another.

    ``patience``: seconds for an answer. ``mapped``: bytes of memory that stay mapped after they were read.
    """

    def __init__(self, patience: float = _PATIENCE, mapped: int = _MOST_MAPPED) -> None:
        self._lock, self._patience = threading.Lock(), patience
        self._mapped, self._most_mapped = OrderedDict[tuple[int, int], mmap.mmap](), mapped  # the latest last
        self._connections: dict[str, socket.socket] = {}
        self._turns: dict[str, threading.Lock] = {}  # of threads that ask the same process; never removed
        self._closed = False

    def take(self, ticket: Ticket) -> Memory:
        """The memory of ``ticket``. Unless it came with the ticket, raises ``TransferError`` where its process is gone,
        stopped, or has it no more."""
        if ticket.memory is not None and ticket.memory.fd >= 0:
            return ticket.memory
        with self._lock:
            turn = self._turns.setdefault(ticket.address, threading.Lock())
        with turn:
            try:
                return self._take(ticket)
            except OSError as error:
                self._forget(ticket.address)
                raise TransferError(f"the process that has a payload does not answer: {error}") from error

    def read(self, ticket: Ticket) -> memoryview:
        """The payload of ``ticket``, as of ``Memory.read``, to be read before its process may write there again; raises
        as ``take``."""
        memory = self.take(ticket)
        try:
            return memoryview(self._mapping(memory))[: memory.size]
        finally:
            memory.close()

    def _mapping(self, memory: Memory) -> mmap.mmap:
        """All of ``memory``: the mapping of the last time, as long as it is there, so that its pages are, too."""
        found = os.fstat(memory.fd)
        key = found.st_dev, found.st_ino  # no other file has them while it is mapped
        with self._lock:
            if (known := self._mapped.get(key)) is not None:
                self._mapped.move_to_end(key)
                return known
            made = mmap.mmap(memory.fd, memory.capacity, access=mmap.ACCESS_COPY)
            self._mapped[key] = made
            while sum(map(len, self._mapped.values())) > self._most_mapped:
                self._mapped.popitem(last=False)  # it ends with its last view
            return made

    def close(self) -> None:
        """End all connections, and forget what was read; ``take`` raises ``TransferError`` from now on."""
        self._closed = True
        self._mapped.clear()
        for address in list(self._connections):
            self._forget(address)

    def _take(self, ticket: Ticket) -> Memory:
        connection = self._connections.get(ticket.address)
        if connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self._patience)
            self._connections[ticket.address] = connection
            if self._closed:  # after it is noted: either ``close`` ends it, or what is raised here does
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

    def _forget(self, address: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()


def _received(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes; empty where the peer has gone."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data
