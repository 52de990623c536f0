"""Uploaded media, stored by content hash with a bound in bytes and LRU eviction."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass

from mmserve.core.media_id import media_id_of
from mmserve.errors import NotFound, ResourceExhausted


@dataclass(frozen=True)
class Stored:
    """The id of an item, and whether the store already had its bytes."""

    media_id: str
    deduplicated: bool


class MediaStore:
    """Content-addressed storage of at most ``capacity`` bytes. Thread-safe.

    ``cache`` is the namespace of a tenant: items of one namespace are not visible in another.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._parts: dict[str, OrderedDict[str, bytes]] = {}  # no namespace is empty
        self._sizes: Counter[str] = Counter()  # bytes of each namespace

    def put(self, data: bytes, *, media_id: str | None = None, cache: str = "") -> Stored:
        """Store ``data``, evicting the least recently used items of the largest namespace as needed.

        ``media_id``: the hash of the bytes, if the caller has computed it. Raises ``ResourceExhausted`` if the item is
        larger than the store.
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
        """The bytes of ``media_id``, now the most recently used; raises ``NotFound``."""
        with self._lock:
            part = self._parts.get(cache, OrderedDict())
            data = part.get(media_id)
            if data is None:
                raise NotFound(f"the server has no media {media_id!r}; upload it (again)")
            part.move_to_end(media_id)
            return data

    def __len__(self) -> int:
        """Number of items."""
        with self._lock:
            return sum(map(len, self._parts.values()))

    @property
    def used(self) -> int:
        """Number of bytes."""
        with self._lock:
            return self._sizes.total()

    def _drop(self, cache: str) -> None:
        """Evict the least recently used item of a namespace."""
        _, dropped = self._parts[cache].popitem(last=False)
        self._sizes[cache] -= len(dropped)
        if not self._parts[cache]:
            del self._parts[cache], self._sizes[cache]
