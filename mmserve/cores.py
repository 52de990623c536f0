"""Processor cores of this process."""

from __future__ import annotations

import os


def available_cores() -> int:
    """How many cores this process may use; where the system does not report that, how many the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
