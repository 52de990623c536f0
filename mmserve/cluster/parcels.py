"""Writing, reading and dropping of states (parcels), by the configured transport."""

from __future__ import annotations

from typing import Any

from mmserve.cluster.messages import Parcel
from mmserve.cluster.object_store import fetched, stored
from mmserve.transfer.nixl import Region, Regions
from mmserve.transfer.payloads import PAYLOADS
from mmserve.transfer.shared_memory import Arena, Reader, Ticket


class Parcels:
    """The parcels that this process has written, and readers for those of others.

    ``transport``: how parcels are written, one of ``[cluster] transport`` except for "auto". Parcels of any transport
    can be read.
    """

    def __init__(self) -> None:
        self.transport = "shared_memory"
        self.arena, self._reader = Arena(), Reader()
        self._regions: Regions | None = None
        self._written: dict[int, Ticket | Region] = {}  # by their numbers, of the configured transport

    def use(self, transport: str) -> None:
        """Set the ``transport``; raises ``ConfigError`` if it is not available. Before the first ``write``."""
        self.transport = transport
        if transport == "nixl":
            self.regions()

    def write(self, payload: Any) -> Parcel:
        """Write ``payload``; it remains readable until ``reuse``."""
        packed = PAYLOADS.pack(payload)
        if self.transport == "object_store":
            data = bytearray(packed.size)
            packed.write(memoryview(data))
            return stored(data)
        made = self.arena.write(packed) if self.transport == "shared_memory" else self.regions().write(packed)
        self._written[made.number] = made
        return made

    def read(self, parcel: Parcel) -> Any:
        """The payload of ``parcel``; raises ``TransferError`` if it is lost or corrupted."""
        if isinstance(parcel, Ticket):
            return PAYLOADS.decode(self._reader.read(parcel))
        return PAYLOADS.decode(self.regions().read(parcel) if isinstance(parcel, Region) else fetched(parcel))

    def reuse(self, number: int) -> None:
        """Allow reuse of a parcel's memory, which has no readers any more."""
        made = self._written.pop(number, None)
        if isinstance(made, Ticket):
            self.arena.drop(made)
        elif made is not None:
            self.regions().drop(made)

    def regions(self) -> Regions:
        """The NIXL regions of this process; created on first use."""
        if self._regions is None:
            self._regions = Regions(self.arena.address)
        return self._regions

    def close(self) -> None:
        """Close all parcels and readers."""
        self._reader.close()
        self.arena.close()
        if self._regions is not None:
            self._regions.close()
