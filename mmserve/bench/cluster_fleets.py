"""Fleets of the bundled models, and requests to them, for the sections of ``mmserve bench cluster``."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mmserve.assembly import build_engines
from mmserve.cluster.config import cluster_config
from mmserve.cluster.coordinator import Coordinator
from mmserve.cluster.fleet import Fleet
from mmserve.config import Config, EngineConfig, ModelConfig
from mmserve.core.request import Diffusion, ImagePart, Message, Policy, Request, Sampling, TextPart
from mmserve.engine.engine import Engine
from mmserve.plan.pictures import picture

#: Side of a picture in pixels.
SIDE = 72


def config(path: str) -> Config:
    """The configuration of a bundled model on one thread, with a queue for all requests of a section."""
    engine = EngineConfig(torch_threads=1, max_queued=4096, max_wait_seconds=0.0)
    return Config(models=(ModelConfig(path=path),), engine=engine)


@contextmanager
def fleet(
    path: str, roles: str, *, engine: EngineConfig | None = None, **changes: Any
) -> Iterator[tuple[Fleet, Coordinator]]:
    """Workers with these ``roles``, such as "e p d", and the coordinator of their model."""
    workers = [{"roles": each} for each in roles.split()]
    settings = {"switching": False, **changes}
    served = config(path) if engine is None else replace(config(path), engine=engine)
    made = Fleet(served, cluster_config({"cluster": settings, "workers": workers}))
    try:
        [coordinator] = made.start().values()
        coordinator.start()
        yield made, coordinator
    finally:
        made.stop()


@contextmanager
def one_process(path: str) -> Iterator[Engine]:
    """An engine with the same model in this process."""
    [engine] = build_engines(config(path)).values()
    with started(engine):
        yield engine


@contextmanager
def started(engine: Engine, roles: Collection[str] = ()) -> Iterator[None]:
    """Run ``engine`` within the context, limited to ``roles`` if any are given."""
    engine.start()
    try:
        if roles:
            engine.serve_roles(roles)
        yield
    finally:
        engine.stop()


def request(name: str, images: int, tokens: int, recompute: str, seed: int, side: int = SIDE) -> Request:
    """A question about ``images`` distinct pictures of ``side`` × ``side`` pixels."""
    parts: list[ImagePart | TextPart] = [ImagePart(picture(seed * 64 + i, side)) for i in range(images)]
    parts.append(TextPart(f"Tell me all about number {seed}."))
    return Request(
        id=name,
        model="",
        messages=(Message("user", tuple(parts)),),
        sampling=Sampling(max_new_tokens=tokens, temperature=1.0, seed=seed),
        diffusion=Diffusion(recompute=Policy(name=recompute)),
    )
