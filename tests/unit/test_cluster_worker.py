"""A worker of a cluster, without models."""

from __future__ import annotations

import pytest

from mmserve.cluster import worker as module
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
