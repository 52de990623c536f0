"""What a worker answers beside its requests: about the adapters and the caches of one of its engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmserve.engine import Engine

#: Each gets the engine, and what the asker gave; returns plain data, which Ray carries.
QUESTIONS: Mapping[str, Callable[..., Any]] = {
    "hold": lambda engine, name: engine.adapters.hold(name),
    "forget": lambda engine, keys: engine.adapters.forget(keys),
    "blocks": lambda engine: engine.kept.blocks(),
    "pin": lambda engine, ids, pinned: engine.kept.pin(ids, pinned),
    "drop": lambda engine, visual, pages: engine.kept.forget(visual, pages),
    "prefix_of": lambda engine, request: engine.kept.prefix_of(request),
}


def answer(engine: Engine, question: str, arguments: Sequence[Any]) -> Any:
    """What ``QUESTIONS[question]`` returns of ``engine``; raises what it raises."""
    return QUESTIONS[question](engine, *arguments)
