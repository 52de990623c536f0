"""The options of ``video_session``: defined, typed and documented once, here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from mmserve.rpc.policies import Commit, Pruner, Quality, Recompute

_Method = TypeVar("_Method", bound=Callable[..., Any])


class SessionOptions(TypedDict, total=False):
    """Options of a session; one that is left out or None has its default.

    model: name of one of the server's models that takes sessions; default the server's first.
    memory: what goes when there are more rows of K/V than ``budget``: "window" (default), "carrier", "similarity",
        "group" or "recall".
    positions: how the rows left are numbered: "renumber" (default), "gaps" or "reanchor".
    budget: rows of K/V that are kept; default 256.
    host_bytes: bytes of features of old frames that are kept for questions about the past; default 64 MiB.
    carriers: rows at most that stand for old frames, where ``memory`` makes such; default 64.
    rate: frames of segments a second that are looked at, above 0, at most 30; default 1.
    scene_similarity: in [-1, 1]; frames less similar than this to the one before begin a scene, of whose other frames
        few are looked at; default all at ``rate``.
    scene_frames: with ``scene_similarity``, frames of a scene at most; default 4.
    detail_every: every so many frames one is taken in detail, the others compactly; default all in detail.
    overload: what happens to frames that come too fast: "block" (default: pushes wait), "drop_oldest" or "thin".
    pruner: method that drops visual tokens, with one of the three amounts below; default none.
    keep_ratio: share of the visual tokens of a frame that the pruner keeps, in (0, 1]; default none.
    token_budget: number of visual tokens of a frame that it keeps, at least 1; default none.
    attention_mass: share of the attention that the kept tokens draw together, in (0, 1]; default none.
    max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stop, steps, block_length, recompute,
        commit, quality: as options of ``generate``, for questions that do not set any of their kind themselves.
    """

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


def documented_session(method: _Method) -> _Method:
    """Append the documentation of the options to the docstring of ``method``."""
    method.__doc__ = "\n\n".join(part for part in (inspect.getdoc(method), inspect.getdoc(SessionOptions)) if part)
    return method
