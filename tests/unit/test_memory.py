"""What a process keeps of its memory, and when it gives it back."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

import pytest

from mmserve.memory import Trimmer

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted by Linux")

#: Copies a message twice, as gRPC does, and prints how many pages were faulted in for it: the first time and then.
COPIES = """
import resource, sys
from mmserve import memory

def copied():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    grown = bytearray()
    for _ in range(SIZE // len(part)):
        grown += part
    bytes(grown)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

SIZE, part = 40 << 20, bytes(1 << 20)
kept = memory.keep_blocks(128 << 20) if sys.argv[1] == "kept" else True
first, again = copied(), copied()
held = memory.resident()
memory.trim()
print(int(kept), first, again, held - memory.resident())
"""


def copies(how: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COPIES), how], capture_output=True, text=True, check=True, timeout=60
    )
    return [int(number) for number in done.stdout.split()]


@LINUX
def test_a_large_block_is_faulted_in_once_and_given_back_by_trim() -> None:
    kept, _first, again, given_back = copies("kept")
    if not kept:
        pytest.skip("the C library has no such setting")
    _, _, plain, _ = copies("plain")
    assert plain > 10_000, "80 MiB are faulted in each time"
    assert again < plain / 10
    assert given_back > 60 << 20


def test_memory_is_given_back_once_nothing_asks_any_more_or_after_a_limit() -> None:
    released = threading.Semaphore(0)
    waiting = Trimmer(lambda: released.release(), after=0.05, within=60.0)
    for _ in range(20):
        waiting.soon()
    assert released.acquire(timeout=30)
    assert not released.acquire(timeout=0.3), "once for all who asked"

    limited = Trimmer(lambda: released.release(), after=60.0, within=0.05)
    limited.soon()
    assert released.acquire(timeout=30), "however often it is asked for"
    limited.soon()
    assert released.acquire(timeout=30)


def test_a_request_puts_the_release_off() -> None:
    times = list[float]()
    trimmer = Trimmer(lambda: times.append(time.monotonic()), after=0.5, within=60.0)
    trimmer.soon()
    time.sleep(0.1)
    asked = time.monotonic()
    trimmer.soon()
    limit = asked + 30
    while not times and time.monotonic() < limit:
        time.sleep(0.02)
    assert times and times[0] >= asked + 0.5
