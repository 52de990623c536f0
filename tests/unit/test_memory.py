"""What a process keeps of its memory, and when it gives it back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mmserve import memory
from mmserve.memory import Trimmer, large_pages_on_request


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


_STARTED = """
import os, sys
from pathlib import Path
from mmserve.memory import restart_with_large_pages
print(os.getpid(), sys.argv[1:], os.environ.get("GLIBC_TUNABLES"), flush=True)
restart_with_large_pages()
data = bytearray(b"x") * (64 << 20)
for line in Path("/proc/self/smaps").read_text().splitlines():
    if line.startswith("Size:"):
        size = int(line.split()[1]) << 10
    elif line.startswith("VmFlags:") and size >= len(data):
        print("large" if "hg" in line.split() else "small")
"""


def _started(**environment: str) -> list[str]:
    """What a program prints that asks for large pages: itself at each start, and whether 64 MiB are in such."""
    environment = {**{name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}, **environment}
    command = [sys.executable, "-c", _STARTED, "an argument"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.skipif(not large_pages_on_request(), reason="the system gives no large pages on request")
def test_a_program_is_started_anew_once_for_large_pages() -> None:
    before, after, *pages = _started(GLIBC_TUNABLES="glibc.malloc.check=0")
    number = before.split()[0]
    assert before == f"{number} ['an argument'] glibc.malloc.check=0"
    assert after == f"{number} ['an argument'] glibc.malloc.check=0:glibc.malloc.hugetlb=1", "the same process"
    assert "large" in pages


def test_a_setting_of_the_environment_stays() -> None:
    started, *pages = _started(GLIBC_TUNABLES="glibc.malloc.hugetlb=0")
    assert started.endswith("glibc.malloc.hugetlb=0")
    assert "large" not in pages


def test_only_systems_that_give_large_pages_on_request_are_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = tmp_path / "enabled"
    monkeypatch.setattr(memory, "_LARGE_PAGES", setting)
    assert not large_pages_on_request()
    for modes, expected in (("always madvise [never]", False), ("[always] madvise never", False)):
        setting.write_text(f"{modes}\n")
        assert large_pages_on_request() is expected
    setting.write_text("always [madvise] never\n")
    for version, expected in (("glibc 2.36", True), ("glibc 2.9", False), ("glibc 3.0", True), ("", False)):
        monkeypatch.setattr(os, "confstr", lambda name, version=version: version)
        assert large_pages_on_request() is expected
