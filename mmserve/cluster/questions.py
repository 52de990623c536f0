"""Calls that a worker answers besides its requests: about adapters, caches and streams of one of its engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mmserve.cluster.worker_streams import WorkerStreams, frame_of
from mmserve.engine.engine import Engine


@dataclass(frozen=True)
class Subject:
    """One of a worker's engines, with its video streams."""

    engine: Engine
    streams: WorkerStreams


#: Functions of the subject and the caller's arguments; they return plain data, which Ray can send.
QUESTIONS: Mapping[str, Callable[..., Any]] = {
    # tokens
    "prompt_ids": lambda of, *given: of.engine.prompt_ids(*given),
    "token_strs": lambda of, ids: of.engine.token_strs(ids),
    "detokenized": lambda of, ids: of.engine.detokenized(ids),
    # adapters
    "hold": lambda of, name: of.engine.adapters.hold(name),
    "discard": lambda of, keys: of.engine.adapters.discard(keys),
    # caches
    "blocks": lambda of: of.engine.caches.blocks(),
    "pin": lambda of, ids, pinned: of.engine.caches.pin(ids, pinned),
    "drop": lambda of, visual, pages: of.engine.caches.discard(visual, pages),
    "others.blocks": lambda of, served, model: of.engine.caches.others(served, model).blocks(),
    "others.pin": lambda of, served, model, ids, pinned: of.engine.caches.others(served, model).pin(ids, pinned),
    "others.drop": lambda of, served, model, ids: of.engine.caches.others(served, model).drop(ids),
    "prefix_of": lambda of, request: of.engine.caches.prefix_of(request),
    # sessions of video
    "stream.open": lambda of, *given: of.streams.open(*given),
    "stream.append": lambda of, name, number, *frame: of.streams.append(name, number, frame_of(*frame)),
    "stream.save": lambda of, name: of.streams.save(name),
    "stream.ask": lambda of, *given: of.streams.ask(*given),
    "stream.stats": lambda of, name: of.streams.stats(name),
    "stream.close": lambda of, name: of.streams.close(name),
    "stream.check": lambda of, *given: of.streams.check(*given),
    "stream.judge": lambda of, *given: of.streams.judge(*given),
}
