"""Several fronts: servers that join one Ray cluster, each with workers of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e_helpers import Process, answer, serving, wait_for
from helpers import picture

from mmserve.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Seconds: workers of a cluster that is joined import everything anew.
PATIENCE = 300.0
WORKERS = '[cluster]\naddress = "{head}"\nspares = 0\n[[workers]]\nroles = "ep"\n[[workers]]\nroles = "d"\n'


@pytest.fixture
def head() -> Iterator[str]:
    """The address of a Ray cluster with room for four workers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = str(Path(sys.executable).with_name("ray"))
    settings = os.environ | {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    start = [ray, "start", "--head", "--num-cpus=4", f"--port={port}", "--include-dashboard=false", "--block"]
    started = subprocess.Popen([*start, "--object-store-memory=134217728"], env=settings, stdout=subprocess.DEVNULL)
    try:
        wait_for("Ray's head", lambda: _listens(port))
        yield f"127.0.0.1:{port}"
    finally:
        started.terminate()
        started.wait(PATIENCE)


def test_fronts_share_a_cluster_and_not_each_other_s_end(head: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(WORKERS.format(head=head))
    with ExitStack() as stack:
        first = stack.enter_context(_front(tmp_path / "a", file))
        (tmp_path / "b").mkdir()
        lost = Process(tmp_path / "b", "--cluster", str(file), "--set", "engine.torch_threads=1")
        stack.enter_context(lost.process)
        stack.callback(lost.process.kill)
        with Client(first.address, timeout=PATIENCE) as one, Client(lost.address, timeout=PATIENCE) as other:
            told = [_told(client) for client in (one, other)]
            assert told[0] == told[1]
            lost.process.send_signal(signal.SIGKILL)
            lost.process.wait(PATIENCE)
            assert _told(one) == told[0]
        with _front(tmp_path / "c", file) as third, Client(third.address, timeout=PATIENCE) as client:
            assert _told(client) == told[0], "in the room that the lost front's workers have left"


def _told(client: Client) -> tuple[Any, ...]:
    return answer(client.generate("What is it?", images=[picture(1)], max_new_tokens=16))


@contextmanager
def _front(folder: Path, file: Path) -> Iterator[Process]:
    folder.mkdir()
    with serving(folder, "--cluster", str(file), "--set", "engine.torch_threads=1") as found:
        yield found
        found.process.send_signal(signal.SIGTERM)


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0
