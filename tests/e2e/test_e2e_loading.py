"""``mmserve serve`` while its models load: it listens, says that it is not ready, and can be ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from e2e_helpers import PATIENCE, command, wait_for
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mmserve.client import Client
from mmserve.errors import NotFound, Unavailable
from mmserve.models.names import shipped_folder

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class GatedModel:
    """A checkpoint whose loading waits until ``open``: its ``config.json`` is a pipe that nobody writes to before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(shipped_folder("bundled"), folder)
        self._config = folder / "config.json"
        self._kept = self._config.rename(folder / "config.kept")
        os.mkfifo(self._config)

    def open(self, text: str | None = None) -> None:
        """Let loading go on, with ``text`` as the configuration; waits until loading has come to it."""
        with self._config.open("w") as pipe:
            self._kept.replace(self._config)  # for whoever reads it again
            pipe.write(self._config.read_text() if text is None else text)


class Process:
    """``mmserve serve`` in a process of its own, from the moment that it listens."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mmserve", "serve", "--set", "server.port=0", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        line = wait_for(f"it to listen: {self.stderr()}", self._listening)
        self.address = line.partition("listening on ")[2].partition(",")[0]

    def _listening(self) -> str:
        assert self.process.poll() is None, self.stderr()
        return next((line for line in self.stderr().splitlines() if "listening on " in line), "")

    def stderr(self) -> str:
        return self.log.read_text()

    def health(self) -> int:
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE).status


@contextmanager
def listening(folder: Path, *arguments: str) -> Iterator[Process]:
    found = Process(folder / "stderr.txt", *arguments)
    with found.process:
        try:
            yield found
        finally:
            found.process.kill()


def test_a_server_listens_while_it_loads_and_serves_what_is_loaded(tmp_path: Path) -> None:
    late = GatedModel(tmp_path / "late")
    with (
        listening(tmp_path, "--model", "bundled", "--model", str(late.folder)) as server,
        Client(server.address, timeout=PATIENCE) as client,
    ):
        assert server.health() == NOT_SERVING
        with pytest.raises(Unavailable, match="'late' is loading"):
            client.generate("x", model="late", timeout=3)
        with pytest.raises(NotFound, match="no model 'other' here; there is reference, late"):
            client.generate("x", model="other")

        def first() -> bool:
            try:
                return bool(client.generate("How many?", max_new_tokens=2, timeout=3).forwards)
            except Unavailable as error:
                assert "'reference' is loading" in error.message
                return False

        wait_for("the first model to serve", first)
        assert [model.name for model in client.models()] == ["reference"]
        assert server.health() == NOT_SERVING, "one model is still loading"
        late.open()
        wait_for("all to serve", lambda: server.health() == SERVING)
        assert client.generate("How many?", model="late", max_new_tokens=2).forwards
        assert [model.name for model in client.models()] == ["reference", "late"]
        assert server.process.stdout is not None
        assert server.process.stdout.readline() == f"mmserve serves reference, late on {server.address}\n"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
    log = server.stderr()
    assert "Traceback" not in log
    assert log.count("kernels of reference: ") == log.count("kernels of late: ") == 1 and "runs as" not in log
    assert "method=/mmserve.v1.GenerationService/Generate" in log and "/grpc.health.v1" not in log


def test_while_a_model_loads_its_port_is_taken_and_a_signal_ends_the_server_cleanly(tmp_path: Path) -> None:
    late = GatedModel(tmp_path / "late")
    with listening(tmp_path, "--model", str(late.folder), "--log-format", "json") as server:
        with Client(server.address) as client, pytest.raises(Unavailable, match="loading"):
            client.models(timeout=3)
        port = server.address.rpartition(":")[2]
        again = command("serve", "--model", str(late.folder), "--set", f"server.port={port}")  # would wait for ever
        assert again.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in again.stderr
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert server.process.stdout is not None and server.process.stdout.read() == ""
    log = server.stderr()
    records = [json.loads(line) for line in log.splitlines()]
    assert [r["message"] for r in records[-2:]] == ["SIGTERM: draining", "stopped"]
    assert all({"time", "level", "logger", "message"} <= set(r) and r["level"] == "INFO" for r in records)
