"""Uploaded media, kept under the hash of their bytes and bounded in bytes: least recently used first out."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass

from mmserve.errors import NotFound, ResourceExhausted

_MEDIA_ID = re.compile(r"sha256:[0-9a-f]{64}")


def media_id_of(data: bytes) -> str:
    """The media id of ``data``: ``sha256:`` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def is_media_id(value: str) -> bool:
    """Whether ``value`` has the form of a media id."""
    return _MEDIA_ID.fullmatch(value) is not None


@dataclass(frozen=True)
class Stored:
    """Where an item went, and whether the store had its bytes already."""

    media_id: str
    deduplicated: bool


class MediaStore:
    """Content-addressed bytes, at most ``capacity`` of them; every method may be called from any thread."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._items: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def put(self, data: bytes, *, media_id: str | None = None) -> Stored:
        """Keep ``data``, dropping the least recently used items to make room.

        ``media_id`` spares the hashing where the caller has hashed the same bytes already. Raises
        ``ResourceExhausted`` where the item alone is larger than the store.
        """
        if len(data) > self.capacity:
            raise ResourceExhausted(f"{len(data)} bytes do not fit into the media store of {self.capacity} bytes")
        key = media_id or media_id_of(data)
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return Stored(key, deduplicated=True)
            while self._bytes + len(data) > self.capacity:
                _, dropped = self._items.popitem(last=False)
                self._bytes -= len(dropped)
            self._items[key] = data
            self._bytes += len(data)
        return Stored(key, deduplicated=False)

    def get(self, media_id: str) -> bytes:
        """The bytes under ``media_id``, now the most recently used; raises ``NotFound``."""
        with self._lock:
            data = self._items.get(media_id)
            if data is None:
                raise NotFound(f"the server has no media {media_id!r}; upload it (again)")
            self._items.move_to_end(media_id)
            return data

    def __len__(self) -> int:
        """Items kept."""
        with self._lock:
            return len(self._items)

    @property
    def used(self) -> int:
        """Bytes kept."""
        with self._lock:
            return self._bytes
