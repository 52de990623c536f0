"""The options of ``video_session``, typed; ``core.options`` has their ranges, defaults and meanings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from mmserve.client.options import describe
from mmserve.core.options import SESSION
from mmserve.core.policies.commit import Commit
from mmserve.core.policies.pruner import Pruner
from mmserve.core.policies.recompute import Recompute
from mmserve.core.tuning import Quality


class SessionOptions(TypedDict, total=False):
    """Options of a session; one that is left out or None has its default. Those of ``generate`` are for questions that
    do not set any of their kind themselves."""

    model: str | None
    memory: Literal["window", "carrier", "similarity", "group", "recall"] | None
    positions: Literal["renumber", "gaps", "reanchor"] | None
    budget: int | None
    host_bytes: int | None
    carriers: int | None
    rate: float | None
    scene_similarity: float | None
    scene_frames: int | None
    detail_every: int | None
    overload: Literal["block", "drop_oldest", "thin"]
    pruner: Pruner | None
    keep_ratio: float | None
    token_budget: int | None
    attention_mass: float | None
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str]
    steps: int | None
    block_length: int | None
    recompute: Recompute | None
    commit: Commit | None
    quality: Quality | None


describe(SessionOptions, SESSION)
