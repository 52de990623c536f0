"""Content-addressed cache of tensors in memory: bounded in bytes, with each value computed once for concurrent
requests.

Entries in use are reference-counted; only unreferenced ones are evicted, least recently used first. Keys are full
SHA-256 digests, and an entry is used only if it has the expected shape; otherwise it is recomputed. Errors of the cache
never fail a request.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from mmserve.core.cached import Block, Label
from mmserve.core.stats import CacheStats
from mmserve.errors import ResourceExhausted
from mmserve.tiers.disk import DiskCache
from mmserve.tiers.writer import Writer

Entry = Mapping[str, Tensor]
#: Returns the label of a value for listings, given its index and the value.
Labels = Callable[[int, Entry], Label | None]
#: Seconds between checks whether a waiting caller was cancelled.
_POLL = 0.05


@dataclass
class _Kept:
    entry: Entry
    size: int  # bytes
    references: int = 0
    label: Label | None = None
    hits: int = 0
    pinned: bool = False
    forgotten: bool = False  # dropped while in use: remains only for its users


@dataclass
class _Making:
    """A value in computation; if it is ``done`` without an entry, the computation failed."""

    done: threading.Event = field(default_factory=threading.Event)
    entry: Entry | None = None


class TensorCache:
    """At most ``capacity`` bytes of tensors in memory, and more on ``disk``. Thread-safe."""

    def __init__(self, capacity: int, disk: DiskCache | None = None) -> None:
        self.capacity, self._disk = capacity, disk
        self._writer = None if disk is None else Writer(disk)
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # least recently used first
        self._making: dict[bytes, _Making] = {}
        self._bytes = 0
        self._count: Counter[str] = Counter()

    @contextmanager
    def lease(
        self,
        keys: Sequence[bytes],
        make: Callable[[list[int]], Sequence[Entry]],
        fits: Callable[[int, Entry], bool],
        check: Callable[[], None] = lambda: None,
        label: Labels = lambda _i, _entry: None,
    ) -> Iterator[list[Entry]]:
        """The values of ``keys``; none is evicted before the context exits, and none may be modified.

        ``make`` computes the values of the missing keys at the given indices; ``fits`` returns whether a found value is
        valid for the key at an index. Exceptions of ``make`` are raised here and do not affect other callers: one that
        waits for the same value computes it. ``check`` is called while waiting for values of other callers, and raises
        to stop waiting. ``label``: the label of the value of the key at an index.
        """
        held: list[bytes] = []
        try:
            found = self._find(keys, make, fits, held, check, label)
            yield [found[key] for key in keys]
        finally:
            self._let_go(held)

    @contextmanager
    def found(
        self,
        keys: Sequence[bytes],
        fits: Callable[[int, Entry], bool],
        label: Labels = lambda _i, _entry: None,
        *,
        leading: bool = False,
    ) -> Iterator[list[Entry | None]]:
        """The present values of ``keys``, in memory or on disk, referenced as by ``lease``; None for missing ones.

        ``leading``: stop at the first missing key, which is counted as a miss. Otherwise a caller that continues with
        ``lease`` for the missing keys is counted once for each key.
        """
        held: list[bytes] = []
        taken: list[Entry | None] = []
        try:
            for i, key in enumerate(keys):
                taken.append(self._take(i, key, fits, held, label))
                if leading and taken[-1] is None:
                    with self._lock:
                        self._count["lookups"] += len(keys) - i
                    taken += [None] * (len(keys) - i - 1)
                    break
            yield taken
        finally:
            self._let_go(held)

    def _take(
        self, i: int, key: bytes, fits: Callable[[int, Entry], bool], held: list[bytes], label: Labels
    ) -> Entry | None:
        with self._lock:
            kept = self._there(key)
            if kept is not None and fits(i, kept.entry):
                self._count["lookups"] += 1
                self._count["hits"] += 1
                self._use(key, kept, held)
                return kept.entry
        stored = self._disk.get(key) if self._disk is not None and kept is None else None
        if stored is None or not fits(i, stored):
            return None
        with self._lock:
            self._count["lookups"] += 1
            self._count["disk_hits"] += 1
        self._keep(key, stored, held, label(i, stored), hits=1)
        return stored

    def put(self, key: bytes, entry: Entry, label: Label) -> bool:
        """Store a value computed elsewhere, in memory now and on disk soon; returns False if the disk's queue is full
        and the value is in memory only."""
        held: list[bytes] = []
        self._keep(key, entry, held, label)
        with self._lock:
            self._count["put"] += 1
        self._let_go(held)
        return self._writer is None or self._writer.put(key, entry, label)

    def flush(self) -> None:
        """Wait until all stored values are on disk, or could not be written."""
        if self._writer is not None:
            self._writer.flush()

    @property
    def on_disk(self) -> bool:
        """Whether there is a disk tier."""
        return self._disk is not None

    @property
    def room(self) -> int:
        """Capacity in bytes of the larger tier."""
        return max(self.capacity, 0 if self._disk is None else self._disk.capacity)

    def blocks(self) -> list[tuple[bytes, Block]]:
        """The labelled entries, tier by tier; slow if a disk has many files."""
        with self._lock:
            kept = [(key, each) for key, each in self._kept.items() if not each.forgotten]
        found = [
            (key, Block(each.label, "host", each.size, each.hits, each.pinned)) for key, each in kept if each.label
        ]
        stored = () if self._disk is None else self._disk.entries()
        return found + [
            (each.key, Block(each.label, "disk", each.size, 0, each.pinned)) for each in stored if each.label
        ]

    def pin(self, keys: Sequence[bytes], pinned: bool) -> int:
        """Exempt ``keys`` from eviction in all tiers or not; returns the number of keys that are present.

        Raises ``ResourceExhausted`` if the pinned entries of a tier would exceed its capacity.
        """
        self.flush()
        there = set[bytes]()
        with self._lock:
            mine = [key for key in keys if self._there(key) is not None]
            held = {key for key, kept in self._kept.items() if kept.pinned} | set(mine)
            if pinned and sum(self._kept[key].size for key in held) > self.capacity:
                raise ResourceExhausted("pinned values would take more memory than the cache may: unpin others")
            for key in mine:
                self._kept[key].pinned = pinned
            there.update(mine)
        if self._disk is not None:
            there.update(key for key in keys if self._disk.pin(key, pinned))
        return len(there)

    def unpin_in_memory(self, model: str, keep: Callable[[bytes, Label], bool] = lambda _key, _label: False) -> None:
        """Unpin the values of ``model`` in memory, except those to ``keep``; those on disk stay pinned."""
        with self._lock:
            for key, kept in self._kept.items():
                if kept.pinned and kept.label is not None and kept.label.model == model and not keep(key, kept.label):
                    kept.pinned = False

    def drop(self, keys: Sequence[bytes]) -> int:
        """Remove ``keys``; returns the number of keys that were present. Requests that use a value keep it."""
        self.flush()
        there = set[bytes]()
        with self._lock:
            for key in keys:
                kept = self._there(key)
                if kept is None:
                    continue
                there.add(key)
                if kept.references:
                    kept.pinned, kept.forgotten = False, True
                else:
                    self._drop(key)
        if self._disk is not None:
            there.update(key for key in keys if self._disk.drop(key))
        return len(there)

    def peek(self, key: bytes) -> Entry | None:
        """The value of ``key`` in memory, without a reference; None if there is none."""
        with self._lock:
            kept = self._there(key)
            return kept.entry if kept is not None else None

    def stats(self) -> CacheStats:
        """Counters, and the present size."""
        disk = self._disk.used if self._disk is not None else 0  # may scan the folder, or wait for another process
        with self._lock:
            return CacheStats(**self._count, entries=len(self._kept), used_bytes=self._bytes, disk_bytes=disk)

    def _find(
        self,
        keys: Sequence[bytes],
        make: Callable[[list[int]], Sequence[Entry]],
        fits: Callable[[int, Entry], bool],
        held: list[bytes],
        check: Callable[[], None],
        label: Labels,
    ) -> dict[bytes, Entry]:
        """All values. A caller waits for others only when it has nothing left to compute, so that deadlocks are
        impossible."""
        index: dict[bytes, int] = {}
        for i, key in enumerate(keys):
            index.setdefault(key, i)
        with self._lock:
            self._count["lookups"] += len(keys)
            self._count["hits"] += len(keys) - len(index)  # duplicate keys
        found: dict[bytes, Entry] = {}
        while missing := [key for key in index if key not in found]:
            mine, others = self._claim(missing, index, fits, held, found)
            if mine:
                found.update(self._make(mine, index, make, fits, held, label))
            elif others:
                key, making = others[0]
                while not making.done.wait(_POLL):
                    check()
                if making.entry is not None and fits(index[key], making.entry):
                    found[key] = making.entry
                    self._join(key, making.entry, held)
        return found

    def _join(self, key: bytes, entry: Entry, held: list[bytes]) -> None:
        """Record callers that waited for ``entry``: if it is cached, they get references, too."""
        with self._lock:
            self._count["joined"] += 1
            kept = self._kept.get(key)
            if kept is not None and kept.entry is entry:
                kept.references += 1
                held.append(key)

    def _claim(
        self,
        missing: list[bytes],
        index: Mapping[bytes, int],
        fits: Callable[[int, Entry], bool],
        held: list[bytes],
        found: dict[bytes, Entry],
    ) -> tuple[list[bytes], list[tuple[bytes, _Making]]]:
        """Take present values; split the missing ones into those that the caller must compute and those in
        computation."""
        mine: list[bytes] = []
        others: list[tuple[bytes, _Making]] = []
        with self._lock:
            for key in missing:
                kept = self._there(key)
                if kept is not None and not fits(index[key], kept.entry):
                    self._count["unfit"] += 1
                    if not kept.references:
                        self._drop(key)
                    kept = None
                if kept is not None:
                    self._count["hits"] += 1
                    self._use(key, kept, held)
                    found[key] = kept.entry
                elif key in self._making:
                    others.append((key, self._making[key]))
                else:
                    self._making[key] = _Making()
                    mine.append(key)
        return mine, others

    def _make(
        self,
        mine: list[bytes],
        index: Mapping[bytes, int],
        make: Callable[[list[int]], Sequence[Entry]],
        fits: Callable[[int, Entry], bool],
        held: list[bytes],
        label: Labels,
    ) -> dict[bytes, Entry]:
        """Values of the claimed keys, from disk or computed; waiting callers are always released."""
        found: dict[bytes, Entry] = {}
        try:
            for key in mine:
                stored = self._disk.get(key) if self._disk is not None else None
                if stored is not None and fits(index[key], stored):
                    found[key] = stored
            absent = [key for key in mine if key not in found]
            made = dict(zip(absent, make([index[key] for key in absent]), strict=True)) if absent else {}
            with self._lock:
                self._count["disk_hits"] += len(found)
                self._count["made"] += len(made)
            found |= made
            labels = {key: label(index[key], entry) for key, entry in found.items()}
            for key, entry in found.items():
                self._keep(key, entry, held, labels[key])
            if self._disk is not None:
                for key, entry in made.items():
                    self._disk.put(key, entry, labels[key])
            return found
        finally:
            with self._lock:
                for key in mine:
                    making = self._making.pop(key)
                    making.entry = found.get(key)
                    making.done.set()

    def _use(self, key: bytes, kept: _Kept, held: list[bytes]) -> None:
        """Add a reference to a value that was found; requires the lock."""
        self._kept.move_to_end(key)
        kept.references += 1
        kept.hits += 1
        held.append(key)

    def _keep(self, key: bytes, entry: Entry, held: list[bytes], label: Label | None = None, hits: int = 0) -> None:
        """Store ``entry`` with a reference, if evicting unreferenced and unpinned entries frees enough memory."""
        size = sum(tensor.nbytes for tensor in entry.values())
        with self._lock:
            if key in self._kept:  # one that did not fit or was dropped, and is still in use
                return
            idle = [other for other, kept in self._kept.items() if not kept.references and not kept.pinned]
            if self._bytes + size - sum(self._kept[other].size for other in idle) > self.capacity:
                return
            for other in idle:
                if self._bytes + size <= self.capacity:
                    break
                self._drop(other)
                self._count["evicted"] += 1
            self._kept[key] = _Kept(entry, size, 1, label, hits)
            self._bytes += size
            held.append(key)

    def _there(self, key: bytes) -> _Kept | None:
        """The entry under ``key`` that is visible to new callers; requires the lock."""
        kept = self._kept.get(key)
        return None if kept is None or kept.forgotten else kept

    def _let_go(self, held: Sequence[bytes]) -> None:
        """Release references."""
        with self._lock:
            for key in held:
                kept = self._kept[key]
                kept.references -= 1
                if kept.forgotten and not kept.references:
                    self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._bytes -= self._kept.pop(key).size
