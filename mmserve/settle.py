"""What a process has loaded at its start is no work for the garbage collector, and what a step makes is hardly any."""

import ctypes
import gc
import os
import threading
from pathlib import Path

#: Objects made and not gone yet, from which on the collector looks at them. At 700, Python's own, most of what it finds
#: is what a search is at, which is looked at again and again: it took 4% of searches' time, now 1%.
_YOUNG = 5_000


#: Seconds after something large has ended, until what was freed goes back to the system.
_TRIM_AFTER = 5.0
_trimming = threading.Lock()
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of memory that this process has now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE
    except OSError:
        return 0


def trim() -> None:
    """Give freed memory back to the system, where its C library can: it keeps it otherwise."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)


def trim_soon() -> None:
    """``trim`` in a few seconds, once for all that ask until then; from any thread."""
    if _trimming.acquire(blocking=False):
        timer = threading.Timer(_TRIM_AFTER, _trim_now)
        timer.daemon = True
        timer.start()


def _trim_now() -> None:
    _trimming.release()
    trim()


def settle() -> None:
    """Take all objects there are out of the collector's rounds: a full one over a model's vocabulary takes 50 ms and
    more, in the middle of some request's step. Call it once everything is loaded that stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
