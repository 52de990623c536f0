"""Scheduling priority of media decoding, below that of text generation."""

from __future__ import annotations

import os
import sys
import threading

#: The "nice" value of these threads and processes.
LOW_PRIORITY = 10


def lower_priority() -> None:
    """Give the calling thread, and threads and processes that it starts later, a low priority (Linux only)."""
    if sys.platform != "linux":  # on other systems threads have no separate priority
        return
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < LOW_PRIORITY:
        os.setpriority(os.PRIO_PROCESS, thread, LOW_PRIORITY)
