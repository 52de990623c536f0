"""Transfer of a request's K/V to another store while its prefill is still running, in chunks of layers and pages.

A layer's keys and values are final once its attention has run, while later layers are still computed; those of a
chunked prompt are final after each chunk. Mooncake (arXiv 2407.00079, section 5.2) and Splitwise (arXiv 2311.18677,
section 4.2) overlap the transfer of a prompt's K/V with its prefill in the same way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future

import numpy as np
import torch

from mmserve.core.payloads import KVChunk, KVState
from mmserve.errors import TransferError
from mmserve.kv.pool import pages_for
from mmserve.kv.store import KVStore

logger = logging.getLogger("mmserve.kv")

#: Minimum number of chunks for K/V to be sent ahead: for fewer, the messages cost more than they save (Splitwise,
#: section 4.2, also sends the K/V of short prompts at once).
LEAST_CHUNKS = 4
#: ``send(number, chunk)`` sends a chunk; ``number`` counts a request's chunks from 0.
Send = Callable[[int, KVChunk], None]


class Outgoing:
    """The sender of one request's K/V, in ``pages`` (int64): chunks of at least ``least`` bytes are read from ``store``
    on ``threads``, which has one thread, and passed to ``send``. Only for the prefill thread."""

    def __init__(self, store: KVStore, pages: np.ndarray, least: int, send: Send, threads: Executor) -> None:
        self._store, self._pages, self._least, self._send, self._threads = store, pages, least, send, threads
        self._sent = [0] * store.num_layers  # number of leading pages of each layer that are sent
        page = store.read_pages(pages[:1])
        self._bytes = max(1, sum(each.nbytes for each in page.values()) // store.num_layers)  # of a page of a layer
        self._chunks: list[Future[None]] = []
        self._closed = False

    @property
    def worthwhile(self) -> bool:
        """Whether there is enough K/V to be sent ahead."""
        return len(self._pages) * len(self._sent) * self._bytes >= LEAST_CHUNKS * self._least

    def final(self, layers: int, positions: int) -> None:
        """Report that K/V of the first ``layers`` layers are final in the pages of the first ``positions``
        positions."""
        self._send_final(layers, positions, self._least)

    def finish(self, positions: int) -> int:
        """Send the rest of the K/V of the first ``positions`` positions, which are final, and wait for it. Returns the
        number of chunks; 0 = a chunk failed: the receiver cannot use the others."""
        if not self._chunks:  # too little: send it with the request
            return 0
        self._send_final(self._store.num_layers, positions, 1)
        try:
            for chunk in self._chunks:
                chunk.result()
        except Exception:
            logger.warning("K/V could not be sent ahead of a request, and are sent with it", exc_info=True)
            return 0
        return len(self._chunks)

    def close(self) -> None:
        """Send nothing more; thread-safe."""
        self._closed = True

    def _send_final(self, layers: int, positions: int, least: int) -> None:
        """Send chunks of final K/V; each has as few layers as reach ``least`` bytes, or all that are left."""
        pages, begin = pages_for(positions, self._store.page_size), 0
        while begin < layers:
            first, end, size = self._sent[begin], begin, 0
            while end < layers and self._sent[end] == first and size < self._least:
                size += (pages - first) * self._bytes
                end += 1
            if size >= least and pages > first:
                number, chosen = len(self._chunks), range(begin, end)
                self._sent[begin:end] = [pages] * len(chosen)
                self._chunks.append(self._threads.submit(self._send_chunk, number, chosen, first, positions))
            begin = end

    @torch.inference_mode()
    def _send_chunk(self, number: int, layers: range, first: int, positions: int) -> None:
        if self._closed:
            return
        size = self._store.page_size
        tensors = self._store.read_pages(self._pages[first : pages_for(positions, size)], layers)
        self._send(number, KVChunk(first, size, tensors, positions - first * size))


class Incoming:
    """The receiver: chunks are written to the request's pages as they arrive, or once it has pages.

    Thread-safe. After ``close`` nothing is written, so that the pages can be reallocated.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._pages: np.ndarray | None = None  # int64
        self._waiting: list[KVChunk] = []
        self._written: dict[str, set[int]] = {name: set() for name in store.names()}  # page indices
        self.count = 0  # number of chunks received
        self._closed = False

    def add(self, number: int, chunk: KVChunk) -> None:
        """Receive the next chunk. Raises ``TransferError`` if one is missing, or does not fit."""
        with self._lock:
            if number != self.count:
                raise TransferError(f"chunk {number} of a request's K/V was received after {self.count} chunks")
            if chunk.page_size != self._store.page_size:
                sizes = f"pages of {chunk.page_size} positions, and this store has pages of {self._store.page_size}"
                raise TransferError(f"received K/V have {sizes}")
            self.count += 1
            self._waiting.append(chunk)
            self._write_waiting()

    def open(self, pages: np.ndarray) -> None:
        """Set the request's pages (int64) in this store; received chunks are written with the next one, or by
        ``finish``."""
        with self._lock:
            self._pages = pages

    def check(self, kv: KVState) -> None:
        """Raises ``TransferError`` unless all K/V that ``kv`` lacks were received, and can be written."""
        with self._lock:
            if kv.ahead != self.count or self._closed:
                raise TransferError(f"{self.count} of {kv.ahead} chunks of K/V that were sent ahead were received")

    def finish(self, kv: KVState) -> None:
        """Write chunks that were not written yet, after the last one. Raises ``TransferError`` if some of ``kv`` is
        missing."""
        with self._lock:
            self._write_waiting()
            whole = set(range(pages_for(kv.positions, self._store.page_size)))
            if missing := [name for name, placed in self._written.items() if not placed >= whole]:
                raise TransferError(f"not all K/V of {missing[0]!r} were received")

    def close(self) -> None:
        """Write nothing from now on; waits for a write in progress."""
        with self._lock:
            self._closed = True
            self._waiting.clear()

    @torch.inference_mode()
    def _write_waiting(self) -> None:
        if self._pages is None or self._closed:
            return
        while self._waiting:
            chunk = self._waiting.pop(0)
            count = len(next(iter(chunk.tensors.values()), ()))
            if chunk.first < 0 or chunk.first + count > len(self._pages):
                raise TransferError(
                    f"K/V of pages up to {chunk.first + count} were received for {len(self._pages)} pages"
                )
            self._store.write_pages(self._pages[chunk.first : chunk.first + count], chunk.tensors, some=True)
            for name in chunk.tensors:
                self._written[name].update(range(chunk.first, chunk.first + count))
