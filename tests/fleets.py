"""A cluster of real Ray actors for tests, and requests to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import Call
from helpers import ask, picture
from lora_checkpoints import adapter_tensors, save_adapter
from qwen_checkpoints import qwen, save_sdar

from mmserve.cluster import ray_actors
from mmserve.cluster.config import cluster_config
from mmserve.cluster.coordinator import Coordinator
from mmserve.cluster.fleet import Fleet
from mmserve.config import Config, EngineConfig, ModelConfig
from mmserve.core.constraint import ConstraintSpec, JsonSchema
from mmserve.core.events import Delta, Finished
from mmserve.core.request import Policy, Request
from mmserve.core.stats import Stats

PATIENCE = 120.0
#: Of the bundled models, and of one with block diffusion.
RECOMPUTE = {"bundled": "none", "bundled-causal": "last", "sdar": "block"}
CLEAN = Stats(live=0, queued=0, pages_in_use=0, held=0)
SCHEMA = ConstraintSpec(JsonSchema('{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'))


def settings(folder: Path) -> Config:
    """The bundled models, and a tiny one with block diffusion, which has the adapters ``red`` and ``blue``."""
    tiny = qwen("qwen3")
    save_sdar(tiny, folder / "sdar", block_size=4)
    for seed, name in enumerate(("red", "blue")):
        save_adapter(folder / "adapters" / name, adapter_tensors(tiny, seed))
    paths = ("bundled", "bundled-causal", str(folder / "sdar"))
    adapters = str(folder / "adapters")
    engine = EngineConfig(max_tokens=512, max_running=16, torch_threads=1, adapter_folder=adapters)
    return Config(models=tuple(ModelConfig(path=path) for path in paths), engine=engine)


@contextmanager
def fleet(config: Config, roles: str, **changes: Any) -> Iterator[Fleet]:
    """Workers with these ``roles``, such as "e p d"; Ray must have started.

    None is taken for a slow one unless ``slow_factor`` says so: tests share their processors with others.
    """
    workers = [{"roles": each} for each in roles.split()]
    cluster = {"switching": False, "spares": 0, "slow_factor": 0, **changes}
    made = Fleet(config, cluster_config({"cluster": cluster, "workers": workers}))
    try:
        for coordinator in made.start().values():
            coordinator.start()
        yield made
        for name, coordinator in made.coordinators.items():
            until(lambda coordinator=coordinator: coordinator.stats() == CLEAN, f"{name} to be empty")
        until(lambda: made.payloads.held == 0, "no state to be kept")
    finally:
        made.stop()


def start_ray(cpus: int = 8) -> None:
    """A local Ray cluster for this process."""
    ray_actors._PLACING = PATIENCE  # a busy machine finds the room late
    ray_actors.start(cluster_config({"workers": [{"roles": "epd", "cpus": float(cpus)}]}))


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> None:
    """Wait until ``condition`` holds."""
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)


def submit(coordinator: Coordinator, *requests: Request) -> list[Call]:
    calls = [Call(request) for request in requests]
    for call in calls:
        coordinator.submit(call.request, call.sink)
    return calls


def finished(call: Call) -> Finished:
    until(lambda: call.ended, f"the end of {call.request.id}")
    return call.finished()


def text(call: Call) -> str:
    return "".join(event.text for event in call.events if isinstance(event, Delta))


def same(one: Finished, other: Finished) -> None:
    for name in ("text", "tokens", "forwards", "edits", "holes", "log_weight", "reason"):
        assert getattr(one, name) == getattr(other, name), name
    usage = replace(one.usage, cached_tokens=0)
    assert usage == replace(other.usage, cached_tokens=0)


def kill(found: Fleet, index: int, what: signal.Signals = signal.SIGKILL) -> None:
    described = found.members[index].described
    assert described is not None
    os.kill(described.pid, what)


def requests(model: str, count: int = 4, **more: Any) -> list[Request]:
    """Unlike requests to ``model``: with images and constraints, drawn and not."""
    sees = "sdar" not in model
    found = []
    for i in range(count):
        images = (picture(10 + i), picture(50 + i)) if sees and i % 2 == 0 else ()
        recompute = Policy(name=RECOMPUTE[model])
        drawn = {"temperature": 0.8, "seed": i} if i % 3 else {}
        one = ask(
            f"{model}.{i}",
            f"What is number {i}?",
            images=images,
            max_new_tokens=24,
            recompute=recompute,
            **drawn,
            **more,
        )
        one = replace(one, model=model, streaming=replace(one.streaming, tokens=True))
        found.append(replace(one, constraint=SCHEMA) if i % 4 == 1 else one)
    return found
