"""The policies that a request can name: by a string, or by a class that has their numbers.

The SDK exports these classes, the server's policies inherit their numbers, and a message has their fields. A class's
policy goes by its name in snake case: ``DkvDecode`` is ``dkv_decode``.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from mmserve.core.policies.commit import (
    BaseCommit,
    Commit,
    Confident,
    DraftModel,
    EarlyCommit,
    Edit,
    EntropyBound,
    Factor,
    Guided,
    Learned,
    Ngram,
    Scheduler,
    Threshold,
)
from mmserve.core.policies.image_reuse import Blend, ImageReuse, KvShare, LegoLink, RandomReuse
from mmserve.core.policies.kv_reduction import ExpectedAttention, HeavyHitters, KvReduction, SinkWindow, VisualCache
from mmserve.core.policies.recompute import Adaptive, DkvDecode, DkvGreedy, Recompute

Pruner = Literal[
    "none",
    "random",
    "resize",
    "cls_attention",
    "hired",
    "visionzip",
    "mustdrop",
    "tome",
    "column_attention",
    "fastv",
    "redvtp",
]
#: Plain decoding, the model's default, the fastest within three points; or the least that is wanted (plain = 1).
Quality = Literal["exact", "balanced", "fast"] | float

#: What a request chooses a policy for, and how it may be named.
KINDS: dict[str, Any] = {
    "recompute": Recompute,
    "commit": Commit,
    "kv_reduction": KvReduction,
    "image_reuse": ImageReuse,
    "pruner": Pruner,
}


def policy_name(policy: Any) -> str:
    """The name of ``policy``: a class with numbers, or an instance of one."""
    kind = policy if isinstance(policy, type) else type(policy)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _members(kind: Any) -> list[Any]:
    """The names and classes that a union or ``Literal`` is made of."""
    return [kind] if isinstance(kind, type | str) else [m for part in get_args(kind) for m in _members(part)]


def policy_names(kind: str) -> tuple[str, ...]:
    """Names of the policies of one of ``KINDS``."""
    return tuple(dict.fromkeys(m if isinstance(m, str) else policy_name(m) for m in _members(KINDS[kind])))


#: Policies with numbers, by name; no two of them share one.
CLASSES: dict[str, type[Any]] = {
    policy_name(m): m for kind in KINDS.values() for m in _members(kind) if isinstance(m, type)
}

__all__ = [
    "Adaptive",
    "BaseCommit",
    "Blend",
    "Commit",
    "Confident",
    "DkvDecode",
    "DkvGreedy",
    "DraftModel",
    "EarlyCommit",
    "Edit",
    "EntropyBound",
    "ExpectedAttention",
    "Factor",
    "Guided",
    "HeavyHitters",
    "ImageReuse",
    "KvReduction",
    "KvShare",
    "Learned",
    "LegoLink",
    "Ngram",
    "Pruner",
    "Quality",
    "RandomReuse",
    "Recompute",
    "Scheduler",
    "SinkWindow",
    "Threshold",
    "VisualCache",
]
