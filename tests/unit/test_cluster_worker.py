"""A worker of a cluster, without models."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mmserve.cluster import worker as module
from mmserve.cluster.link import connected
from mmserve.config import Config, ServerConfig


def test_a_worker_that_is_closed_sends_its_last_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(module, "build_engines", lambda _config: {})
    monkeypatch.setattr(module.traces, "configure", lambda endpoint: lambda: ended.append(endpoint))
    worker = module.Worker()
    worker.load(
        Config(server=ServerConfig(otlp_endpoint="receiver:4317")), transport="object_store", linked=False, kv_bits=0
    )
    assert not ended
    worker.close()
    assert ended == ["receiver:4317"]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> module.Worker:
    monkeypatch.setattr(module, "build_engines", lambda _config: {})
    return module.Worker()


def test_a_spare_reports_nothing_that_nobody_reads(worker: module.Worker) -> None:
    """What it reported would wait in its memory for as long as it does."""
    came: list[Any] = []
    first = threading.Event()

    def read() -> None:
        came.append(next(worker.events()))
        first.set()

    threading.Thread(target=read, daemon=True).start()
    assert not first.wait(3 * module.HEARTBEAT_SECONDS) and not came
    worker.serve(["decode"], 0, 0)
    assert first.wait(60)


@pytest.mark.timeout(120)
def test_a_call_that_fails_does_not_end_those_after_it(worker: module.Worker, caplog: pytest.LogCaptureFixture) -> None:
    described = worker.load(Config(), transport="shared_memory", linked=True, kv_bits=0)
    link = connected(described.listener)
    link.send(("cancel", ("of a model that it does not have", ["x"], None)))
    link.send(("serve", (["decode"], 0, 0)))
    assert next(link.messages()), "a sign of life, which comes after the call"
    assert "a call of 'cancel' failed" in caplog.text
    link.close()
