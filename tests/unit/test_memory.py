"""What a process keeps of its memory, and when it gives it back."""

from __future__ import annotations

import threading
import time

from mmserve.memory import Trimmer


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
