"""The handover from encode to prefill: a prompt as ids with visual tokens, and the spans of its images and clips."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.tensors import Tensor


@dataclass(frozen=True)
class Span:
    """The rows of an image or clip in a prompt, after pruning."""

    start: int
    stop: int
    place: int  # rotary position of its first row before pruning
    clip: bool

    def places_of(self, encoded: Encoded) -> np.ndarray:
        """Rotary positions of its rows, relative to its first: int64 ``[n]``, or ``[axes, n]``."""
        if encoded.places is None:
            return np.arange(self.stop - self.start)
        return encoded.places[..., self.start : self.stop] - self.place

    def visual_of(self, encoded: Encoded) -> tuple[np.ndarray, Tensor | None]:
        """The indices of its rows that are visual tokens (int64, ascending), and those tokens ``[n, visual width]``."""
        first, end = np.searchsorted(encoded.image_rows, [self.start, self.stop]).tolist()
        features = None if encoded.features is None else encoded.features[first:end]
        return encoded.image_rows[first:end] - self.start, features


@dataclass(frozen=True)
class Past:
    """K/V of prompt rows that were computed before the request, such as those of a video stream.

    Both are ``[N, n, G, K]``, keys before rotation; they are not modified while a request holds them.
    """

    rows: np.ndarray  # int64 [n], ascending: their rows of the prompt; never its last row
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Encoded:
    """Handover from encode to prefill: the prompt's ids, and the visual tokens that replace embeddings at
    ``image_rows``."""

    ids: np.ndarray  # int64 [prompt]
    image_rows: np.ndarray  # int64 [visual tokens], ascending
    features: Tensor | None  # [visual tokens, visual width]; None without images
    companion_features: Tensor | None = None  # the same by the companion's tower, if a policy needs it
    places: np.ndarray | None = None  # int64 [prompt + 1], or [axes, prompt + 1]: see ``Canvas.create``
    pruned: int = 0  # number of visual tokens that were pruned
    spans: tuple[Span, ...] = ()  # of each image and clip, in order
    #: For each image and clip that the decoder still has to prune: the prompt rows (int64, ascending) of each grid's
    #: patches; empty = the prompt is final.
    grids: tuple[tuple[np.ndarray, ...], ...] = ()
    span_keys: tuple[bytes, ...] = ()  # of each span, if its K/V are reused
    past: Past | None = None  # rows whose K/V exist already, so that no pass runs them


@dataclass(frozen=True)
class DeepStack:
    """Visual features that are added to the hidden states after the first layers (see ``DeepRows``)."""

    positions: np.ndarray  # int64 [n], ascending
    features_nLD: Tensor
