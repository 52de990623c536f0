"""What a process keeps of its memory, and when it gives it back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

import pytest

from mmserve import memory
from mmserve.memory import Trimmer, available, limit_address_space, resident


class Clock:
    """A clock that a trimmer's pauses move on; ``meanwhile`` is called in the middle of the first one."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._time = 1000.0
        self.pauses: list[float] = []
        self._meanwhile = meanwhile

    def now(self) -> float:
        return self._time

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._time += seconds / 2
        if len(self.pauses) == 1:
            self._meanwhile()
        self._time += seconds / 2


def test_memory_is_given_back_once_for_all_who_asked() -> None:
    asked, released = threading.Event(), threading.Semaphore(0)
    clock = Clock(lambda: asked.wait(30))
    trimmer = Trimmer(lambda: released.release(), after=0.5, within=60.0, now=clock.now, sleep=clock.sleep)
    for _ in range(20):
        trimmer.soon()
    asked.set()
    assert released.acquire(timeout=30)
    assert not released.acquire(timeout=0.1)
    trimmer.soon()
    assert released.acquire(timeout=30), "it can be asked again"


def test_a_request_puts_the_release_off() -> None:
    released = threading.Event()
    clock = Clock(lambda: trimmer.soon())
    trimmer = Trimmer(released.set, after=0.5, within=60.0, now=clock.now, sleep=clock.sleep)
    trimmer.soon()
    assert released.wait(30)
    assert clock.pauses == [0.5, 0.25], "until half a second after the second request"


def test_a_release_is_not_put_off_beyond_its_limit() -> None:
    released = threading.Event()
    clock = Clock(lambda: trimmer.soon())
    trimmer = Trimmer(released.set, after=60.0, within=0.5, now=clock.now, sleep=clock.sleep)
    trimmer.soon()
    assert released.wait(30)
    assert clock.pauses == [0.5]


def test_without_the_files_of_linux_memory_is_asked_of_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    here, free = resident(), available()

    def missing(*_: object) -> NoReturn:
        raise FileNotFoundError

    monkeypatch.setattr(memory.os, "open", missing)
    monkeypatch.setattr(memory.Path, "read_text", missing)
    assert 0.5 < resident() / here < 2
    assert 0.2 < available() / free < 5


def test_where_no_limit_holds_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> NoReturn:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(memory.resource, "setrlimit", refused)
    limit_address_space(1 << 30)
