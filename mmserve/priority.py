"""Scheduling priority of work on media, below that of text, where both want a core."""

from __future__ import annotations

import os
import sys
import threading

#: "nice" of such threads and processes.
LOW_PRIORITY = 10


def lower_priority() -> None:
    """Give the calling thread, and threads and processes that it starts from now on, a low priority (Linux only)."""
    if sys.platform != "linux":  # elsewhere, threads have no priority of their own
        return
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < LOW_PRIORITY:
        os.setpriority(os.PRIO_PROCESS, thread, LOW_PRIORITY)
