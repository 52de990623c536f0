"""The store of states between two workers: this process holds their memory, so that they outlive the worker that wrote
them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from mmserve.cluster.messages import Parcel
from mmserve.cluster.object_store import fetched, stored
from mmserve.transfer.nixl import Region, Regions
from mmserve.transfer.shared_memory import Arena, Memory, Reader, Ticket, allow_descriptors


@dataclass(frozen=True)
class HeldMemory:
    """Shared memory that this process holds: ``here``: in its own arena, ``origin``: where it was written."""

    here: Ticket
    origin: Ticket


class SharedPayloadStore:
    """``PayloadStore`` with shared memory on this host; states from other hosts remain references to Ray's object
    store, or NIXL regions.

    ``host_of``: the host of a worker by its name; ``reuse``: lets a worker reuse the memory of its ticket or region.
    """

    def __init__(self, host_of: Callable[[str], str], reuse: Callable[[Ticket | Region], None]) -> None:
        self._host_of, self._reuse = host_of, reuse
        allow_descriptors()
        self._arena, self._reader = Arena(), Reader()
        self._beginning = threading.Lock()
        self._regions: Regions | None = None  # created on first use

    def persist(self, parcel: Parcel) -> Parcel:
        """See ``PayloadStore.persist``. States outside of this host's memory do not outlive the worker that wrote
        them."""
        if not isinstance(parcel, Ticket):
            return parcel
        return HeldMemory(self._arena.put(self._reader.take(parcel)), parcel)

    def own(self, parcel: Parcel) -> Parcel:
        """See ``PayloadStore.own``; states in Ray's store, or in a region, are written again by this process."""
        if isinstance(parcel, Ticket):
            return self.persist(parcel)
        if not isinstance(parcel, Region):
            return stored(fetched(parcel))
        with self._beginning:  # states of several workers arrive concurrently
            if self._regions is None:
                self._regions = Regions(self._arena.address)
            regions = self._regions
        data = regions.read(parcel)
        self._reuse(parcel)
        return regions.copy(data)

    def sent(self, parcel: Parcel, worker: str) -> Parcel:
        """See ``PayloadStore.sent``: to another host, bytes are sent by Ray's object store."""
        if not isinstance(parcel, HeldMemory):
            return parcel
        if self._host_of(worker) == self._arena.host:
            return parcel.here
        with closing(self._reader.take(parcel.here)) as memory:
            return stored(memory.read())

    def drop(self, parcel: Parcel) -> None:
        """See ``PayloadStore.drop``."""
        if isinstance(parcel, HeldMemory):
            self._arena.drop(parcel.here)
            self._reuse(parcel.origin)
        elif self._regions is not None and isinstance(parcel, Region) and parcel.address == self._regions.address:
            self._regions.drop(parcel)
        elif isinstance(parcel, Ticket | Region):
            self._reuse(parcel)

    def offered(self, ticket: Ticket) -> Memory | None:
        """See ``Arena.offered``."""
        return self._arena.offered(ticket)

    @property
    def held(self) -> int:
        """Number of states held here."""
        return len(self._arena) + (0 if self._regions is None else len(self._regions))

    def close(self) -> None:
        """Drop all states."""
        self._reader.close()
        self._arena.close()
        if self._regions is not None:
            self._regions.close()
