"""Writes to disk in the background."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping

from torch import Tensor

from mmserve.core.cached import Label
from mmserve.tiers.disk import DiskCache

logger = logging.getLogger("mmserve.tiers")

#: Maximum bytes waiting to be written; further entries are not written to disk.
_WAITING = 256 << 20


class Writer:
    """Writes entries to ``disk`` in a thread, which exits when the queue is empty."""

    def __init__(self, disk: DiskCache, most: int = _WAITING) -> None:
        self._disk, self._most = disk, most
        self._changed = threading.Condition()
        self._waiting: deque[tuple[bytes, Mapping[str, Tensor], Label | None, int]] = deque()
        self._bytes = 0  # queued or being written
        self._queued = self._ended = 0  # numbers of entries so far
        self._running = False

    def put(self, key: bytes, entry: Mapping[str, Tensor], label: Label | None) -> bool:
        """Queue ``entry`` for writing; returns False, without queueing it, if the queue is full."""
        size = sum(tensor.nbytes for tensor in entry.values())
        with self._changed:
            if self._bytes and self._bytes + size > self._most:
                return False
            self._waiting.append((key, entry, label, size))
            self._bytes += size
            self._queued += 1
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="mmserve-cache-writer", daemon=True).start()
        return True

    def flush(self) -> None:
        """Wait until all entries that are queued now are written, or could not be."""
        with self._changed:
            last = self._queued
            self._changed.wait_for(lambda: self._ended >= last)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._running = False
                    return
                key, entry, label, size = self._waiting.popleft()
            try:
                if key not in self._disk:
                    self._disk.put(key, entry, label)
            except Exception as error:  # noqa: BLE001 - others are still to be written
                logger.warning("a cache entry could not be written to disk: %s", error)
            with self._changed:
                self._bytes -= size
                self._ended += 1
                self._changed.notify_all()
