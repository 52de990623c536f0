"""Payloads between stages in different processes: arrays, tensors, numbers and texts only.

No parsers, and no page ids of a store. Policies and text decoders are created again from the request; random draws
depend only on seed, step and position (``decode/sampler.py``), so a canvas's step count is all of the generator's
state. ``transfer/payloads.py`` defines the serialisation and version of each kind.
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
    """Encode → prefill: a prompt, with the constraint of the request, or of each sample if it is not split yet."""

    encoded: Encoded
    constraints: tuple[ConstraintState, ...] = ()


@dataclass(frozen=True)
class VisualPayload:
    """Encode → encode: cached visual tokens of some of a request's media, by the hex of their keys."""

    entries: Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class KVState:
    """K/V of the first ``positions`` of a sequence, in full pages; ``tensors``: by the names in their store.

    ``ahead``: number of ``KVChunk`` sent before, which hold all K/V; ``tensors`` is then empty.
    """

    positions: int
    page_size: int
    tensors: Mapping[str, Tensor]
    ahead: int = 0


@dataclass(frozen=True)
class KVChunk:
    """Prefill → decode, sent ahead of the handover: K/V of some layers of the pages from ``first`` (relative to the
    request); ``tensors`` as in ``KVState``. ``positions``: number of leading positions with K/V."""

    first: int
    page_size: int
    tensors: Mapping[str, Tensor]
    positions: int


@dataclass(frozen=True)
class GuidanceState:
    """The second sequence of a guided request, whose prompt is masks (see ``Guidance``)."""

    scale: float
    embeddings: Tensor  # [N, D]
    kv: KVState


@dataclass(frozen=True)
class PrefilledPayload:
    """Prefill → decode: a canvas with the K/V of its pages.

    ``features``: visual tokens, for models that run their prompt again. ``draft_kv``: K/V of the draft or verifier
    model. ``extensions``: state of the request's extensions, each a dict with its kind in ``is``, of numbers, texts,
    arrays, tensors, and lists and dicts of these.
    """

    canvas: Canvas
    kv: KVState
    recomputed: int  # token positions run through the model so far
    candidates: Candidates | None = None  # candidates that are not chosen from yet
    constraint: ConstraintState | None = None
    embeddings: Tensor | None = None  # [N, D], current at every position
    features: Tensor | None = None  # [n, D]
    deep: DeepStack | None = None
    guidance: GuidanceState | None = None
    draft_kv: KVState | None = None
    extensions: tuple[Mapping[str, Any], ...] = ()

    @property
    def prefilled(self) -> PrefilledPayload:
        """Itself; ``CanvasPayload`` has the same property."""
        return self


@dataclass(frozen=True)
class TextState:
    """An answer's text so far (see ``TextStream``)."""

    tokens: tuple[int, ...]
    text: str
    sent: int
    stopped: bool


@dataclass(frozen=True)
class CanvasPayload:
    """Decode → decode: a canvas between two steps.

    ``step``: the result of the latest step, for canvases of random tokens.
    """

    prefilled: PrefilledPayload
    text: TextState
    log_probabilities: np.ndarray  # float32 [N]
    forwards: int
    edits: int = 0
    rows: np.ndarray | None = None  # int64, positions of the next pass, if selected already
    fresh: tuple[np.ndarray, np.ndarray] | None = None  # int64 each, positions and tokens not yet embedded
    step: Mapping[str, Any] | None = None
    stable_steps: int = 0
    record: CanvasRecord | None = None

    @property
    def constraint(self) -> ConstraintState | None:
        """The constraint of the request."""
        return self.prefilled.constraint
