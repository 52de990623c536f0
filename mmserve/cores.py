"""Number of CPU cores."""

from __future__ import annotations

import os


def available_cores() -> int:
    """The number of cores available to this process (its CPU affinity); if unknown, the number in the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
