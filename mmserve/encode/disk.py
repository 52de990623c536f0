"""The second tier of a cache: a folder of safetensors files, bounded in bytes, that outlives the server.

Each file has its key and the hash of its contents: one that was cut off, changed or renamed is removed,
never used. Files appear whole, by renaming. Whatever else lies in the folder, a model's weights for example, is neither
counted nor touched.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from mmserve.errors import ConfigError

logger = logging.getLogger("mmserve.encode")

_SUFFIX, _PARTIAL = ".safetensors", ".partial"
#: Names of files that were put here: a key, and whether the file is whole.
_OURS = re.compile(rf"[0-9a-f]{{64}}({_SUFFIX}|{_PARTIAL})")
#: Folders that this process holds, by device and inode. An open descriptor keeps other processes out until this one
#: ends, however it ends.
_held: dict[tuple[int, int], int] = {}


class DiskCache:
    """At most ``capacity`` bytes of files in ``folder``, which no other server may use; for any number of threads."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder, self.capacity = folder, capacity
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # bytes of each file, the least recently used first
        self._used = 0
        self._failing = False  # the last entry could not be written
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _hold(folder)
            ours = [path for path in folder.iterdir() if _OURS.fullmatch(path.name) and path.is_file()]
            for left in ours:
                if left.suffix == _PARTIAL:
                    left.unlink()
            there = [(path.stat(), path) for path in ours if path.suffix == _SUFFIX]
        except OSError as error:
            raise ConfigError(f"[encoder_cache] disk_folder {folder} cannot be used: {error.strerror}") from error
        for stat, path in sorted(there, key=lambda found: found[0].st_mtime_ns):
            self._add(path.name, stat.st_size)
        self._make_room(0)

    @property
    def used(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return self._used

    def get(self, key: bytes) -> dict[str, Tensor] | None:
        """What was put under ``key``, on the CPU; None where there is nothing, or nothing that can be trusted."""
        path = self._path(key)
        with self._lock:
            if path.name not in self._sizes:
                return None
            self._sizes.move_to_end(path.name)
        try:
            said, entry = _read(path)
            if said == _label(key, entry):
                with suppress(OSError):  # gone since, or another user's: only what goes first depends on it
                    os.utime(path)
                return entry
            why = "it is not what was written under this key"
        except Exception as error:  # noqa: BLE001 - no content of a file fails a request
            why = str(error)
        logger.warning("removed %s from the encoder cache: %s", path, why)
        with self._lock:
            self._remove(path.name)
        return None

    def put(self, key: bytes, entry: Mapping[str, Tensor]) -> None:
        """Keep ``entry`` if it fits; a disk that cannot be written to is logged, once until it can."""
        path = self._path(key)
        partial = path.with_suffix(_PARTIAL)
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in entry.items()}
        try:
            save_file(plain, partial, metadata=_label(key, plain))
            size = partial.stat().st_size
            with self._lock:
                self._remove(path.name)
                if self._make_room(size):
                    partial.rename(path)
                    self._add(path.name, size)
        except Exception as error:  # noqa: BLE001 - what cannot be kept fails no request
            self._tell(error)
        else:
            self._tell(None)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)  # no room for it, or none on the disk: its bytes are not counted

    def _tell(self, error: Exception | None) -> None:
        """A full disk fails for every request: only its beginning and its end are news."""
        with self._lock:
            changed, self._failing = self._failing != (error is not None), error is not None
        if changed and error is not None:
            logger.warning("the encoder cache cannot write to %s, and keeps nothing new there: %s", self.folder, error)
        elif changed:
            logger.warning("the encoder cache can write to %s again", self.folder)

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{_SUFFIX}"

    def _make_room(self, size: int) -> bool:
        """Whether ``size`` more bytes fit, once the least recently used are gone."""
        if size > self.capacity:
            return False
        while self._used + size > self.capacity:
            self._remove(next(iter(self._sizes)))
        return True

    def _add(self, name: str, size: int) -> None:
        self._sizes[name] = size
        self._used += size

    def _remove(self, name: str) -> None:
        size = self._sizes.pop(name, None)
        if size is not None:
            self._used -= size
            with suppress(OSError):  # gone already, or for the next start to count
                (self.folder / name).unlink()


def _hold(folder: Path) -> None:
    """Keep other servers out of ``folder`` until this process ends: each would count only its own files, and remove
    what the other is writing. ``ConfigError`` where another one has it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    status = os.fstat(opened)
    if (status.st_dev, status.st_ino) in _held:
        os.close(opened)
        return
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(opened)
        why = "another server uses it; give each server a folder of its own"
        raise ConfigError(f"[encoder_cache] disk_folder {folder} cannot be used: {why}") from error
    except OSError as error:  # some network file systems know no locks
        logger.warning("the encoder cache cannot keep other servers out of %s: %s", folder, error.strerror)
    _held[status.st_dev, status.st_ino] = opened


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """A file's header, and its tensors, on the CPU.

    Read and not mapped: of a mapped file, what is cut off or written over later would be so in memory, too, after the
    hash, and a page that is gone ends the process.
    """
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header.get("__metadata__", {}), load(data)


def _label(key: bytes, entry: Mapping[str, Tensor]) -> dict[str, str]:
    """A file's header: its key, and the SHA-256 of names, types, shapes and contents."""
    made = sha256()
    for name, tensor in sorted(entry.items()):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        made.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return {"key": key.hex(), "sha256": made.hexdigest()}
