"""What containers and clusters run beside a server: the health check of the image, and what keeps a cluster's front."""

from __future__ import annotations

import subprocess
import sys

import pytest
from deployed import DEPLOY
from echo_server import EchoEngine, threaded


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (DEPLOY, DEPLOY / "ray"):
        monkeypatch.syspath_prepend(str(folder))


def test_the_health_check_says_whether_a_server_serves() -> None:
    command = [sys.executable, str(DEPLOY / "healthcheck.py")]
    with threaded(EchoEngine()) as address:
        assert subprocess.run([*command, address], check=False).returncode == 0
    gone = subprocess.run([*command, address], check=False, capture_output=True, text=True)
    assert gone.returncode == 1 and "UNAVAILABLE" in gone.stderr


def test_a_front_that_ends_or_does_not_serve_is_noticed() -> None:
    from mmserve_front import FrontProcess

    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    with threaded(EchoEngine()) as address:
        front = FrontProcess(sleeps, address)
        front.check()
        front._process.kill()
        front._process.wait()
        with pytest.raises(RuntimeError, match="ended with exit code -9"):
            front.check()
        front = FrontProcess(sleeps, address)
    with pytest.raises(RuntimeError, match="does not serve"):
        front.check()
    front.stop(5)
    assert front._process.returncode == -15
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        FrontProcess([sys.executable, "-c", "raise SystemExit(3)"], address, start_seconds=60)
