"""Uploaded media, kept under the hash of their bytes and bounded in bytes: least recently used first out."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass

from mmserve.core.media_id import media_id_of
from mmserve.errors import NotFound, ResourceExhausted


@dataclass(frozen=True)
class Stored:
    """Where an item went, and whether the store had its bytes already."""

    media_id: str
    deduplicated: bool


class MediaStore:
    """Content-addressed bytes, at most ``capacity`` of them; every method may be called from any thread.

    ``cache`` names the part of the store that a tenant uses: what was put into one part is not found in another.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._parts: dict[str, OrderedDict[str, bytes]] = {}  # none of them is empty
        self._sizes: Counter[str] = Counter()  # bytes of each part

    def put(self, data: bytes, *, media_id: str | None = None, cache: str = "") -> Stored:
        """Keep ``data``, dropping items to make room: the least recently used ones of the part that holds most.

        ``media_id`` spares the hashing where the caller has hashed the same bytes already. Raises
        ``ResourceExhausted`` where the item alone is larger than the store.
        """
        if len(data) > self.capacity:
            raise ResourceExhausted(f"{len(data)} bytes do not fit into the media store of {self.capacity} bytes")
        key = media_id or media_id_of(data)
        with self._lock:
            if key in self._parts.get(cache, ()):
                self._parts[cache].move_to_end(key)
                return Stored(key, deduplicated=True)
            while self._sizes.total() + len(data) > self.capacity:
                self._drop(max(self._parts, key=lambda part: self._sizes[part] + len(data) * (part == cache)))
            self._parts.setdefault(cache, OrderedDict())[key] = data
            self._sizes[cache] += len(data)
        return Stored(key, deduplicated=False)

    def get(self, media_id: str, cache: str = "") -> bytes:
        """The bytes under ``media_id``, now the most recently used; raises ``NotFound``."""
        with self._lock:
            part = self._parts.get(cache, OrderedDict())
            data = part.get(media_id)
            if data is None:
                raise NotFound(f"the server has no media {media_id!r}; upload it (again)")
            part.move_to_end(media_id)
            return data

    def __len__(self) -> int:
        """Items kept."""
        with self._lock:
            return sum(map(len, self._parts.values()))

    @property
    def used(self) -> int:
        """Bytes kept."""
        with self._lock:
            return self._sizes.total()

    def _drop(self, cache: str) -> None:
        """Drop the least recently used item of a part."""
        _, dropped = self._parts[cache].popitem(last=False)
        self._sizes[cache] -= len(dropped)
        if not self._parts[cache]:
            del self._parts[cache], self._sizes[cache]
