"""What encode hands to prefill: a prompt as ids, with its visual tokens, and where each image or clip is in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.tensors import Tensor


@dataclass(frozen=True)
class Span:
    """The rows of a prompt that an image or a clip became, and what of it pruning left."""

    start: int
    stop: int
    place: int  # position of its first row for the rotary embedding, also where that row was pruned
    clip: bool

    def places_of(self, encoded: Encoded) -> np.ndarray:
        """Positions of its rows, counted from its first: int64 ``[n]``, or ``[axes, n]``."""
        if encoded.places is None:
            return np.arange(self.stop - self.start)
        return encoded.places[..., self.start : self.stop] - self.place

    def visual_of(self, encoded: Encoded) -> tuple[np.ndarray, Tensor | None]:
        """Which of its rows are visual tokens (int64, ascending), and those tokens ``[n, visual width]``."""
        first, end = np.searchsorted(encoded.image_rows, [self.start, self.stop]).tolist()
        features = None if encoded.features is None else encoded.features[first:end]
        return encoded.image_rows[first:end] - self.start, features


@dataclass(frozen=True)
class Past:
    """K/V of rows of a prompt that were computed before the request came, such as those of a stream of video.

    Both ``[N, n, G, K]``, keys before rotation; never changed while a request has them.
    """

    rows: np.ndarray  # int64 [n], ascending: which rows of the prompt they are of; never its last
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Encoded:
    """Encode → prefill: the prompt as ids, and the visual tokens that replace embeddings at ``image_rows``."""

    ids: np.ndarray  # int64 [prompt]
    image_rows: np.ndarray  # int64 [visual tokens], ascending
    features: Tensor | None  # [visual tokens, visual width]; None without images
    companion_features: Tensor | None = None  # the same by the companion's tower, for policies that ask for it
    places: np.ndarray | None = None  # int64 [prompt + 1], or [axes, prompt + 1]: see ``Canvas.create``
    pruned: int = 0  # visual tokens that are gone
    spans: tuple[Span, ...] = ()  # of each image and clip, in order
    #: Of each image and clip, the rows (int64, ascending) of the prompt that are the patches of each grid, where the
    #: decoder is to look at them before any page is taken; empty = the prompt is what it will be.
    grids: tuple[tuple[np.ndarray, ...], ...] = ()
    span_keys: tuple[bytes, ...] = ()  # of each, where its K/V are to be taken from elsewhere
    past: Past | None = None  # rows that no pass runs: their K/V are there already


@dataclass(frozen=True)
class DeepStack:
    """What a request's visual tokens add to the hidden states after the first layers (see ``DeepRows``)."""

    positions: np.ndarray  # int64 [n], ascending
    features_nLD: Tensor
