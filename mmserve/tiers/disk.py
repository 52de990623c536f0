"""The last tier of a cache: a folder of safetensors files, bounded in bytes, that persists across restarts.

Processes of one host may share a folder: changes require a lock on the folder, and the bound applies to all files of a
kind together. Each file has its key, a label and the hash of its contents: a truncated, changed or renamed file is
never used, and is removed if it has a header of this class. Files are written under a temporary name and renamed when
complete. Other files in the folder, such as a model's weights, are neither counted nor modified.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from mmserve.core.cached import Label
from mmserve.errors import ConfigError, ResourceExhausted

logger = logging.getLogger("mmserve.tiers")

_SUFFIX, _PARTIAL, _PIN = ".safetensors", ".partial", ".pin"
#: Keys in a file's header.
_KEY, _HASH, _LABEL = "key", "sha256", "label"
#: Maximum bytes of a header of this class.
_HEADER = 1 << 20


@dataclass(frozen=True)
class Stored:
    """A file: its key, its label, its size in bytes, and whether it is pinned."""

    key: bytes
    label: Label | None
    size: int
    pinned: bool


class DiskCache:
    """At most ``capacity`` bytes of files in ``folder``; safe for any number of threads and processes.

    ``kind`` is a part of the file names: caches of other kinds in the same folder ignore them. ``table``: the table of
    the configuration, for error messages.
    """

    def __init__(self, folder: Path, capacity: int, *, kind: str = "", table: str = "encoder_cache") -> None:
        self.folder, self.capacity, self._table = folder, capacity, table
        self._suffix = f".{kind}{_SUFFIX}" if kind else _SUFFIX
        self._ours = re.compile(rf"[0-9a-f]{{64}}{re.escape(self._suffix)}")
        self._partials = re.compile(rf"[0-9a-f]{{64}}{re.escape(self._suffix.replace(_SUFFIX, _PARTIAL))}")
        self._lock = threading.RLock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # bytes of each file, least recently used first
        self._when: dict[str, int] = {}  # last use of each file at the latest scan
        self._used = 0
        self._seen = -1  # the folder's modification time at the latest scan
        self._failing = False  # the last entry could not be written
        self._unlocked = False  # the file system does not support locks
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._alone():
                self._remove_partials()
                self._make_room(0)
        except OSError as error:
            raise ConfigError(f"[{table}] disk_folder {folder} cannot be used: {error.strerror}") from error

    @property
    def used(self) -> int:
        """Bytes of all files."""
        with self._lock:
            with suppress(OSError):
                self._look()
            return self._used

    def __contains__(self, key: bytes) -> bool:
        return self._path(key).exists()

    def get(self, key: bytes) -> dict[str, Tensor] | None:
        """The tensors stored under ``key``, on the CPU; None if there is no valid file."""
        path = self._path(key)
        try:
            data = _contents(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read: %s", path, error.strerror)
            return None
        try:
            header, entry = _header(data), load(data)
            if header == _labelled(key, entry, header.get(_LABEL, "")):
                with suppress(OSError):  # deleted, or of another user: affects only the eviction order
                    os.utime(path)
                with self._lock, suppress(KeyError, OSError):
                    self._sizes.move_to_end(path.name)
                    self._when[path.name] = path.stat().st_mtime_ns
                return entry
            why = "it is not what was written under this key"
        except Exception as error:  # noqa: BLE001 - no content of a file fails a request
            why = str(error)
        with suppress(OSError), self._alone():
            removed = self._remove(path.name)
            logger.warning("%s %s: %s", "removed" if removed else "a file that is not ours is not used:", path, why)
        return None

    def put(self, key: bytes, entry: Mapping[str, Tensor], label: Label | None = None) -> None:
        """Store ``entry`` if it fits; write errors are logged once until a write succeeds."""
        path = self._path(key)
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in entry.items()}
        try:
            with self._writing(path) as partial:
                if partial is not None:
                    save_file(plain, partial, metadata=_labelled(key, plain, "" if label is None else label.text()))
                    self._appear(partial, path)
        except Exception as error:  # noqa: BLE001 - what cannot be kept fails no request
            self._note(error)
        else:
            self._note(None)

    def drop(self, key: bytes) -> bool:
        """Remove ``key``; returns whether it was present."""
        with self._alone():
            with suppress(OSError):
                self._path(key).with_suffix(_PIN).unlink()
            self._look()
            removed = self._remove(self._path(key).name)
            self._noticed()
            return removed

    def pin(self, key: bytes, pinned: bool) -> bool:
        """Exempt ``key`` from eviction or not; returns whether it is present. Applies to all processes of the host.

        Raises ``ResourceExhausted`` if pinned files would exceed the capacity.
        """
        path = self._path(key)
        with self._alone():
            self._look()
            size = self._sizes.get(path.name)
            if size is None:
                return False
            if not pinned:
                with suppress(FileNotFoundError):
                    path.with_suffix(_PIN).unlink()
                return True
            held = sum(self._sizes[name] for name in self._pinned() if name != path.name)
            if held + size > self.capacity:
                raise ResourceExhausted(
                    f"pinned files would take {held + size} bytes, and [{self._table}] disk_bytes is {self.capacity}: "
                    "unpin others, or set it higher"
                )
            path.with_suffix(_PIN).touch()
            return True

    def entries(self) -> Iterator[Stored]:
        """All valid files, from their headers; slow if there are many."""
        with self._lock, suppress(OSError):
            self._look()
        with self._lock:
            sizes, pinned = dict(self._sizes), self._pinned()
        for name, size in sizes.items():
            with suppress(OSError, ValueError, TypeError, AttributeError):
                header = _header_of(self.folder / name)
                text = header.get(_LABEL, "")
                yield Stored(bytes.fromhex(header[_KEY]), Label.of(text) if text else None, size, name in pinned)

    # --- the folder ---

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """With exclusive access to the folder, in this process and others."""
        with self._lock:
            opened = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX)
                except OSError as error:  # some network file systems do not support locks
                    if not self._unlocked:
                        logger.warning("no lock on %s, which other servers must not use: %s", self.folder, error)
                    self._unlocked = True
                yield
            finally:
                os.close(opened)  # releases the lock

    def _look(self) -> None:
        """Read the changes made to the folder by other processes since the last scan."""
        changed = self.folder.stat().st_mtime_ns
        if changed == self._seen:
            return
        there: dict[str, os.stat_result] = {}
        for entry in os.scandir(self.folder):
            with suppress(OSError):
                if not self._ours.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                    continue
                if entry.name in self._sizes or _is_ours(self.folder / entry.name):
                    there[entry.name] = entry.stat(follow_symlinks=False)
        by_use = sorted(there.items(), key=lambda each: each[1].st_mtime_ns)
        self._sizes = OrderedDict((name, found.st_size) for name, found in by_use)
        self._when = {name: found.st_mtime_ns for name, found in by_use}
        self._used, self._seen = sum(self._sizes.values()), changed

    @contextmanager
    def _writing(self, path: Path) -> Iterator[Path | None]:
        """A new temporary file beside ``path``, locked by this call and removed when the context exits; None if another
        writer is writing it."""
        partial = path.with_suffix(_PARTIAL)
        with self._alone():
            self._look()
            opened = os.open(partial, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(opened)
                opened = -1
            except OSError:
                pass  # no locks here: logged by ``_alone``
            self._noticed()
        try:
            yield partial if opened >= 0 else None
        finally:
            if opened >= 0:
                with suppress(OSError), self._alone():
                    self._look()
                    partial.unlink(missing_ok=True)
                    self._noticed()
                os.close(opened)

    def _appear(self, partial: Path, path: Path) -> None:
        """Rename a complete file, after evictions if needed; never replaces a file that is not of this class."""
        size = partial.stat().st_size
        with self._alone():
            self._look()
            self._remove(path.name)
            if self._make_room(size):
                os.link(partial, path)
                self._sizes[path.name] = size
                self._used += size
            self._noticed()

    def _noticed(self) -> None:
        """Record that the latest change of the folder was made by this process; requires the lock.

        The clock of a file system may be coarse: the modification time is set to a unique value.
        """
        with suppress(OSError):  # the folder belongs to another user
            now = time.time_ns()
            os.utime(self.folder, ns=(now, now))
        self._seen = self.folder.stat().st_mtime_ns

    def _remove_partials(self) -> None:
        """Remove temporary files of processes that died while writing: they are not locked."""
        for entry in os.scandir(self.folder):
            if not self._partials.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                continue
            with suppress(OSError):
                opened = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    Path(entry.path).unlink()
                finally:
                    os.close(opened)

    def _make_room(self, size: int) -> bool:
        """Evict least recently used, unpinned files until ``size`` more bytes fit; returns whether they do."""
        self._look()
        if size > self.capacity:
            return False
        if self._used + size <= self.capacity:
            return True
        pinned = self._pinned()
        if size and size + sum(self._sizes[name] for name in pinned) > self.capacity:
            return False  # evicting all others would not suffice
        for spares_used in (True, False):  # first those not read since the latest scan
            for name in [name for name in self._sizes if name not in pinned]:
                if self._used + size <= self.capacity:
                    break
                if not (spares_used and self._used_since(name)):
                    self._remove(name)
        self._noticed()
        return self._used + size <= self.capacity

    def _used_since(self, name: str) -> bool:
        """Whether another process has read a file since the last scan; if so, it becomes the most recently used."""
        try:
            when = (self.folder / name).stat().st_mtime_ns
        except OSError:
            return False
        before, self._when[name] = self._when.get(name, when), when
        if when > before:
            self._sizes.move_to_end(name)
        return when > before

    def _pinned(self) -> set[str]:
        """Names of pinned files."""
        found = set[str]()
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                if entry.name.endswith(_PIN):
                    found.add(entry.name.removesuffix(_PIN) + _SUFFIX)
        return found & self._sizes.keys()

    def _remove(self, name: str) -> bool:
        """Remove a file if it was written by this class; returns whether it was."""
        path = self.folder / name
        self._when.pop(name, None)
        self._used -= self._sizes.pop(name, 0)
        with suppress(OSError):  # already deleted, or not deletable by this user
            if _is_ours(path):
                path.unlink()
                return True
        return False

    def _note(self, error: Exception | None) -> None:
        """Log an error, or its end: a full disk fails for every request, so only changes are logged."""
        with self._lock:
            changed, self._failing = self._failing != (error is not None), error is not None
        if changed and error is not None:
            logger.warning("a cache cannot write to %s, and keeps nothing new there: %s", self.folder, error)
        elif changed:
            logger.warning("the cache can write to %s again", self.folder)

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{self._suffix}"


def _contents(path: Path) -> bytes:
    """The bytes of a regular file.

    Read and not mapped: later truncation or overwriting of a mapped file would change the memory after the hash check,
    and a missing page kills the process.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(0, "it is no plain file")
        return file.read()


def _header_of(path: Path) -> dict[str, str]:
    """The metadata of a file's header; raises ``ValueError`` or ``OSError`` if it has none."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= _HEADER:
            raise ValueError(f"a header of {size} bytes")
        return _texts(file.read(size))


def _header(data: bytes) -> dict[str, str]:
    return _texts(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _texts(header: bytes) -> dict[str, str]:
    found = json.loads(header)
    texts = found.get("__metadata__", {})
    return dict(texts) if isinstance(texts, dict) else {}


def _is_ours(path: Path) -> bool:
    """Whether a file has a header written by ``DiskCache``, regardless of its contents."""
    try:
        return {_KEY, _HASH} <= _header_of(path).keys()
    except (ValueError, AttributeError, OSError):
        return False


def _labelled(key: bytes, entry: Mapping[str, Tensor], label: str) -> dict[str, str]:
    """The metadata of a file: its key, its label, and the SHA-256 of these and of names, dtypes, shapes and
    contents."""
    made = sha256(label.encode())
    for name, tensor in sorted(entry.items()):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        made.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return {_KEY: key.hex(), _LABEL: label, _HASH: made.hexdigest()}
