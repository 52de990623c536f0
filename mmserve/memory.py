"""Memory of this process as its C library and the system manage it: what it has, what it keeps, what it gives back."""

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

#: Seconds without anything large that has ended, until what was freed goes back to the system, and how long that may
#: be put off: what is used again meanwhile need not be faulted in again.
_TRIM_AFTER, _TRIM_WITHIN = 5.0, 60.0
_PAGE = os.sysconf("SC_PAGE_SIZE")

_library = ctypes.CDLL(None)


def resident() -> int:
    """Bytes of memory that this process has now."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # 10 us, by ``pathlib`` 36: searches ask twice
    except OSError:
        return int(_psutil().Process().memory_info().rss)
    try:
        return int(os.read(file, 128).split()[1]) * _PAGE
    finally:
        os.close(file)


def available() -> int:
    """Bytes of memory that this process may still take: what the machine has free, within the control group's limit."""
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
    """Folders of this process's control group (version 2) and of those above it; none where there is no such thing."""
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
    """psutil, which is installed where the system is not Linux."""
    return importlib.import_module("psutil")


def limit_address_space(size: int) -> None:
    """Have allocations fail that would give this process more than ``size`` bytes of address space; no limit where the
    system has none that holds (macOS)."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def trim() -> None:
    """Give freed memory back to the system, where the C library can: it keeps it otherwise."""
    release = getattr(_library, "malloc_trim", None)
    if release is not None:
        release(0)


class Trimmer:
    """Calls ``release`` on a thread ``after`` seconds without a further request for it, and at most ``within`` seconds
    after the first one. ``now`` and ``sleep`` are the clock."""

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
        self._asked = 0.0  # when, last
        self._running = False

    def soon(self) -> None:
        """Ask for a release; from any thread."""
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


#: Calls ``trim`` once nothing large has ended for a few seconds.
trim_soon = Trimmer(trim).soon
