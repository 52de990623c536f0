"""Where states are between two workers: this process holds their memory, so that they outlive the worker that made
them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from mmserve.cluster.messages import Parcel
from mmserve.cluster.object_store import fetched, stored
from mmserve.transfer.shared_memory import Arena, Memory, Reader, Ticket, allow_descriptors


@dataclass(frozen=True)
class Kept:
    """Shared memory that this process holds: ``here`` on its own arena, ``origin`` where it was written."""

    here: Ticket
    origin: Ticket


class SharedPayloadStore:
    """``PayloadStore`` over shared memory on this host; states from other hosts stay references to Ray's object store.

    ``host_of``: the host of a worker by its name; ``reuse``: has a worker write to the memory of a ticket of its own
    again.
    """

    def __init__(self, host_of: Callable[[str], str], reuse: Callable[[Ticket], None]) -> None:
        self._host_of, self._reuse = host_of, reuse
        allow_descriptors()
        self._arena, self._reader = Arena(), Reader()

    def keep(self, parcel: Parcel) -> Parcel:
        """As of ``PayloadStore.keep``. A reference to Ray's store does not outlive the worker that made it."""
        if not isinstance(parcel, Ticket):
            return parcel
        return Kept(self._arena.put(self._reader.take(parcel)), parcel)

    def own(self, parcel: Parcel) -> Parcel:
        """As of ``PayloadStore.own``; what is in Ray's store is put there anew, by this process."""
        return self.keep(parcel) if isinstance(parcel, Ticket) else stored(fetched(parcel))

    def sent(self, parcel: Parcel, worker: str) -> Parcel:
        """As of ``PayloadStore.sent``: to another host the bytes go by Ray's object store."""
        if not isinstance(parcel, Kept):
            return parcel
        if self._host_of(worker) == self._arena.host:
            return parcel.here
        with closing(self._reader.take(parcel.here)) as memory:
            return stored(memory.read())

    def drop(self, parcel: Parcel) -> None:
        """As of ``PayloadStore.drop``."""
        if isinstance(parcel, Kept):
            self._arena.drop(parcel.here)
            self._reuse(parcel.origin)
        elif isinstance(parcel, Ticket):
            self._reuse(parcel)

    def offered(self, ticket: Ticket) -> Memory | None:
        """As of ``Arena.offered``."""
        return self._arena.offered(ticket)

    @property
    def held(self) -> int:
        """States that are kept here."""
        return len(self._arena)

    def close(self) -> None:
        """Forget all of them."""
        self._reader.close()
        self._arena.close()
