"""The options of ``video_session``, typed; ``core.options`` has their ranges, defaults and meanings."""

from __future__ import annotations

from typing import Literal

from mmserve.client.options import SharedOptions, describe
from mmserve.core.options import SESSION


class SessionOptions(SharedOptions, total=False):
    """Options of a session; one that is left out or None has its default. Those of ``generate`` are for questions that
    do not set any of their kind themselves."""

    memory: Literal["window", "carrier", "similarity", "group", "recall"] | None
    positions: Literal["renumber", "gaps", "reanchor"] | None
    budget: int | None
    host_bytes: int | None
    carriers: int | None
    rate: float | None
    scene_similarity: float | None
    scene_frames: int | None
    detail_every: int | None
    overload: Literal["block", "drop_oldest", "thin"] | None


describe(SessionOptions, SESSION)
