"""Memory of this process: resident and available bytes, limits, and return of freed memory to the system."""

import contextlib
import ctypes
import importlib
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds after the last large release until freed memory is returned to the system, and the maximum delay: memory that
#: is reused before need not be faulted in again.
_TRIM_AFTER, _TRIM_WITHIN = 5.0, 60.0
_PAGE = os.sysconf("SC_PAGE_SIZE")

_library = ctypes.CDLL(None)


def resident() -> int:
    """Resident memory of this process in bytes."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # 10 us, with ``pathlib`` 36: searches read it twice
    except OSError:
        return int(_psutil().Process().memory_info().rss)
    try:
        return int(os.read(file, 128).split()[1]) * _PAGE
    finally:
        os.close(file)


def available() -> int:
    """Bytes that this process may still allocate: free memory of the machine, within the control group's limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return int(_psutil().virtual_memory().available)
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    for most, held in ((folder / "memory.max", folder / "memory.current") for folder in _control_groups()):
        try:
            limit, cached = most.read_text().strip(), (most.parent / "memory.stat").read_text()
            used = int(held.read_text())
        except OSError:
            continue
        if limit != "max":
            files = next((int(x.split()[1]) for x in cached.splitlines() if x.startswith("inactive_file ")), 0)
            free = min(free, int(limit) - used + files)
    return max(0, free)


def _control_groups() -> list[Path]:
    """Folders of this process's control group (version 2) and its ancestors; empty if there are none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    root = Path("/sys/fs/cgroup")
    folder = root / own.lstrip("/")
    return [each for each in (folder, *folder.parents) if each.is_relative_to(root)]


def _psutil() -> Any:
    """psutil, a dependency on systems other than Linux."""
    return importlib.import_module("psutil")


def limit_address_space(size: int) -> None:
    """Limit the address space of this process to ``size`` bytes, so that larger allocations fail; does nothing on
    systems without an effective limit (macOS)."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def trim() -> None:
    """Return freed memory to the system, if the C library supports it: it would keep it otherwise."""
    release = getattr(_library, "malloc_trim", None)
    if release is not None:
        release(0)


class Trimmer:
    """Calls ``release`` in a thread, ``after`` seconds without a further request, and at most ``within`` seconds after
    the first one. ``now`` and ``sleep`` are the clock."""

    def __init__(
        self,
        release: Callable[[], None],
        after: float = _TRIM_AFTER,
        within: float = _TRIM_WITHIN,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._release, self._after, self._within = release, after, within
        self._now, self._sleep = now, sleep
        self._lock = threading.Lock()
        self._asked = 0.0  # time of the last request
        self._running = False

    def soon(self) -> None:
        """Request a release; from any thread."""
        with self._lock:
            self._asked = self._now()
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="mmserve-trim", daemon=True).start()

    def _run(self) -> None:
        limit = self._now() + self._within
        while True:
            with self._lock:
                left = min(self._asked + self._after, limit) - self._now()
                if left <= 0:
                    self._running = False
                    break
            self._sleep(left)
        self._release()


#: Calls ``trim`` a few seconds after the last request.
trim_soon = Trimmer(trim).soon
