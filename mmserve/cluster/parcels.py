"""How one process's states go to others: written, read, and dropped, by the transport that was chosen for it."""

from __future__ import annotations

from typing import Any

from mmserve.cluster.messages import Parcel
from mmserve.cluster.object_store import fetched, stored
from mmserve.transfer.nixl import Region, Regions
from mmserve.transfer.payloads import PAYLOADS
from mmserve.transfer.shared_memory import Arena, Reader, Ticket


class Parcels:
    """What this process has written, and what reads that of others.

    ``transport``: how what it writes goes out, one of ``[cluster] transport`` but "auto". What it reads may have come
    by any of them.
    """

    def __init__(self) -> None:
        self.transport = "shared_memory"
        self.arena, self._reader = Arena(), Reader()
        self._regions: Regions | None = None
        self._written: dict[int, Ticket | Region] = {}  # by their numbers, of the one transport

    def use(self, transport: str) -> None:
        """Write by ``transport`` from now on; ``ConfigError`` where it is not there. Before the first ``write``."""
        self.transport = transport
        if transport == "nixl":
            self.regions()

    def write(self, payload: Any) -> Parcel:
        """Offer ``payload`` until ``reuse``."""
        packed = PAYLOADS.pack(payload)
        if self.transport == "object_store":
            data = bytearray(packed.size)
            packed.write(memoryview(data))
            return stored(data)
        made = self.arena.write(packed) if self.transport == "shared_memory" else self.regions().write(packed)
        self._written[made.number] = made
        return made

    def read(self, parcel: Parcel) -> Any:
        """The payload of ``parcel``; ``TransferError`` where it does not come, or has changed on the way."""
        if isinstance(parcel, Ticket):
            return PAYLOADS.decode(self._reader.read(parcel))
        return PAYLOADS.decode(self.regions().read(parcel) if isinstance(parcel, Region) else fetched(parcel))

    def reuse(self, number: int) -> None:
        """Nobody reads this any more: its memory may be written again."""
        made = self._written.pop(number, None)
        if isinstance(made, Ticket):
            self.arena.drop(made)
        elif made is not None:
            self.regions().drop(made)

    def regions(self) -> Regions:
        """Those of this process, from the first use on."""
        if self._regions is None:
            self._regions = Regions(self.arena.address)
        return self._regions

    def close(self) -> None:
        """Offer nothing any longer, and read nothing."""
        self._reader.close()
        self.arena.close()
        if self._regions is not None:
            self._regions.close()
