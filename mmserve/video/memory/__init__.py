"""Memory policies of streams by name."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.core.session import Memory
from mmserve.errors import InvalidArgument
from mmserve.video.memory.base import Kind, MemoryPolicy, Retained, Rows
from mmserve.video.memory.carrier import Carrier
from mmserve.video.memory.group import Group
from mmserve.video.memory.similarity import Similarity
from mmserve.video.memory.window import Window

POLICIES: dict[str, Callable[[Memory], MemoryPolicy]] = {
    "window": lambda _memory: Window(),
    "carrier": lambda memory: Carrier(memory.carriers),
    "similarity": lambda _memory: Similarity(),
    "group": lambda _memory: Group(),
    "recall": lambda _memory: Window(),  # evicted frames are archived in host memory (``mmserve.video.archive``)
}


def policy_of(memory: Memory) -> MemoryPolicy:
    """The policy of ``memory``; raises ``InvalidArgument`` for an unknown name."""
    if memory.policy not in POLICIES:
        raise InvalidArgument.of("memory.policy", f"there is no policy {memory.policy!r}; known are {list(POLICIES)}")
    return POLICIES[memory.policy](memory)


__all__ = ["POLICIES", "Kind", "MemoryPolicy", "Retained", "Rows", "policy_of"]
