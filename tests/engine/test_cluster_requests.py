"""Requests on real workers that end at any moment: answers as of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import Call, eventually
from helpers import ask
from local_workers import LocalWorker, local_cluster

from mmserve.assembly import build_engines
from mmserve.cluster.config import ClusterSettings
from mmserve.config import Config, EngineConfig, ModelConfig
from mmserve.core.request import Request, Stage

pytestmark = [pytest.mark.timeout(300)]


def test_an_adapters_block_length_holds_on_every_worker() -> None:
    """The adapter for tools of the bundled model has blocks of 4 tokens, the model of 32."""
    config = Config(
        models=(ModelConfig(path="bundled"),), engine=EngineConfig(max_tokens=512, max_running=8, torch_threads=1)
    )
    request = replace(ask("one", "What is there?", max_new_tokens=24), model="bundled", adapter="tools")
    request = replace(request, streaming=replace(request.streaming, tokens=True))
    [engine] = build_engines(config).values()
    engine.start()
    calls = [Call(request), *(Call(_with_blocks(request, length)) for length in (4, 32))]
    for each in calls:
        engine.submit(each.request, each.sink)
    own, four, model = (each.finished() for each in calls)
    engine.stop()
    assert own.tokens == four.tokens != model.tokens

    roles = {"ep": ("encode", "prefill"), "d0": ("decode",), "d1": ("decode",)}
    workers = [LocalWorker(name, each, config) for name, each in roles.items()]
    with local_cluster(config, ClusterSettings(), *workers) as made:
        groups, call = made._in_flight.groups, Call(request)

        def saved() -> bool:
            parts = [part for group in list(groups.values()) for part in list(group.parts.values())]
            return any(part.point.stage is Stage.READY for part in parts)

        made.submit(request, call.sink)
        eventually(lambda: saved() or call.ended, "the answer is begun, and saved")
        for group in list(groups.values()):
            at = [part.worker for part in list(group.parts.values())]
            for worker in [worker for worker in workers if worker.name in at]:
                worker.kill()
        assert call.finished().tokens == own.tokens


def _with_blocks(request: Request, length: int) -> Request:
    return replace(request, id=f"{length}", diffusion=replace(request.diffusion, block_length=length))
