"""What travels between stages that do not share a process: arrays, tensors, numbers and texts, and nothing else.

No parser, no page id of a store, no object that is somebody's. A policy is made again from its request, and so is what
text is decoded by; random draws depend on seed, step and position alone (``decode/sampler.py``), so the step that a
canvas counts is all the state that a generator has. ``transfer/payloads.py`` gives each kind its bytes and its version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmserve.core.candidates import Candidates
from mmserve.core.canvas import Canvas
from mmserve.core.canvas_record import CanvasRecord
from mmserve.core.constraint_state import ConstraintState
from mmserve.core.encoded import DeepStack, Encoded
from mmserve.core.tensors import Tensor


@dataclass(frozen=True)
class EncodedPayload:
    """Encode → prefill: a prompt, and the constraint of the request, or of each sample where it is not split yet."""

    encoded: Encoded
    constraints: tuple[ConstraintState, ...] = ()


@dataclass(frozen=True)
class VisualPayload:
    """Encode → encode: visual tokens of some of a request's media, as the cache has them, by the hex of their keys."""

    entries: Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class KVState:
    """K/V of the first ``positions`` of a sequence, whole pages of them: ``tensors`` by the names of their store.

    ``ahead``: so many ``KVChunk`` went before it and hold all of them; it has no tensors then.
    """

    positions: int
    page_size: int
    tensors: Mapping[str, Tensor]
    ahead: int = 0


@dataclass(frozen=True)
class KVChunk:
    """Prefill → decode, ahead of the rest: K/V of some layers of the pages from ``first`` on, counted within their
    request; ``tensors`` as of ``KVState``. ``positions``: so many of them, from the first, hold anything."""

    first: int
    page_size: int
    tensors: Mapping[str, Tensor]
    positions: int


@dataclass(frozen=True)
class GuidanceState:
    """The sequence of a guided request whose prompt is masks: as ``Guidance``."""

    scale: float
    embeddings: Tensor  # [N, D]
    kv: KVState


@dataclass(frozen=True)
class PrefilledPayload:
    """Prefill → decode: a canvas of masks, or of a next-token model, with the K/V of its pages.

    ``features`` are the visual tokens of models that read their prompt again. ``draft_kv`` are of the draft or verifier
    model. ``extensions``: what else the request asked for keeps of it, each a table with its kind's name as ``is``, of
    numbers, texts, arrays, tensors, and lists and tables of them.
    """

    canvas: Canvas
    kv: KVState
    recomputed: int  # token positions run through the model so far
    candidates: Candidates | None = None  # that are not chosen from yet
    constraint: ConstraintState | None = None
    embeddings: Tensor | None = None  # [N, D], current at every position
    features: Tensor | None = None  # [n, D]
    deep: DeepStack | None = None
    guidance: GuidanceState | None = None
    draft_kv: KVState | None = None
    extensions: tuple[Mapping[str, Any], ...] = ()

    @property
    def prefilled(self) -> PrefilledPayload:
        """Itself: as of ``CanvasPayload``."""
        return self


@dataclass(frozen=True)
class TextState:
    """An answer's text so far: as ``TextStream``."""

    tokens: tuple[int, ...]
    text: str
    sent: int
    stopped: bool


@dataclass(frozen=True)
class CanvasPayload:
    """Decode → decode: a canvas between two steps.

    ``step``: of a canvas of random tokens, the result of its latest step.
    """

    prefilled: PrefilledPayload
    text: TextState
    log_probabilities: np.ndarray  # float32 [N]
    forwards: int
    edits: int = 0
    rows: np.ndarray | None = None  # int64, positions of the next pass, where they are chosen
    fresh: tuple[np.ndarray, np.ndarray] | None = None  # int64 each, positions and tokens not yet embedded
    step: Mapping[str, Any] | None = None
    still: int = 0
    record: CanvasRecord | None = None

    @property
    def constraint(self) -> ConstraintState | None:
        """The constraint of the request."""
        return self.prefilled.constraint
